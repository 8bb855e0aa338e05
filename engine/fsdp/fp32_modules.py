"""Modules that compute in float32 while the rest of the model computes in a lower precision, as FSDP units.

Modules that the model's class keeps in float32 (``_keep_in_fp32_modules_strict``) cast their inputs by themselves.
Modules that the user names (``engine.fp32_modules``), e.g. routers, have their inputs cast to float32.

Correction biases are never cast. In most families they are buffers, which FSDP ignores; as frozen parameters they are
in FSDP's ``ignored_params`` (``correction_biases``). A module that multiplies float32 buffers into its activations
passes float32 to the next weight, so it runs under autocast.
"""

import functools
import logging
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import SettingError, close_matches
from ..model.families import READ_WITHOUT_A_CALL
from ..model.meta import kept_in_float32
from ..wrap_forward import wrap_forward

__all__ = ["correction_biases", "find_float32_modules", "keep_input_dtype", "run_under_autocast", "unmatched_patterns"]

logger = logging.getLogger("epfsdp2")

# Names of correction biases in routers: e_score_correction_bias, and expert_bias in Afmoe.
_CORRECTION_BIAS = re.compile(r"(?:^|[._])(?:correction|expert)_bias$")


@dataclass(frozen=True)
class Float32Module:
    """A module that FSDP gathers in float32, except some children, which are a unit in ``param_dtype`` before it."""

    module: nn.Module
    low_precision_children: tuple[nn.Module, ...] = ()
    casts_inputs: bool = False


def find_float32_modules(
    model: nn.Module, experts: Sequence[nn.Module], patterns: Sequence[str] = ()
) -> list[Float32Module]:
    """Find the modules that are kept in float32, in the order for ``fully_shard``: inner ones first.

    Modules that patterns match (FQNs, ``*`` matches anything) come before those that the model's class keeps in
    float32.

    Raises:
        SettingError: a pattern matches no module that has parameters, or one that holds experts.
    """
    named, kept = _named(model, set(experts), patterns), kept_in_float32(model)
    kept_params = {p for name, p in model.named_parameters() if kept.search(name)}
    owners = list(_owners(model, kept_params - {p for module in named for p in module.parameters()}))
    return [Float32Module(module, casts_inputs=True) for module in named] + owners[::-1]


def correction_biases(model: nn.Module, num_experts: Collection[int]) -> set[nn.Parameter]:
    """Find frozen parameters with one entry per expert, which are added to routing scores (Afmoe, Laguna, Ernie 4.5).

    Names are matched too, because other frozen parameters may have this size (``head_dim`` of 128, 128 experts).
    """
    return {
        p
        for name, p in model.named_parameters()
        if _CORRECTION_BIAS.search(name) and not p.requires_grad and p.numel() in num_experts
    }


def run_under_autocast(
    model: nn.Module, experts: Collection[nn.Module], device_type: str, param_dtype: torch.dtype
) -> None:
    """Run modules under autocast that have linears and float32 buffers but no experts (MiniMax's linear attention).

    Otherwise a matmul gets a float32 activation and a weight of a lower ``param_dtype``, and raises. Routers and rotary
    embeddings have buffers but no linear below them; they cast by themselves.
    """
    mixing = []
    for module in model.modules() if param_dtype != torch.float32 else ():
        if not any(buffer.is_floating_point() for buffer in module.buffers(recurse=False)):
            continue
        below = list(module.modules())[1:]
        if any(isinstance(m, nn.Linear) for m in below) and not any(m in experts for m in below):
            mixing.append(module)
            wrap_forward(module, "autocast", functools.partial(_under_autocast, device_type, param_dtype))
    if mixing and dist.get_rank() == 0:
        logger.warning(
            "epfsdp2: %s multiplies float32 buffers of its own, so it runs under autocast to %s (%d modules)",
            " and ".join(sorted({type(module).__name__ for module in mixing})),
            param_dtype,
            len(mixing),
        )


def _under_autocast(
    device_type: str, dtype: torch.dtype, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    with torch.autocast(device_type, dtype):
        return forward(*args, **kwargs)


def keep_input_dtype(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Cast the output to the dtype of the input; a forward hook.

    With a float32 weight some families' norms return float32, which the next linear can't multiply (DeepSeek-V4).
    """
    like = args[0] if args else None
    if isinstance(output, torch.Tensor) and isinstance(like, torch.Tensor) and output.shape == like.shape:
        return output.to(like.dtype)
    return output


def unmatched_patterns(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the FQN patterns that match no module with parameters."""
    names = _with_params(model)
    return [pattern for pattern in patterns if not any(fnmatchcase(fqn, pattern) for fqn in names)]


def _with_params(model: nn.Module) -> dict[str, nn.Module]:
    return {fqn: m for fqn, m in model.named_modules() if fqn and any(True for _ in m.parameters())}


def _named(model: nn.Module, experts: set[nn.Module], patterns: Sequence[str]) -> list[nn.Module]:
    found: dict[nn.Module, None] = {}
    with_params = _with_params(model)
    for pattern in patterns:
        matching = [m for fqn, m in with_params.items() if fnmatchcase(fqn, pattern)]
        if not matching:
            works = f"one like {close_matches(pattern, with_params)}"
            raise SettingError("engine.fp32_modules", pattern, "matches no module of the model.", works)
        if any(experts & set(module.modules()) for module in matching):
            rule = "matches a module that holds experts, which compute in engine.dtype."
            raise SettingError("engine.fp32_modules", pattern, rule, "the router alone, e.g. '*.mlp.gate'")
        for fqn in (fqn for fqn, m in with_params.items() if m in matching):
            parent, _, own = fqn.rpartition(".")
            if (type(model.get_submodule(parent)).__name__, own) in READ_WITHOUT_A_CALL:
                rule = f"matches {fqn}, whose weight the model's code reads without calling it, and casts to float32."
                raise SettingError("engine.fp32_modules", pattern, rule, "leave it out")
        found.update(dict.fromkeys(reversed(matching)))  # a module comes before what is below it
    return list(found)


def _owners(model: nn.Module, kept: set[nn.Parameter]) -> Iterator[Float32Module]:
    """Yield the largest modules with ``kept`` parameters alone, and those that hold some directly, outer ones first.

    A convolution's parameters count as its parent's, because linear attention may pass them to a kernel (Bailing). FSDP
    gathers nothing for a convolution that is not called.
    """
    todo = [model]
    while todo:
        module = todo.pop()
        below = set(module.parameters())
        if not below & kept:
            continue
        if below <= kept:
            yield Float32Module(module)
            continue
        convolutions = [c for c in module.children() if isinstance(c, nn.modules.conv._ConvNd)]
        own = {*module.parameters(recurse=False), *(p for c in convolutions for p in c.parameters())}
        todo.extend(c for c in module.children() if c not in convolutions)
        if kept & own:
            yield Float32Module(module, tuple(c for c in module.children() if set(c.parameters()) - kept - own))
