"""Adapters for tests: their settings, values that change the output, and models that have them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize

from epfsdp2.engine.lora.adapters import A, B, Lora, lora_of
from epfsdp2.engine.lora.settings import LoraSettings
from epfsdp2.engine.topology.dtensor import is_adapter
from tests.support.engine.sharded import sharded_model, whole_tensor
from tests.support.models.tiny import reference_model

__all__ = [
    "SETTINGS",
    "adapt",
    "adapted_weights",
    "adapters_of",
    "lora_settings",
    "sharded_with_adapters",
    "stirred",
]

SETTINGS = {"lora_rank": 4, "lora_alpha": 12, "target_modules": "all-linear"}


def lora_settings(**changes: Any) -> LoraSettings:
    return LoraSettings.of(SETTINGS | changes, "actor_rollout_ref.model")


def adapters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in model.named_parameters() if is_adapter(name)}


def stirred(model: nn.Module, seed: int = 5) -> Callable[[str], torch.Tensor]:
    """Return a ``read`` for ``Lora.initialize`` with random adapters that change the output."""

    def read(name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed + len(name) + sum(name.encode()))
        return torch.randn(model.get_parameter(name).shape, generator=generator) * 0.1

    return read


def adapt(plain: nn.Module, model: nn.Module) -> dict[str, nn.Parameter]:
    """Add the adapters of a sharded model to a plain one, and return them by name; collective."""
    leaves, lora = dict[str, nn.Parameter](), lora_of(model)
    plain.requires_grad_(False)
    for name, target in lora.targets.items():
        a, b = (nn.Parameter(whole_tensor(model.get_parameter(name + end))) for end in (A, B))
        leaves |= {name + A: a, name + B: b}
        module = plain.get_submodule(name.rpartition(".")[0])
        parametrize.register_parametrization(module, target.own, _Adapted(a, b, target.scaling, target.is_transposed))
    return leaves


class _Adapted(nn.Module):
    def __init__(self, a: nn.Parameter, b: nn.Parameter, scaling: float, is_transposed: bool):
        super().__init__()
        self.a, self.b, self.scaling, self.is_transposed = a, b, scaling, is_transposed

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        delta = self.scaling * self.b @ self.a
        return weight + (delta.mT if self.is_transposed else delta)


def sharded_with_adapters(folder, ep, fsdp_size=-1, seed=0, changes=None, **options):
    """Build a sharded model with adapters in the engine's order."""
    model, meshes = sharded_model(
        folder,
        dist.get_world_size(),
        ep,
        fsdp_size,
        before=lambda model: Lora(model, lora_settings(**(changes or {}))),
        initialize=lambda name, tensor, fits: is_adapter(name),
        finish=lambda model: lora_of(model).initialize(model, seed),
        **options,
    )
    lora = lora_of(model)
    lora.freeze_base(model)
    return model.train(), meshes, lora


def adapted_weights(folder, model):
    """Return the plain model's weights with the adapters of a sharded model, by plain arithmetic; collective."""
    plain = reference_model(folder)
    weights = {name: param.detach() for name, param in plain.named_parameters()}
    adapt(plain, model)
    for name in lora_of(model).targets:
        module, _, own = name.rpartition(".")
        weights[name] = getattr(plain.get_submodule(module), own).detach()
    return weights
