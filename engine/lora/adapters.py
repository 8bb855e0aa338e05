"""Low-rank adapters on linears and on stacks of experts: frozen weights ``W`` that compute as ``W + scaling * B @ A``.

An adapter is two more parameters of the module that owns the weight: ``<weight>_lora_A`` ``[r, in]`` and
``<weight>_lora_B`` ``[out, r]``; a stack of experts has a pair per expert, ``[E, r, in]`` and ``[E, out, r]``. With
DoRA (https://arxiv.org/abs/2402.09353) a linear has ``<weight>_lora_magnitude`` ``[out]`` too. A module that is trained
whole (``modules_to_save``) has a trained copy ``<parameter>_lora_saved`` of each frozen parameter. No module is
wrapped, so names stay, and FSDP shards, gathers and reduces adapters of experts with their weights.
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
from ..topology.dtensor import is_adapter, local_pieces, local_tensor
from ..wrap_forward import wrap_forward
from .settings import LoraSettings
from .targets import Target, experts_of, find_saved, find_targets

__all__ = ["A", "B", "MAGNITUDE", "SAVED", "Lora", "lora_of"]

A, B, MAGNITUDE, SAVED = "_lora_A", "_lora_B", "_lora_magnitude", "_lora_saved"
_HANDLE = "_epfsdp2_lora"


class Lora:
    """The adapters of one model, and its modules that are trained whole.

    Args:
        model: a model that is not sharded yet, on any device. It gets the adapters' parameters, without values.
        plan: ``engine.expert_plan``.

    Attributes:
        targets: the adapted weights by name.
        saved: names of the frozen parameters with a trained copy, named with ``SAVED`` at the end.
        shapes: global shapes of the trained parameters, by name.
        enabled: whether a forward adds the adapters and uses the copies.

    Raises:
        SettingError: the settings name weights that the model does not have, or that can't be adapted.
    """

    def __init__(self, model: Any, settings: LoraSettings, plan: Mapping[str, int] | None = None):
        self.settings, self.enabled = settings, True
        self.targets: dict[str, Target] = {target.name: target for target in find_targets(model, settings, plan)}
        self.has_experts = bool(experts_of(model, plan))
        self.saved: list[str] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        saved_modules = find_saved(model, settings, plan)
        for target in self.targets.values():
            self._attach(target)
        for fqn in saved_modules:
            self._copy(fqn, model.get_submodule(fqn))
        # The backward of the first layer issues the collectives of the other layers, whatever is adapted in it.
        model.get_input_embeddings().register_forward_hook(_requires_grad)
        setattr(model, _HANDLE, self)

    def _attach(self, target: Target) -> None:
        weight, (size_in, size_out) = target.module.get_parameter(target.own), target.sizes
        stack = () if target.experts is None else (target.experts,)
        shapes = {A: (*stack, target.rank, size_in), B: (*stack, size_out, target.rank)}
        if self.settings.use_dora:
            shapes[MAGNITUDE] = (size_out,)
        self.shapes |= {target.name + suffix: shape for suffix, shape in shapes.items()}
        for suffix, shape in shapes.items():
            adapter = nn.Parameter(torch.empty(shape, dtype=weight.dtype, device=weight.device))
            target.module.register_parameter(target.own + suffix, adapter)
        if target.experts is None:
            # Registered before FSDP's hook, which frees the gathered parameters.
            target.module.register_forward_hook(partial(_add, self, target.scaling))
        else:
            adapt_experts(target.module, self, target.own, target.scaling)

    def _copy(self, fqn: str, module: nn.Module) -> None:
        names = [name for name, param in module.named_parameters(recurse=False) if param.requires_grad]
        for name in names:
            module.register_parameter(name + SAVED, nn.Parameter(torch.empty_like(module.get_parameter(name))))
            self.shapes[f"{fqn}.{name}{SAVED}"] = tuple(module.get_parameter(name).shape)
        self.saved += [f"{fqn}.{name}" for name in names]
        wrap_forward(module, "saved_modules", partial(_with_copies, self, module, names))

    def freeze_base(self, model: nn.Module) -> None:
        """Freeze everything but the adapters and the copies, before the first forward, when FSDP reads it.

        ``parallelize`` runs before, because its rule for correction biases reads what the family itself freezes.
        """
        for name, param in model.named_parameters():
            param.requires_grad_(is_adapter(name))

    @torch.no_grad()
    def initialize(self, model: nn.Module, seed: int, read: Callable[[str], torch.Tensor] | None = None) -> None:
        """Fill this rank's shards from a saved adapter, or with a new one that adds nothing.

        A new adapter has ``B = 0``, and ``A`` uniform within ``1 / sqrt(in)`` as in peft. The seed, the weight's name
        and the expert's number determine ``A``, so it is equal on every mesh. The weights have to be loaded.

        Args:
            read: reads a saved adapter's full parameter by its name in the model; None for a new adapter.
        """
        if read is not None:
            for name in self.shapes:
                values = read(name)
                for held, local in local_pieces(model.get_parameter(name)):
                    local.copy_(values[held.slices])
            return
        for name in self.saved:
            local_tensor(model.get_parameter(name + SAVED)).copy_(local_tensor(model.get_parameter(name)))
        for name, target in self.targets.items():
            _draw(model.get_parameter(name + A), f"{seed} {name}", target.experts is not None)
            local_tensor(model.get_parameter(name + B)).zero_()
            if self.settings.use_dora:
                # FSDP shards both along the rows, at the same indices.
                norms = local_tensor(model.get_parameter(name)).float().norm(dim=1)
                local_tensor(model.get_parameter(name + MAGNITUDE)).copy_(norms)

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Run a block of code without adapters: the model is then the reference policy."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True

    def facts(self) -> dict[str, Any]:
        """Return the values, as plain types, that have to be equal in a checkpoint and a run."""
        found: dict[str, Any] = {name: getattr(self.settings, name) for name in ("rank", "alpha")}
        for name, default in list(found.items()):
            if others := {t.name: getattr(t, name) for t in self.targets.values() if getattr(t, name) != default}:
                found[f"{name}_of"] = others
        found |= {name: True for name in ("use_rslora", "use_dora") if getattr(self.settings, name)}
        return found | ({"saved": self.saved} if self.saved else {})


def lora_of(model: nn.Module) -> Lora | None:
    """Return the adapters of a model, or None."""
    return getattr(model, _HANDLE, None)


def _add(lora: Lora, scaling: float, module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    if not lora.enabled:
        return output
    a, b = module.weight_lora_A, module.weight_lora_B
    added = scaling * F.linear(F.linear(args[0], a), b)
    if not lora.settings.use_dora:
        return output + added
    with torch.no_grad():  # no gradient flows through the norm (section 4.3 of the paper)
        norms = torch.linalg.norm(module.weight.float() + (scaling * (b @ a)).float(), dim=1)
    factor = (module.weight_lora_magnitude / norms).to(output.dtype)
    without_bias = output if module.bias is None else output - module.bias
    return output + (factor - 1) * without_bias + factor * added


def _with_copies(
    lora: Lora, module: nn.Module, names: list[str], forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a module's forward with its gathered trained copies in place of its parameters."""
    if not lora.enabled:
        return forward(*args, **kwargs)
    held = module._parameters
    originals = {name: held[name] for name in names}
    held.update({name: held[name + SAVED] for name in names})
    try:
        return forward(*args, **kwargs)
    finally:
        held.update(originals)


def _requires_grad(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)


def _draw(param: torch.Tensor, what: str, is_stack: bool) -> None:
    for held, local in local_pieces(param):
        if not is_stack:
            local.copy_(_drawn(what, tuple(param.shape))[held.slices])
            continue
        for i, expert in enumerate(range(held.low[0], held.high[0])):
            local[i].copy_(_drawn(f"{what} {expert}", tuple(param.shape[1:]))[held.slices[1:]])


def _drawn(what: str, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(what.encode()))
    return (2 * torch.rand(shape, generator=generator) - 1) * shape[-1] ** -0.5
