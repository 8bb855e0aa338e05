"""Load this rank's shards from Hugging Face safetensors.

A rank reads only the rows and columns of its own shards, expert by expert if the checkpoint stores single experts
(``hf_slices.py``). The first replica of the model reads, and broadcasts to the others.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from ..compat.transformers_names import Transpose
from ..config.values import ACTOR_MODEL
from ..errors import SettingError, listed
from ..model.hf_convert import converter_targets
from ..model.weight_sources import Source, list_numbers, match_sources, tied_names
from ..topology.dtensor import checkpoint_tensors, is_expert_parameter, local_pieces, local_tensor
from ..topology.index_ranges import IndexRange, bounding_range
from ..topology.mesh import Meshes
from ..topology.rank_consistency import raise_on_all_ranks
from .hf_slices import CheckpointSlice, SliceCopy, SliceFinder
from .safetensors_reader import CheckpointFiles

__all__ = ["Matched", "load_weights", "match_weights", "tensor_reader", "verify_experts"]

# Computed at run time, but stored in old checkpoints; transformers ignores them too.
_COMPUTED = r"rotary_emb\.inv_freq$"


@dataclass(frozen=True)
class _Target:
    """A tensor to fill.

    Args:
        slices: the checkpoint's slices of it, each with its keys (one per expert, or one). None if a converter has to
            compute it, from whole tensors or, if it is ``by_experts``, from those of the wanted experts.
        copies: other tensors of the checkpoint that the model ties to this one.
    """

    name: str
    source: Source
    slices: list[tuple[CheckpointSlice, list[str]]] | None
    by_experts: bool = False
    copies: tuple["_Target", ...] = ()


@dataclass(frozen=True)
class Matched:
    """The match of a checkpoint's tensors with a model's, by names and shapes alone (``match_weights``).

    Args:
        initialized: name of each tensor that ``initialize`` fills -> whether the checkpoint has it in that shape.
        unused: names of the checkpoint's tensors that fill nothing.
    """

    files: CheckpointFiles
    sources: Mapping[str, Source]
    targets: list[_Target]
    initialize: Callable[[str, torch.Tensor, bool], bool]
    initialized: Mapping[str, bool]
    unused: list[str]


def match_weights(
    model: Any,
    files: CheckpointFiles,
    meshes: Meshes,
    initialize: Callable[[str, torch.Tensor, bool], bool] = lambda name, tensor, fits: False,
    may_be_unused: str = r"(?!)",
) -> Matched:
    """Match a checkpoint's tensors with those of a sharded model, without reading them; collective.

    The model's shards may still be on the meta device. So a config with larger sizes than the checkpoint's is refused
    before a rank allocates them.

    Args:
        initialize: called with name, local tensor and whether the checkpoint has it in the model's shape. It fills the
            tensor, unless that is on the meta device, and returns True. If it returns False, the tensor is read, or
            reported as missing or misshaped.
        may_be_unused: a pattern to search in names, for tensors that only the checkpoint may have. Those that the
            model's class ignores are always allowed.

    Raises:
        ValueError: with the first tensors that are missing, unknown, of another shape or there twice, and their files.
        RankMismatchError: only some ranks found such tensors.
    """
    with raise_on_all_ranks(meshes.dense.device_type), torch.no_grad():
        sources, known = match_sources(model, files.file_of), model.state_dict()
        tied = {first: others for first, *others in tied_names(model)}
        copies = {name for others in tied.values() for name in others}
        finder = SliceFinder(model)
        wanted: list[_Target] = []
        initialized: dict[str, bool] = {}
        unused = [name for name in sources if name not in known]
        allowed = [may_be_unused, _COMPUTED, *(model._keys_to_ignore_on_load_unexpected or ())]
        unknown = [name for name in unused if not any(re.search(pattern, name) for pattern in allowed)]
        wrong = [f"{_named(sources[name].keys[0][1], files)} is no tensor of the model" for name in unknown]
        for name, target in checkpoint_tensors(model).items():
            if name in copies:
                continue
            stored = [own for own in (name, *tied.get(name, ())) if own in sources]
            source = sources.get(name)
            fits = source is not None and (source.converter is not None or _has_shape(target, source, files))
            if initialize(name, local_tensor(target), fits):
                initialized[name] = fits
                unused += stored
                continue
            if not stored:
                wrong.append(f"{name} is missing")
                continue
            rivals = [pair for own in stored if (pair := sources[own].rivals()) is not None]
            if rivals:
                wrong += [f"{_named(a, files)} and {_named(b, files)} are both {name} of the model" for a, b in rivals]
                continue
            found = [_target(n, target, sources[n], finder, files) for n in stored]
            wrong += [fault for of in found for fault in _faults(of, target, files)]
            wanted.append(replace(found[0], copies=tuple(found[1:])))
        if wrong:
            kind = type(model).__name__.removeprefix("FSDP")
            raise ValueError(f"{files.folder} is no checkpoint of {kind}: {listed(wrong)}.")
        unread = [key for name in unused for _, key in sources[name].keys]
        return Matched(files, sources, wanted, initialize, initialized, unread)


def load_weights(model: nn.Module, matched: Matched, meshes: Meshes, progress: bool = False) -> list[str]:
    """Fill the parameters and persistent buffers of a sharded, materialised model from a checkpoint; collective.

    Args:
        matched: the match of this model; its ``initialize`` is called again for each tensor that it fills.

    Returns:
        Names of the checkpoint's tensors that are not read.

    Raises:
        SettingError: the config ties two tensors that differ in the checkpoint.
        RankMismatchError: some ranks could not read their shards.
    """
    tensors, device = checkpoint_tensors(model), meshes.dense.device_type
    reads = meshes.dense.get_local_rank("dp_replicate") == 0
    _check_tied(matched, reads, model, device)
    with raise_on_all_ranks(device), torch.no_grad():
        for name, fits in matched.initialized.items():
            matched.initialize(name, local_tensor(tensors[name]), fits)
        for target in tqdm(matched.targets if reads else (), desc="Loading weights", disable=not progress):
            _fill(target, tensors[target.name], model, matched.files)
    if meshes.topology.dp_replicate > 1:
        for tensor in tensors.values():
            local = local_tensor(tensor).detach()
            sent = local.to(device)  # the backend can't send shards from the CPU
            dist.broadcast(sent, group=meshes.dense.get_group("dp_replicate"), group_src=0)
            if sent.data_ptr() != local.data_ptr():
                local.copy_(sent)
    return matched.unused


def tensor_reader(model: nn.Module, files: CheckpointFiles) -> Callable[[str], torch.Tensor]:
    """Return a function that reads a full tensor by its name in a model on meta, through transformers' converters."""
    sources, tensors = match_sources(model, files.file_of), checkpoint_tensors(model)

    def read(name: str) -> torch.Tensor:
        if name not in sources:
            raise ValueError(f"{files.folder} has nothing for {name} of the model.")
        source, target = sources[name], tensors[name]
        if source.converter is None or _is_unconverted(target, source, files):
            return files.read(source.keys[-1][1])
        return _convert(name, target, source, IndexRange.of(target.shape).slices, model, files)

    return read


def verify_experts(model: nn.Module, matched: Matched, count: int = 2) -> list[str]:
    """Compare ``count`` of this rank's experts, each of another stack, with transformers' conversion of whole tensors.

    Returns:
        ``<stack>[<expert>]`` of each compared expert.

    Raises:
        ValueError: an expert differs from the checkpoint.
    """
    sources, files = matched.sources, matched.files
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
            wanted = _convert(name, target, sources[name], one.slices, model, files)
            found = values[one.slices_in(held_range)].cpu()
            if not torch.equal(found, wanted.to(found.dtype)):
                raise ValueError(f"{name}[{expert}] differs from {files.folder} after loading.")
        done.append(f"{name}[{expert}]")
    return done


def _check_tied(matched: Matched, reads: bool, model: nn.Module, device: torch.device | str) -> None:
    """Raise ``SettingError`` on all ranks if the checkpoint has several of tied tensors, and they differ; collective.

    ``from_pretrained`` unties tensors that differ, while vLLM reads only one. Each rank of the first replica, which
    ``reads``, compares its own shard.
    """
    pairs = [(target, other) for target in matched.targets for other in target.copies]
    if not pairs:
        return
    files, tensors = matched.files, checkpoint_tensors(model)
    differs = torch.zeros(len(pairs), dtype=torch.int32)
    with raise_on_all_ranks(device), torch.no_grad():
        for i, pair in enumerate(pairs if reads else ()):
            shards = [torch.empty_like(tensors[pair[0].name], device="cpu") for _ in pair]
            for target, shard in zip(pair, shards, strict=True):
                _fill(target, shard, model, files)
            differs[i] = not torch.equal(*map(local_tensor, shards))
    differs = differs.to(device)
    dist.all_reduce(differs, dist.ReduceOp.MAX)
    for pair, differ in zip(pairs, differs.tolist(), strict=True):
        if differ:
            first, other = (_named(target.source.keys[0][1], files) for target in pair)
            rule = f"its config ties {other} to {first} (tie_word_embeddings), but their values differ."
            works = '"tie_word_embeddings": false in its config.json, or a checkpoint without one of the two'
            raise SettingError(f"{ACTOR_MODEL}.path", files.folder, rule, works)


def _target(name: str, target: torch.Tensor, source: Source, finder: SliceFinder, files: CheckpointFiles) -> _Target:
    slices = _slices_of(name, target, source, finder, files)
    is_stack = is_expert_parameter(target) and all(len(keys) == 1 for keys in source.by_pattern().values())
    return _Target(name, source, slices, slices is None and is_stack and finder.keeps_experts(name, target.shape))


def _slices_of(
    name: str, target: torch.Tensor, source: Source, finder: SliceFinder, files: CheckpointFiles
) -> list[tuple[CheckpointSlice, list[str]]] | None:
    """Find the checkpoint's slices of a target (``_Target.slices``)."""
    if source.converter is None or _is_unconverted(target, source, files):
        return [(CheckpointSlice.whole(name, tuple(target.shape)), [source.keys[-1][1]])]
    lists = list(source.by_pattern().values())
    one_by_one = any(len(keys) > 1 for keys in lists)
    if one_by_one:
        # A converter with several targets gives each an equal part of the experts.
        experts = target.shape[0]
        wanted = experts * len(source.converter.target_patterns)
        for keys in lists:
            if len(keys) != wanted or (len(keys) > 1 and list_numbers(keys) != list(range(len(keys)))):
                raise ValueError(
                    f"{files.folder}: {name} stacks {experts} experts, but the checkpoint has {len(keys)} tensors from "
                    f"{keys[0]} to {keys[-1]}."
                )
        lists = [keys[source.part * experts : (source.part + 1) * experts] for keys in lists]
    is_stack = one_by_one or is_expert_parameter(target)
    found = finder.find(name, target.shape, is_stack, (id(source.converter), source.part))
    keys_of = {keys[0]: keys for keys in lists}
    if found is None or {piece.name for piece in found} != keys_of.keys():
        return None
    return [(piece, keys_of[piece.name]) for piece in found]


def _is_unconverted(target: torch.Tensor, source: Source, files: CheckpointFiles) -> bool:
    """Return whether the tensor has the target's shape already, so that its converter, a transpose, does nothing."""
    operations = source.converter.operations if source.converter is not None else []
    lenient = all(isinstance(each, Transpose) and getattr(each, "check_dims", False) for each in operations)
    return lenient and _has_shape(target, source, files)


def _has_shape(target: torch.Tensor, source: Source, files: CheckpointFiles) -> bool:
    return files.shape(source.keys[-1][1]) == tuple(target.shape)


def _faults(target: _Target, tensor: torch.Tensor, files: CheckpointFiles) -> list[str]:
    """List the checkpoint's tensors of a wrong shape."""
    wrong = []
    for piece, keys in target.slices or ():
        shape = piece.expected(tensor.shape[0] if is_expert_parameter(tensor) else None)
        for key in keys:
            if files.shape(key) != shape:
                found = f"{_named(key, files)} is {files.shape(key)}"
                wrong.append(f"{found}, but {target.name} of the model needs {shape}")
    return wrong


def _named(key: str, files: CheckpointFiles) -> str:
    return f"{key} (in {files.file_of[key]})"


def _fill(target: _Target, tensor: torch.Tensor, model: nn.Module, files: CheckpointFiles) -> None:
    """Read this rank's shard of a tensor."""
    if not local_tensor(tensor).numel():
        return
    held_pieces = list(local_pieces(tensor))
    if target.slices is None:
        whole = bounding_range([held for held, _ in held_pieces])
        values = _convert(target.name, tensor, target.source, whole.slices, model, files, target.by_experts)
        for held, local in held_pieces:
            local.copy_(values[held.slices_in(whole)])
        return
    for held, local in held_pieces:
        for piece, keys in target.slices:
            for key, part, into in _parts_in(piece, keys, held, local, files):
                part.copy(files.read(key, part.source), into)


def _parts_in(
    piece: CheckpointSlice, keys: list[str], held: IndexRange, local: torch.Tensor, files: CheckpointFiles
) -> Iterator[tuple[str, SliceCopy, torch.Tensor]]:
    """Yield key, copy and target view of each read that fills a range."""
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


def _convert(
    name: str,
    target: torch.Tensor,
    source: Source,
    index: tuple[slice, ...],
    model: nn.Module,
    files: CheckpointFiles,
    by_experts: bool = False,
) -> torch.Tensor:
    """Read a part of a tensor, by transformers' converter if it has one.

    No experts outside ``index`` are read, if they are stored one by one or the converter makes it ``by_experts``.
    """
    if source.converter is None:
        return files.read(source.keys[-1][1], index)
    by_pattern, converter = source.by_pattern(), copy.deepcopy(source.converter)
    first = converter_targets(name, converter)[0]  # by its name transformers finds the other targets' sizes (Split)
    one_by_one = any(len(keys) > 1 for keys in by_pattern.values())
    apart = one_by_one or by_experts
    owned = index[0] if apart else slice(None)
    for pattern, keys in by_pattern.items():
        if one_by_one:
            # A converter with several targets gives each an equal part of the experts.
            parts = range(len(converter.target_patterns))
            keys = [key for i in parts for key in keys[i * target.shape[0] : (i + 1) * target.shape[0]][owned]]
        for key in keys:
            converter.add_tensor(first, key, pattern, partial(files.read, key, (owned,) if by_experts else None))
    made = converter.convert(first, model=model, config=model.config)
    value = made[name]
    value = value[0] if isinstance(value, list) else value
    experts = owned.stop - owned.start if apart else target.shape[0]
    if tuple(value.shape) != (experts, *target.shape[1:]):
        raise ValueError(
            f"{files.folder}: {name} of the model has the shape {tuple(target.shape)}, but {source.keys[0][1]} and "
            f"tensors like it give {tuple(value.shape)}."
        )
    return value[(slice(None), *index[1:])] if apart else value[index]
