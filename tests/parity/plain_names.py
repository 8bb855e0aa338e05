"""Names and values of the engine's parameters in the plain model, and back."""

import torch
from torch import nn

from epfsdp2.engine.compat.transformers_names import RENAMED, flattened_matrices

__all__ = ["own_values", "plain_name", "plain_values"]


def plain_name(model: nn.Module, name: str) -> str:
    """Return the plain model's name of a parameter of the engine's model."""
    for plain, own in getattr(model, RENAMED, {}).items():
        if name.endswith(own):
            return name.removesuffix(own) + plain
    return name


def plain_values(model: nn.Module, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the plain model's values of an engine's parameter: one tensor, or several matrices."""
    if found := flattened_matrices(model, name):
        was, names = found
        return dict(zip(names, was.flatten(value), strict=True))
    return {plain_name(model, name): value}


def own_values(model: nn.Module, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the plain model's tensors by the engine's names, in the engine's shapes."""
    own = {}
    for name, _ in model.named_parameters():
        if found := flattened_matrices(model, name):
            was, names = found
            if all(part in values for part in names):
                own[name] = was.stack(values[part] for part in names)
        elif (plain := plain_name(model, name)) in values:
            own[name] = values[plain]
    return own
