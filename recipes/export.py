"""Export a checkpoint of a run as a Hugging Face model.

    python -m epfsdp2.recipes.export checkpoints/global_step_100/actor my-model

The export runs in one process without a GPU, with one tensor in memory at a time. Names and layout match the family's
own checkpoints, so transformers and vLLM load the result; the values are the trained ones, bit for bit. Config,
generation config, tokenizer and custom code come from the checkpoint's ``huggingface`` folder. LoRA adapters are merged
into their weights. If the checkpoint lacks the frozen weights (engine.save_frozen_base), they are read from the base
model and compared by checksum.
"""

import argparse
import functools
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from ..engine.checkpoint.atomic_folder import CheckpointError, atomic_dir, copy_files, verify_files
from ..engine.checkpoint.export_hf import FILE_BYTES, Base, write_hf_weights
from ..engine.checkpoint.load import tensor_reader
from ..engine.checkpoint.safetensors_reader import open_checkpoint
from ..engine.checkpoint.state import BASE
from ..engine.checkpoint.stored_shards import HF, MODEL, SHARDS, read_facts, stored_tensors
from ..engine.lora.frozen_base import checksum
from ..engine.lora.peft_files import ADAPTER
from ..engine.lora.settings import LoraSettings
from ..engine.lora.targets import find_targets
from ..engine.model.meta import model_of_checkpoint
from ..engine.model.value_head import value_fields
from ..engine.model_files import CONFIG, json_bytes, with_dtype
from ..engine.mtp.layers import add_stored_mtp_layers
from ..engine.topology.dtensor import checkpoint_tensors

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
    parser.add_argument("--dtype", choices=_DTYPES, default="trained", help="dtype to store; trained: unchanged")
    parser.add_argument("--file-gigabytes", type=float, default=FILE_BYTES / 1e9, help="largest size of a file")
    parser.add_argument("--base", type=Path, help="folder of the adapters' base model, if it has moved")
    options = parser.parse_args(arguments)
    console = Console(highlight=False, soft_wrap=True, stderr=True)
    try:
        file_bytes = int(options.file_gigabytes * 1e9)
        export(options.checkpoint, options.out, _DTYPES[options.dtype], file_bytes, options.base)
    except (CheckpointError, OSError, ValueError) as error:
        console.print(str(error), style="red", markup=False)
        return 1
    console.print(f"wrote {options.out}", markup=False)
    return 0


def export(
    checkpoint: Path,
    out: Path,
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
    base: Path | None = None,
) -> None:
    """Write the model of a checkpoint to ``out``.

    Args:
        dtype: of floating-point tensors, except those that the model's class keeps in float32; None: as trained.
        base: folder of the adapters' base model; None for the folder that the run used.

    Raises:
        CheckpointError: the checkpoint is not complete or holds no model, or the base model's values differ.
        FileExistsError: ``out`` exists.
    """
    verify_files(checkpoint)
    if out.exists():
        raise FileExistsError(f"{out} is there already.")
    stored = stored_tensors(checkpoint / SHARDS)
    names = [name.removeprefix(MODEL) for name in stored if name.startswith(MODEL)]
    if not names:
        raise CheckpointError(f"{checkpoint} holds no model: checkpoint.save_contents was without it.")
    kept = dtype or torch.float32
    extend = functools.partial(add_stored_mtp_layers, names=names, dtype=kept)
    model = model_of_checkpoint(checkpoint / HF, names, kept, extend)
    dtypes = {
        name: own.dtype if dtype is not None and own.is_floating_point() else None
        for name, own in checkpoint_tensors(model).items()
    }
    lora, targets = read_facts(checkpoint).get("lora"), None
    if lora is not None:
        settings = LoraSettings.of_folder(checkpoint / ADAPTER, "model")
        targets = {target.name: target for target in find_targets(model, settings)}
    frozen = _frozen_base(checkpoint, model, base) if (checkpoint / BASE).is_file() else None
    with atomic_dir(out) as partial:
        copy_files(checkpoint / HF, partial, "*.safetensors*")
        config = {**json.loads((partial / CONFIG).read_text()), **value_fields(model)}
        if dtype is not None:
            config = with_dtype(config, str(dtype).removeprefix("torch."))
        (partial / CONFIG).write_bytes(json_bytes(config))
        write_hf_weights(model, stored, partial, dtypes, file_bytes, targets, frozen, progress=True)


def _frozen_base(checkpoint: Path, model: nn.Module, folder: Path | None) -> Base:
    """Return a reader of the frozen weights from the base model's checkpoint, which compares checksums."""
    saved = json.loads((checkpoint / BASE).read_text())
    path = Path(saved["model"]) if folder is None else folder
    if not path.is_dir():
        raise CheckpointError(
            f"{checkpoint} holds adapters without the frozen weights that they were trained on, those of "
            f"{saved['model']}, which is no folder here: name one with --base."
        )
    read = tensor_reader(model, open_checkpoint(path))
    dtypes = {name: getattr(torch, dtype) for name, (_, _, dtype) in saved["tensors"].items()}

    def compared(name: str) -> torch.Tensor:
        values = read(name).to(dtypes[name])
        if checksum(values) != saved["tensors"][name][1]:
            raise CheckpointError(f"{name} of {path} is not what the adapters of {checkpoint} were trained on.")
        return values

    return Base(compared, dtypes)


if __name__ == "__main__":
    raise SystemExit(main())
