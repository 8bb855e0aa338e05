"""Find or make a Hugging Face model of a checkpoint: of this engine, of verl's fsdp2 engine, or any folder of one."""

import logging
import re
from pathlib import Path

from ...engine.checkpoint.stored_shards import HF, SHARDS
from ..export import export
from ..import_fsdp2 import import_fsdp2
from .rollouts import RolloutError

__all__ = ["hf_folder", "step_of"]

_OF_VERL = "fsdp_config.json"


def hf_folder(checkpoint: Path, scratch: Path) -> Path:
    """Return a folder with config and safetensors; one that has to be converted is written below ``scratch``.

    Args:
        checkpoint: of a role (``global_step_100/actor``), its parent, or a Hugging Face model.
        scratch: an empty folder.

    Raises:
        RolloutError: it is no checkpoint.
        CheckpointError, OSError, ValueError: it is not complete, or damaged.
    """
    folder = checkpoint / "actor" if (checkpoint / "actor").is_dir() else checkpoint
    for found in (folder, folder / HF):
        if (found / "config.json").is_file() and any(found.glob("*.safetensors")):
            return found
    if (folder / _OF_VERL).is_file():
        # torch warns for each file that there is no process group; none is needed.
        logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
        weights, folder = folder.absolute(), scratch / "imported" / "actor"
        linked = scratch / "linked"  # without optimizer state
        linked.mkdir()
        for path in (weights / _OF_VERL, weights / HF, *weights.glob("model_world_size_*.pt")):
            (linked / path.name).symlink_to(path)
        folder.parent.mkdir()
        import_fsdp2(linked, folder, step=step_of(checkpoint) or 0)
    if not (folder / SHARDS).is_dir():
        kinds = "a Hugging Face model in safetensors, or a checkpoint's folder of a role (global_step_100/actor)"
        raise RolloutError(f"{checkpoint} holds no model. What works: {kinds}.")
    export(folder, scratch / "model")
    return scratch / "model"


def step_of(checkpoint: Path) -> int | None:
    """Return the trainer's step of a checkpoint's folder; None if its path has none."""
    found = re.findall(r"global_step_(\d+)", str(checkpoint.absolute()))
    return int(found[-1]) if found else None
