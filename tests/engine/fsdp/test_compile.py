"""Compiling the dense parts: the same numbers, and eager with a clear line of log where compiling fails."""

from unittest import mock

import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd

from epfsdp2.engine import parallelize
from epfsdp2.engine.fsdp import compile as compiling
from epfsdp2.engine.wrap_forward import wrapped_by
from tests.parity.families import save
from tests.support.engine.sharded import sharded_model, whole_gradients
from tests.support.logs import logged_lines
from tests.support.models.tiny import VOCAB, save_qwen3_moe, token_loss
from tests.support.ranks import run_ranks

WORLD = 2


def _sharded(folder, backend, ep=2, **options):
    real = compiling.compile_dense_parts
    with mock.patch.object(parallelize, "compile_dense_parts", lambda *parts: real(*parts, backend)):
        return sharded_model(folder, WORLD, ep, **options)[0].train()


def _batch(length):
    generator = torch.Generator().manual_seed(length + 100 * dist.get_rank())
    return torch.randint(0, VOCAB, (2, length), generator=generator)


def _gradients(folder, backend, **options):
    model = _sharded(folder, backend, **options)
    token_loss(model, _batch(11)).backward()
    return whole_gradients(model)


def _equal(got, want):
    for name, grad in want.items():
        assert (got[name] - grad).norm() <= 1e-5 * grad.norm(), name


def _compiled_and_broken(folder):
    lines, compiled = logged_lines(), []

    def counting(graph, inputs):
        compiled.append(graph)
        return graph.forward

    def broken(graph, inputs):
        raise RuntimeError("no compiler on this machine")

    def breaks_later(graph, inputs):
        compiled.append(graph)  # there are three
        return graph.forward if len(compiled) < 3 else broken(graph, inputs)

    want = _gradients(folder, None)
    # Parts that were compiled before a failure are recomputed in backward, and must save the same tensors. Backwards
    # are compiled in the forward, where eager is still possible.
    breaks_backward = aot_autograd(fw_compiler=counting, bw_compiler=broken)
    for backend, checkpointing, failures in (
        (counting, "full", 0),
        (broken, "none", 1),
        (breaks_later, "selective", 1),
        (breaks_later, "full", 1),
        (breaks_backward, "full", 1),
    ):
        torch._dynamo.reset()
        lines.clear(), compiled.clear()
        _equal(_gradients(folder, backend, compile_dense=True, checkpointing=checkpointing), want)
        assert len(lines) == failures and bool(compiled) == (backend is not broken), (backend, lines, len(compiled))
        assert all("engine.compile_dense" in line and "no compiler on this machine" in line for line in lines)


def test_compile_of_dense_parts_gives_the_eager_gradients_and_falls_back_with_one_line(tmp_path):
    run_ranks(_compiled_and_broken, WORLD, save_qwen3_moe(tmp_path))


def _recomputed(folder, lengths):
    """Steps on rows of several lengths; the second length is compiled for any."""
    in_backward = []

    def compiling_once(graph, inputs):
        assert not in_backward
        return graph.forward

    torch._dynamo.reset()
    options = {"ep": 1, "etp": 2, "checkpointing": "full"}
    models = [_sharded(folder, None, **options), _sharded(folder, compiling_once, compile_dense=True, **options)]
    for length in lengths:
        losses = [token_loss(model, _batch(length)) for model in models]
        in_backward.append(True)
        for loss in losses:
            loss.backward()
        in_backward.clear()
        _equal(whole_gradients(models[1]), whole_gradients(models[0]))


def test_compile_of_a_layer_whose_router_and_states_change_compiles_nothing_in_backward(tmp_path):
    """Gemma 4's router stands beside attention, which leaves keys and values in a mapping."""
    run_ranks(_recomputed, WORLD, save("gemma4", tmp_path), (9, 11, 9))


def test_compile_of_a_layer_with_experts_leaves_the_experts_out():
    layer = torch.nn.Module()
    layer.attention, layer.norm = torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)
    layer.mlp = torch.nn.Module()
    layer.mlp.experts = torch.nn.Linear(2, 2)
    layer.dropout = torch.nn.Dropout()
    compiling.compile_dense_parts([layer], [layer.mlp.experts], "eager")
    assert [name for name, part in layer.named_modules() if wrapped_by(part)] == ["attention", "norm"]
