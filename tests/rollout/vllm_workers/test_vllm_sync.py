"""Full tensors and slices over verl's transport: real vLLM workers equal a fresh engine.

The checkpoints of one worker are untied, those of two are tied. The last test of an engine kills its workers.
"""

import asyncio
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from epfsdp2.engine.compat import versions
from epfsdp2.engine.model.layers import layer_names
from epfsdp2.rollout.layout.layout_check import RANK
from epfsdp2.rollout.layout.slice_names import slice_name
from epfsdp2.rollout.layout.specs import Heads, Rollout, TensorSpec
from epfsdp2.rollout.sent_tensors import SentModel
from epfsdp2.rollout.servers import planned_layout
from epfsdp2.rollout.sync import RolloutSync, SyncSettings
from epfsdp2.rollout.transport.checksums import CHECKSUMS, with_checksums
from epfsdp2.rollout.vllm import adapter
from epfsdp2.rollout.vllm.adapter import Updates, WeightSyncError
from tests.support.engine.sharded import sharded_model
from tests.support.rollout.sent_slices import config_for
from tests.support.rollout.units import worker_units
from tests.support.rollout.vllm_engine import as_taken, one_by_one

pytestmark = pytest.mark.e2e

GATE_UP, DOWN = (f"model.layers.0.mlp.experts.{kind}_proj" for kind in ("gate_up", "down"))
W13, W2 = (f"model.layers.1.mlp.experts.{kind}_weight" for kind in ("w13", "w2"))


@pytest.fixture
def engine(start_engine, checkpoints):
    return start_engine(checkpoints[0].path, tp_size=1, again=True)


@pytest.fixture
def two_workers(start_engine, checkpoints):
    return start_engine(checkpoints[2].path, tp_size=2, again=True)


def _whole(weights):
    """Send the experts of a layer far apart: the bucket of the first is reused before the layer is complete."""
    others = {name: tensor for name, tensor in weights.items() if name not in (GATE_UP, DOWN)}
    ends = [{name: weights[name]} if name in weights else {} for name in (GATE_UP, DOWN)]
    return lambda rank: iter((ends[0] | others | ends[1]).items())


def _layouts(checkpoint, tp):
    tensors = [TensorSpec(name, tuple(w.shape), w.element_size()) for name, w in checkpoint.weights.items()]
    return [planned_layout(tensors, Rollout(tp), worker, Heads.of(checkpoint.config)) for worker in range(tp)]


def _units(checkpoint, tp=1, rank=0, steps=1):
    return worker_units(checkpoint.weights, Rollout(tp), rank, Heads.of(checkpoint.config), steps=steps)


def _slices(checkpoint, tp, steps):
    return lambda rank: with_checksums(_units(checkpoint, tp, rank, steps))


def _check_syncs(engine, old, new):
    """Send full tensors, slices in three numbers of parts, and full tensors again."""
    fresh, tp = engine.generate(), engine.tp_size
    assert engine.difference(old) == "" != engine.difference(new)
    engine.sync(_whole(new.weights))
    assert engine.difference(new) == ""
    changed = engine.generate()
    assert changed != fresh
    for steps, checkpoint in ((3, old), (1, new), (2, old)):
        engine.call("epfsdp2_check_layout", layouts=_layouts(old, tp)).result()
        engine.sync(_slices(checkpoint, tp, steps), verify=steps > 1)
        assert engine.difference(checkpoint) == ""
        assert engine.generate() == (fresh if checkpoint is old else changed)
    engine.sync(_whole(new.weights))
    assert engine.difference(new) == ""
    assert engine.leftovers() == []


def test_vllm_after_syncs_of_full_tensors_and_slices_equals_a_fresh_engine(engine, checkpoints):
    _check_syncs(engine, *checkpoints[:2])


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
    with pytest.raises(WeightSyncError, match=f"trainer rank 0 .*{message.replace('COUNT', str(count))}"):
        engine.sync(lambda rank: iter(spoiled.items()))
    assert engine.leftovers() == []


def test_reload_of_one_expert_at_a_time_is_exact_and_misses_one(engine, checkpoints):
    """Families whose loader knows no fused tensors send one tensor per expert and projection."""
    single = {}
    for name, tensor in checkpoints[1].weights.items():
        single.update(one_by_one(name, tensor) if ".experts." in name else {name: tensor})
    engine.sync(lambda rank: iter(single.items()))
    assert engine.difference(checkpoints[1]) == ""
    del single["model.layers.1.mlp.experts.6.up_proj.weight"]
    with pytest.raises(WeightSyncError, match=r"model\.layers\.1\.mlp\.experts\S* \(141312 of 147456\)"):
        engine.sync(lambda rank: iter(single.items()))


def test_reload_of_a_repeated_name_raises(engine, checkpoints):
    # Far enough apart to be sent in two buckets: within one, verl's transport keeps the last.
    twice = [("model.norm.weight", torch.zeros(96)), *checkpoints[0].weights.items()]
    with pytest.raises(WeightSyncError, match="model.norm.weight was sent twice"):
        engine.sync(lambda rank: iter(twice))


def _refused(engine, layouts):
    with pytest.raises(RuntimeError) as caught:
        engine.call("epfsdp2_check_layout", layouts=layouts).result()
    return str(caught.value)


def test_check_layout_refuses_another_layout_with_the_first_difference(engine, checkpoints):
    (right,) = _layouts(checkpoints[0], 1)
    message = _refused(engine, [_without(right, W13)])
    assert "differ in 1 of " in message
    assert f"first {W13}: planned is nothing, actual is [8, 128, 96] from 0" in message
    message = _refused(engine, [{**right, "model.layers.1.mlp.gate.bias": "[8] from 0"}])
    assert "planned is [8] from 0, actual is nothing" in message
    assert "plans for 2 workers per replica; vLLM has 1" in _refused(engine, [right, right])


class _Beside(Updates):
    """The adapter of a trainer rank beside a running engine."""

    use_shm, rollout_rank, _has_server = True, 0, False

    def __init__(self, engine):
        self.engine, self.zmq_handle, self.calls = engine, engine.handle(), []
        self.config = type("Config", (dict,), {})(config_for(Rollout(1)))
        self.config.checkpoint_engine = SimpleNamespace(update_weights_bucket_megabytes=1)

    async def _execute_method(self, method, non_block, kwargs):
        self.calls.append((method, kwargs.get("verify", False)))
        return asyncio.wrap_future(self.engine.call(method, **kwargs))


@pytest.mark.parametrize("differs", [False, True], ids=["same", "another"])
def test_untested_vllm_gets_slices_if_its_layout_is_the_planned_one(
    engine, checkpoints, monkeypatch, capsys, caplog, differs
):
    planned, old, new = SentModel.planned_layouts, *checkpoints[:2]
    monkeypatch.setattr(versions, "TESTED", {})
    monkeypatch.setattr(adapter, "_failure_of_call", lambda call: call.exception() if call.done() else None)
    if differs:
        monkeypatch.setattr(
            SentModel, "planned_layouts", lambda *given: [{**planned(*given)[0], W2: "[8, 64, 96] from 0"}]
        )
    engine.sync(_whole(old.weights))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model, meshes = sharded_model(Path(new.path), 1)
        sync = RolloutSync(model, meshes, layer_names(model), {}, SyncSettings("auto", 1 << 22, server="vllm"))
        beside = _Beside(engine)
        for _ in range(2):
            asyncio.run(beside.update_weights(sync.weights()))
    finally:
        torch.distributed.destroy_process_group()
    assert engine.difference(new) == ""
    mode, update = "full" if differs else "sliced", "update_weights_from_ipc"
    # The first sync is verified, although the settings ask for none.
    assert beside.calls == [("epfsdp2_check_layout", False), (update, not differs), (update, False)]
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if "weight sync" in line] == [
        f"[epfsdp2] weight sync {number}, {mode}" for number in (1, 2)
    ]
    said = [record.getMessage() for record in caplog.records if "falls back" in record.getMessage()]
    assert len(said) == differs
    for line in said:
        assert f"vllm {versions.installed('vllm')} was not tested with" in line
        assert f"first {W2}: planned is [8, 64, 96] from 0, actual is [8, 96, 64] from 0" in line


def test_verified_sync_sees_flipped_and_missing_values(engine, checkpoints):
    checkpoint, wrong = checkpoints[0], slice_name(W2)

    def flipped(tensors, wrong):
        for name, values in tensors:
            if name == wrong:
                values = values.clone()
                values.view(-1)[7] += 1e-3
            yield name, values

    def sums():
        return with_checksums(_units(checkpoint))

    whole = with_checksums(as_taken(checkpoint.weights.items()))
    for message, tensors in (
        (f"the received values of {wrong} differ from those that were sent", flipped(sums(), wrong)),
        ("the received values of lm_head.weight differ", flipped(whole, "lm_head.weight")),
        ("the checksums of the tensors were not received", (item for item in sums() if item[0] != CHECKSUMS)),
        (r"\d+ tensors were received of \d+ that were sent", (item for item in sums() if item[0] != wrong)),
    ):
        with pytest.raises(WeightSyncError, match=message):
            engine.sync(lambda rank, tensors=tensors: tensors, verify=True)


def test_reload_of_wrong_units_raises_and_the_next_sync_is_exact(engine, checkpoints):
    checkpoint = checkpoints[0]
    halves, whole = list(_units(checkpoint, steps=2)), dict(_units(checkpoint))

    def renamed(before, after):
        return [(name.replace(before, after), values) for name, values in halves]

    for message, units in (
        (
            r"did not receive every element.*model.layers.1.mlp.experts.*\(98304 of 147456\)",
            [unit for unit in halves if unit[0] != slice_name(W13, 1, 2)],
        ),
        (
            r"model.norm.weight/0/3/0 \[48\] was sent, and has shape \[96\] on",
            renamed("model.norm.weight/0/2", "model.norm.weight/0/3"),
        ),
        (f"elements of {W13} were sent twice", [*halves, (slice_name(W13), whole[slice_name(W13)])]),
        (f"elements of {W2} were sent twice", [*halves, (slice_name(W2), whole[slice_name(W2)])]),
        ("a slice of model.nrom.weight was sent, which vLLM's model does not", renamed("model.norm", "model.nrom")),
    ):
        with pytest.raises(WeightSyncError, match=message):
            engine.sync(lambda rank, units=units: iter(units))
    engine.sync(lambda rank: iter(halves))
    assert engine.difference(checkpoint) == ""


def test_receiving_call_ends_when_the_trainer_rank_stops_sending(engine, checkpoints):
    def hanging(rank):
        for index, item in enumerate(checkpoints[0].weights.items()):
            if index == 15:
                time.sleep(4)
            yield item

    with pytest.raises(WeightSyncError, match="no answer from the trainer rank behind .* within 2 s"):
        engine.sync(hanging, timeout_seconds=2)
    assert engine.leftovers() == []
    engine.sync(_whole(checkpoints[0].weights))
    assert engine.difference(checkpoints[0]) == ""


def test_send_weights_raises_the_sources_own_error(engine, checkpoints):
    def failing(rank):
        yield next(iter(checkpoints[0].weights.items()))
        raise ZeroDivisionError("from the gather")

    with pytest.raises(ZeroDivisionError, match="from the gather"):
        engine.sync(failing, timeout_seconds=1)
    assert engine.leftovers() == []
    engine.call("clear").result()  # after the receiving call, which else takes the next sender's first message


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


def test_vllm_on_two_tied_workers_after_syncs_of_full_tensors_and_slices_equals_a_fresh_engine(
    two_workers, checkpoints
):
    _check_syncs(two_workers, *checkpoints[2:])


def test_vllm_on_two_workers_with_an_error_on_one_reports_it_to_the_first(two_workers, checkpoints):
    weights = checkpoints[2].weights
    short = _without(weights, "model.norm.weight")
    with pytest.raises(WeightSyncError, match=r"trainer rank 0 .*model\.norm \(0 of 96\)"):
        two_workers.sync(lambda rank: iter((short if rank == 1 else weights).items()))
    assert two_workers.leftovers() == []


def test_check_layout_compares_each_workers_own(two_workers, checkpoints):
    first, second = _layouts(checkpoints[2], 2)
    embedding = "model.embed_tokens.weight"
    said = _refused(two_workers, [first, {**second, embedding: "[72, 96] from 0"}])
    assert "worker 1 of a replica: the trainer's plan and the worker's model differ in 1 of " in said
    assert f"first {embedding}: planned is [72, 96] from 0, actual is [72, 96] from 128" in said
    said = _refused(two_workers, [second, first])
    assert "worker 0 of a replica: the trainer's plan and the worker's model differ in " in said
    assert f"first {RANK}: planned is 1 of 2 in tensor parallel, experts cut, actual is 0 of 2 in tensor " in said


def test_send_weights_raises_on_every_rank_when_the_workers_are_killed(two_workers, checkpoints):
    workers = two_workers.workers()
    assert len(workers) == 2

    def killing(rank):
        for index, item in enumerate(checkpoints[2].weights.items()):
            if rank == 1 and index == 15:
                for worker in workers:
                    os.kill(worker, signal.SIGKILL)
            yield item

    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="trainer rank 0"):
        two_workers.sync(killing, timeout_seconds=8)
    # `sync` waits for both senders; the second does not watch the call and ends by its time-out.
    assert time.monotonic() - started < 30
    assert two_workers.leftovers() == []
