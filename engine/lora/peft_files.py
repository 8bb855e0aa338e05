"""Write and read adapters in peft's format: ``adapter_config.json`` and ``adapter_model.safetensors``.

In peft, linears are ``target_modules`` and stacks of experts ``target_parameters``. For the latter it concatenates the
experts, ``A`` as ``[E * r, in]`` and ``B`` as ``[out, r * E]``, and nests the adapters of one module (peft 0.21,
``tuners/lora/layer.py``, ``ParamWrapper``). For some MoE families it assumes that any name such as ``gate_proj`` means
experts (``_MOE_TARGET_MODULE_MAPPING``), so linears with such names are written as parameters too.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..errors import SettingError, listed
from ..model.safetensors_files import DamagedFileError, SafetensorsFile
from .adapters import A, B, Lora
from .settings import ADAPTER_CONFIG, Target

__all__ = ["ADAPTER", "adapter_config", "as_peft", "peft_names", "read_adapter", "write_adapter"]

ADAPTER = "lora_adapter"  # the folder's name in a checkpoint
_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_TAKEN_FOR_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def write_adapter(out: Path, lora: Lora, base: str, read: Callable[[str], torch.Tensor]) -> None:
    """Write the adapters of a model to a folder.

    Args:
        base: name or path of the base model.
        read: returns an adapter's full parameter by its name in the model.
    """
    keys = peft_names(lora.targets)
    tensors = {
        key: as_peft(read(name + suffix), suffix, lora.targets[name].experts).contiguous()
        for (name, suffix), key in keys.items()
    }
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / _FILE, metadata={"format": "pt"})
    (out / ADAPTER_CONFIG).write_text(json.dumps(adapter_config(lora, base), indent=2))


def read_adapter(folder: Path, targets: Mapping[str, Target], setting: str) -> Callable[[str], torch.Tensor]:
    """Return a function that reads an adapter's full parameter by its name in the model.

    Raises:
        SettingError: the folder's adapters are not those of the targets.
    """
    path, keys = folder / _FILE, peft_names(targets)
    if not path.is_file():
        raise SettingError(setting, folder, f"it holds no {_FILE}.", "a complete adapter")
    with _as_setting(setting, folder):
        file = SafetensorsFile(path)
    there = set(file.shapes)
    wrong = [f"{key} is missing" for key in keys.values() if key not in there]
    wrong += [
        f"{key} belongs to no weight that the adapter's config names" for key in sorted(there - set(keys.values()))
    ]
    if wrong:
        raise SettingError(setting, folder, f"it does not fit the model: {listed(wrong)}.", "an adapter of this model")

    def read(name: str) -> torch.Tensor:
        weight, suffix = (name.removesuffix(A), A) if name.endswith(A) else (name.removesuffix(B), B)
        with _as_setting(setting, folder):
            return _from_peft(file.read(keys[weight, suffix]), suffix, targets[weight].experts)

    return read


@contextmanager
def _as_setting(setting: str, folder: Path) -> Iterator[None]:
    try:
        yield
    except (DamagedFileError, RuntimeError, IndexError) as error:
        raise SettingError(setting, folder, f"{_FILE}: {error}.", "a complete adapter of this model") from error


def peft_names(targets: Mapping[str, Target]) -> dict[tuple[str, str], str]:
    """Map each target's name and suffix (``A`` or ``B``) to peft's name."""
    found = {}
    for name, target in targets.items():
        module = name.rpartition(".")[0]
        beside = [other for other in targets if other.rpartition(".")[0] == module]
        ordered = [n for n in _in_order(target) if f"{module}.{n}" in beside]
        # peft wraps the first parameter first, so the others are outside of it.
        nested = ".base_layer" * (len(ordered) - 1 - ordered.index(target.own))
        for suffix in (A, B):
            found[name, suffix] = f"{_PREFIX}{module}{nested}.{suffix.strip('_')}.weight"
    return found


def _in_order(target: Target) -> list[str]:
    return [name for name, _ in target.module.named_parameters(recurse=False)]


def as_peft(half: torch.Tensor, suffix: str, experts: int | None) -> torch.Tensor:
    """Return an ``A`` or ``B`` in peft's layout."""
    if experts is None:
        return half
    return half.flatten(0, 1) if suffix == A else half.permute(1, 2, 0).flatten(1)


def _from_peft(half: torch.Tensor, suffix: str, experts: int | None) -> torch.Tensor:
    if experts is None:
        return half
    if suffix == A:
        return half.unflatten(0, (experts, -1))
    return half.unflatten(1, (-1, experts)).permute(2, 0, 1)


def adapter_config(lora: Lora, base: str) -> dict[str, Any]:
    """Return peft's config of a model's adapters.

    Args:
        base: name or path of the base model.
    """
    linears = {name.removesuffix(".weight") for name, target in lora.targets.items() if target.experts is None}
    modules = {name for name in linears if name.rpartition(".")[2] not in _TAKEN_FOR_EXPERTS}
    parameters = [name for name in lora.targets if name.removesuffix(".weight") not in modules]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.settings.rank,
        "lora_alpha": lora.settings.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(modules),
        "target_parameters": parameters or None,
        "init_lora_weights": True,
        "inference_mode": True,
    }
