"""Where vLLM's own loaders put every element of a model: the layout of ``layout/vllm_layout.py``, recorded.

Nothing is moved. The trainer's tensors are stood for by tensors on the meta device; whatever views naming and loaders
take of them, torch keeps their storage, offset and strides. A dispatch mode sees the copies with which loaders end, and
their two sides tell a box of a tensor and a box of a parameter. Imports torch alone; ``worker.py`` has the model.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...engine.model import hf_names
from ...engine.model.hf_convert import storage_id
from ...engine.topology.index_ranges import IndexRange
from ..layout.vllm_layout import Need, Tensor

__all__ = ["Recorder", "View", "checkpoint_views", "joined"]


@dataclass(frozen=True)
class View:
    """A tensor of a checkpoint, as a strided view of one of the trainer's (``torch.as_strided``)."""

    name: str
    tensor: str
    shape: tuple[int, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def checkpoint_views(model: Any, tensors: Iterable[Tensor]) -> list[View]:
    """What vLLM's loader is given of each of the trainer's tensors.

    Raises:
        ValueError: naming makes a new tensor of several, or of a part that is no view.
    """
    stand_ins = {t.name: torch.empty(t.shape, device="meta") for t in tensors}
    names = {storage_id(t): name for name, t in stand_ins.items()}
    views = []
    for name, part in hf_names.as_checkpoint(model, stand_ins.items()):
        if storage_id(part) not in names:
            raise ValueError(f"{name} is not a view of one of the trainer's tensors, but made of them.")
        own = names[storage_id(part)]
        shape = tuple(stand_ins[own].shape)
        views.append(View(name, own, shape, tuple(part.shape), tuple(part.stride()), int(part.storage_offset())))
    return views


class Recorder(TorchDispatchMode):
    """Notes every copy of a view into a parameter, in place of doing it.

    Args:
        views: of a checkpoint, see ``checkpoint_views``.
        parameters: of the receiving model, by name; contiguous, on any device.
    """

    def __init__(self, views: Sequence[View], parameters: Mapping[str, torch.Tensor]):
        super().__init__()
        self._views = views
        self._tensors = {view.tensor: torch.empty(view.shape, device="meta") for view in views}
        # The shape comes from here: ``parameter.data`` in a loader is another tensor of the same storage.
        self._sources = {storage_id(tensor): (name, tensor) for name, tensor in self._tensors.items()}
        self._targets: dict[int, tuple[str, torch.Tensor]] = {}
        for name, tensor in parameters.items():  # of a parameter with several names, the first one counts
            self._targets.setdefault(storage_id(tensor), (name, tensor))
        self._needs: dict[str, set[Need]] = {}

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The checkpoint for the model's ``load_weights``, without values."""
        for view in self._views:
            yield view.name, self._tensors[view.tensor].as_strided(view.size, view.stride, view.offset)

    def needs(self) -> dict[str, list[Need]]:
        """What the model takes, by the trainer's name, as few boxes as can be; nothing of what it ignores."""
        return {name: joined(needs) for name, needs in self._needs.items()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        target, source = args[:2]
        if storage_id(source) not in self._sources:
            if source.is_meta:
                raise ValueError("a loader copies a tensor that it has made, and not a view of one that it was given.")
            return func(*args, **(kwargs or {}))
        name, tensor = self._sources[storage_id(source)]
        if storage_id(target) not in self._targets:
            raise ValueError(f"a loader copies {name} to a place that is no parameter.")
        parameter, whole = self._targets[storage_id(target)]
        box, dims = _box(tensor.shape, source)
        there, dims_there = _box(whole.shape, target)
        dropped = tensor.dim() - whole.dim()
        if dropped < 0 or math.prod(tensor.shape[:dropped]) != 1 or dims != tuple(d + dropped for d in dims_there):
            raise ValueError(f"a loader turns dims of {name} {list(tensor.shape)} for {parameter} {list(whole.shape)}.")
        self._needs.setdefault(name, set()).add(Need(box, parameter, there.low))
        return target


def joined(needs: Iterable[Need]) -> list[Need]:
    """The same elements in the same places, with boxes that continue one another made one; sorted."""
    found = sorted(needs, key=lambda n: (n.parameter, n.box))
    for dim in reversed(range(len(found[0].at) if found else 0)):
        # Neighbours along ``dim`` come one after the other in this order.
        found.sort(key=lambda n: (n.parameter, n.box.low[:dim] + n.box.low[dim + 1 :], n.box.low[dim]))
        kept: list[Need] = []
        for need in found:
            if kept and _continues(kept[-1], need, dim):
                kept[-1] = Need(
                    kept[-1].box.with_dim(dim, kept[-1].box.low[dim], need.box.high[dim]), need.parameter, kept[-1].at
                )
            else:
                kept.append(need)
        found = kept
    return sorted(found, key=lambda n: (n.parameter, n.box))


def _continues(first: Need, second: Need, dim: int) -> bool:
    size = first.box.high[dim] - first.box.low[dim]
    box = first.box.with_dim(dim, first.box.high[dim], second.box.high[dim])
    at = (*first.at[:dim], first.at[dim] + size, *first.at[dim + 1 :])
    return first.parameter == second.parameter and box == second.box and at == second.at


def _box(shape: Sequence[int], view: torch.Tensor) -> tuple[IndexRange, tuple[int, ...]]:
    """The box of a contiguous tensor of ``shape`` that ``view`` is, and which of its dims each longer one is."""
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
            raise ValueError(f"a view {list(view.shape)} of a tensor {list(shape)} is no box of it.")
        high[dim] = low[dim] + size
        dims.append(dim)
    return IndexRange(tuple(low), tuple(high)), tuple(dims)
