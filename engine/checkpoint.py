"""Save and resume, and export to Hugging Face format.

A checkpoint folder of one role holds

    dist_ckpt/          torch distributed checkpoint: model and optimizer by parameter name, with real placements
    trainer_state.json  learning-rate schedule and step
    rng/                torch's random state on each rank, of the CPU and of its device
    huggingface/        config, tokenizer; with ``hf_model`` also the weights in the family's checkpoint layout
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from .optimizer import MultiOptimizer

__all__ = ["KNOWN_CONTENTS", "load_checkpoint", "remove_old", "save_checkpoint", "write_hf_weights"]

KNOWN_CONTENTS = frozenset({"model", "optimizer", "extra", "hf_model"})
_SHARDS, _STATE, _RNG = "dist_ckpt", "trainer_state.json", "rng"
_HF_FILE_BYTES = 5 << 30


def save_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: MultiOptimizer | None,
    lr_scheduler: Any,
    contents: Iterable[str],
    step: int,
) -> None:
    """Write ``model``, ``optimizer`` and ``extra`` of ``contents``; collective.

    Files appear in a sibling folder that gets its name when all ranks have written.
    """
    contents = set(contents)
    partial = folder.with_name(folder.name + ".partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    state = _sharded_state(model, optimizer, contents)
    if state:
        dcp.save(state, checkpoint_id=partial / _SHARDS)
    if "extra" in contents:
        (partial / _RNG).mkdir(parents=True, exist_ok=True)
        save_file(_random_state(), partial / _RNG / f"{dist.get_rank():05d}.safetensors")
        if dist.get_rank() == 0:
            schedule = lr_scheduler.state_dict() if lr_scheduler is not None else None
            (partial / _STATE).write_text(json.dumps({"step": step, "lr_scheduler": schedule}))
    dist.barrier()
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for path in partial.iterdir():
            target = folder / path.name
            if target.is_dir():
                shutil.rmtree(target)
            path.replace(target)
        partial.rmdir()
    dist.barrier()


def load_checkpoint(
    folder: Path, model: nn.Module, optimizer: MultiOptimizer | None, lr_scheduler: Any, contents: Iterable[str]
) -> None:
    """Restore what ``contents`` names, on any arrangement of ranks; collective.

    Raises:
        FileNotFoundError: if the folder holds no checkpoint of this engine.
        ValueError: if the optimizer's state was not saved, or is of another model or another algorithm, or the
            schedule is of other optimizers; before a parameter has changed.
    """
    contents = set(contents)
    if not (folder / _SHARDS).is_dir():
        raise FileNotFoundError(f"{folder} holds no {_SHARDS}/: it is no checkpoint of this engine.")
    schedule = None
    if "extra" in contents and (folder / _STATE).is_file() and lr_scheduler is not None:
        schedule = json.loads((folder / _STATE).read_text())["lr_scheduler"]
        if schedule is not None:
            lr_scheduler.check_state_dict(schedule)
    state = _sharded_state(model, None, contents)
    if "optimizer" in contents and optimizer is not None:
        state["optimizer"] = _optimizer_template(folder / _SHARDS, optimizer)
    if state:
        dcp.load(state, checkpoint_id=folder / _SHARDS)
    if "model" in state:
        set_model_state_dict(model, state["model"])
    if "optimizer" in state and optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
    if "extra" in contents and (folder / _STATE).is_file():
        if lr_scheduler is not None and schedule is not None:
            lr_scheduler.load_state_dict(schedule)
        rng = folder / _RNG / f"{dist.get_rank():05d}.safetensors"
        if rng.is_file():
            state = load_file(rng)
            torch.set_rng_state(state["cpu"])
            if "device" in state and torch.accelerator.is_available():
                torch.get_device_module().set_rng_state(state["device"])
    dist.barrier()


def write_hf_weights(folder: Path, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Write full tensors, under checkpoint names, as sharded safetensors with an index; rank 0 writes, all drain.

    Args:
        tensors: collective stream; the same on all ranks.
    """
    writer = dist.get_rank() == 0
    pending: dict[str, torch.Tensor] = {}
    pending_bytes, files, total = 0, [], 0

    def flush() -> None:
        nonlocal pending, pending_bytes
        if pending:
            files.append(sorted(pending))
            save_file(pending, folder / f"part-{len(files):05d}.safetensors", metadata={"format": "pt"})
            pending, pending_bytes = {}, 0

    if writer:
        folder.mkdir(parents=True, exist_ok=True)
    for name, tensor in tensors:
        if not writer:
            continue
        if pending_bytes + tensor.nbytes > _HF_FILE_BYTES:
            flush()
        pending[name] = tensor.cpu().contiguous()
        pending_bytes += tensor.nbytes
        total += tensor.nbytes
    if writer:
        flush()
        _name_hf_files(folder, files, total)
    dist.barrier()


def remove_old(saved: list[Path], max_to_keep: int | None) -> list[Path]:
    """Delete the oldest of ``saved`` (oldest first) beyond ``max_to_keep``; returns what is left."""
    if not max_to_keep or max_to_keep < 1:
        return saved
    for path in saved[:-max_to_keep]:
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
    return saved[-max_to_keep:]


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.accelerator.is_available():
        state["device"] = torch.get_device_module().get_rng_state()
    return state


def _sharded_state(model: nn.Module, optimizer: MultiOptimizer | None, contents: set[str]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    if "model" in contents:
        state["model"] = get_model_state_dict(model)
    if "optimizer" in contents and optimizer is not None:
        packed = optimizer.state_dict()
        # As a tuple the groups are one entry of the checkpoint, read without knowing how many there are.
        state["optimizer"] = {"state": packed["state"], "param_groups": tuple(packed["param_groups"])}
    return state


def _optimizer_template(shards: Path, optimizer: MultiOptimizer) -> dict[str, Any]:
    """What the checkpoint has of the optimizer's state, as this optimizer's own tensors, to be read into; collective.

    Raises:
        ValueError: if it does not fit.
    """
    metadata = dcp.FileSystemReader(shards).read_metadata()
    if "optimizer.param_groups" not in metadata.state_dict_metadata:
        raise ValueError(f"{shards.parent} holds no optimizer state: leave the optimizer out of what is loaded.")
    groups: dict[str, Any] = {"optimizer": {"param_groups": ()}}
    dcp.load(groups, checkpoint_id=shards)
    optimizer.check_groups(groups["optimizer"]["param_groups"])
    saved = _saved_state(metadata)
    # torch makes state at the first step; what is read needs somewhere to go.
    optimizer.init_state()
    own = optimizer.state_dict()["state"]
    for fqn, entries in saved.items():
        if entries.keys() != own[fqn].keys():
            raise ValueError(f"The saved state of {fqn} is {sorted(entries)}, the optimizer's is {sorted(own[fqn])}.")
        for key, entry in entries.items():
            shape = getattr(own[fqn][key], "shape", None)
            if isinstance(entry, TensorStorageMetadata) and entry.size != shape:
                raise ValueError(f"The saved {key} of {fqn} is {tuple(entry.size)}, the optimizer's is {shape}.")
    # A parameter that had no gradient yet when the checkpoint was written has no state in it.
    return {"state": {fqn: own[fqn] for fqn in own if fqn in saved}, "param_groups": ()}


def _saved_state(metadata: Metadata) -> dict[str, dict[str, Any]]:
    """Parameter name -> entry of its optimizer state -> what is stored."""
    saved: dict[str, dict[str, Any]] = {}
    for key, path in metadata.planner_data.items():
        if path[:2] == ("optimizer", "state"):
            saved.setdefault(path[2], {})[path[3]] = metadata.state_dict_metadata[key]
    return saved


def _name_hf_files(folder: Path, files: Sequence[Sequence[str]], total: int) -> None:
    """Give the written parts the names that ``from_pretrained`` looks for."""
    if len(files) == 1:
        (folder / "part-00001.safetensors").replace(folder / "model.safetensors")
        return
    weight_map = {}
    for i, names in enumerate(files, start=1):
        file = f"model-{i:05d}-of-{len(files):05d}.safetensors"
        (folder / f"part-{i:05d}.safetensors").replace(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
