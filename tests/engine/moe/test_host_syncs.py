"""Host syncs: one per layer, for the sizes of the all-to-alls.

A sync is counted where Python reads a tensor, and in operators whose output's size depends on values: on an accelerator
each of these waits.
"""

import contextlib
import functools
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from epfsdp2.engine.fsdp.activation_checkpoint import _routing_contexts
from epfsdp2.engine.head import log_probs
from epfsdp2.engine.integration.step_features import RouterTerms
from epfsdp2.engine.moe.find import find_experts
from epfsdp2.engine.moe.forward import ExpertsRuntime, attach, experts_forward
from epfsdp2.engine.moe.gemm import backends
from epfsdp2.engine.moe.router.losses import RouterLosses
from epfsdp2.engine.packing.sequences import PackedSequences
from tests.support.engine.sharded import sharded_model
from tests.support.models.tiny import VOCAB, save_qwen3_moe
from tests.support.ranks import run_ranks
from tests.support.trainer.settings import TINY

E, K, D, TOKENS = 8, 2, 16, 12
READS = ("item", "tolist", "numpy", "__bool__", "__int__", "__index__", "__float__")
COPIES = ("new_tensor",)  # of the host's numbers, from memory that is not pinned
OF_VALUES = ("nonzero", "masked_select", "bincount", "_unique2", "_local_scalar_dense", "repeat_interleave")


class Waits(TorchDispatchMode):
    """Records by name the calls that would wait."""

    def __init__(self):
        super().__init__()
        self.found, self.inside = [], False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        by_mask = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if by_mask or (name in OF_VALUES and kwargs.get("output_size") is None):
            self.found.append(name)
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def counting(self):
        with contextlib.ExitStack() as stack:
            for make in ("tensor", "as_tensor"):
                noted = mock.patch.object(torch, make, side_effect=self._noting(make, torch))
                stack.enter_context(noted)
            for read in (*READS, *COPIES):
                stack.enter_context(mock.patch.object(torch.Tensor, read, self._noting(read), create=True))
            with self:
                yield

    def _noting(self, read, of=torch.Tensor):
        original = getattr(of, read)

        def noted(*args, **kwargs):
            if self.inside:  # a mode, as that of a recomputation, calls it once more
                return original(*args, **kwargs)
            self.found.append(read)
            self.inside = True
            try:
                return original(*args, **kwargs)
            finally:
                self.inside = False

        return noted


def _waits(ep, recomputed=False, etp=1):
    config = Qwen3MoeConfig(num_experts=E, hidden_size=D, moe_intermediate_size=D)
    config._experts_implementation = "eager"
    module = Qwen3MoeExperts(config)
    for name, param in list(module.named_parameters()):
        local = torch.randn(E // ep, *param.shape[1:]).chunk(etp, dim=2 if name == "down_proj" else 1)[0].contiguous()
        setattr(module, name, torch.nn.Parameter(local))
    group, etp_group = (dist.group.WORLD if size > 1 else None for size in (ep, etp))
    attach(module, ExpertsRuntime(E, group, etp_group=etp_group))
    hidden = torch.randn(TOKENS, D, requires_grad=True)
    ids, weights = torch.randint(0, E, (TOKENS, K)), torch.rand(TOKENS, K, requires_grad=True)
    forward, backward = Waits(), Waits()
    compute = functools.partial(experts_forward, module)
    if recomputed:
        contexts = functools.partial(_routing_contexts, E)
        compute = functools.partial(
            checkpoint, compute, use_reentrant=False, context_fn=contexts, preserve_rng_state=False
        )
    # On a CPU nothing waits, so there the gradients' loop may ask for the counts once more.
    with mock.patch.object(backends, "_on_cpu", lambda tensor: False), forward.counting():
        out = compute(hidden, ids, weights)
    with mock.patch.object(backends, "_on_cpu", lambda tensor: False), backward.counting():
        out.backward(torch.ones_like(out))
    return forward.found, backward.found


def _model_waits(folder):
    """Run packed rows, sharded experts, and layers that backward recomputes."""
    model, _ = sharded_model(folder, 2, 2, checkpointing="full", before=PackedSequences)
    ids = torch.randint(0, VOCAB, (1, 24), generator=torch.Generator().manual_seed(dist.get_rank()))
    positions = torch.cat([torch.arange(9), torch.arange(15)])[None]
    forward, backward, before_layers = Waits(), Waits(), []
    model.train()
    model.model.layers[0].register_forward_pre_hook(lambda *_: before_layers.append(len(forward.found)))
    with mock.patch.object(backends, "_on_cpu", lambda tensor: False):
        with forward.counting():
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
            loss = nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
        with backward.counting():
            loss.backward()
    # Beside the layers, the bounds of the row's sequences are read once per micro-batch.
    assert forward.found[before_layers[0] :] == ["tolist"] * 3 and backward.found == []


def _router_losses_wait():
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**TINY))
    losses, waits = RouterLosses(model, find_experts(model), 0.1, 0.1), Waits()
    terms = RouterTerms(losses, dist.group.WORLD, None)
    batch = {"input_ids": torch.nested.nested_tensor([torch.zeros(TOKENS)], layout=torch.jagged)}
    with waits.counting():
        terms.begin_batch(batch, forward_only=False)
    assert losses._batch_tokens == TOKENS * dist.get_world_size() and waits.found == []
    losses.watch()
    model(input_ids=torch.randint(0, 32, (1, TOKENS)), use_cache=False)
    is_token = torch.arange(TOKENS) < TOKENS - 2
    with waits.counting():
        losses.loss(is_token).backward()
    assert waits.found == []


def _ranks_wait(folder):
    assert _waits(2) == _waits(2, recomputed=True) == _waits(1, etp=2) == (["tolist"], [])
    assert _waits(1) == ([], [])
    _model_waits(folder)
    _router_losses_wait()


def test_host_syncs_are_one_a_layer_in_forward_and_none_in_backward_when_recomputed_or_for_router_losses(tmp_path):
    run_ranks(_ranks_wait, 2, save_qwen3_moe(tmp_path, mlp_only_layers=[]))


def test_host_syncs_of_log_probs_in_tiles_are_none(monkeypatch):
    monkeypatch.setattr(log_probs, "tile_sizes", lambda device: (5, 16))
    hidden, weight = (torch.randn(n, D, requires_grad=True) for n in (TOKENS, 40))
    labels, temperature, waits = torch.arange(TOKENS), torch.ones(TOKENS), Waits()
    with waits.counting():
        found = log_probs.log_probs_and_entropy(hidden, weight, None, labels, temperature, True)
        found.backward(torch.ones_like(found))
    assert hidden.grad.abs().sum() > 0 and waits.found == []
