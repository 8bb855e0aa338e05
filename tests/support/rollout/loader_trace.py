"""Traces where vLLM's and SGLang's own loaders put every element of a model, to check ``rollout/layout``.

No values are moved. Tensors on the meta device represent the trainer's tensors, and torch tracks storage, offset and
strides of their views. Loaders end with copies. A dispatch mode intercepts each copy, and computes the block of the
tensor and the block of the parameter from its two sides.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from epfsdp2.engine.compat.transformers_names import flattened_matrices
from epfsdp2.engine.model import hf_names
from epfsdp2.engine.model.hf_convert import storage_id
from epfsdp2.engine.topology.dtensor import checkpoint_tensors
from epfsdp2.engine.topology.index_ranges import IndexRange
from epfsdp2.rollout.layout.layout_check import named_layers, prefix_of
from epfsdp2.rollout.layout.specs import Heads, Rollout, SliceForm, TargetSlice, TensorSpec
from epfsdp2.rollout.servers import target_slices

__all__ = ["differing_layouts", "held_tensors"]

_DECAY = (torch.ops.aten.exp.default, torch.ops.aten.neg.default)


def differing_layouts(
    model: Any,
    parameters: Mapping[str, torch.Tensor],
    load_weights: Callable[[Iterable[tuple[str, torch.Tensor]]], Any],
    rollout: Rollout,
    worker: int,
    heads: Heads,
) -> Iterator[tuple[str, list[TargetSlice], list[TargetSlice]]]:
    """Yield the tensors whose computed slices differ from the traced slices of a worker's loader, with both.

    Args:
        model: the trainer's, on any device.
        parameters: the worker's parameters by name, and its buffers that the loader fills.
        load_weights: the worker's.
    """
    specs = [TensorSpec(name, tuple(t.shape), t.element_size()) for name, t in checkpoint_tensors(model).items()]
    with torch.no_grad(), LoaderTracer(model, specs, parameters) as tracer:
        load_weights(iter(tracer.weights))
    traced = tracer.slices()
    for spec in specs:
        computed = _sorted(merge_slices(target_slices(spec, rollout, worker, heads)))
        found = _sorted(traced.get(spec.name, []))
        if computed != found:
            yield spec.name, computed, found


def held_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a worker's parameters by the names of layouts, and then its buffers, some of which are views of them."""
    layers = [(prefix_of(name), layer) for name, layer in named_layers(model)]
    held = [(prefix, layer._parameters) for prefix, layer in layers]
    held += [(prefix, layer._buffers) for prefix, layer in layers]
    return {prefix + own: t for prefix, tensors in held for own, t in tensors.items() if t is not None}


def _sorted(slices: Iterable[TargetSlice]) -> list[TargetSlice]:
    return sorted(slices, key=lambda part: (part.block.low, part.at))


def _checkpoint_tensors(model: Any, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors as vLLM's loader receives them, flattened experts in the three dims that it restores."""
    flattened = {name: found for name in tensors if (found := flattened_matrices(model, name))}
    others = ((name, tensor) for name, tensor in tensors.items() if name not in flattened)
    yield from hf_names.as_singles(model, others)
    for name, (was, names) in flattened.items():
        yield from zip(names, was.parts(tensors[name]), strict=True)


class LoaderTracer(TorchDispatchMode):
    """Records every copy of a view into a parameter instead of executing it; copies of a view stand for the view.

    Views that a loader has joined by ``torch.cat`` and copies as a whole are recorded one by one.

    Args:
        model: the trainer's.
        tensors: the trainer's.
        parameters: the receiving model's parameters by name; contiguous, on any device.

    Attributes:
        weights: the checkpoint tensors, without values, for the receiving model's ``load_weights``.
    """

    def __init__(self, model: Any, tensors: Iterable[TensorSpec], parameters: Mapping[str, torch.Tensor]):
        super().__init__()
        sources = {spec.name: torch.empty(spec.shape, device="meta") for spec in tensors}
        # Keyed by storage, since ``parameter.data`` in a loader is another tensor of the same storage.
        self._sources = {storage_id(tensor): (name, tensor) for name, tensor in sources.items()}
        self.weights = list(_checkpoint_tensors(model, sources))
        assert all(storage_id(part) in self._sources for _, part in self.weights), (
            "not views of one trainer tensor each"
        )
        self._forms: dict[int, SliceForm] = {}  # of a source's storage, once the loader has changed its values
        self._decayed: set[str] = set()
        self._kept: list[torch.Tensor] = []
        self._joined: dict[int, tuple[torch.Tensor, Sequence[torch.Tensor], int]] = {}
        self._targets: dict[int, tuple[str, torch.Tensor]] = {}
        for name, tensor in parameters.items():  # a parameter with several names gets the first
            self._targets.setdefault(storage_id(tensor), (name, tensor))
        self._slices: dict[str, set[TargetSlice]] = {}

    def slices(self) -> dict[str, list[TargetSlice]]:
        """Return the slices that the model loaded, merged, by the trainer's name; ignored tensors have no entry."""
        return {name: merge_slices(map(self._with_form, slices)) for name, slices in self._slices.items()}

    def _with_form(self, part: TargetSlice) -> TargetSlice:
        return replace(part, form="decay") if part.parameter in self._decayed else part

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.clone.default and storage_id(args[0]) in self._sources:
            return self._in_halves(args[0])
        if func is torch.ops.aten.zero_.default and storage_id(args[0]) in self._sources:
            self._forms[storage_id(args[0])] = "zeros"
            return args[0]
        if func in _DECAY and storage_id(args[0]) in self._sources:  # vLLM's loader of Mamba's decay
            self._forms[storage_id(args[0])] = "decay"
            return args[0]
        if func is torch.ops.aten.exp.default and storage_id(args[0]) in self._targets:  # of Mamba2's, once it is there
            self._decayed.add(self._targets[storage_id(args[0])][0])
        if func is torch.ops.aten.cat.default and all(storage_id(part) in self._sources for part in args[0]):
            joined = func(*args, **(kwargs or {}))
            self._joined[storage_id(joined)] = (joined, args[0], args[1] if len(args) > 1 else 0)
            return joined
        if func is torch.ops.aten._to_copy.default and not args[0].is_meta and _is_to_meta(kwargs):
            return args[0]  # indices, moved to where the weights are
        if func is torch.ops.aten.index.Tensor and storage_id(args[0]) in self._sources and not args[1][0].is_meta:
            rows = args[1][0].tolist()
            if len(args[1]) == 1 and rows == list(range(rows[0], rows[0] + len(rows))):
                return args[0].narrow(0, rows[0], len(rows))
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        target, source = args[:2]
        if storage_id(source) in self._joined and source.numel() == self._joined[storage_id(source)][0].numel():
            _, parts, dim = self._joined[storage_id(source)]
            for part, place in zip(parts, target.split([part.shape[dim] for part in parts], dim), strict=True):
                self._record(place, part)
            return target
        return self._record(target, source, *args[2:], **(kwargs or {}))

    def _in_halves(self, source: torch.Tensor) -> torch.Tensor:
        """Replace a clone by its source, or by a tensor that represents the source in halves.

        A clone in halves, ``[heads, 2, rows / 2, inputs]``, has the even rows of each head before the odd ones.
        """
        name, whole = self._sources[storage_id(source)]
        is_halved = source.dim() == 4 and source.shape[1] == 2 and source.numel() == whole.numel()
        if not is_halved or source.is_contiguous() or not source.transpose(1, 2).is_contiguous():
            return source
        copy = torch.empty(source.shape, device="meta")
        self._sources[storage_id(copy)] = (name, whole)
        self._forms[storage_id(copy)] = "halves"
        self._kept.append(copy)
        return copy

    def _record(self, target: torch.Tensor, source: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        if storage_id(source) not in self._sources:
            if source.is_meta:
                raise ValueError("a loader copies a tensor of its own instead of a view of a checkpoint tensor.")
            return target.copy_(source, *args, **kwargs)
        name, tensor = self._sources[storage_id(source)]
        if storage_id(target) not in self._targets:
            raise ValueError(f"a loader copies {name} to memory that is not a parameter's.")
        parameter, whole = self._targets[storage_id(target)]
        block, dims = _range_of(tensor.shape, source)
        target_block, target_dims = _range_of(whole.shape, target)
        dropped = tensor.dim() - whole.dim()
        wanted = tuple(d + dropped for d in target_dims)
        is_transposed = dims == (*wanted[:-2], *reversed(wanted[-2:])) != wanted
        if dropped < 0 or math.prod(tensor.shape[:dropped]) != 1 or not (is_transposed or dims == wanted):
            raise ValueError(
                f"a loader permutes dims of {name} {list(tensor.shape)} for {parameter} {list(whole.shape)}."
            )
        form = self._forms.get(storage_id(source), "transposed" if is_transposed else "")
        self._slices.setdefault(name, set()).add(TargetSlice(block, parameter, target_block.low, form))
        return target


def _is_to_meta(arguments: Mapping[str, Any] | None) -> bool:
    device = (arguments or {}).get("device")
    return device is not None and torch.device(device).type == "meta"


def merge_slices(slices: Iterable[TargetSlice]) -> list[TargetSlice]:
    """Merge slices that are adjacent in both tensor and parameter; returns them sorted."""
    found = sorted(slices, key=lambda n: (n.parameter, n.block))
    for dim in reversed(range(len(found[0].block.low) if found else 0)):
        # In this order, slices that are adjacent along ``dim`` follow one another.
        found.sort(key=lambda n: (n.parameter, n.block.low[:dim] + n.block.low[dim + 1 :], n.block.low[dim]))
        kept: list[TargetSlice] = []
        for part in found:
            if kept and _continues(kept[-1], part, dim):
                block = kept[-1].block.with_dim(dim, kept[-1].block.low[dim], part.block.high[dim])
                kept[-1] = replace(kept[-1], block=block)
            else:
                kept.append(part)
        found = kept
    return sorted(found, key=lambda n: (n.parameter, n.block))


def _continues(first: TargetSlice, second: TargetSlice, dim: int) -> bool:
    steps = [size if d == dim else 0 for d, size in enumerate(first.block.shape)]
    block = first.block.with_dim(dim, first.block.high[dim], second.block.high[dim])
    return replace(first, block=block, at=first.moved(steps)) == second


def _range_of(shape: Sequence[int], view: torch.Tensor) -> tuple[IndexRange, tuple[int, ...]]:
    """Return the block of a contiguous tensor of ``shape`` that ``view`` covers, and the dims of its sizes above 1."""
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    rest, low = view.storage_offset(), []
    for stride in strides:
        low.append(rest // stride)
        rest %= stride
    high, dims = [at + 1 for at in low], []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size == 1:
            continue
        dim = next((d for d, s in enumerate(strides) if s == stride and shape[d] > 1), None)
        if dim is None or low[dim] + size > shape[dim]:
            raise ValueError(f"a view {list(view.shape)} of a tensor {list(shape)} is not a contiguous block of it.")
        high[dim] = low[dim] + size
        dims.append(dim)
    return IndexRange(tuple(low), tuple(high)), tuple(dims)
