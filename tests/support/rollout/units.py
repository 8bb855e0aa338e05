"""A worker's parameters computed from full tensors in one process: the plain twin of the ranks' exchange."""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from epfsdp2.rollout.layout.slice_names import slice_name
from epfsdp2.rollout.layout.specs import Heads, Rollout, TargetSlice, TensorSpec
from epfsdp2.rollout.servers import is_quantised, slices_of_scales, target_slices

__all__ = ["Quantise", "bits", "check_stored", "stored_parameters"]
__all__ += ["worker_parameters", "worker_slices", "worker_units"]

# Returns the values and the scales of a weight.
Quantise = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def worker_slices(
    tensors: Iterable[tuple[str, torch.Tensor]],
    rollout: Rollout,
    worker: int,
    heads: Heads,
    quantise: Quantise | None = None,
) -> Iterator[tuple[TargetSlice, torch.Tensor]]:
    """Yield a worker's slices, each with its whole tensor: of the weight, its quantised values, or its scales."""
    for name, whole in tensors:
        spec = TensorSpec(name, tuple(whole.shape), whole.element_size())
        slices, scales = target_slices(spec, rollout, worker, heads), None
        if rollout.is_quantised and is_quantised(heads.family, name):
            assert quantise is not None
            whole, scales = quantise(whole)
        yield from ((part, whole) for part in slices)
        if scales is not None:
            yield from ((part, scales) for part in slices_of_scales(spec, slices, rollout, heads.family))


def stored_parameters(
    slices: Iterable[tuple[TargetSlice, torch.Tensor]], head_dim: int = 1
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the parameters that slices of whole tensors fill, and the mask of their filled elements.

    Args:
        slices: with the whole tensor of each.
        head_dim: rows of a head, for slices in ``halves``.
    """
    parts: dict[str, list[tuple[TargetSlice, torch.Tensor]]] = {}
    for part, whole in slices:
        parts.setdefault(part.parameter, []).append((part, _stored(whole[part.block.slices], part, head_dim)))
    found = {}
    for name, placed in parts.items():
        shape = tuple(map(max, zip(*(part.end for part, _ in placed), strict=True)))
        dtype = max((values.dtype for _, values in placed), key=lambda dtype: dtype.itemsize)
        whole, is_filled = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=torch.bool)
        for part, values in placed:
            into = tuple(map(slice, part.at, part.end))
            assert not is_filled[into].any(), f"slices of {name} overlap"
            whole[into] = values.reshape(values.shape[values.dim() - len(part.at) :])
            is_filled[into] = True
        found[name] = whole, is_filled
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def check_stored(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[torch.Tensor, torch.Tensor]], case: object = ""
) -> None:
    """Check names, dtypes, shapes and the bits of filled elements against ``stored_parameters``."""
    assert found.keys() == expected.keys(), (case, found.keys() ^ expected.keys())
    for name, (values, is_filled) in expected.items():
        assert (found[name].dtype, found[name].shape) == (values.dtype, values.shape), (case, name)
        assert torch.equal(bits(found[name][is_filled]), bits(values[is_filled])), (case, name)


def _stored(values: torch.Tensor, part: TargetSlice, head_dim: int) -> torch.Tensor:
    if part.form == "transposed":
        return values.mT
    if part.form == "zeros":
        return torch.zeros_like(values)
    if part.form == "decay":
        return -torch.exp(values.float())
    if part.form == "halves":
        return torch.cat([head[odd::2] for head in values.split(head_dim) for odd in (0, 1)])
    return values


def worker_parameters(
    tensors: Mapping[str, torch.Tensor], rollout: Rollout, worker: int, heads: Heads, quantise: Quantise | None = None
) -> dict[str, torch.Tensor]:
    """Return a worker's parameters by name, in its layout and without the padding rows of vocabularies.

    Args:
        tensors: the trainer's full tensors by name, each in the dtype in which it is sent.
        worker: index in its replica.
        quantise: for a rollout that holds quantised weights.
    """
    found = stored_parameters(worker_slices(tensors.items(), rollout, worker, heads, quantise), heads.dim)
    assert all(is_filled.all() for _, is_filled in found.values())
    return {name: values for name, (values, _) in found.items()}


def worker_units(
    tensors: Mapping[str, torch.Tensor], rollout: Rollout, worker: int, heads: Heads, *, steps: int = 1
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``worker_parameters``, each in ``steps`` units, or fewer if it has fewer rows."""
    for parameter, values in worker_parameters(tensors, rollout, worker, heads).items():
        count = min(steps, len(values)) if values.dim() else 1
        for first in range(count):
            yield slice_name(parameter, first, count), values[first::count] if count > 1 else values
