"""Compiling the dense parts: the same numbers, and eager with a clear line of log where compiling fails."""

from unittest import mock

import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd

from epfsdp2.engine import parallelize
from epfsdp2.engine.fsdp import compile as compiling
from tests.parity.families import save
from tests.support.engine.sharded import sharded_model, whole_gradients
from tests.support.logs import logged_lines
from tests.support.models.tiny import VOCAB, save_qwen3_moe, token_loss
from tests.support.ranks import run_ranks

WORLD, COMPILE = 2, compiling.compile_dense_parts


def _gradients(folder, backend, **options):
    compile_dense = compiling.compile_dense_parts
    parallelize.compile_dense_parts = lambda layers, experts: compile_dense(layers, experts, backend)
    model, _ = sharded_model(folder, WORLD, 2, **options)
    parallelize.compile_dense_parts = compile_dense
    model.train()
    ids = torch.randint(0, VOCAB, (2, 11), generator=torch.Generator().manual_seed(dist.get_rank()))
    token_loss(model, ids).backward()
    return whole_gradients(model)


def _equal(got, want):
    for name, grad in want.items():
        assert (got[name] - grad).norm() <= 1e-5 * grad.norm(), name


def _compiled_and_broken(folder):
    lines = logged_lines()
    compiled = []

    def counting(graph, inputs):
        compiled.append(graph)
        return graph.forward

    def broken(graph, inputs):
        raise RuntimeError("no compiler on this machine")

    want = _gradients(folder, None)
    for checkpointing in ("none", "full"):
        compiled.clear()
        _equal(_gradients(folder, counting, compile_dense=True, checkpointing=checkpointing), want)
        assert compiled and not lines
        torch._dynamo.reset()
    _equal(_gradients(folder, broken, compile_dense=True), want)
    assert len(lines) == 1
    assert "engine.compile_dense" in lines[0] and "no compiler on this machine" in lines[0]

    def breaks_later(graph, inputs):
        compiled.append(graph)
        return graph.forward if len(compiled) < 3 else broken(graph, inputs)

    # Parts that were compiled are recomputed in backward, and must save the same tensors.
    for checkpointing in ("selective", "full"):
        torch._dynamo.reset()
        lines.clear(), compiled.clear()
        _equal(_gradients(folder, breaks_later, compile_dense=True, checkpointing=checkpointing), want)
        assert len(lines) == 1 and len(compiled) == 3

    # Backwards are compiled in the forward, where eager is still possible.
    for checkpointing in ("none", "full"):
        torch._dynamo.reset()
        lines.clear(), compiled.clear()
        backend = aot_autograd(fw_compiler=counting, bw_compiler=broken)
        _equal(_gradients(folder, backend, compile_dense=True, checkpointing=checkpointing), want)
        assert compiled and len(lines) == 1 and "no compiler on this machine" in lines[0]


def test_compile_of_dense_parts_gives_the_eager_gradients_and_falls_back_with_one_line(tmp_path):
    run_ranks(_compiled_and_broken, WORLD, save_qwen3_moe(tmp_path))


def _recomputed(folder, lengths):
    """Steps on rows of several lengths; the second length is compiled for any."""
    in_backward = []

    def compiling_once(graph, inputs):
        assert not in_backward
        return graph.forward

    for checkpointing in ("selective", "full"):
        torch._dynamo.reset()
        models = []
        for backend in (None, compiling_once):
            patched = mock.patch.object(
                parallelize,
                "compile_dense_parts",
                lambda layers, experts, backend=backend: COMPILE(layers, experts, backend),
            )
            with patched:
                options = {"compile_dense": backend is not None, "checkpointing": checkpointing}
                models.append(sharded_model(folder, WORLD, 1, etp=2, **options)[0].train())
        for length in lengths:
            generator = torch.Generator().manual_seed(length + 100 * dist.get_rank())
            ids = torch.randint(0, VOCAB, (2, length), generator=generator)
            losses = [token_loss(model, ids) for model in models]
            in_backward.append(True)
            for loss in losses:
                loss.backward()
            in_backward.clear()
            _equal(whole_gradients(models[1]), whole_gradients(models[0]))


def test_compile_of_a_layer_whose_router_and_states_change_compiles_nothing_in_backward(tmp_path):
    """Gemma 4's router stands beside attention, which leaves keys and values in a mapping."""
    run_ranks(_recomputed, WORLD, save("gemma4", tmp_path), (9, 11, 9))


def test_compile_of_a_layer_with_experts_leaves_the_experts_out(tmp_path):
    layer = torch.nn.Module()
    layer.attention, layer.norm = torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)
    layer.mlp = torch.nn.Module()
    layer.mlp.experts = torch.nn.Linear(2, 2)
    layer.dropout = torch.nn.Dropout()
    assert compiling.compile_dense_parts([layer], [layer.mlp.experts], "eager") == 2
