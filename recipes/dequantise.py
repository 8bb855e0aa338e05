"""Convert a quantised Hugging Face checkpoint to bfloat16, which can be trained.

    python -m epfsdp2.recipes.dequantise gpt-oss-20b gpt-oss-20b-bf16

The conversion runs in one process without a GPU, with one tensor in memory at a time. Plain tensors are copied
unchanged, like the folder's small files, tokenizer and generation config among them. The config loses its entries about
quantisation. It also loses those about code of the checkpoint's own, which keeps experts in a list, if transformers has
a class. ``quantised_weights.py`` has the formats.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tqdm import tqdm
from transformers import CONFIG_MAPPING

from ..engine.checkpoint.atomic_folder import CheckpointError, atomic_dir
from ..engine.checkpoint.export_hf import FILE_BYTES
from ..engine.checkpoint.safetensors_reader import check_files, open_checkpoint
from ..engine.checkpoint.safetensors_writer import Entry, write_safetensors
from ..engine.errors import listed
from ..engine.model.families import SAME_AS
from ..engine.model.meta import DEQUANTISED, quantisation_of
from ..engine.model_files import CONFIG, json_bytes, read_small_files, write_files
from .quantised_weights import OF_ACTIVATIONS, QuantisationError, find_quantised

__all__ = ["dequantise", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m epfsdp2.recipes.dequantise",
        description="Write a quantised Hugging Face checkpoint in bfloat16: safetensors, config and tokenizer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path, help="folder of the quantised checkpoint (hf download fetches one)")
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    parser.add_argument("--file-gigabytes", type=float, default=FILE_BYTES / 1e9, help="largest size of a file")
    options = parser.parse_args(arguments)
    console = Console(highlight=False, soft_wrap=True, stderr=True)
    try:
        weights, left_out = dequantise(options.checkpoint, options.out, int(options.file_gigabytes * 1e9))
    except (CheckpointError, OSError, ValueError) as error:
        console.print(str(error), style="red", markup=False)
        return 1
    for name in left_out:
        console.print(f"left out: {name}", style="yellow", markup=False)
    console.print(f"wrote {options.out}: {weights} weights were dequantised", markup=False)
    return 0


def dequantise(checkpoint: Path, out: Path, file_bytes: int = FILE_BYTES) -> tuple[int, list[str]]:
    """Write a quantised checkpoint to ``out`` in bfloat16.

    Returns:
        The number of weights that were quantised; and the names left out. These are other files of the folder, and
        scales of activations, with a star for each number.

    Raises:
        QuantisationError: it is not quantised, or in an unknown format, or has a weight both quantised and plain.
        SettingError: the checkpoint is not complete.
        FileExistsError: ``out`` exists.
    """
    files = open_checkpoint(checkpoint)
    check_files(files)
    if out.exists():
        raise FileExistsError(f"{out} is there already.")
    config = json.loads((checkpoint / CONFIG).read_text())
    quantisation = quantisation_of(config)
    if quantisation is None:
        raise QuantisationError(f"{checkpoint}/{CONFIG} has no quantization_config: its weights are not quantised.")
    if (method := quantisation.get("quant_method")) not in DEQUANTISED:
        raise QuantisationError(f"{checkpoint}/{CONFIG} has quant_method={method}; known are {', '.join(DEQUANTISED)}.")
    weights, scales = find_quantised(files, quantisation)
    by_values = {weight.values: weight for weight in weights}
    tensors = [(key, by_values.get(key)) for key in files.file_of if key not in scales]
    entries = [
        Entry(weight.name, weight.shape, torch.bfloat16) if weight else Entry(key, files.shape(key), files.dtype(key))
        for key, weight in tensors
    ]
    if twice := [name for name, count in Counter(entry.name for entry in entries).items() if count > 1]:
        raise QuantisationError(f"{checkpoint} has weights twice, quantised and plain: {listed(twice)}.")
    with atomic_dir(out) as partial:
        write_files(partial, {**read_small_files(checkpoint), CONFIG: json_bytes(_of_transformers(_plain(config)))})
        values = (
            (weight.name, weight.dequantised(files, torch.bfloat16)) if weight else (key, files.read(key))
            for key, weight in tqdm(tensors, desc="Dequantising")
        )
        write_safetensors(partial, entries, values, file_bytes)
    of_activations = {re.sub(r"\d+", "*", key) for key in scales if OF_ACTIVATIONS.search(key)}
    return len(weights), [*files.unread, *sorted(of_activations)]


def _of_transformers(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config of transformers' own class of the family, if it has one."""
    family = config.get("model_type", "")
    family = SAME_AS.get(family, family)
    if family not in CONFIG_MAPPING:
        return config
    return {**{name: value for name, value in config.items() if name != "auto_map"}, "model_type": family}


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config, nested ones included, without quantisation and with bfloat16 as dtype."""
    plain: dict[str, Any] = {}
    for name, value in config.items():
        if name in ("dtype", "torch_dtype"):
            plain[name] = "bfloat16"
        elif name not in ("quantization_config", "compression_config"):
            plain[name] = _plain(value) if isinstance(value, dict) and name.endswith("_config") else value
    return plain


if __name__ == "__main__":
    raise SystemExit(main())
