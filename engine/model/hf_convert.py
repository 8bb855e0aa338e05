"""Run transformers' weight converters in reverse, one parameter at a time.

Most tensors of a checkpoint come from one parameter. Some converters make several parameters at once, from tensors
that they share or only count together. ERNIE 4.5-VL has text and vision experts in one list of a checkpoint, and in two
stacks of the model. Such parameters are *converted together*.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..compat.transformers_names import WeightConverter, get_model_conversion_mapping, revert_weight_conversion
from ..topology.dtensor import checkpoint_tensors

__all__ = ["converter_targets", "cache_shapes", "revert", "converted_together", "storage_id"]

_SHAPES: WeakKeyDictionary[Any, dict[str, dict[str, torch.Size]]] = WeakKeyDictionary()


def converter_targets(name: str, converter: WeightConverter | None) -> list[str]:
    """Return the names of all parameters that the converter of ``name`` makes, in its order."""
    patterns = converter.target_patterns if converter is not None else []
    found = next((pattern for pattern in patterns if pattern in name), None)
    return [name] if found is None else [name.replace(found, pattern) for pattern in patterns]


def revert(model: Any, name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the checkpoint's tensors that come from one parameter alone, by name: views, where the layouts allow it.

    ``values`` may be those of some experts of a stack, which get the names of the first experts.
    """
    others = {n: torch.empty(s, device="meta") for n, s in _converted_with(model, name).items() if n != name}
    parts = revert_weight_conversion(model, {name: values, **others})
    return {own: part for own, part in parts.items() if storage_id(part) == storage_id(values)} if others else parts


def converted_together(model: Any, name: str) -> tuple[str, ...]:
    """Return the parameters from which the checkpoint's tensors of ``name`` are made: itself, and others if needed."""
    shapes = _converted_with(model, name)
    if len(shapes) == 1:
        return (name,)
    wholes = {n: torch.empty(shape, device="meta") for n, shape in shapes.items()}
    known = {storage_id(whole) for whole in wholes.values()}
    are_parts = all(storage_id(part) in known for part in revert_weight_conversion(model, wholes).values())
    return (name,) if are_parts else tuple(shapes)


def cache_shapes(model: Any) -> None:
    """Find which parameters are converted together; afterwards a background thread need not read the model for it."""
    if model not in _SHAPES:
        _SHAPES[model] = found = {}
        shapes = {n: tensor.shape for n, tensor in checkpoint_tensors(model).items()}
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        several = [c for c in mapping if isinstance(c, WeightConverter) and len(c.target_patterns) > 1]
        for own in shapes:
            for converter in several:
                together = [n for n in converter_targets(own, converter) if n in shapes]
                if len(together) > 1:
                    found[own] = {n: shapes[n] for n in together}


def _converted_with(model: Any, name: str) -> dict[str, torch.Size]:
    """Return name and shape of the parameter and of those that a converter makes with it, in its order."""
    cache_shapes(model)
    return _SHAPES[model].get(name, {name: torch.Size()})


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that is equal for views of the same memory, also on the meta device."""
    return tensor.untyped_storage()._cdata
