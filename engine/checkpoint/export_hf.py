"""Convert the sharded tensors of a checkpoint to files for ``from_pretrained``, in the family's names and layout.

Each rank writes some of the files and holds one tensor of the model in memory at a time.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..lora.adapters import MAGNITUDE, SAVED, A, B
from ..lora.merge import merged
from ..lora.targets import Target
from ..model import hf_names
from ..model.hf_convert import converted_together
from ..model.safetensors_files import SafetensorsFile
from ..topology.dtensor import checkpoint_tensors
from .atomic_folder import CheckpointError
from .safetensors_writer import Entry, split_into_files, write_file, write_index
from .stored_shards import MODEL, StoredTensor

__all__ = ["FILE_BYTES", "Base", "reader", "write_hf_weights"]

FILE_BYTES = 5 * 10**9


@dataclass(frozen=True)
class _Source:
    """A tensor of the model to write in ``dtype``; ``load`` reads it from its files, in the dtype that it has there."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def read(self) -> torch.Tensor:
        return self.load().to(self.dtype)


@dataclass(frozen=True)
class Base:
    """Frozen weights that a checkpoint does not have: a function that reads one by its name, and the run's dtypes."""

    read: Callable[[str], torch.Tensor]
    dtypes: Mapping[str, torch.dtype]


# Tensors of the model that are converted together, mostly one; held in memory at once.
_Group = list[_Source]


def write_hf_weights(
    model: Any,
    stored: Mapping[str, StoredTensor],
    out: Path,
    dtypes: Mapping[str, torch.dtype | None],
    file_bytes: int = FILE_BYTES,
    targets: Mapping[str, Target] | None = None,
    base: Base | None = None,
    share: tuple[int, int] = (0, 1),
    progress: bool = False,
) -> None:
    """Write a checkpoint's tensors of the model to safetensors files in ``out``.

    Args:
        model: determines the names and the layout; its own values are not read.
        stored: the tensors of the checkpoint (``stored_tensors``).
        dtypes: name of each tensor -> the dtype to write, None for the stored one.
        file_bytes: largest size of a file, unless one tensor is larger.
        targets: weights with adapters in the checkpoint, which are merged; None without adapters.
        base: frozen weights that the checkpoint lacks.
        share: rank and number of writing ranks. Each writes some of the files, and all write the index.

    Raises:
        CheckpointError: tensors of the model are missing in the checkpoint.
    """
    tensors = _with_adapters(stored, _stored(model, stored, dtypes, base), targets or {})
    by_name = {tensor.name: tensor for tensor in tensors}
    together = dict.fromkeys(converted_together(model, name) for name in by_name)
    groups = [[by_name[name] for name in names] for names in together]
    files = split_into_files(groups, lambda group: sum(tensor.nbytes for tensor in group), file_bytes)
    entries = [[entry for group in file for entry in _entries(model, group)] for file in files]
    rank, ranks = share
    names = write_index(out, entries)
    mine = list(zip(names, files, entries, strict=True))[rank::ranks]
    with tqdm(total=sum(len(file) for _, file, _ in mine), desc="Exporting", disable=not progress) as bar:
        for name, file, members in mine:
            write_file(out / name, members, _values(model, file, bar))


def reader(stored: Mapping[str, StoredTensor]) -> Callable[[str], torch.Tensor]:
    """Return a function that reads a full tensor of the checkpoint by its name in the model."""
    names = [name.removeprefix(MODEL) for name in stored if name.startswith(MODEL)]
    known = {tensor.name: tensor for tensor in _stored(None, stored, dict.fromkeys(names))}
    return lambda name: known[name].read()


def _with_adapters(
    stored: Mapping[str, StoredTensor], tensors: list[_Source], targets: Mapping[str, Target]
) -> list[_Source]:
    """Merge adapters into their tensors, and replace tensors that were trained in full."""
    ends = (A, B, MAGNITUDE, SAVED)
    beside = [t.name + end for t in tensors for end in ends if MODEL + t.name + end in stored]
    found = {tensor.name: tensor for tensor in _stored(None, stored, dict.fromkeys(beside))}

    def adapted(tensor: _Source) -> _Source:
        copy, a = found.get(tensor.name + SAVED), found.get(tensor.name + A)
        if copy is not None:
            return replace(tensor, shape=copy.shape, load=copy.read)
        if a is None:
            return tensor
        b, magnitude = found[tensor.name + B], found.get(tensor.name + MAGNITUDE)
        return replace(tensor, load=partial(_merged, tensor, a, b, magnitude, targets[tensor.name]))

    return [adapted(tensor) for tensor in tensors]


def _merged(weight: _Source, a: _Source, b: _Source, magnitude: _Source | None, target: Target) -> torch.Tensor:
    scales = None if magnitude is None else magnitude.read()
    return merged(weight.load(), a.read(), b.read(), target.scaling, target.is_transposed, scales)


def _stored(
    model: Any, stored: Mapping[str, StoredTensor], dtypes: Mapping[str, torch.dtype | None], base: Base | None = None
) -> list[_Source]:
    opened = cache(SafetensorsFile)
    missing = [name for name in dtypes if MODEL + name not in stored]
    if missing and base is None:
        raise CheckpointError(f"the checkpoint lacks {len(missing)} tensors of the model, first {missing[0]}.")
    found = []
    of_base = checkpoint_tensors(model) if base is not None else {}
    for name, dtype in dtypes.items():
        if base is not None and MODEL + name not in stored:
            own = of_base[name]
            kept = base.dtypes.get(name, own.dtype)
            found.append(_Source(name, tuple(own.shape), dtype or kept, partial(base.read, name)))
            continue
        tensor = stored[MODEL + name]
        found.append(_Source(name, tensor.shape, dtype or tensor.dtype, partial(_assembled, name, tensor, opened)))
    return found


def _assembled(name: str, stored: StoredTensor, opened: Callable[[Path], SafetensorsFile]) -> torch.Tensor:
    """Read a tensor's shards."""
    tensor = torch.empty(stored.shape, dtype=stored.dtype)
    for offset, (_, path) in stored.shards.items():
        values = opened(path).read(MODEL + name)
        tensor[tuple(slice(at, at + size) for at, size in zip(offset, values.shape, strict=True))] = values
    return tensor


def _entries(model: Any, group: _Group) -> list[Entry]:
    values = [(t.name, torch.empty(t.shape, dtype=t.dtype, device="meta")) for t in group]
    return [Entry(name, tuple(part.shape), part.dtype) for name, part in hf_names.as_published(model, values)]


def _values(model: Any, file: list[_Group], bar: tqdm) -> Iterator[tuple[str, torch.Tensor]]:
    for group in file:
        yield from hf_names.as_published(model, ((t.name, t.read()) for t in group))
        bar.update()
