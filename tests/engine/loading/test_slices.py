"""The slices of a checkpoint that a parameter is made of: found once for all layers, and never guessed."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from epfsdp2.engine.checkpoint import hf_slices, load
from epfsdp2.engine.checkpoint.hf_slices import CheckpointSlice, SliceFinder
from epfsdp2.engine.model.meta import build_on_meta
from epfsdp2.engine.topology.dtensor import checkpoint_tensors
from tests.parity.families import ALL, AsAuto
from tests.support.engine.sharded import sharded_model
from tests.support.models.tiny import save_qwen3_moe
from tests.support.ranks import run_ranks

# Experts one by one, transposed, as rows of one matrix, beside those of another stack, and dense weights that are cut.
FAMILIES = ("qwen3_moe", "qwen3_vl_moe", "dbrx", "ernie4_5_vl_moe", "phimoe")


def _counted(folder):
    with (
        mock.patch.object(hf_slices, "_slices_of", wraps=hf_slices._slices_of) as probes,
        mock.patch.object(load, "match_sources", wraps=load.match_sources) as matches,
    ):
        sharded_model(folder, dist.get_world_size(), 2)
    assert [call.args[1].rpartition(".")[2] for call in probes.call_args_list] == ["gate_up_proj", "down_proj"]
    assert matches.call_count == 1


def test_a_load_matches_once_and_probes_a_converter_once_for_all_layers(tmp_path):
    run_ranks(_counted, 2, save_qwen3_moe(tmp_path, num_hidden_layers=4))


@pytest.mark.parametrize("family", FAMILIES)
def test_slices_found_once_for_all_layers_are_those_of_each(family):
    plain = ALL[family].build()
    model = build_on_meta(AsAuto(type(plain)), plain.config, torch.float32)
    shared = SliceFinder(model)
    for name, tensor in checkpoint_tensors(model).items():
        is_stack = tensor.dim() == 3 and ".experts." in name
        assert shared.find(name, tensor.shape, is_stack) == SliceFinder(model).find(name, tensor.shape, is_stack), name
    assert len(shared._probed) < len(checkpoint_tensors(model))


def _found(convert, shape=(2, 6, 4), is_stack=False, parameters=(("a.0.w", None),)):
    """Find slices where ``convert`` makes a checkpoint's tensors, by name, of a parameter's name and values.

    Args:
        parameters: the name of each, and what makes it of a checkpoint.
    """
    with (
        mock.patch.object(hf_slices, "converted_together", lambda model, name: (name,)),
        mock.patch.object(hf_slices, "revert", lambda model, name, values: convert(name, values)),
    ):
        finder = SliceFinder(None)
        found = [finder.find(name, shape, is_stack, converter) for name, converter in parameters]
    return found[0] if len(found) == 1 else found


NO_SLICES = {
    "computed": lambda values: values + 1,
    "scaled": lambda values: values * 2,
    "of another dtype": lambda values: values.float(),
    "in another order": lambda values: values.flip(1),
    "two rows swapped": lambda values: values[:, [0, 1, 2, 4, 3, 5]],
    "two columns swapped": lambda values: values[..., [0, 2, 1, 3]],
    "split over two dims": lambda values: values.unflatten(1, (3, 2)),
    "two dims in one": lambda values: values.flatten(1, 2),
    "repeated": lambda values: torch.cat([values, values]),
    "cut off": lambda values: values[:, :5],
    "every other row": lambda values: values[:, ::2],
    "one row for all": lambda values: values[:, :1].expand_as(values),
    "shifted": lambda values: values.roll(1, 2),
}


@pytest.mark.parametrize("kind", NO_SLICES)
@pytest.mark.parametrize("is_stack", [False, True])
def test_no_slices_are_found_of_what_is_no_rearrangement(kind, is_stack):
    assert _found(lambda name, values: {"t": NO_SLICES[kind](values)}, is_stack=is_stack) is None


@pytest.mark.parametrize("kind", [*NO_SLICES, "experts last"])
def test_experts_are_converted_alone_where_a_converter_keeps_each_apart(kind):
    change = (NO_SLICES | {"experts last": lambda values: values.movedim(0, -1)})[kind]
    with (
        mock.patch.object(hf_slices, "converted_together", lambda model, name: (name,)),
        mock.patch.object(hf_slices, "revert", lambda model, name, values: {"t": change(values), "u": values}),
    ):
        kept = SliceFinder(None).keeps_experts("a.0.w", (8, 6, 4))
    assert kept == (kind not in ("computed", "scaled", "of another dtype", "repeated", "experts last"))


def test_slices_found_are_those_of_rearranged_elements():
    cut = _found(lambda name, values: {"t": values[:, ::2].mT.contiguous(), "u": values[:, 1::2]})
    assert cut == [
        CheckpointSlice("t", (2, 4, 3), (0, 2, 1), (1, 1, 2), (0, 0, 0)),
        CheckpointSlice("u", (2, 3, 4), (0, 1, 2), (1, 2, 1), (0, 1, 0)),
    ]
    rows = _found(lambda name, values: {"t": values.mT.flatten(0, 1)}, (8, 6, 4), True)
    assert rows == [CheckpointSlice("t", (4, 6), (2, 1), (1, 1), (0, 0, 0), 4)]


@pytest.mark.parametrize("is_copy", [False, True])
def test_slices_of_a_layer_that_is_converted_otherwise_are_its_own(is_copy):
    """Views tell by themselves; of copies, that another converter makes them."""

    def convert(name, values):
        values = values.mT if name == "a.1.w" else values
        return {name.replace("w", "v"): values.clone(memory_format=torch.contiguous_format) if is_copy else values}

    parameters = [("a.0.w", 0), ("a.1.w", int(is_copy)), ("a.2.w", 0)]
    first, other, last = _found(convert, (2, 4, 4), parameters=parameters)
    assert last == [replace(first[0], name="a.2.v")] and first[0].dims == (0, 1, 2)
    assert other == [CheckpointSlice("a.1.v", (2, 4, 4), (0, 2, 1), (1, 1, 1), (0, 0, 0))]
