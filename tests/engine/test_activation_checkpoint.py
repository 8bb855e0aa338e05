"""Activation checkpointing: the same numbers, and the same routing where a recomputation would route otherwise."""

import itertools
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from epfsdp2.engine.fsdp import activation_checkpoint
from tests.support.engine import sharded_model
from tests.support.models import VOCAB, reference_model, save_qwen3_moe, token_loss
from tests.support.ranks import run_ranks

WORLD = 2


def _batch(rank):
    return torch.randint(0, VOCAB, (2, 13), generator=torch.Generator().manual_seed(rank))


def _restless_routers(model):
    """Make every call of a router see other logits than the one before, far more than rounding would."""
    calls = itertools.count()
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):

            def forward(hidden, gate=layer.mlp.gate, original=layer.mlp.gate.forward):
                noise = torch.randn(gate.weight.shape, generator=torch.Generator().manual_seed(next(calls)))
                return original(hidden + noise[0, : hidden.shape[-1]])

            layer.mlp.gate.forward = forward


def _chosen(model):
    """The ids that each experts module is called with, in order, by module."""
    chosen = {}
    for name, module in model.named_modules():
        if name.endswith("experts"):
            chosen[name] = []
            module.register_forward_pre_hook(lambda m, args, seen=chosen[name]: seen.append(args[1].clone()))
    return chosen


def _routing_is_kept(folder):
    model, _ = sharded_model(folder, WORLD, 2, checkpointing="full")
    model.train()
    _restless_routers(model)
    chosen = _chosen(model)
    token_loss(model, _batch(dist.get_rank())).backward()
    for forward, again in chosen.values():
        assert torch.equal(forward, again)
    assert all(p.grad is not None for p in model.parameters())


def test_a_recomputed_router_chooses_the_experts_of_the_forward(tmp_path):
    run_ranks(_routing_is_kept, WORLD, save_qwen3_moe(tmp_path))


def _routing_changes_without(folder):
    def plain(module, num_experts, inputs_on_host, forward, *args, **kwargs):
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    with patch.object(activation_checkpoint, "_recomputed", plain):
        model, _ = sharded_model(folder, WORLD, 1, checkpointing="full")
    model.train()
    _restless_routers(model)
    chosen = _chosen(model)
    token_loss(model, _batch(dist.get_rank())).backward()
    assert not any(torch.equal(forward, again) for forward, again in chosen.values())


def test_with_plain_checkpointing_the_restless_routers_choose_others(tmp_path):
    run_ranks(_routing_changes_without, WORLD, save_qwen3_moe(tmp_path))


def _selective_keeps_the_experts(folder):
    rank = dist.get_rank()
    ids = torch.cat([_batch(r) for r in range(WORLD)])
    reference = reference_model(folder).train()
    token_loss(reference, ids).backward()
    model, _ = sharded_model(folder, WORLD, 2, checkpointing="selective")
    model.train()
    chosen, attention = _chosen(model), []
    model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda m, args: attention.append(1))
    token_loss(model, ids[2 * rank : 2 * rank + 2]).backward()
    assert len(attention) == 2
    assert all(len(calls) == 1 for calls in chosen.values())
    wanted = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        want = wanted[name].grad
        assert (param.grad.full_tensor() - want).norm() <= 1e-5 * want.norm(), name


def test_selective_recomputes_attention_and_keeps_the_experts(tmp_path):
    run_ranks(_selective_keeps_the_experts, WORLD, save_qwen3_moe(tmp_path))


def _inputs_on_host(folder):
    """What the layers are handed is gone from the device once they have run, and the gradients are the same."""
    ids, gradients = _batch(dist.get_rank()), []
    for offload in (False, True):
        model, _ = sharded_model(folder, WORLD, 2, checkpointing="full", activation_offload=offload)
        model.train()
        inputs = []

        def keep(module, args, kwargs, inputs=inputs):
            hidden = args[0] if args else kwargs["hidden_states"]
            inputs.append(StorageWeakRef(hidden.untyped_storage()))

        hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in model.model.layers]
        loss = token_loss(model, ids)
        assert [storage.expired() for storage in inputs] == [offload] * len(model.model.layers)
        for hook in hooks:
            hook.remove()
        loss.backward()
        gradients.append([p.grad.full_tensor() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_offloaded_inputs_leave_the_device_and_change_nothing(tmp_path):
    run_ranks(_inputs_on_host, WORLD, save_qwen3_moe(tmp_path))


@pytest.mark.parametrize("experts", [8, 40000])
def test_kept_ids_give_topks_values_and_gradient(experts):
    scores = torch.randn(5, experts, requires_grad=True)
    record, replay = activation_checkpoint._routing_contexts(experts)
    with record:
        kept = torch.topk(scores, 3, dim=-1)
    with replay:
        again = scores.topk(3, -1)
    want = torch.topk(scores, 3)
    seed = torch.randn(5, 3)
    (expected,) = torch.autograd.grad(want.values, scores, seed)
    for got in (kept, again):
        assert torch.equal(got.indices, want.indices) and torch.equal(got[0], want.values)
        assert torch.equal(torch.autograd.grad(got.values, scores, seed)[0], expected)


def test_a_topk_over_more_than_the_experts_is_left_alone():
    record, replay = activation_checkpoint._routing_contexts(8)
    with record:
        torch.randn(2, 9).topk(2)
    with replay:  # nothing was recorded, and nothing is asked for
        values = torch.arange(9.0).topk(1).values
    assert values.item() == 8.0
