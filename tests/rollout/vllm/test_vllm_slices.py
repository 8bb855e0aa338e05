"""Real vLLM workers that receive their own parameters hold and compute what a fresh engine does."""

from functools import partial

import pytest

from epfsdp2.rollout.layout.layout_check import RANK
from epfsdp2.rollout.layout.slice_names import slice_name
from epfsdp2.rollout.layout.specs import Heads, Rollout, TensorSpec
from epfsdp2.rollout.servers import planned_layout, target_slices
from epfsdp2.rollout.transport.checksums import CHECKSUMS, with_checksums
from epfsdp2.rollout.vllm.adapter import WeightSyncError
from tests.rollout.families import model_on_meta
from tests.support.rollout.loader_trace import checkpoint_views, merge_slices
from tests.support.rollout.units import worker_units
from tests.support.rollout.vllm_engine import as_taken

pytestmark = pytest.mark.e2e


def _layouts(checkpoint, tp):
    tensors = [TensorSpec(name, tuple(w.shape), w.element_size()) for name, w in checkpoint.weights.items()]
    return [planned_layout(tensors, Rollout(tp), worker, Heads.of(checkpoint.config)) for worker in range(tp)]


def _units(checkpoint, tp, rank, steps=1):
    return worker_units(checkpoint.weights, Rollout(tp), rank, Heads.of(checkpoint.config), steps=steps)


def _check_traced_layout(engine, checkpoint, tp):
    tensors = [TensorSpec(name, tuple(w.shape), w.element_size()) for name, w in checkpoint.weights.items()]
    views = checkpoint_views(model_on_meta(checkpoint.config), tensors)
    heads = Heads.of(checkpoint.config)
    for rank, traced in enumerate(engine.call("epfsdp2_layout", views=views).result()):
        computed = {tensor.name: merge_slices(target_slices(tensor, Rollout(tp), rank, heads)) for tensor in tensors}
        assert traced == computed


def _three_syncs_of_units(start_engine, checkpoints, tp, first):
    old, new = checkpoints[first : first + 2]
    engine = start_engine(old.path, tp_size=tp)
    fresh = engine.generate()
    for times, checkpoint in enumerate((new, old, new)):
        # Before the first sync, and after it, the layouts of both sides are the same.
        engine.call("epfsdp2_check_layout", layouts=_layouts(old, tp)).result()
        sent = partial(_units, checkpoint, tp, steps=(3, 1, 2)[times])
        engine.sync(lambda rank, sent=sent: with_checksums(sent(rank)), verify=times < 2)
        assert engine.difference(checkpoint) == ""
        assert (engine.generate() == fresh) == (checkpoint is old)
    _check_traced_layout(engine, new, tp)
    assert engine.difference(new) == "", "recording leaves the weights alone"
    engine.sync(lambda rank: iter(old.weights.items()))
    assert engine.difference(old) == "", "whole tensors are taken again after units"
    assert engine.leftovers() == []


def test_vllm_on_one_worker_after_three_syncs_of_units_equals_a_fresh_engine(start_engine, checkpoints):
    _three_syncs_of_units(start_engine, checkpoints, 1, 0)


def _refused(engine, layouts):
    with pytest.raises(RuntimeError) as caught:
        engine.call("epfsdp2_check_layout", layouts=layouts).result()
    return str(caught.value)


def test_check_layout_refuses_another_layout_with_the_first_difference(start_engine, checkpoints):
    engine = start_engine(checkpoints[0].path, tp_size=1, again=True)
    (right,) = _layouts(checkpoints[0], 1)
    engine.call("epfsdp2_check_layout", layouts=[right]).result()
    missing = dict(right)
    del missing["model.layers.1.mlp.experts.w13_weight"]
    message = _refused(engine, [missing])
    assert "differ in 1 of " in message
    assert "first model.layers.1.mlp.experts.w13_weight: planned is nothing, actual is [8, 128, 96] from 0" in message
    message = _refused(engine, [{**right, "model.layers.1.mlp.gate.bias": "[8] from 0"}])
    assert "planned is [8] from 0, actual is nothing" in message
    assert "plans for 2 workers per replica; vLLM has 1" in _refused(engine, [right, right])
    engine.call("epfsdp2_check_layout", layouts=[right]).result()


def _flipped(tensors, wrong):
    """Yield the tensors with one value of one of them changed, after its checksum was computed."""
    for name, values in tensors:
        if name == wrong:
            values = values.clone()
            values.view(-1)[7] += 1e-3
        yield name, values


def test_verified_sync_sees_a_flipped_value(start_engine, checkpoints):
    checkpoint = checkpoints[0]
    engine = start_engine(checkpoint.path, tp_size=1, again=True)
    wrong = slice_name("model.layers.1.mlp.experts.w2_weight")

    def sums():
        return with_checksums(_units(checkpoint, 1, 0))

    with pytest.raises(WeightSyncError, match=f"the received values of {wrong} differ from those that were sent"):
        engine.sync(lambda rank: _flipped(sums(), wrong), verify=True)
    with pytest.raises(WeightSyncError, match="the received values of lm_head.weight differ"):
        whole = with_checksums(as_taken(checkpoint.weights.items()))
        engine.sync(lambda rank: _flipped(whole, "lm_head.weight"), verify=True)
    with pytest.raises(WeightSyncError, match="the checksums of the tensors were not received"):
        engine.sync(lambda rank: (item for item in sums() if item[0] != CHECKSUMS), verify=True)
    with pytest.raises(WeightSyncError, match=r"\d+ tensors were received of \d+ that were sent"):
        engine.sync(lambda rank: (item for item in sums() if item[0] != wrong), verify=True)
    engine.sync(lambda rank: sums(), verify=True)
    assert engine.difference(checkpoint) == ""


def test_reload_of_wrong_units_raises(start_engine, checkpoints):
    checkpoint = checkpoints[0]
    engine = start_engine(checkpoint.path, tp_size=1, again=True)

    def changed(change):
        return lambda rank: (item for unit in _units(checkpoint, 1, rank, steps=2) for item in change(*unit))

    w13, w2 = (f"model.layers.1.mlp.experts.{kind}_weight" for kind in ("w13", "w2"))
    with pytest.raises(
        WeightSyncError, match=r"did not receive every element.*model.layers.1.mlp.experts.*\(98304 of 147456\)"
    ):
        engine.sync(changed(lambda name, values: [] if name == slice_name(w13, 1, 2) else [(name, values)]))
    with pytest.raises(WeightSyncError, match=r"model.norm.weight/0/3/0 \[48\] was sent for what is \[96\] on"):
        engine.sync(
            changed(lambda name, values: [(name.replace("model.norm.weight/0/2", "model.norm.weight/0/3"), values)])
        )
    for twice in (w13, w2):
        with pytest.raises(WeightSyncError, match=f"elements of {twice} were sent twice in one weight sync"):
            whole = (slice_name(twice), dict(_units(checkpoint, 1, 0))[slice_name(twice)])
            engine.sync(lambda rank, whole=whole: iter([*_units(checkpoint, 1, rank, steps=2), whole]))
    with pytest.raises(
        WeightSyncError, match="a slice of model.nrom.weight was sent, which vLLM's model does not have"
    ):
        engine.sync(changed(lambda name, values: [(name.replace("model.norm", "model.nrom"), values)]))
    engine.sync(changed(lambda name, values: [(name, values)]))
    assert engine.difference(checkpoint) == ""


def test_vllm_on_two_workers_after_three_syncs_of_units_equals_a_fresh_engine(start_engine, checkpoints):
    _three_syncs_of_units(start_engine, checkpoints, 2, 0)


def test_check_layout_compares_each_workers_own(start_engine, checkpoints):
    engine = start_engine(checkpoints[0].path, tp_size=2, again=True)
    first, second = _layouts(checkpoints[0], 2)
    engine.call("epfsdp2_check_layout", layouts=[first, second]).result()
    said = _refused(engine, [first, {**second, "lm_head.weight": "[72, 96] from 0"}])
    assert "worker 1 of a replica: the trainer's plan and the worker's model differ in 1 of " in said
    assert "first lm_head.weight: planned is [72, 96] from 0, actual is [72, 96] from 128" in said
    said = _refused(engine, [second, first])
    assert "worker 0 of a replica: the trainer's plan and the worker's model differ in " in said
    assert f"first {RANK}: planned is 1 of 2 in tensor parallel, experts cut, actual is 0 of 2 in tensor " in said


def test_vllm_on_two_workers_with_tied_embeddings_after_three_syncs_equals_a_fresh_engine(start_engine, checkpoints):
    _three_syncs_of_units(start_engine, checkpoints, 2, 2)


def test_verified_sync_sees_values_that_vllm_loses(start_engine, checkpoints):
    """A worker whose loaders lose a value: the received tensors are right, the loaded ones are not."""
    checkpoint = checkpoints[0]
    engine = start_engine(checkpoint.path, tp_size=1, extension="losing_extension.LosesAValue")
    with pytest.raises(
        WeightSyncError, match="the values of model.layers.0.input_layernorm.weight on the worker differ from those"
    ):
        engine.sync(lambda rank: with_checksums(_units(checkpoint, 1, rank)), verify=True)
