"""Workers that get nothing but their own slices hold, and compute, what a fresh engine does."""

import pytest

from epfsdp2.rollout.placement import Heads, Rollout, Tensor, needs
from epfsdp2.rollout.recorded import checkpoint_views, joined
from epfsdp2.rollout.server_adapter import WeightSyncError
from epfsdp2.rollout.slices import slice_name
from tests.rollout.families import model_on_meta

pytestmark = pytest.mark.e2e


def _slices(checkpoint, tp, rank):
    for name, weight in checkpoint.weights.items():
        tensor = Tensor(name, tuple(weight.shape), weight.element_size())
        for need in needs(tensor, Rollout(tp), rank, Heads.of(checkpoint.config)):
            yield slice_name(need.parameter, need.at), weight[need.box.slices].contiguous()


def _records_where_slices_go(engine, checkpoint, tp):
    tensors = [Tensor(name, tuple(w.shape), w.element_size()) for name, w in checkpoint.weights.items()]
    views = checkpoint_views(model_on_meta(checkpoint.config), tensors)
    heads = Heads.of(checkpoint.config)
    for rank, layout in enumerate(engine.call("epfsdp2_layout", views=views).result()):
        computed = {tensor.name: joined(needs(tensor, Rollout(tp), rank, heads)) for tensor in tensors}
        assert layout == computed


@pytest.mark.parametrize(("tp", "first"), [(1, 0), (2, 0), (2, 2)], ids=["one", "two", "two, tied"])
def test_three_syncs_of_slices(start_engine, checkpoints, tp, first):
    old, new = checkpoints[first : first + 2]
    engine = start_engine(old.path, tp_size=tp)
    fresh = engine.generate()
    for checkpoint in (new, old, new):
        engine.sync(lambda rank, checkpoint=checkpoint: _slices(checkpoint, tp, rank))
        assert engine.difference(checkpoint) == ""
        assert (engine.generate() == fresh) == (checkpoint is old)
    _records_where_slices_go(engine, new, tp)
    assert engine.difference(new) == "", "recording leaves the weights alone"
    engine.sync(lambda rank: iter(old.weights.items()))
    assert engine.difference(old) == "", "whole tensors are taken again after slices"
    assert engine.leftovers() == []


def test_wrong_slices_are_refused(start_engine, checkpoints):
    checkpoint = checkpoints[0]
    engine = start_engine(checkpoint.path, tp_size=1)

    def changed(change):
        return lambda rank: (item for item in (change(*s) for s in _slices(checkpoint, 1, rank)) if item)

    up = slice_name("model.layers.1.mlp.experts.w13_weight", (0, 64, 0))
    with pytest.raises(
        WeightSyncError, match=r"did not receive every element.*model.layers.1.mlp.experts.*\(98304 of 147456\)"
    ):
        engine.sync(changed(lambda name, values: None if name == up else (name, values)))
    with pytest.raises(WeightSyncError, match=r"a slice \[96\] at \[1\] was sent for model.norm.weight"):
        engine.sync(changed(lambda name, values: (name.replace("model.norm.weight/0", "model.norm.weight/1"), values)))
    with pytest.raises(
        WeightSyncError, match="a slice of model.nrom.weight was sent, which vLLM's model does not have"
    ):
        engine.sync(changed(lambda name, values: (name.replace("model.norm", "model.nrom"), values)))
    engine.sync(changed(lambda name, values: (name, values)))
    assert engine.difference(checkpoint) == ""
