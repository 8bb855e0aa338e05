"""transformers' private names for loading and saving (read in 5.9.0, 5.12.1 and 5.24.0)."""

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel, core_model_loading

from .private_names import look_up
from .wrap_function import wrap

__all__ = [
    "ALL_EXPERTS_FUNCTIONS",
    "DECODER",
    "FLATTENED",
    "NESTED",
    "NUMBERED",
    "RENAMED",
    "Flattened",
    "Transpose",
    "WeightConverter",
    "WeightRenaming",
    "dot_natural_key",
    "flattened_matrices",
    "get_model_conversion_mapping",
    "no_init_weights",
    "own_name",
    "renamed",
    "revert_weight_conversion",
    "set_experts_implementation",
    "use_experts_implementation",
]

_find = partial(look_up, known="5.9 to 5.24")
_LOADING = "transformers.core_model_loading"

ALL_EXPERTS_FUNCTIONS = _find("transformers.integrations.moe:ALL_EXPERTS_FUNCTIONS")
Transpose = _find(f"{_LOADING}:Transpose")
WeightConverter = _find(f"{_LOADING}:WeightConverter")
WeightRenaming = _find(f"{_LOADING}:WeightRenaming")
use_experts_implementation = _find("transformers.integrations.moe:use_experts_implementation")
dot_natural_key = _find(f"{_LOADING}:dot_natural_key")
no_init_weights = _find("transformers.initialization:no_init_weights")
_get_mapping = _find("transformers.conversion_mapping:get_model_conversion_mapping")
_revert = _find(f"{_LOADING}:revert_weight_conversion")
_rename_source_key = _find(f"{_LOADING}:rename_source_key")

RENAMED = "_epfsdp2_renamed"
"""Attribute of a model: the end of a parameter's own name, by the end of transformers' name, where they differ."""

FLATTENED = "_epfsdp2_flattened"
"""Attribute of a model: ``Flattened`` by the end of the name of a flattened parameter."""

DECODER = "_epfsdp2_decoder"
"""Attribute of a model with a layer at ``mtp``: the FQN of its decoder, whose converters are the layer's too."""

NUMBERED = "_epfsdp2_numbered"
"""Attribute of a model, true if checkpoints call its layer ``mtp.layers.0`` ``mtp.0``, and name what is in it as they
do in a decoder layer."""

NESTED = "_epfsdp2_nested"
"""Attribute of a model, true if checkpoints have what is in a layer ``mtp.layers.N`` in
``mtp.layers.N.transformer_block``, without the two norms and the projection of its inputs."""

_NESTED = r"(\.mtp\.layers\.\d+)\."
_SUBMODELS: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Flattened:
    """A stack of experts that transformers and checkpoints hold as matrices ``[E * rows, D]``.

    Args:
        names: the ends of the matrices' names. The stack is ``[E, len(names) * rows, D]``, in their order.
        rows: rows per expert in a matrix.
        is_transposed: whether the stack is ``[E, D, rows]``, for one matrix.
    """

    names: tuple[str, ...]
    rows: int
    is_transposed: bool = False

    def stack(self, matrices: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the stack of the matrices, which are in the order of ``names``."""
        parts = [matrix.unflatten(0, (-1, self.rows)) for matrix in matrices]
        return parts[0].mT if self.is_transposed else torch.cat(parts, dim=1)

    def parts(self, stack: torch.Tensor) -> list[torch.Tensor]:
        """Return the matrices of a stack, or of a slice of experts, as views ``[E, rows, D]``."""
        return [stack.mT] if self.is_transposed else list(stack.split(self.rows, dim=1))

    def flatten(self, stack: torch.Tensor) -> list[torch.Tensor]:
        """Return the matrices of a stack, or of a slice of experts; copies, if there are two experts or more."""
        return [part.flatten(0, 1) for part in self.parts(stack)]

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **_: Any
    ) -> dict[str, torch.Tensor]:
        """Stack the matrices: the interface of operations of transformers' ``WeightConverter``."""
        return {target_patterns[0]: self.stack(input_dict[pattern][0] for pattern in source_patterns)}


def renamed(
    key: str, renamings: Sequence[Any], converters: Sequence[Any], base_model_prefix: Any, known: Mapping[str, Any]
) -> tuple[str, str | None]:
    """Return the model's name of a checkpoint's tensor, and the source pattern of its converter; None without one.

    Args:
        base_model_prefix: added to a name or removed from it if the result is in ``known``.
        known: the model's names; values are not None.
    """
    # By position: the fourth parameter is ``prefix`` up to 5.11 and ``base_model_prefix`` after.
    return _rename_source_key(key, renamings, converters, base_model_prefix, known)


def own_name(model: nn.Module, name: str) -> str:
    """Return the model's own name of a parameter, for transformers' name."""
    for plain, own in getattr(model, RENAMED, {}).items():
        if name.endswith(plain):
            return name.removesuffix(plain) + own
    return name


def flattened_matrices(model: nn.Module, name: str) -> tuple[Flattened, list[str]] | None:
    """Return the ``Flattened`` of a stack of experts, and its matrices' names; None for any other parameter."""
    for end, of in getattr(model, FLATTENED, {}).items():
        if name.endswith(end):
            return of, [name.removesuffix(end) + own for own in of.names]
    return None


def get_model_conversion_mapping(model: nn.Module, **kwargs: Any) -> list[Any]:
    """Return transformers' weight converters and renamings for a model, sharded or not, and the model's own."""
    own = [WeightRenaming(re.escape(old), new) for old, new in getattr(model, RENAMED, {}).items()]
    flattened = [
        WeightConverter([re.escape(name) for name in of.names], new, [of])
        for new, of in getattr(model, FLATTENED, {}).items()
    ]
    mapping = _get_mapping(_unsharded(model), **kwargs)
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    decoder = getattr(model, DECODER, "")
    scopes = {decoder, decoder.removeprefix("model.")} - {""}  # the latter in transformers 5.19
    beside = [copy.copy(entry) for entry in converters if entry.scope_prefix in scopes]
    if hasattr(model, NUMBERED):
        beside += [copy.copy(entry) for entry in mapping if isinstance(entry, WeightRenaming)]
        mapping = [WeightRenaming(r"^mtp\.0\.", "mtp.layers.0."), *mapping]
    if hasattr(model, NESTED):
        mapping = [WeightRenaming(_NESTED + r"transformer_block\.", r"\1."), *mapping]
    for entry in beside:
        entry.scope_prefix = "mtp"
    if hasattr(model, NUMBERED):
        beside += [WeightRenaming(r"^mtp\.layers\.0\.hc_head_", "mtp.layers.0.hc_head.hc_")]
        beside += [WeightRenaming(r"^mtp\.layers\.0\.kv_norm\.", "mtp.layers.0.norm.")]  # 5.24 renames any norm
    return [*mapping, *own, *flattened, *beside]


class _PartsAreViews(TorchFunctionMode):
    """Skips copies: transformers 5.19 makes the parts of a stack contiguous, and 5.13 returns views."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def _active(stock: Any) -> Any:
    """Let the names of a group be reverted one by one: Kimi-K2.5's ``norm2`` to ``norm1``, and ``norm1`` to ``norm0``.

    transformers 5.24 reverts one of them only after it has seen the other.
    """

    def reverse_transform(rename: Any) -> Any:
        found = stock(rename)
        found._active = True
        return found

    return reverse_transform


if hasattr(core_model_loading, "GroupWeightRename"):
    wrap(core_model_loading.GroupWeightRename, "reverse_transform", _active)


def set_experts_implementation(model: Any, experts: Iterable[Any], name: str) -> None:
    """Set the function registered as ``name`` as the forward of a model's experts modules.

    transformers 5.23 by itself leaves out a model whose source does not decorate a class (``moe/outside``).
    """
    model.set_experts_implementation(name)
    for module in experts:
        module.config._experts_implementation_internal = name


def revert_weight_conversion(model: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert a model's tensors to a checkpoint's, views where the layouts allow it; the model may be sharded."""
    flattened: dict[str, torch.Tensor] = {}
    # The converters of a submodel read names inside of it alone.
    inside = f"{getattr(model, DECODER)}.mtp." if hasattr(model, DECODER) else "mtp."
    others = {re.sub(r"^mtp\.", inside, name): tensor for name, tensor in state.items()}
    for name in state:
        if found := flattened_matrices(model, name):
            of, names = found
            flattened |= dict(zip(names, of.flatten(others.pop(name)), strict=True))
    with _PartsAreViews():
        reverted: dict[str, torch.Tensor] = {**_revert(_unsharded(model), others), **flattened}
    for old, new in getattr(model, RENAMED, {}).items():
        reverted = {n.removesuffix(new) + old if n.endswith(new) else n: t for n, t in reverted.items()}
    if hasattr(model, NESTED):
        inner = _NESTED + r"(?!embed_norm|hidden_norm|input_proj)"
        reverted = {re.sub(inner, r"\1.transformer_block.", name): tensor for name, tensor in reverted.items()}
    if hasattr(model, DECODER):  # what begins the decoder's names is another word in some checkpoints
        reverted = {re.sub(r"^(\w+\.)*mtp\.", "mtp.", name): tensor for name, tensor in reverted.items()}
    return reverted


def _unsharded(model: nn.Module) -> nn.Module:
    """Return a view of a model whose submodels have their own classes; all else is shared.

    transformers finds conversions by the name of a class, and from 5.20 on by its module; FSDP replaces both. It walks
    all modules at each conversion, so the view yields only submodels.
    """
    if not isinstance(model, PreTrainedModel):
        return model
    if model not in _SUBMODELS:
        _SUBMODELS[model] = [n for n, module in model.named_modules() if isinstance(module, PreTrainedModel)]
    plain, names = _of_own_class(model), _SUBMODELS[model]
    plain.named_modules = lambda: ((n, _of_own_class(model.get_submodule(n))) for n in names)  # type: ignore
    return plain


def _of_own_class(module: nn.Module) -> nn.Module:
    own = next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
    plain: nn.Module = own.__new__(own)  # type: ignore[assignment]
    plain.__dict__.update(module.__dict__)
    return plain
