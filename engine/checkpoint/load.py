"""Load this rank's shards from Hugging Face safetensors.

A rank never reads a whole tensor of which it needs a part: it opens the files and reads the rows and columns of its own
shards, expert by expert if the checkpoint stores them so (``hf_slices.py``). The first replica of the model reads, and
broadcasts to the others. Names and layouts come from transformers' own weight converters (``core_model_loading.py``).
"""

import copy
import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from ..compat.transformers_names import (
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    get_model_conversion_mapping,
    renamed,
)
from ..errors import listed
from ..model.hf_convert import converter_targets
from ..topology.dtensor import checkpoint_tensors, is_expert_parameter, local_pieces, local_tensor
from ..topology.index_ranges import IndexRange, bounding_range
from ..topology.mesh import Meshes
from ..topology.rank_consistency import raise_on_all_ranks
from .hf_slices import CheckpointSlice, SliceCopy, find_slices
from .safetensors_reader import CheckpointFiles

__all__ = ["check_weights", "load_weights", "tensor_reader", "verify_experts"]

# Computed at run time, but stored in old checkpoints; transformers ignores them too.
_COMPUTED = r"rotary_emb\.inv_freq$"


@dataclass
class _Source:
    """How one target tensor is made from checkpoint tensors: a plain copy, or a converter over lists of them.

    Args:
        part: the index of the tensor among the converter's targets.
    """

    converter: WeightConverter | None = None
    part: int = 0
    keys: list[tuple[str | None, str]] = field(default_factory=list)
    """(source pattern of the converter, checkpoint key), in natural order."""

    def by_pattern(self) -> dict[str | None, list[str]]:
        found: dict[str | None, list[str]] = {}
        for pattern, key in self.keys:
            found.setdefault(pattern, []).append(key)
        return found


@dataclass(frozen=True)
class _Target:
    """A tensor to fill.

    Args:
        slices: the checkpoint's slices of it, each with its keys, one per expert or a single one; None if a converter
            has to make it from whole tensors.
    """

    name: str
    target: torch.Tensor
    source: _Source
    slices: list[tuple[CheckpointSlice, list[str]]] | None


def load_weights(
    model: nn.Module,
    files: CheckpointFiles,
    meshes: Meshes,
    initialize: Callable[[str, torch.Tensor, bool], bool] = lambda name, tensor, fits: False,
    progress: bool = False,
    may_be_unused: str = r"(?!)",
) -> list[str]:
    """Fill the parameters and persistent buffers of a sharded, materialised model from a checkpoint; collective.

    Names and shapes are compared before anything is read.

    Args:
        initialize: called with name, local tensor and whether the checkpoint has it in the model's shape. It fills the
            tensor and returns True; or it returns False, and the tensor is read, or reported as missing or misshaped.
        progress: show a progress bar.
        may_be_unused: a pattern to search in names, for tensors that the checkpoint may have and the model not; those
            that the model's class ignores are allowed anyway.

    Returns:
        Names of the tensors in the checkpoint that the model does not have.

    Raises:
        ValueError: with the first tensors that are missing, unknown or of another shape, and their files.
        RankMismatchError: some ranks could not read their shards.
    """
    unused: list[str] = []
    device = meshes.dense.device_type
    first_replica = meshes.dense.get_local_rank("dp_replicate") == 0
    with raise_on_all_ranks(device), torch.no_grad():
        wanted, unused = _match(model, files, initialize, may_be_unused)
        for tensor in tqdm(wanted if first_replica else (), desc="Loading weights", disable=not progress):
            _fill(tensor, model, files)
    if meshes.topology.dp_replicate > 1:
        for target in checkpoint_tensors(model).values():
            _copy_of_first_replica(local_tensor(target), meshes)
    return unused


def check_weights(
    model: nn.Module,
    files: CheckpointFiles,
    meshes: Meshes,
    initialize: Callable[[str, torch.Tensor, bool], bool],
    may_be_unused: str,
) -> None:
    """Do what ``load_weights`` does up to the reading, with a model whose shards are on the meta device; collective.

    Otherwise a config with larger sizes than the checkpoint's would have a rank allocate them before it is refused.
    """
    tied = getattr(model, "all_tied_weights_keys", {})  # which are tied once they are allocated
    with raise_on_all_ranks(meshes.dense.device_type), torch.no_grad():
        _match(model, files, initialize, may_be_unused, tied)


def tensor_reader(model: nn.Module, files: CheckpointFiles) -> Callable[[str], torch.Tensor]:
    """Return a function that reads one of a model's full tensors by its name, as transformers' converters make it.

    Args:
        model: on the meta device, not sharded.
    """
    sources, tensors = _match_sources(model, files), checkpoint_tensors(model)

    def read(name: str) -> torch.Tensor:
        if name not in sources:
            raise ValueError(f"{files.folder} has nothing for {name} of the model.")
        source, target = sources[name], tensors[name]
        if source.converter is None or _is_unconverted(target, source, files):
            return files.read(source.keys[-1][1])
        return _convert(name, target, source, IndexRange.of(target.shape).slices, model, files)

    return read


def verify_experts(model: nn.Module, files: CheckpointFiles, count: int = 2) -> list[str]:
    """Compare a few of this rank's experts with what transformers' converter makes from whole tensors.

    Args:
        count: number of experts; each is taken from another stack, far apart in the model.

    Returns:
        ``<stack>[<expert>]`` of each expert that was compared.

    Raises:
        ValueError: an expert differs from the checkpoint.
    """
    sources = _match_sources(model, files)
    held = {
        name: target
        for name, target in checkpoint_tensors(model).items()
        if is_expert_parameter(target) and target.dim() == 3 and name in sources and local_tensor(target).numel()
    }
    names, done = list(held), []
    count = min(count, len(names))
    for index in (round(i * (len(names) - 1) / max(1, count - 1)) for i in range(count)):
        name, target = names[index], held[names[index]]
        for held_range, values in local_pieces(target.detach()):
            expert = held_range.low[0] + index % (held_range.high[0] - held_range.low[0])
            one = held_range.with_dim(0, expert, expert + 1)
            if sources[name].converter is None:
                wanted = files.read(sources[name].keys[-1][1], one.slices)
            else:
                wanted = _convert(name, target, sources[name], one.slices, model, files)
            found = values[one.slices_in(held_range)].cpu()
            if not torch.equal(found, wanted.to(found.dtype)):
                raise ValueError(f"{name}[{expert}] differs from {files.folder} after loading.")
        done.append(f"{name}[{expert}]")
    return done


def _match(
    model: nn.Module,
    files: CheckpointFiles,
    initialize: Callable[[str, torch.Tensor, bool], bool],
    may_be_unused: str,
    tied: Container[str] = (),
) -> tuple[list[_Target], list[str]]:
    """Return the tensors to fill, and the names of the checkpoint's that have no place; reads no tensor.

    Raises:
        ValueError: with the first tensors that are missing, unknown or of another shape, and their files.
    """
    sources = _match_sources(model, files)
    wanted: list[_Target] = []
    wrong: list[str] = []
    for name, target in checkpoint_tensors(model).items():
        if name in tied:
            continue
        source = sources.get(name)
        if initialize(name, local_tensor(target), _fits(target, source, files)):
            continue
        if source is None:
            wrong.append(f"{name} is missing")
            continue
        tensor = _Target(name, target, source, _slices_of(name, target, source, model, files))
        wrong += _faults(tensor, files)
        wanted.append(tensor)
    known = model.state_dict()
    unused = [name for name in sources if name not in known]
    wrong += _unknown([name for name in unused if not re.search(may_be_unused, name)], sources, model, files)
    if wrong:
        kind = type(model).__name__.removeprefix("FSDP")
        raise ValueError(f"{files.folder} is no checkpoint of {kind}: {listed(wrong)}.")
    return wanted, unused


def _match_sources(model: nn.Module, files: CheckpointFiles) -> dict[str, _Source]:
    """Map each target name to the checkpoint tensors that it is made of; reads no tensor."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    prefix, known = str(model.base_model_prefix), model.state_dict()

    sources: dict[str, _Source] = {}
    for key in sorted(files.file_of, key=dot_natural_key):
        name, pattern = renamed(key, renamings, converters, prefix, known)
        if name not in known and key in known:
            name, pattern = key, None
        converter = by_pattern[pattern] if pattern is not None else None
        for part, target in enumerate(converter_targets(name, converter)):
            sources.setdefault(target, _Source(converter, part)).keys.append((pattern, key))
    return sources


def _fits(target: torch.Tensor, source: _Source | None, files: CheckpointFiles) -> bool:
    """Return whether the checkpoint has the tensor; without a converter, whether in its shape."""
    if source is None or source.converter is not None:
        return source is not None
    return files.shape(source.keys[-1][1]) == tuple(target.shape)


def _slices_of(
    name: str, target: torch.Tensor, source: _Source, model: Any, files: CheckpointFiles
) -> list[tuple[CheckpointSlice, list[str]]] | None:
    """Find the checkpoint's slices of a target; see ``_Target.slices``.

    Raises:
        ValueError: the numbers of experts differ.
    """
    if source.converter is None or _is_unconverted(target, source, files):
        return [(CheckpointSlice.whole(name, tuple(target.shape)), [source.keys[-1][1]])]
    lists = list(source.by_pattern().values())
    one_by_one = any(len(keys) > 1 for keys in lists)
    if one_by_one:
        # A converter with several targets gives each an equal part of the experts.
        experts = target.shape[0]
        for keys in lists:
            _check_experts(name, keys, experts, len(source.converter.target_patterns), files)
        lists = [keys[source.part * experts : (source.part + 1) * experts] for keys in lists]
    is_stack = one_by_one or is_expert_parameter(target)
    found = find_slices(model, name, target.shape, is_stack)
    keys_of = {keys[0]: keys for keys in lists}
    if found is None or {piece.name for piece in found} != keys_of.keys():
        return None
    return [(piece, keys_of[piece.name]) for piece in found]


def _is_unconverted(target: torch.Tensor, source: _Source, files: CheckpointFiles) -> bool:
    """Return whether the tensor has the target's shape already and the converter only transposes those that don't."""
    operations = source.converter.operations if source.converter is not None else []
    lenient = all(
        isinstance(operation, Transpose) and getattr(operation, "check_dims", False) for operation in operations
    )
    return lenient and files.shape(source.keys[-1][1]) == tuple(target.shape)


def _faults(tensor: _Target, files: CheckpointFiles) -> list[str]:
    """List the checkpoint's tensors that have a wrong shape."""
    wrong = []
    for piece, keys in tensor.slices or ():
        shape = piece.expected(tensor.target.shape[0] if is_expert_parameter(tensor.target) else None)
        for key in keys:
            if files.shape(key) != shape:
                where = f"{key} (in {files.file_of[key]})"
                wrong.append(f"{where} is {files.shape(key)}, but {tensor.name} of the model needs {shape}")
    return wrong


def _unknown(names: list[str], sources: Mapping[str, _Source], model: Any, files: CheckpointFiles) -> list[str]:
    patterns = [_COMPUTED, *(model._keys_to_ignore_on_load_unexpected or ())]
    keys = [sources[name].keys[0][1] for name in names if not any(re.search(p, name) for p in patterns)]
    return [f"{key} (in {files.file_of[key]}) is no tensor of the model" for key in keys]


def _fill(tensor: _Target, model: nn.Module, files: CheckpointFiles) -> None:
    """Read this rank's shard of a tensor."""
    if not local_tensor(tensor.target).numel():
        return
    held_pieces = list(local_pieces(tensor.target))
    if tensor.slices is None:
        whole = bounding_range([held for held, _ in held_pieces])
        values = _convert(tensor.name, tensor.target, tensor.source, whole.slices, model, files)
        for held, local in held_pieces:
            local.copy_(values[held.slices_in(whole)])
        return
    for held, local in held_pieces:
        for piece, keys in tensor.slices:
            for key, part, into in _parts_in(piece, keys, held, local, files):
                part.copy(files.read(key, part.source), into)


def _parts_in(
    piece: CheckpointSlice, keys: list[str], held: IndexRange, local: torch.Tensor, files: CheckpointFiles
) -> Iterator[tuple[str, SliceCopy, torch.Tensor]]:
    """Yield what to read for a range: the key, the part of its tensor, and where in the range's values it belongs."""
    if len(keys) == 1 and not piece.rows:
        part = piece.copy_into(held, files.shape(keys[0]))
        if part is not None:
            yield keys[0], part, local
        return
    for expert in range(held.low[0], held.high[0]):
        key = keys[0 if piece.rows else expert]
        part = piece.copy_into(held.with_dim(0, 0, 1), piece.shape if piece.rows else files.shape(key))
        if part is not None:
            yield key, part.of_expert(expert, piece.rows), local[expert - held.low[0]].unsqueeze(0)


def _copy_of_first_replica(local: torch.Tensor, meshes: Meshes) -> None:
    """Receive what the first replica has read; collective."""
    sent = local.detach().to(meshes.dense.device_type)  # shards may be on the CPU, which the backend can't send from
    dist.broadcast(sent, group=meshes.dense.get_group("dp_replicate"), group_src=0)
    if sent.data_ptr() != local.data_ptr():
        local.detach().copy_(sent)


def _convert(
    name: str, target: torch.Tensor, source: _Source, index: tuple[slice, ...], model: nn.Module, files: CheckpointFiles
) -> torch.Tensor:
    """Run transformers' converter; only on the experts of ``index`` if the checkpoint stores them one by one."""
    by_pattern = source.by_pattern()
    one_by_one = any(len(keys) > 1 for keys in by_pattern.values())
    owned = index[0] if one_by_one else slice(None)

    converter = copy.deepcopy(source.converter)
    assert converter is not None
    for pattern, keys in by_pattern.items():
        if one_by_one:
            # A converter with several targets gives each an equal part of the experts.
            parts = range(len(converter.target_patterns))
            keys = [key for i in parts for key in keys[i * target.shape[0] : (i + 1) * target.shape[0]][owned]]
        for key in keys:
            converter.add_tensor(name, key, pattern, partial(files.read, key))
    made = converter.convert(name, model=model, config=model.config)
    value = made[name]
    value = value[0] if isinstance(value, list) else value
    experts = owned.stop - owned.start if one_by_one else target.shape[0]
    if tuple(value.shape) != (experts, *target.shape[1:]):
        raise ValueError(
            f"{files.folder}: {name} of the model has the shape {tuple(target.shape)}, but {source.keys[0][1]} and "
            f"tensors like it give {tuple(value.shape)}."
        )
    return value[(slice(None), *index[1:])] if one_by_one else value[index]


def _check_experts(name: str, keys: list[str], experts: int, targets: int, files: CheckpointFiles) -> None:
    if len(keys) != targets * experts:
        raise ValueError(
            f"{files.folder}: {name} stacks {experts} experts, but the checkpoint has {len(keys)} tensors like "
            f"{keys[0]}."
        )
