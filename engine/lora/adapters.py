"""Low-rank adapters on linears and on stacks of experts: frozen weights ``W`` that compute as ``W + alpha/r * B @ A``.

An adapter is two more parameters of the module that owns the weight: ``<weight>_lora_A`` ``[r, in]`` and
``<weight>_lora_B`` ``[out, r]``; a stack of experts has a pair per expert, ``[E, r, in]`` and ``[E, out, r]``. No
module is wrapped, so all other names in the model are unchanged. Adapters of experts are in the same module as the
weights, and are sharded, gathered and reduced with them, so they need no collectives of their own.
"""

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..moe.forward import adapt_experts
from ..topology.dtensor import is_adapter, local_range, local_tensor
from .settings import LoraSettings, Target, find_targets

__all__ = ["A", "B", "Lora", "lora_of"]

A, B = "_lora_A", "_lora_B"
_HANDLE = "_epfsdp2_lora"


class Lora:
    """The adapters of one model.

    Args:
        model: a model that is not sharded yet, on any device; gets the adapters' parameters, without values.
        settings: rank, alpha and targets.
        plan: ``engine.expert_plan``.

    Attributes:
        targets: the adapted weights by name.
        enabled: whether a forward adds the adapters.

    Raises:
        SettingError: the settings name weights that the model does not have.
    """

    def __init__(self, model: Any, settings: LoraSettings, plan: Mapping[str, int] | None = None):
        self.settings, self.scaling, self.enabled = settings, settings.scaling, True
        self.targets: dict[str, Target] = {target.name: target for target in find_targets(model, settings, plan)}
        for target in self.targets.values():
            self._attach(target)
        # So that the backward of the first layer issues the same collectives as the others, whatever is adapted in it.
        model.get_input_embeddings().register_forward_hook(_requires_grad)
        setattr(model, _HANDLE, self)

    def _attach(self, target: Target) -> None:
        weight, (size_in, size_out) = target.module.get_parameter(target.own), target.sizes
        stack = () if target.experts is None else (target.experts,)
        for suffix, shape in ((A, (self.settings.rank, size_in)), (B, (size_out, self.settings.rank))):
            adapter = nn.Parameter(torch.empty((*stack, *shape), dtype=weight.dtype, device=weight.device))
            target.module.register_parameter(target.own + suffix, adapter)
        if target.experts is None:
            # Before FSDP's own hook, which frees the gathered parameters.
            target.module.register_forward_hook(partial(_add, self))
        else:
            adapt_experts(target.module, self)

    def freeze_base(self, model: nn.Module) -> None:
        """Freeze everything but the adapters.

        Call it after ``parallelize``, which treats parameters that a family keeps frozen differently
        (``fp32_modules.correction_biases``), and before the first forward, when FSDP reads ``requires_grad``.
        """
        for name, param in model.named_parameters():
            param.requires_grad_(is_adapter(name))

    @torch.no_grad()
    def initialize(self, model: nn.Module, seed: int, read: Callable[[str], torch.Tensor] | None = None) -> None:
        """Fill this rank's shards, from a saved adapter or with an adapter that adds nothing.

        The latter has ``B = 0`` and draws ``A`` as peft does, uniformly within ``1 / sqrt(in)``, from the seed and the
        name of the weight (and the number of the expert), so that it is equal on every mesh.

        Args:
            read: returns an adapter's full parameter by its name in the model.
        """
        for name, target in self.targets.items():
            for suffix in (A, B):
                param = model.get_parameter(name + suffix)
                held, local = local_range(param), local_tensor(param)
                if read is not None:
                    local.copy_(read(name + suffix)[held.slices])
                elif suffix == B:
                    local.zero_()
                elif target.experts is None:
                    local.copy_(_drawn(f"{seed} {name}", tuple(param.shape))[held.slices])
                else:
                    for i, expert in enumerate(range(held.low[0], held.high[0])):
                        drawn = _drawn(f"{seed} {name} {expert}", tuple(param.shape[1:]))
                        local[i].copy_(drawn[held.slices[1:]])

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Run the block without adapters: the model is then the reference policy."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True

    def facts(self) -> dict[str, float]:
        """Return the facts that a checkpoint and a run must have in common; plain values."""
        return {"rank": self.settings.rank, "alpha": self.settings.alpha}


def lora_of(model: nn.Module) -> Lora | None:
    """Return the adapters of a model; None if it has none."""
    return getattr(model, _HANDLE, None)


def _add(lora: Lora, module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    if not lora.enabled:
        return output
    low = F.linear(args[0], module.weight_lora_A)
    return output + lora.scaling * F.linear(low, module.weight_lora_B)


def _requires_grad(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)


def _drawn(what: str, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(what.encode()))
    return (2 * torch.rand(shape, generator=generator) - 1) * shape[-1] ** -0.5
