"""The same at tensor-parallel size 2, one sender per worker, with embeddings tied to the head."""

import os
import signal
import time

import pytest

from epfsdp2.rollout.vllm.adapter import WeightSyncError

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def engine(start_engine, checkpoints):
    return start_engine(checkpoints[2].path, tp_size=2)


def test_vllm_on_two_workers_after_two_syncs_has_exactly_the_senders_weights(engine, checkpoints):
    first, second = checkpoints[2:4]
    assert "lm_head.weight" not in first.weights
    fresh = engine.generate()
    assert engine.difference(first) == ""
    engine.sync(lambda rank: iter(second.weights.items()))
    assert engine.difference(second) == ""
    assert engine.generate() != fresh
    engine.sync(lambda rank: iter(first.weights.items()))
    assert engine.difference(first) == ""
    assert engine.generate() == fresh
    assert engine.leftovers() == []


def test_digests_with_one_ranks_weights_changed_differ_on_that_rank_only(engine, checkpoints):
    first, second = checkpoints[2:4]
    engine.sync(lambda rank: iter((second if rank == 1 else first).weights.items()))
    report = engine.difference(first)
    assert report.count("tensors differ:") == 1
    assert report.startswith("21 of 21 tensors differ:")


def test_vllm_on_two_workers_with_an_error_on_one_reports_it_to_the_first(engine, checkpoints):
    weights = checkpoints[2].weights
    short = {name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}
    with pytest.raises(WeightSyncError, match=r"trainer rank 0 .*model\.norm \(0 of 96\)"):
        engine.sync(lambda rank: iter((short if rank == 1 else weights).items()))
    assert engine.leftovers() == []


def test_send_weights_raises_on_every_rank_when_a_worker_is_killed(engine, checkpoints):
    workers = engine.workers()
    assert len(workers) == 2

    def killing(rank):
        for index, item in enumerate(checkpoints[2].weights.items()):
            if rank == 1 and index == 15:
                for worker in workers:
                    os.kill(worker, signal.SIGKILL)
            yield item

    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="trainer rank 0"):
        engine.sync(killing, timeout_seconds=8)
    # `sync` waits for both senders; the second does not watch the call and ends by its time-out.
    assert time.monotonic() - started < 30
    assert engine.leftovers() == []
