"""A checkpoint of a run as a Hugging Face model.

    python -m epfsdp2.recipes.export checkpoints/global_step_100/actor my-model

Runs on one process without a GPU and holds one of the model's tensors at a time. Names and layout are those of the
family's own checkpoints, so transformers and vLLM load the result; the values are the trained ones, bit for bit.
"""

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
import transformers
from rich.console import Console
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from tqdm import tqdm

from ..engine.checkpoint import HF, MODEL, SHARDS
from ..engine.manifest import CheckpointError, check_files
from ..engine.modeling import build_on_meta
from ..engine.safetensors_writer import Entry, write_safetensors
from ..engine.shards import checkpointed
from ..rollout import naming

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
    parser.add_argument("--file-gigabytes", type=float, default=5.0, help="size of a file, at most")
    options = parser.parse_args(arguments)
    console = Console(highlight=False, soft_wrap=True, stderr=True)
    try:
        export(options.checkpoint, options.out, _DTYPES[options.dtype], int(options.file_gigabytes * 1e9))
    except (CheckpointError, OSError, ValueError) as error:
        console.print(str(error), style="red", markup=False)
        return 1
    console.print(f"wrote {options.out}", markup=False)
    return 0


def export(checkpoint: Path, out: Path, dtype: torch.dtype | None = None, file_bytes: int = 5 * 10**9) -> None:
    """Write the model of a checkpoint to ``out``.

    Args:
        dtype: of floating-point tensors, but for those that the model's class keeps in float32; as trained by default.

    Raises:
        CheckpointError: the checkpoint is not complete, or holds no model.
        FileExistsError: ``out`` is there already.
    """
    check_files(checkpoint)
    if out.exists():
        raise FileExistsError(f"{out} is there already.")
    metadata = dcp.HuggingFaceStorageReader(str(checkpoint / SHARDS)).read_metadata()
    if not any(name.startswith(MODEL) for name in metadata.state_dict_metadata):
        raise CheckpointError(f"{checkpoint} holds no model: checkpoint.save_contents was without it.")
    config = transformers.AutoConfig.from_pretrained(checkpoint / HF)
    model_class = getattr(transformers, config.architectures[0])
    model = build_on_meta(_Class(model_class), config, dtype or torch.float32)
    cast(Any, model).tie_weights()  # which going to meta has undone
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(checkpoint / HF, partial, ignore=shutil.ignore_patterns("*.safetensors*"))
    entries = [
        Entry(name, tuple(tensor.shape), tensor.dtype)
        for name, tensor in naming.as_checkpoint(model, _tensors(model, metadata, dtype, "meta"))
    ]
    values = tqdm(naming.as_checkpoint(model, _tensors(model, metadata, dtype, "cpu")), "Exporting", len(entries))
    write_safetensors(partial, entries, values, file_bytes)
    partial.replace(out)


def _tensors(
    model: nn.Module, metadata: Metadata, dtype: torch.dtype | None, device: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's tensors, whole, one at a time; without values on ``meta``."""
    pieces: dict[str, list[tuple[torch.Size, str]]] = {}
    for index, stored in metadata.storage_data.items():
        pieces.setdefault(index.fqn, []).append((index.offset, stored.relative_path))
    missing = [name for name in checkpointed(model) if MODEL + name not in pieces]
    if missing:
        raise CheckpointError(f"the checkpoint lacks {len(missing)} tensors of the model, first {missing[0]}.")
    for name, own in checkpointed(model).items():
        entry = metadata.state_dict_metadata[MODEL + name]
        assert isinstance(entry, TensorStorageMetadata), "safetensors hold nothing else"
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
        for offset, path in pieces[MODEL + name] if device != "meta" else ():
            with safe_open(path, framework="pt") as file:
                values = file.get_tensor(MODEL + name)
            tensor[tuple(slice(at, at + size) for at, size in zip(offset, values.shape, strict=True))] = values
        yield name, tensor.to(own.dtype) if dtype is not None and tensor.is_floating_point() else tensor


class _Class:
    """A model class in the place of an auto class."""

    def __init__(self, model_class: type[transformers.PreTrainedModel]):
        self._class = model_class

    def from_config(self, config, dtype: torch.dtype, trust_remote_code: bool = False):
        return self._class._from_config(config, dtype=dtype)


if __name__ == "__main__":
    sys.exit(main())
