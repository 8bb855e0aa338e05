"""Weights over verl's real transport into a real vLLM engine, tensor-parallel size 1."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from epfsdp2.rollout.vllm.adapter import WeightSyncError
from tests.support.rollout.vllm_engine import as_taken, one_by_one

pytestmark = pytest.mark.e2e

GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def engine(start_engine, checkpoints):
    return start_engine(checkpoints[0].path)


def same_on_all_ranks(weights: dict):
    return lambda rank: iter(weights.items())


def across_buckets(weights: dict):
    """Send the experts of a layer far apart, so that the bucket of the first is reused before the layer is complete."""
    first, last = GATE_UP, GATE_UP.replace("gate_up", "down")
    yield first, weights[first]
    yield from ((name, tensor) for name, tensor in weights.items() if name not in (first, last))
    yield last, weights[last]


@pytest.fixture(scope="module")
def synced(engine, checkpoints):
    """Tokens generated before any sync, and after a sync to the other checkpoint's weights."""
    outputs = {"fresh 1": engine.generate()}
    assert engine.difference(checkpoints[0]) == ""
    assert engine.difference(checkpoints[1]) != ""
    engine.sync(same_on_all_ranks(checkpoints[1].weights))
    outputs["synced 2"] = engine.generate()
    return outputs


def test_vllm_after_two_syncs_has_exactly_the_senders_weights(engine, checkpoints, synced):
    assert engine.difference(checkpoints[1]) == ""
    engine.sync(same_on_all_ranks(checkpoints[0].weights))
    assert engine.difference(checkpoints[0]) == ""
    assert engine.generate() == synced["fresh 1"]
    assert synced["synced 2"] != synced["fresh 1"]
    assert engine.leftovers() == []


def test_read_parameters_returns_the_loaded_values(engine, checkpoints):
    engine.sync(same_on_all_ranks(checkpoints[0].weights))
    name = "model.layers.1.mlp.experts.w2_weight"
    dtype, shape, data = engine.call("epfsdp2_read_parameters", names=[name]).result()[0][name]
    found = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).view(shape)
    assert torch.equal(found, checkpoints[0].weights["model.layers.1.mlp.experts.down_proj"])


@pytest.mark.parametrize(
    ("name", "index", "shows_in"),
    [
        ("model.layers.1.mlp.experts.down_proj", (5, 7, 9), "model.layers.1.mlp.experts.w2_weight"),
        ("model.layers.0.mlp.experts.gate_up_proj", (7, 127, 95), "model.layers.0.mlp.experts.w13_weight"),
        ("model.layers.0.self_attn.k_proj.weight", (63, 0), "model.layers.0.self_attn.qkv_proj.weight"),
        ("lm_head.weight", (199, 95), "lm_head.weight"),
    ],
)
def test_digests_with_one_changed_element_differ_in_one_entry(engine, checkpoints, name, index, shows_in):
    """Digests are of the model's values: the sync brings the change, the sender's old weights lack it."""
    changed = {**checkpoints[0].weights, name: checkpoints[0].weights[name].clone()}
    changed[name][index] += 1e-6
    engine.sync(same_on_all_ranks(changed))
    assert engine.difference(checkpoints[0], changed) == ""
    report = engine.difference(checkpoints[0])
    assert report.startswith("1 of 21 tensors differ:")
    assert f"\n{shows_in}: is" in report


def test_digests_with_swapped_gate_and_up_differ(engine, checkpoints, synced):
    """Neither counts nor names differ, so only the digests can tell."""
    gate, up = checkpoints[0].weights[GATE_UP].chunk(2, 1)
    engine.sync(same_on_all_ranks({**checkpoints[0].weights, GATE_UP: torch.cat([up, gate], 1)}))
    report = engine.difference(checkpoints[0])
    assert report.startswith("1 of 21 tensors differ:\nmodel.layers.0.mlp.experts.w13_weight: is"), report
    assert engine.generate() != synced["fresh 1"]


def test_reload_of_a_layer_from_several_buckets_is_exact(engine, checkpoints):
    engine.sync(lambda rank: across_buckets(checkpoints[1].weights))
    assert engine.difference(checkpoints[1]) == ""


def test_reload_of_one_expert_at_a_time_is_exact(engine, checkpoints):
    """Families whose loader knows no fused tensors send one tensor per expert and projection."""
    single = {}
    for name, tensor in checkpoints[1].weights.items():
        single.update(one_by_one(name, tensor) if ".experts." in name else {name: tensor})
    assert len(single) == 69
    engine.sync(same_on_all_ranks(single))
    assert engine.difference(checkpoints[1]) == ""
    del single["model.layers.1.mlp.experts.6.up_proj.weight"]
    with pytest.raises(WeightSyncError, match=r"model\.layers\.1\.mlp\.experts\S* \(141312 of 147456\)"):
        engine.sync(same_on_all_ranks(single))


def _without(weights, name):
    return {key: value for key, value in weights.items() if key != name}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda w: {**w, GATE_UP: w[GATE_UP][:7]}, r"1 layers .*layers\.0\.mlp\.experts\S* \(135168 of 147456\)"),
        (lambda w: _without(w, "model.norm.weight"), r"1 layers .*model\.norm \(0 of 96\)"),
        (lambda w: _without(w, "lm_head.weight"), r"1 layers .*lm_head \(0 of 19200\)"),
        (lambda w: _without(w, "model.layers.1.self_attn.v_proj.weight"), r"qkv_proj \(18432 of 24576\)"),
        (
            lambda w: {(k.replace("gate_up_proj", "w13") if k == GATE_UP else k): v for k, v in w.items()},
            r"1 layers .*1 tensors were sent that vLLM's model silently ignored.*layers\.0\.mlp\.experts\.w13",
        ),
        (lambda w: {**w, "model.layers.0.mlp.experts.more": w[GATE_UP]}, r"silently ignored.*experts\.more"),
        (lambda w: {**w, "model.norm.weight": torch.zeros(95)}, r"after COUNT tensors .*loading the received weights"),
    ],
    ids=["expert missing", "layer missing", "head missing", "projection missing", "renamed", "unknown", "wrong shape"],
)
def test_reload_of_incomplete_or_wrong_tensors_raises(engine, checkpoints, spoil, message):
    spoiled = spoil(checkpoints[0].weights)
    count = len(list(as_taken(spoiled.items())))  # 25 where vLLM takes stacks
    with pytest.raises(WeightSyncError, match=message.replace("COUNT", str(count))) as caught:
        engine.sync(same_on_all_ranks(spoiled))
    assert "trainer rank 0" in str(caught.value)
    assert engine.leftovers() == []


def test_reload_of_a_repeated_name_raises(engine, checkpoints):
    twice = [*checkpoints[0].weights.items(), ("model.norm.weight", torch.zeros(96))]
    # Far enough apart to be sent in two buckets: within one, verl's transport keeps the last.
    twice.insert(0, twice.pop())
    with pytest.raises(WeightSyncError, match="model.norm.weight was sent twice"):
        engine.sync(lambda rank: iter(twice))


def test_sync_after_failed_ones_is_exact(engine, checkpoints, synced):
    engine.sync(same_on_all_ranks(checkpoints[0].weights))
    assert engine.difference(checkpoints[0]) == ""
    assert engine.generate() == synced["fresh 1"]


def test_send_weights_raises_the_sources_own_error(engine, checkpoints):
    def failing(rank):
        yield next(iter(checkpoints[0].weights.items()))
        raise ZeroDivisionError("from the gather")

    with pytest.raises(ZeroDivisionError, match="from the gather"):
        engine.sync(failing, timeout_seconds=3)
    assert engine.leftovers() == []


def test_receiving_call_ends_when_the_trainer_rank_is_killed(engine, checkpoints):
    from epfsdp2.engine import cleanup

    script = Path(__file__).parent / "sender_process.py"
    socket = Path(engine.handle().removeprefix("ipc://"))
    sender = subprocess.Popen([sys.executable, str(script), engine.handle()], stdout=subprocess.PIPE, text=True)
    try:
        while not socket.exists():
            assert sender.poll() is None
            time.sleep(0.1)
        receiving = engine.call("update_weights_from_ipc", use_shm=True, sync_timeout_seconds=4)
        while sender.stdout.readline() != "hanging\n":
            assert sender.poll() is None
        held = cleanup.held_by([sender.pid])
    finally:
        sender.send_signal(signal.SIGKILL)
        sender.wait()
    with pytest.raises(RuntimeError, match="no answer from the trainer rank behind .* within 4 s"):
        receiving.result(60)
    assert socket.exists()
    cleanup.remove_unused(held)
    assert engine.leftovers() == []
    engine.sync(same_on_all_ranks(checkpoints[0].weights))
    assert engine.difference(checkpoints[0]) == ""


def test_send_weights_raises_before_time_out_when_the_worker_is_killed(engine, checkpoints):
    killed_at = None

    def killing(rank):
        nonlocal killed_at
        for index, item in enumerate(checkpoints[0].weights.items()):
            if index == 15:
                (worker,) = engine.workers()
                os.kill(worker, signal.SIGKILL)
                killed_at = time.monotonic()
            yield item

    with pytest.raises(WeightSyncError, match=r"trainer rank 0 after \d+ tensors \(last: .*Error") as caught:
        engine.sync(killing, timeout_seconds=50)
    assert time.monotonic() - killed_at < 25
    assert "no answer" not in str(caught.value)  # the cause is vLLM's own
    assert engine.leftovers() == []


def test_digests_see_a_disabled_sync_and_equal_a_fresh_engines(engine, start_engine, checkpoints, synced):
    fresh = start_engine(checkpoints[1].path, extension="broken_extension.BrokenSync")
    # The engine above was started on the first checkpoint and synced to the second, this one was started on it.
    assert fresh.generate() == synced["synced 2"]
    assert fresh.difference(checkpoints[1]) == ""
    fresh.sync(same_on_all_ranks(checkpoints[0].weights))
    assert "tensors differ" in fresh.difference(checkpoints[0])
    assert fresh.generate() == synced["synced 2"]
    fresh.call("take_and_keep_buckets").result()
    # verl's receiver can't let go of a bucket that is still in use, and it was filled again before it was used.
    with pytest.raises(WeightSyncError, match="cannot close exported pointers exist"):
        fresh.sync(lambda rank: across_buckets(checkpoints[0].weights))
    assert "\nmodel.layers.0.mlp.experts.w13_weight: is" in fresh.difference(checkpoints[0])
