"""The units that a worker is sent, made of full tensors in one process: the plain twin of what ranks exchange."""

from collections.abc import Callable, Iterator, Mapping

import torch

from epfsdp2.rollout.layout.slice_names import slice_name
from epfsdp2.rollout.layout.specs import Heads, Rollout, TargetSlice, TensorSpec
from epfsdp2.rollout.servers import is_quantised, slices_of_scales, target_slices

__all__ = ["Quantise", "worker_parameters", "worker_units"]

# Returns the values and the scales of a weight.
Quantise = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def worker_units(
    tensors: Mapping[str, torch.Tensor],
    rollout: Rollout,
    worker: int,
    heads: Heads,
    *,
    steps: int = 1,
    quantise: Quantise | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the units of a worker; arguments as of ``worker_parameters``.

    Args:
        steps: how many units a parameter comes in; fewer where it has fewer rows.
    """
    for parameter, values in worker_parameters(tensors, rollout, worker, heads, quantise).items():
        count = min(steps, len(values)) if values.dim() else 1
        for first in range(count):
            yield slice_name(parameter, first, count), values[first::count] if count > 1 else values


def worker_parameters(
    tensors: Mapping[str, torch.Tensor], rollout: Rollout, worker: int, heads: Heads, quantise: Quantise | None = None
) -> dict[str, torch.Tensor]:
    """Return a worker's parameters by name, in its layout and without the padding rows of vocabularies.

    Args:
        tensors: the trainer's full tensors by name, each in the dtype in which it is sent.
        worker: index in its replica.
        quantise: for a rollout that holds quantised weights.

    Raises:
        ValueError: the slices of a parameter overlap, leave elements out or differ in dtype.
    """
    placed: dict[str, list[tuple[TargetSlice, torch.Tensor]]] = {}
    for name, whole in tensors.items():
        spec = TensorSpec(name, tuple(whole.shape), whole.element_size())
        slices = target_slices(spec, rollout, worker, heads)
        kinds = [(slices, whole)]
        if rollout.is_quantised and is_quantised(heads.family, name):
            assert quantise is not None
            values, scales = quantise(whole)
            kinds = [(slices, values), (slices_of_scales(spec, slices, rollout, heads.family), scales)]
        rows = heads.of_layer(name).dim
        for parts, values in kinds:
            for part in parts:
                placed.setdefault(part.parameter, []).append((part, _stored(values[part.block.slices], part, rows)))
    return {parameter: _joined(parameter, parts) for parameter, parts in placed.items()}


def _stored(values: torch.Tensor, part: TargetSlice, rows: int) -> torch.Tensor:
    """Return a slice's values as its parameter stores them; ``rows`` of a head."""
    if part.form == "transposed":
        values = values.transpose(-1, -2)
    elif part.form == "zeros":
        values = torch.zeros_like(values)
    elif part.form == "decay":
        values = -torch.exp(values.float())
    elif part.form == "halves":
        values = torch.cat([head[odd::2] for head in values.split(rows) for odd in (0, 1)])
    return values.reshape(values.shape[values.dim() - len(part.at) :])


def _joined(parameter: str, parts: list[tuple[TargetSlice, torch.Tensor]]) -> torch.Tensor:
    if len({values.dtype for _, values in parts}) > 1:
        raise ValueError(f"{parameter} has slices in several dtypes")
    ends = zip(*((low + size for low, size in zip(p.at, v.shape, strict=True)) for p, v in parts), strict=True)
    whole = parts[0][1].new_empty([max(end) for end in ends])
    times = torch.zeros(whole.shape, dtype=torch.uint8)
    for part, values in parts:
        at = tuple(slice(low, low + size) for low, size in zip(part.at, values.shape, strict=True))
        whole[at] = values
        times[at] += 1
    if not bool((times == 1).all()):
        raise ValueError(f"the slices of {parameter} overlap or leave elements out")
    return whole
