"""Parameters of a model that the engine has built, and what the plain model calls and has of them."""

import torch
from torch import nn

from epfsdp2.engine.compat.transformers_names import RENAMED, flattened_matrices

__all__ = ["own_values", "plain_name", "plain_values"]


def plain_name(model: nn.Module, name: str) -> str:
    """What the plain model calls a parameter of one that the engine has built."""
    for plain, own in getattr(model, RENAMED, {}).items():
        if name.endswith(own):
            return name.removesuffix(own) + plain
    return name


def plain_values(model: nn.Module, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the plain model has of a parameter of one that the engine has built: one tensor, or several matrices."""
    if found := flattened_matrices(model, name):
        was, names = found
        return dict(zip(names, was.flatten(value), strict=True))
    return {plain_name(model, name): value}


def own_values(model: nn.Module, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of the plain model's parameters as they are in the one that the engine has built, by its names."""
    own = {}
    for name, _ in model.named_parameters():
        if found := flattened_matrices(model, name):
            was, names = found
            if all(part in values for part in names):
                own[name] = was.stack(values[part] for part in names)
        elif (plain := plain_name(model, name)) in values:
            own[name] = values[plain]
    return own
