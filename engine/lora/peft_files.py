"""Write and read adapters in peft's format: ``adapter_config.json`` and ``adapter_model.safetensors``.

In peft, linears are ``target_modules`` and stacks of experts ``target_parameters``. For stacks peft concatenates the
experts, ``A`` as ``[E * r, in]`` and ``B`` as ``[out, r * E]``, and nests the adapters of one module (peft 0.21,
``tuners/lora/layer.py``, ``ParamWrapper``). For some MoE families peft assumes that any name such as ``gate_proj``
means experts (``_MOE_TARGET_MODULE_MAPPING``). So linears of an MoE with such names are written as parameters too.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..errors import SettingError, listed
from ..model.safetensors_files import DamagedFileError, SafetensorsFile
from .adapters import MAGNITUDE, SAVED, A, B, Lora
from .settings import ADAPTER_CONFIG
from .targets import Target

__all__ = ["ADAPTER", "adapter_config", "as_peft", "check_dora", "peft_names", "read_adapter", "write_adapter"]

ADAPTER = "lora_adapter"  # the folder's name in a checkpoint
_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_TAKEN_FOR_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def write_adapter(out: Path, lora: Lora, base: str, read: Callable[[str], torch.Tensor]) -> None:
    """Write the adapters of a model to a folder.

    Args:
        base: name or path of the base model.
        read: reads an adapter's full parameter by its name in the model.
    """
    tensors = {
        key: as_peft(read(name + suffix), suffix, _experts(lora, name)).contiguous()
        for (name, suffix), key in peft_names(lora).items()
    }
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / _FILE, metadata={"format": "pt"})
    (out / ADAPTER_CONFIG).write_text(json.dumps(adapter_config(lora, base), indent=2))


def read_adapter(folder: Path, lora: Lora, setting: str) -> Callable[[str], torch.Tensor]:
    """Return a function that reads an adapter's full parameter by its name in the model.

    Raises:
        SettingError: the folder's adapters don't fit the model.
    """
    path, keys = folder / _FILE, peft_names(lora)
    if not path.is_file():
        raise SettingError(setting, folder, f"it holds no {_FILE}.", "a complete adapter")
    with _as_setting(setting, folder):
        file = SafetensorsFile(path)
    unknown = sorted(set(file.shapes) - set(keys.values()))
    wrong = [f"{key} is missing" for key in keys.values() if key not in file.shapes]
    wrong += [f"{key} belongs to no weight that the adapter's config names" for key in unknown]
    for (name, suffix), key in keys.items():
        shape = as_peft(torch.empty(lora.shapes[name + suffix], device="meta"), suffix, _experts(lora, name)).shape
        if key in file.shapes and tuple(file.shapes[key]) != tuple(shape):
            wrong.append(f"{key} is {list(file.shapes[key])}, and the model's {list(shape)}")
    if wrong:
        raise SettingError(setting, folder, f"it does not fit the model: {listed(wrong)}.", "an adapter of this model")

    def read(name: str) -> torch.Tensor:
        suffix = next(suffix for suffix in (A, B, MAGNITUDE, SAVED) if name.endswith(suffix))
        weight = name.removesuffix(suffix)
        with _as_setting(setting, folder):
            return _from_peft(file.read(keys[weight, suffix]), suffix, _experts(lora, weight))

    return read


@contextmanager
def _as_setting(setting: str, folder: Path) -> Iterator[None]:
    try:
        yield
    except (DamagedFileError, RuntimeError, IndexError) as error:
        raise SettingError(setting, folder, f"{_FILE}: {error}.", "a complete adapter of this model") from error


def peft_names(lora: Lora) -> dict[tuple[str, str], str]:
    """Map the name of each weight with its suffix (``A``, ``B``, ``MAGNITUDE`` or ``SAVED``) to peft's name."""
    found = {(name, SAVED): _PREFIX + name for name in lora.saved}
    for name, target in lora.targets.items():
        module = name.rpartition(".")[0]
        ordered = [own for own, _ in target.module.named_parameters(recurse=False) if f"{module}.{own}" in lora.targets]
        # peft wraps the first parameter first, so later ones are nested outside of it.
        nested = ".base_layer" * (len(ordered) - 1 - ordered.index(target.own))
        for suffix in (A, B):
            found[name, suffix] = f"{_PREFIX}{module}{nested}.{suffix.strip('_')}.weight"
        if lora.settings.use_dora:
            found[name, MAGNITUDE] = f"{_PREFIX}{module}.lora_magnitude_vector"
    return found


def _experts(lora: Lora, name: str) -> int | None:
    return lora.targets[name].experts if name in lora.targets else None


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
    settings, parameters, named = lora.settings, list[str](), dict[str, Target]()
    for name, target in lora.targets.items():
        linear = name.removesuffix(".weight")
        is_parameter = target.experts is not None or _is_taken_for_experts(lora, linear)
        parameters += [name] if is_parameter else []
        named[name if is_parameter else linear] = target  # peft's names
    saved = list(dict.fromkeys(name.rpartition(".")[0] for name in lora.saved))
    return {
        "peft_type": "LORA",
        "task_type": "TOKEN_CLS" if settings.value_head else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "use_rslora": settings.use_rslora,
        "use_dora": settings.use_dora,
        "rank_pattern": {re.escape(name): t.rank for name, t in named.items() if t.rank != settings.rank},
        "alpha_pattern": {re.escape(name): t.alpha for name, t in named.items() if t.alpha != settings.alpha},
        "modules_to_save": saved or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(named.keys() - set(parameters)),
        "target_parameters": parameters or None,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def check_dora(lora: Lora, setting: str) -> None:
    """Refuse DoRA on linears that peft treats as parameters, because it has DoRA for modules alone.

    Raises:
        SettingError: names the first of them.
    """
    linears = (name.removesuffix(".weight") for name in lora.targets)
    taken = [linear for linear in linears if _is_taken_for_experts(lora, linear)]
    if lora.settings.use_dora and taken:
        rule = f"peft takes {taken[0]} for a parameter in models with experts, and has DoRA for linears alone."
        works = f"{setting}.target_modules=[q_proj,k_proj,v_proj,o_proj], or use_dora=False"
        raise SettingError(f"{setting}.lora.use_dora", True, rule, works)


def _is_taken_for_experts(lora: Lora, linear: str) -> bool:
    return lora.has_experts and linear.rpartition(".")[2] in _TAKEN_FOR_EXPERTS
