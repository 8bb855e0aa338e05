"""DeepEP as the dispatcher: when it is refused, and everything around its kernels.

There is no DeepEP here. ``_Documented`` does over gloo what DeepEP 1.2.1 documents of ``deep_ep.Buffer``; what this
can't show is that DeepEP does so too.
"""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3MoeConfig

from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.moe.deepep import check_deepep, exchange
from epfsdp2.engine.moe.dispatch import combine, deferred_router_grad, dispatch
from epfsdp2.engine.preflight.features import check_dispatcher
from epfsdp2.engine.preflight.run import check_training
from tests.support.moe.routing import EXPERTS, D, K, routings
from tests.support.ranks import run_ranks
from tests.support.trainer.settings import checkpoint, engine


def _to_each(pieces):
    """Return every rank's piece for this rank, by rank."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, pieces)
    return [theirs[dist.get_rank()] for theirs in everyone]


class _Documented:
    """A stand-in for ``deep_ep.Buffer``: its documented part, over gloo."""

    def get_dispatch_layout(self, topk_idx, num_experts):
        world = dist.get_world_size()
        in_rank = torch.stack([(topk_idx // (num_experts // world) == r).any(1) for r in range(world)], dim=1)
        per_expert = torch.bincount(topk_idx.reshape(-1), minlength=num_experts).int()
        return in_rank.sum(0).int(), None, per_expert, in_rank, None

    def dispatch(self, x, handle=None, is_token_in_rank=None, topk_idx=None, topk_weights=None, **layout):
        cached = handle is not None
        in_rank = handle[0] if cached else is_token_in_rank
        going = [in_rank[:, r].nonzero().squeeze(1) for r in range(dist.get_world_size())]
        arrived = torch.cat(tokens := _to_each([x[rows] for rows in going]))
        if cached:
            return arrived, None, None, None, None, None
        local = layout["num_tokens_per_expert"].numel() // dist.get_world_size()
        ids = torch.cat(_to_each([topk_idx[rows] for rows in going])) - dist.get_rank() * local
        mine = (ids >= 0) & (ids < local)
        weights = torch.cat(_to_each([topk_weights[rows] for rows in going])) * mine
        counts = torch.bincount(ids[mine], minlength=local).tolist()
        handle = (in_rank, going, [len(rows) for rows in tokens])
        return arrived, torch.where(mine, ids, -1), weights, counts, handle, None

    def combine(self, x, handle, topk_weights=None):
        in_rank, going, sizes = handle

        def summed(rows):
            out = rows.new_zeros(in_rank.shape[0], rows.shape[1])
            for where, part in zip(going, _to_each(list(rows.split(sizes))), strict=True):
                out[where] += part
            return out

        return summed(x), None if topk_weights is None else summed(topk_weights), None


class _NoAtomics(TorchDispatchMode):
    """Refuses sums whose order differs from run to run on a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        adds = func.overloadpacket.__name__ in ("index_add", "index_add_", "scatter_add", "scatter_add_")
        assert not adds or args[0].dim() == 1  # a weight has one row, and so one summand
        return func(*args, **(kwargs or {}))


def _every_routing():
    rank, world = dist.get_rank(), dist.get_world_size()
    local, group = EXPERTS // world, dist.group.WORLD
    scale_e = torch.arange(1.0, EXPERTS + 1)[rank * local : (rank + 1) * local]

    def compute(rows_RD, counts_e, scale_R=None):
        out = rows_RD * torch.repeat_interleave(scale_e, counts_e).unsqueeze(-1)
        return out if scale_R is None else deferred_router_grad(out, scale_R)

    def exchanged(*given):
        return exchange(
            *given, compute, num_experts=EXPERTS, group=group, buffer=lambda group, row_bytes: _Documented()
        )

    for name, ids in routings(rank, world):
        hidden = torch.randn(ids.shape[0], D, requires_grad=True)
        weights = torch.rand(ids.shape[0], K, requires_grad=True)
        sent = dispatch(hidden, ids, EXPERTS, group)
        want = combine(compute(sent.rows_RD, sent.counts_e), sent, weights, group)
        of_the_host = mock.patch.object(torch, "tensor", side_effect=AssertionError("a copy that waits for the device"))
        with _NoAtomics(), of_the_host:
            out = exchanged(hidden, ids, weights.detach())
            torch.autograd.grad(out.sum(), hidden)
        out = exchanged(hidden, ids, weights)
        torch.testing.assert_close(out, want, msg=name)
        seed = torch.randn_like(want)
        wanted = torch.autograd.grad(want, [hidden, weights], seed)
        for got, w in zip(torch.autograd.grad(out, [hidden, weights], seed), wanted, strict=True):
            torch.testing.assert_close(got, w, msg=name)
        with torch.no_grad():
            torch.testing.assert_close(exchanged(hidden, ids, weights), want, msg=name)


def test_deepep_around_a_documented_buffer_gives_what_our_dispatch_gives():
    run_ranks(_every_routing, 2)


def test_deepep_without_a_gpu_is_refused_by_name(tmp_path):
    with pytest.raises(SettingError, match=r"engine.dispatcher=deepep: .* device is cpu. .*dispatcher=all_to_all"):
        check_training(engine(ep_size=2, dispatcher="deepep"), 2, checkpoint(tmp_path), device="cpu")


def test_deepep_where_it_can_be_used_warns_that_it_was_never_run(monkeypatch, caplog):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    facts = SimpleNamespace(model=SimpleNamespace(config=Qwen3MoeConfig(hidden_size=2048)))
    for dispatcher, warnings in (("all_to_all", 0), ("deepep", 1)):
        check_dispatcher(engine(ep_size=8, dispatcher=dispatcher), facts, "cuda")
        assert caplog.text.count("was never run with DeepEP") == warnings


def test_deepep_that_is_not_installed_is_refused_by_name():
    with pytest.raises(SettingError, match=r"engine.dispatcher=deepep: deep_ep is not installed."):
        check_deepep("cuda", 8, 2048, torch.bfloat16)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ((8, 2048, torch.bfloat16, True), "engine.full_determinism=True"),
        ((8, 2048, torch.float32), "float32"),
        ((8, 2880, torch.bfloat16), "hidden size is 2880"),
    ],
)
def test_deepep_with_settings_it_has_no_kernel_for_is_refused(monkeypatch, asked, words):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(SettingError, match=f"engine.dispatcher=deepep: .*{words}"):
        check_deepep("cuda", *asked)
    check_deepep("cuda", 8, 2048, torch.bfloat16)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("raise AssertionError('NCCL 2.30.4 is needed')", "can't be imported: AssertionError: NCCL 2.30.4 is needed"),
        (
            "class Buffer:\n    def get_dispatch_config(ranks):\n        assert ranks in (2, 8), ranks",
            "no configuration for engine.ep_size=6: 6",
        ),
    ],
)
def test_deepep_that_its_own_code_refuses_is_refused_with_that_text(monkeypatch, tmp_path, module, words):
    (tmp_path / "deep_ep.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    check_deepep("cuda", 6, 2048, torch.bfloat16)  # on a driver without a GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SettingError, match=f"engine.dispatcher=deepep: deep_ep .*{words}"):
        check_deepep("cuda", 6, 2048, torch.bfloat16)
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
