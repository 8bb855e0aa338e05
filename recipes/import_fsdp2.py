"""Convert a checkpoint of verl's own fsdp2 engine to this engine's format, to resume with expert parallelism.

    python -m epfsdp2.recipes.import_fsdp2 before/global_step_100/actor after/global_step_100/actor

Weights, optimizer state, schedule and torch's random state are converted bit for bit. verl's files are pickles; torch's
restricted unpickler reads them, so no code in them is run. The import needs one process without a GPU, and has one
whole tensor in memory at a time. verl saves the tokenizer as transformers writes it, and omits a generation config that
transformers calls invalid; ``--base`` copies these files from the base model.

For ``trainer.resume_mode=auto``, ``after/latest_checkpointed_iteration.txt`` has to contain ``100``. The position in
the data, ``global_step_100/data.pt``, has the same format for every engine and can be copied.
"""

import argparse
import json
import logging
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from tqdm import tqdm

from ..engine.checkpoint.atomic_folder import CheckpointError, atomic_dir, copy_files
from ..engine.checkpoint.export_hf import FILE_BYTES
from ..engine.checkpoint.safetensors_writer import Entry, write_safetensors
from ..engine.checkpoint.state import RNG, plain_value
from ..engine.checkpoint.stored_shards import HF, MODEL, OPTIMIZER, SHARDS, STATE
from ..engine.compat.transformers_names import own_name
from ..engine.errors import listed
from ..engine.model.meta import model_of_checkpoint
from ..engine.model.value_head import value_fields
from ..engine.model.weight_sources import tied_names
from ..engine.model_files import CONFIG, json_bytes, read_small_files, write_files
from ..engine.moe.find import find_experts
from ..engine.topology.dtensor import checkpoint_tensors

__all__ = ["import_fsdp2", "main"]

_CONFIG = "fsdp_config.json"
_KINDS = ("model", "optim", "extra_state")  # prefixes of verl's files of a rank
# Globals in numpy's random state, which is saved beside torch's; numpy 1 has another path for the first.
_RECONSTRUCT = np.zeros(0).__reduce__()[0]
_NUMPY: list[Any] = [(_RECONSTRUCT, f"numpy.{core}.multiarray._reconstruct") for core in ("_core", "core")]
_NUMPY += [np.ndarray, np.dtype, type(np.dtype(np.uint32))]
_States = Mapping[Path, Mapping[str, Any]]  # of all ranks in their order, by file


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m epfsdp2.recipes.import_fsdp2",
        description="Write a checkpoint of verl's fsdp2 engine as one of epfsdp2, to resume from.",
        epilog="trainer.resume_mode=auto resumes from the step in latest_checkpointed_iteration.txt, beside the "
        "folders global_step_<n>.",
    )
    parser.add_argument("checkpoint", type=Path, help="folder of a role, e.g. .../global_step_100/actor")
    parser.add_argument("out", type=Path, help="folder to write, e.g. .../global_step_100/actor; must not exist")
    parser.add_argument("--step", type=int, help="the trainer's step; default: n of the folder global_step_<n>")
    parser.add_argument("--optimizer", help="class of the optimizer; not needed for Adam and AdamW")
    parser.add_argument("--base", type=Path, help="folder of model.path, to copy tokenizer and generation config from")
    options = parser.parse_args(arguments)
    console = Console(highlight=False, soft_wrap=True, stderr=True)
    # torch warns for each file that there is no process group; none is needed.
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    try:
        missing = import_fsdp2(options.checkpoint, options.out, options.step, options.optimizer, options.base)
    except (CheckpointError, OSError, ValueError) as error:
        console.print(str(error), style="red", markup=False)
        return 1
    for content in missing:
        console.print(f"{options.checkpoint} holds no {content}: a run resumes without.", style="yellow", markup=False)
    console.print(f"wrote {options.out}", markup=False)
    return 0


def import_fsdp2(
    checkpoint: Path, out: Path, step: int | None = None, optimizer: str | None = None, base: Path | None = None
) -> list[str]:
    """Convert verl's checkpoint of a role to ``out``, atomically; return the contents that the checkpoint lacks.

    Args:
        step: the trainer's step; None to parse it from the folders' names.
        optimizer: class name of the optimizer; None for Adam or AdamW, which the files identify.
        base: folder of the base model, whose small files replace verl's.

    Raises:
        CheckpointError: it is no complete checkpoint of fsdp2, or files are damaged or contain code, or tensors don't
            fit the model in its ``huggingface`` folder.
        FileExistsError: ``out`` exists.
        ValueError: the step is unknown, or this engine does not support the model.
    """
    if out.exists():
        raise FileExistsError(f"{out} is there already.")
    files = _rank_files(checkpoint)
    step = _global_step(checkpoint, out) if step is None else step
    saved = {kind: {path: _read(path) for path in tqdm(paths, f"Reading {kind}")} for kind, paths in files.items()}
    model = model_of_checkpoint(checkpoint / HF, saved["model"][files["model"][0]])
    states = {path: {own_name(model, n): value for n, value in of.items()} for path, of in saved["model"].items()}
    tensors = {MODEL + name: stored for name, stored in _model(states, model)}
    groups = None
    if "optim" in saved:
        order = [name for name in next(iter(states.values())) if name in dict(model.named_parameters())]
        groups, moments = _optimizer(saved["optim"], model, order, optimizer)
        tensors |= {OPTIMIZER + name: stored for name, stored in moments.items()}
    extras = saved.get("extra_state", {})
    schedule = _of_first(extras, "lr_scheduler") if extras else None
    schedules = None if schedule is None else dict.fromkeys(_parts(model), schedule)
    facts = {"step": step, "lr_scheduler": schedules, "param_groups": groups}
    with atomic_dir(out, manifest=True) as partial:
        for folder in (SHARDS, RNG):
            (partial / folder).mkdir()
        entries = [Entry(name, stored.shape, stored.dtype) for name, stored in tensors.items()]
        values = ((name, stored.whole()) for name, stored in tensors.items())
        write_safetensors(partial / SHARDS, entries, tqdm(values, "Importing", len(entries)), FILE_BYTES)
        for rank, extra in enumerate(extras.values()):
            if "rng" in extra:
                # verl has the device's state under the device's name.
                device = [state for name, state in extra["rng"].items() if name not in ("cpu", "numpy", "random")]
                random = {"cpu": extra["rng"]["cpu"], **({"device": device[0]} if device else {})}
                save_file(random, partial / RNG / f"{rank:05d}.safetensors")
        (partial / STATE).write_text(json.dumps(facts, default=plain_value))
        copy_files(checkpoint / HF, partial / HF)
        write_files(partial / HF, {} if base is None else read_small_files(base))
        if fields := value_fields(model):
            config = json.loads((partial / HF / CONFIG).read_text())
            (partial / HF / CONFIG).write_bytes(json_bytes({**config, **fields}))
    told = {"optimizer state": groups, "learning-rate schedule": schedule}
    return [content for content, found in told.items() if found is None]


@dataclass(frozen=True)
class _Stored:
    """A tensor as the ranks' pieces, in order along ``dim``."""

    pieces: Sequence[torch.Tensor]
    dim: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces[0].dtype

    def whole(self) -> torch.Tensor:
        return self.pieces[0] if len(self.pieces) == 1 else torch.cat(list(self.pieces), self.dim)


def _rank_files(checkpoint: Path) -> dict[str, list[Path]]:
    """Return the checkpoint's files by kind, in the order of ranks."""
    path = checkpoint / _CONFIG
    if not path.is_file():
        raise CheckpointError(
            f"{checkpoint} holds no {_CONFIG}: it is no folder of a role that verl's fsdp2 engine wrote, such as "
            "global_step_100/actor."
        )
    try:
        facts = json.loads(path.read_text())
        version, world = int(facts["FSDP_version"]), int(facts["world_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    if version != 2:
        raise CheckpointError(f"{checkpoint} is of FSDP version {version}; only fsdp2's shards can be imported.")
    files = {kind: [checkpoint / f"{kind}_world_size_{world}_rank_{r}.pt" for r in range(world)] for kind in _KINDS}
    found = {path for kind in _KINDS for path in checkpoint.glob(f"{kind}_world_size_*_rank_*.pt")}
    others = sorted(path.name for path in found.difference(*files.values()))
    if others:
        raise CheckpointError(f"{checkpoint} is of {world} ranks by its {_CONFIG}, and it holds {listed(others)}.")
    files = {kind: paths for kind, paths in files.items() if kind == "model" or found & set(paths)}
    missing = [path.name for paths in files.values() for path in paths if path not in found]
    missing += [] if (checkpoint / HF / "config.json").is_file() else [f"{HF}/config.json"]
    if missing:
        raise CheckpointError(f"{checkpoint} is not complete, it lacks {listed(missing)}.")
    return files


def _global_step(*folders: Path) -> int:
    for folder in folders:
        for part in reversed(folder.absolute().parts):
            if (match := re.fullmatch(r"global_step_(\d+)", part)) is not None:
                return int(match[1])
    raise ValueError(f"{folders[0]} lies in no global_step_<n>: give the trainer's step as --step.")


def _read(path: Path) -> dict[str, Any]:
    """Load a state dict of ``torch.save``; its tensors are memory-mapped."""
    try:
        with zipfile.ZipFile(path) as file:
            broken = file.testzip()
    except (OSError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if broken is not None:
        raise CheckpointError(f"{path} is damaged: the checksum of {broken} in it is another one.")
    try:
        with torch.serialization.safe_globals(_NUMPY):
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        why = f"it would call {named[1]}" if named else f"it is no state dict of torch.save ({reason})"
        raise CheckpointError(f"{path} is refused: {why}; only tensors and plain values are read.") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds no state dict.")
    return state


def _model(states: _States, model: nn.Module) -> Iterator[tuple[str, _Stored]]:
    """Return the stored tensors by the model's names; tied parameters appear once."""
    path, first_state = next(iter(states.items()))
    if adapters := [name for name in first_state if "lora_" in name]:
        raise CheckpointError(f"{path} holds LoRA adapters, which have other names here: {listed(adapters)}.")
    saved, own = _joined(states), checkpoint_tensors(model)
    tied_to = {name: first for first, *others in tied_names(model) for name in others}
    wrong = [f"{name} is missing" for name in own if name not in saved]
    wrong += [f"{name} is no tensor of the model" for name in saved if name not in own and name not in tied_to]
    wrong += [
        f"{name} is tied to {first} by {HF}/config.json, but their values differ"
        for name, first in tied_to.items()
        if name in saved and first in saved and not torch.equal(saved[name].whole(), saved[first].whole())
    ]
    _raise_for(list(states), wrong, {name: (saved[name], own[name]) for name in own if name in saved})
    return ((name, saved[name]) for name in own)


def _optimizer(
    states: _States, model: nn.Module, order: Sequence[str], algorithm: str | None
) -> tuple[list[dict[str, Any]], dict[str, _Stored]]:
    """Return groups in the format of ``MultiOptimizer.state_dict``, and state by ``<parameter>.<key>``.

    ``order`` has the parameters in the order of verl's model; the optimizer's state refers to them by number.
    """
    groups, parameters, path = _of_first(states, "param_groups"), dict(model.named_parameters()), next(iter(states))
    if len(groups) != 1 or len(groups[0]["params"]) != len(parameters):
        counts = [len(group["params"]) for group in groups]
        raise CheckpointError(
            f"{path} is of groups of {counts} parameters, verl's fsdp2 has one of all {len(parameters)} parameters."
        )
    options = {key: value for key, value in groups[0].items() if key != "params"}
    names = dict(zip(groups[0]["params"], order, strict=True))
    flat: dict[Path, dict[str, Any]] = {path: {} for path in states}
    for source, state in states.items():
        for number, entries in _entry(source, state, "state").items():
            flat[source] |= {f"{names[number]}.{key}": value for key, value in entries.items() if value is not None}
    moments = _joined(flat)
    # Every state except scalars, such as the step count, has the parameter's shape.
    per_element = {name: moment for name, moment in moments.items() if moment.shape}
    pairs = {name: (moment, parameters[name.rpartition(".")[0]]) for name, moment in per_element.items()}
    _raise_for(list(states), [], pairs)
    if not algorithm:  # no optimizer of torch but Adam and AdamW has both of these options
        if not {"amsgrad", "decoupled_weight_decay"} <= options.keys():
            raise CheckpointError(f"{path} does not say whose state it is: give the optimizer's class as --optimizer.")
        algorithm = "AdamW" if options["decoupled_weight_decay"] else "Adam"
    head = {**options, "algorithm": algorithm}
    return [{**head, "params": params, "optimizer": part} for part, params in _parts(model).items()], moments


def _parts(model: nn.Module) -> dict[str, list[str]]:
    """Return the parameters' names by optimizer of ``build_multi_optimizer``."""
    experts = {f"{info.fqn}.{name}" for info in find_experts(model) for name in info.ep_dims}
    names = [name for name, _ in model.named_parameters()]
    return {"dense": [n for n in names if n not in experts], "experts": [n for n in names if n in experts]}


def _joined(states: _States) -> dict[str, _Stored]:
    """Return each tensor with the pieces of all ranks."""
    first, names = next((path, state.keys()) for path, state in states.items())
    for path, state in states.items():
        if others := sorted(state.keys() ^ names):
            raise CheckpointError(f"{path} and {first.name} differ in {listed(others)}.")
    try:
        return {name: _stored(list(states), name, [state[name] for state in states.values()]) for name in names}
    except AttributeError as error:
        raise CheckpointError(f"{first} holds DTensors of another version of torch: {error}") from error


def _stored(files: Sequence[Path], name: str, of_ranks: Sequence[Any]) -> _Stored:
    first = of_ranks[0]
    if any(type(tensor) is not type(first) or not isinstance(tensor, torch.Tensor) for tensor in of_ranks):
        raise CheckpointError(f"{name} is no tensor in some of {files[0].name} to {files[-1].name}.")
    if not isinstance(first, DTensor):  # a buffer or a step count, replicated
        for path, tensor in zip(files, of_ranks, strict=True):
            if not torch.equal(tensor, first):
                raise CheckpointError(f"{name} in {path} is another one than in {files[0].name}.")
        return _Stored([first], 0, tuple(first.shape))
    *replicated, placement = first.placements
    if type(placement) is not Shard or not all(other.is_replicate() for other in replicated):
        raise CheckpointError(f"{name} in {files[0]} is placed as {first.placements}, which is not how fsdp2 shards.")
    dim, shape = placement.dim, tuple(first.shape)
    pieces = [tensor.to_local().detach() for tensor in of_ranks]
    held = sum(piece.shape[dim] for piece in pieces)
    copies = max(held // shape[dim], 1) if replicated else 1  # verl numbers ranks replica by replica
    pieces = pieces[: len(pieces) // copies]
    if held != copies * shape[dim] or sum(piece.shape[dim] for piece in pieces) != shape[dim]:
        raise CheckpointError(f"{name} is {shape}, the pieces in {files[0].name} to {files[-1].name} are not.")
    return _Stored(pieces, dim, shape)


def _raise_for(files: Sequence[Path], wrong: list[str], pairs: Mapping[str, tuple[_Stored, torch.Tensor]]) -> None:
    """Raise for what is wrong, and for each pair of a stored tensor and the model's whose shapes differ."""
    wrong += [
        f"{name} is {stored.shape}, the model's is {tuple(own.shape)}"
        for name, (stored, own) in pairs.items()
        if stored.shape != tuple(own.shape)
    ]
    if wrong:
        which = f"{files[0].parent}: {files[0].name} to {files[-1].name}"
        raise CheckpointError(f"{which} are not of the model that {HF}/config.json describes: {listed(wrong)}.")


def _of_first(states: _States, key: str) -> Any:
    return _entry(*next(iter(states.items())), key)


def _entry(path: Path, state: Mapping[str, Any], key: str) -> Any:
    if key not in state:
        raise CheckpointError(f"{path} holds no {key}.")
    return state[key]


if __name__ == "__main__":
    raise SystemExit(main())
