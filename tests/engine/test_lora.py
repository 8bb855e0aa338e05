"""Low-rank adapters against the plain Hugging Face model that computes with ``W + scaling * B @ A``, float32."""

import pytest
import torch
import torch.distributed as dist
from torch.func import functional_call

from epfsdp2.engine.clip import clip_grad_norm_
from epfsdp2.engine.lora import A, B, Lora, lora_of
from epfsdp2.engine.lora_settings import LoraSettings
from epfsdp2.engine.optimizer import build_multi_optimizer
from epfsdp2.engine.shards import is_adapter
from tests.support.engine import sharded_model
from tests.support.models import VOCAB, reference_model, save_qwen3_moe
from tests.support.ranks import run_ranks

WORLD = 4
RELATIVE = 1e-5
CLIP = 0.5
SETTINGS = {"lora_rank": 4, "lora_alpha": 12, "target_modules": "all-linear"}
SCALING = 3.0


def lora_settings(**changes):
    return LoraSettings.of(SETTINGS | changes, "actor_rollout_ref.model")


def _sharded(folder, ep, fsdp_size=-1, seed=0, changes=None, **options):
    """A sharded model with adapters, as the engine makes it."""
    model, meshes = sharded_model(
        folder,
        dist.get_world_size(),
        ep,
        fsdp_size,
        before=lambda model: Lora(model, lora_settings(**(changes or {}))),
        initialize=lambda name, tensor, fits: is_adapter(name),
        **options,
    )
    lora = lora_of(model)
    lora.initialize(model, seed)
    lora.freeze_the_rest(model)
    return model.train(), meshes, lora


def _adapters(model):
    return {name: param for name, param in model.named_parameters() if is_adapter(name)}


def _stirred(model, seed=5):
    """Adapters that change something: each drawn whole, and cut as it is here."""

    def read(name):
        generator = torch.Generator().manual_seed(seed + len(name) + sum(name.encode()))
        return torch.randn(model.get_parameter(name).shape, generator=generator) * 0.1

    return read


def _merged(weights, adapters):
    """The weights that a plain model with these adapters has."""
    changed = dict(weights)
    for name in weights:
        if name + A in adapters:
            changed[name] = weights[name] + SCALING * adapters[name + B] @ adapters[name + A]
    return changed


class _Reference:
    """The plain model, its frozen weights, and leaves for the adapters."""

    def __init__(self, folder, adapters):
        self.model = reference_model(folder).train()
        self.weights = {name: param.detach() for name, param in self.model.named_parameters()}
        self.adapters = {name: value.clone().requires_grad_() for name, value in adapters.items()}

    def logits(self, ids):
        with_adapters = _merged(self.weights, self.adapters)
        return functional_call(self.model, with_adapters, kwargs={"input_ids": ids, "use_cache": False}).logits

    def loss(self, ids):
        return _loss(self.logits(ids), ids)


def _loss(logits, ids):
    return torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1))


def _logits(model, ids):
    return model(input_ids=ids, use_cache=False).logits


def _adam(params):
    return torch.optim.AdamW(params, lr=1e-3, eps=1e-6)


def _batch(world):
    return torch.randint(0, VOCAB, (2 * world, 17), generator=torch.Generator().manual_seed(1))


def _relative(value, reference):
    return ((value - reference).norm() / reference.norm().clamp_min(1e-12)).item()


def _whole(param):
    return param.detach().full_tensor()


def _two_updates(folder, cases):
    rank, world = dist.get_rank(), dist.get_world_size()
    ids = _batch(world)
    mine = slice(2 * rank, 2 * rank + 2)
    expected = None
    for ep, fsdp_size, options in cases:
        where = f"ep={ep} fsdp_size={fsdp_size} {options}"
        model, meshes, lora = _sharded(folder, ep, fsdp_size, **options)
        lora.initialize(model, 0, _stirred(model))
        base = {n: _whole(p).clone() for n, p in model.named_parameters() if not is_adapter(n)}
        if expected is None:
            expected = _updates(_Reference(folder, {n: _whole(p) for n, p in _adapters(model).items()}), ids)
        optimizer = build_multi_optimizer(model, _adam)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        assert {id(p) for p in held} == {id(p) for p in _adapters(model).values()}
        for logits, grads, norm, params in expected:
            optimizer.zero_grad()
            got = _logits(model, ids[mine])
            torch.testing.assert_close(got.detach().log_softmax(-1), logits[mine], rtol=1e-5, atol=1e-5)
            _loss(got, ids[mine]).backward()
            assert all(p.grad is None for n, p in model.named_parameters() if not is_adapter(n)), where
            for name, param in _adapters(model).items():
                assert _relative(param.grad.full_tensor(), grads[name]) < RELATIVE, (where, name)
            got = clip_grad_norm_(model.parameters(), CLIP, meshes)
            assert abs(got.item() / norm.item() - 1) < RELATIVE, where
            optimizer.step()
            for name, param in _adapters(model).items():
                assert _relative(_whole(param), params[name]) < RELATIVE, (where, name)
        assert all(torch.equal(_whole(p), base[n]) for n, p in model.named_parameters() if n in base), where


def _updates(reference, ids):
    """Log-probs, gradients, norm and adapters of two updates of the plain model."""
    optimizer = _adam(list(reference.adapters.values()))
    expected = []
    for _ in range(2):
        optimizer.zero_grad()
        logits = reference.logits(ids)
        _loss(logits, ids).backward()
        grads = {n: p.grad.clone() for n, p in reference.adapters.items()}
        norm = torch.nn.utils.clip_grad_norm_(reference.adapters.values(), CLIP)
        optimizer.step()
        params = {n: p.detach().clone() for n, p in reference.adapters.items()}
        expected.append((logits.detach().log_softmax(-1), grads, norm, params))
    return expected


def test_log_probs_gradients_and_two_updates_equal_the_plain_model(tmp_path):
    cases = [
        (1, -1, {"checkpointing": "full"}),
        (2, -1, {}),
        (4, -1, {"checkpointing": "selective"}),
        (2, 2, {}),
        (2, -1, {"expert_shard_dim": 0}),
        (2, -1, {"cpu_offload": True}),
    ]
    run_ranks(_two_updates, WORLD, save_qwen3_moe(tmp_path), cases)


def _begins_as_the_base(folder):
    ids = _batch(dist.get_world_size())
    drawn = None
    for ep in (1, 2, 4):
        model, _, lora = _sharded(folder, ep, seed=7)
        adapters = {name: _whole(param) for name, param in _adapters(model).items()}
        assert all(not value.any() for name, value in adapters.items() if name.endswith(B))
        assert all(value.abs().max() <= value.shape[-1] ** -0.5 for value in adapters.values())
        assert len({value.flatten()[0].item() for name, value in adapters.items() if name.endswith(A)}) > 10
        drawn = drawn or adapters
        assert all(torch.equal(value, drawn[name]) for name, value in adapters.items()), ep
        with torch.no_grad():
            with_adapters = _logits(model, ids)
            with lora.disabled():
                without = _logits(model, ids)
        assert torch.equal(with_adapters, without)
        lora.initialize(model, 0, _stirred(model))
        with torch.no_grad():
            assert not torch.allclose(_logits(model, ids), without, atol=1e-2)
            with lora.disabled():
                assert torch.equal(_logits(model, ids), without)
    plain = reference_model(folder)
    with torch.no_grad():
        torch.testing.assert_close(without, _logits(plain, ids), rtol=1e-5, atol=1e-5)


def test_a_run_begins_as_the_base_and_its_reference_is_the_base(tmp_path):
    run_ranks(_begins_as_the_base, WORLD, save_qwen3_moe(tmp_path))
