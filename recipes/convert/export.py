"""A checkpoint of a run as a Hugging Face model.

    python -m epfsdp2.recipes.export checkpoints/global_step_100/actor my-model

Runs on one process without a GPU and holds one of the model's tensors at a time. Names and layout are those of the
family's own checkpoints, so transformers and vLLM load the result; the values are the trained ones, bit for bit.
Low-rank adapters are merged into the weights that they adapt.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from ...engine.checkpoint.atomic_folder import CheckpointError, atomic_dir, copy_files, verify_files
from ...engine.checkpoint.export_hf import FILE_BYTES, MODEL, write_hf_weights
from ...engine.checkpoint.state import HF, SHARDS
from ...engine.checkpoint.stored_shards import read_facts, shards_metadata
from ...engine.model.meta import model_of_checkpoint
from ...engine.topology.dtensor import checkpoint_tensors

__all__ = ["export", "main"]

_DTYPES = {"trained": None, "bfloat16": torch.bfloat16, "float32": torch.float32}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m epfsdp2.recipes.export",
        description="Write a checkpoint of a run as a Hugging Face model: safetensors, config and tokenizer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path, help="folder of a role, e.g. .../global_step_100/actor")
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    parser.add_argument("--dtype", choices=_DTYPES, default="trained", help="what to store; trained: as it is")
    parser.add_argument("--file-gigabytes", type=float, default=FILE_BYTES / 1e9, help="size of a file, at most")
    options = parser.parse_args(arguments)
    console = Console(highlight=False, soft_wrap=True, stderr=True)
    try:
        export(options.checkpoint, options.out, _DTYPES[options.dtype], int(options.file_gigabytes * 1e9))
    except (CheckpointError, OSError, ValueError) as error:
        console.print(str(error), style="red", markup=False)
        return 1
    console.print(f"wrote {options.out}", markup=False)
    return 0


def export(checkpoint: Path, out: Path, dtype: torch.dtype | None = None, file_bytes: int = FILE_BYTES) -> None:
    """Write the model of a checkpoint to ``out``.

    Args:
        dtype: of floating-point tensors, but for those that the model's class keeps in float32; as trained by default.

    Raises:
        CheckpointError: the checkpoint is not complete, or holds no model.
        FileExistsError: ``out`` is there already.
    """
    verify_files(checkpoint)
    if out.exists():
        raise FileExistsError(f"{out} is there already.")
    metadata = shards_metadata(checkpoint / SHARDS)
    names = [name.removeprefix(MODEL) for name in metadata.state_dict_metadata if name.startswith(MODEL)]
    if not names:
        raise CheckpointError(f"{checkpoint} holds no model: checkpoint.save_contents was without it.")
    model = model_of_checkpoint(checkpoint / HF, names, dtype or torch.float32)
    dtypes = {
        name: own.dtype if dtype is not None and own.is_floating_point() else None
        for name, own in checkpoint_tensors(model).items()
    }
    with atomic_dir(out) as partial:
        copy_files(checkpoint / HF, partial, "*.safetensors*")
        lora = read_facts(checkpoint).get("lora")
        scaling = None if lora is None else lora["alpha"] / lora["rank"]
        write_hf_weights(model, checkpoint / SHARDS, partial, dtypes, file_bytes, scaling, progress=True)
