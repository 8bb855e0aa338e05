"""Activation checkpointing: the same numbers, and the same routing even if a recomputed router differs."""

import contextlib
import itertools
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from epfsdp2.engine.fsdp import activation_checkpoint
from tests.parity.families import FAMILIES
from tests.support.engine.recorder import Recorder
from tests.support.engine.sharded import sharded_model, whole_gradients
from tests.support.models.tiny import reference_model, relative_error, save_qwen3_moe, token_batch, token_loss
from tests.support.ranks import each_case, run_ranks

WORLD = 2


def _own_tokens():
    return token_batch(WORLD)[2 * dist.get_rank() : 2 * dist.get_rank() + 2]


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
    token_loss(model, _own_tokens()).backward()
    *recomputed, last = chosen.values()
    for forward, again in recomputed:
        assert torch.equal(forward, again)
    assert len(last) == 1  # its backward comes first
    assert all(p.grad is not None for p in model.parameters())


def _selective_keeps_the_experts(folder):
    reference = reference_model(folder).train()
    token_loss(reference, token_batch(WORLD)).backward()
    model, _ = sharded_model(folder, WORLD, 2, checkpointing="selective")
    model.train()
    chosen, attention = _chosen(model), []
    model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda m, args: attention.append(1))
    token_loss(model, _own_tokens()).backward()
    assert len(attention) == 2
    assert all(len(calls) == 1 for calls in chosen.values())
    wanted = dict(reference.named_parameters())
    assert max(relative_error(grad, wanted[n].grad) for n, grad in whole_gradients(model).items()) < 1e-5


def _plans_are_kept_and_inputs_offloaded(folder):
    """The counts are exchanged, and the slots sorted, in the forward alone; offloaded inputs of layers are freed."""
    ids, calls, freed, gradients = _own_tokens(), [], [], []
    for options in ({}, {"checkpointing": "full"}, {"checkpointing": "full", "activation_offload": True}):
        model, _ = sharded_model(folder, WORLD, 2, **options)
        model.train()
        inputs = []

        def keep(module, args, kwargs, inputs=inputs):
            hidden = args[0] if args else kwargs["hidden_states"]
            inputs.append(StorageWeakRef(hidden.untyped_storage()))

        for layer in model.model.layers:
            layer.register_forward_pre_hook(keep, with_kwargs=True)
        with Recorder(model) as recorder, patch.object(torch, "sort", side_effect=torch.sort) as sorts:
            loss = token_loss(model, ids)
            freed.append([storage.expired() for storage in inputs])
            loss.backward()
        calls.append((recorder.events.count(("all-to-all", torch.int64)), sorts.call_count))
        gradients.append(list(whole_gradients(model).values()))
    assert min(calls[0]) > 0 and calls == calls[:1] * 3
    assert freed == [[False] * 3, [False] * 3, [True, True, False]]  # the last layer is not recomputed
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*gradients, strict=True))


CHECKS = (_routing_is_kept, _selective_keeps_the_experts, _plans_are_kept_and_inputs_offloaded)


def _check_each(folder):
    each_case([(check.__name__,) for check in CHECKS], lambda name: globals()[name](folder))


def test_activation_checkpointing_keeps_routes_plans_and_gradients_and_offloads_inputs(tmp_path):
    run_ranks(_check_each, WORLD, save_qwen3_moe(tmp_path))


class _FakeStreams:
    """A device's streams, for tensors on a CPU; logs the launches on each."""

    def __init__(self, monkeypatch):
        self.log, self.running = [], "compute"
        self.compute = SimpleNamespace(name="compute", wait_stream=lambda other: self.log.append("compute waits"))
        self.copies = SimpleNamespace(name="copies", wait_stream=lambda other: None)
        monkeypatch.setattr(torch, "get_device_module", lambda device: self)
        init = activation_checkpoint._Held.__init__
        on_copies = lambda held, saved, stream, before: init(held, saved, self.copies, before)  # noqa: E731
        monkeypatch.setattr(activation_checkpoint._Held, "__init__", on_copies)
        monkeypatch.setattr(activation_checkpoint, "_empty_on_host", lambda like, pinned: torch.empty_like(like))
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.log.append("kept for the copy"))
        copy = torch.Tensor.copy_

        def copy_(target, source, non_blocking=False):
            self.log.append(f"copy {int(source[0, 0])} on {self.running}")
            return copy(target, source)

        monkeypatch.setattr(torch.Tensor, "copy_", copy_)

    def current_stream(self, device):
        return self.compute

    def is_available(self):
        return False  # torch's checkpoint asks, where torch is built for CUDA

    @contextlib.contextmanager
    def stream(self, stream):
        self.running = stream.name
        yield
        self.running = "compute"


class _AddsOne(torch.nn.Module):
    def __init__(self, log):
        super().__init__()
        self.log, self.weight = log, torch.nn.Parameter(torch.ones(()))

    def forward(self, hidden_states):
        self.log.append(f"layer {int(hidden_states[0, 0])}")
        return hidden_states * self.weight + 1


def test_activation_offload_copies_on_a_second_stream_and_fetches_a_layer_ahead(monkeypatch):
    streams = _FakeStreams(monkeypatch)
    layers = [_AddsOne(streams.log) for _ in range(3)]
    activation_checkpoint.checkpoint_layers(layers, (), 8, "full", inputs_on_host=True)
    for _ in range(2):  # a second micro-batch does not fetch those of the first
        streams.log.clear()
        hidden = torch.zeros(2, 2, requires_grad=True)
        for layer in layers:
            hidden = layer(hidden_states=hidden)
        assert streams.log == [
            entry for i in range(3) for entry in (f"copy {i} on copies", "kept for the copy", f"layer {i}")
        ]
        streams.log.clear()
        hidden.sum().backward()
        assert streams.log == [
            *("copy 2 on copies", "compute waits", "copy 1 on copies", "layer 2"),
            *("compute waits", "copy 0 on copies", "layer 1"),
            *("compute waits", "layer 0"),
        ]
    assert [layer.weight.grad.item() for layer in layers] == [0, 8, 16]


def test_checkpointed_layer_that_may_draw_numbers_has_its_random_state_kept():
    def layer(family, **settings):
        return FAMILIES[family].build(**settings).model.layers[0]

    draws = activation_checkpoint.draws_numbers
    assert not draws(layer("qwen3_moe")) and not draws(torch.nn.Sequential(torch.nn.Dropout(0.0)))
    assert draws(layer("qwen3_moe", attention_dropout=0.1)) and draws(layer("phimoe", router_jitter_noise=0.0))
    assert draws(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(0.1)))
    with patch.object(activation_checkpoint, "checkpoint") as called:
        for module, kept in ((_AddsOne([]), False), (torch.nn.Sequential(torch.nn.Dropout(0.1)), True)):
            activation_checkpoint._recomputed(module.train(), 8, None, lambda hidden: hidden, torch.ones(1))
            assert called.call_args.kwargs["preserve_rng_state"] is kept


@pytest.mark.parametrize("experts", [8, 40000])
def test_replayed_topk_with_kept_ids_gives_topks_values_and_gradient(experts):
    scores, others = torch.randn(5, experts, requires_grad=True), torch.arange(experts + 1.0)
    record, replay = activation_checkpoint._routing_contexts(experts)
    with record:
        kept = torch.topk(scores, 3, dim=-1)
        others.flip(0).topk(2)  # over more than the experts: no routing
    with replay:
        again = scores.topk(3, -1)
        assert others.topk(1).values.item() == experts
    want = torch.topk(scores, 3)
    seed = torch.randn(5, 3)
    (expected,) = torch.autograd.grad(want.values, scores, seed)
    for got in (kept, again):
        assert torch.equal(got.indices, want.indices) and torch.equal(got[0], want.values)
        assert torch.equal(torch.autograd.grad(got.values, scores, seed)[0], expected)
