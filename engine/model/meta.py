"""Build a Hugging Face model without its weights, and allocate them once it is sharded.

Memory is poisoned when it is allocated (NaN, or the smallest integer). So a tensor that loading did not fill is found,
instead of being trained from whatever was in memory.
"""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    PretrainedConfig,
)

from ..compat.transformers_names import no_init_weights
from ..errors import SettingError, listed
from ..moe.outside.families import prepare
from ..topology.dtensor import local_tensor
from ..topology.rank_consistency import gathered
from .run_config import config_parts, for_run

__all__ = [
    "DEQUANTISED",
    "UninitializedError",
    "build_on_meta",
    "check_initialized",
    "check_no_kernels",
    "check_not_quantised",
    "copy_on_meta",
    "kept_in_float32",
    "materialize",
    "model_of_checkpoint",
    "quantisation_of",
]

_SMALL = 1 << 20  # elements; larger tensors go to meta at once, without memory
_CHUNK = 1 << 24  # elements looked at together
# quant_method of checkpoints that recipes.dequantise makes bfloat16 ones of.
DEQUANTISED = ("fp8", "mxfp4", "compressed-tensors", "modelopt", "modelopt_fp4")


class UninitializedError(ValueError):
    """Parameters or buffers were not filled by loading; raised on all ranks."""


def build_on_meta(
    auto_class: Any,
    config: PretrainedConfig,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    extend: Callable[[nn.Module], None] = lambda model: None,
) -> nn.Module:
    """Build the model with its parameters on the meta device and its buffers real.

    Computed buffers (rotary frequencies) are in no checkpoint, so they must keep their values. No parameter beyond
    ``_SMALL`` elements is allocated. Modules that the class always keeps in float32 are, as by ``from_pretrained``.
    The model has a config of its own, in which the run's settings replace the checkpoint's (``run_config.py``).
    Families outside transformers' experts interface that are known are brought onto it.

    Args:
        auto_class: a transformers auto class, e.g. ``AutoModelForCausalLM``.
        extend: adds modules to the model, whose parameters go to meta too.
    """
    with _parameters_on_meta(), no_init_weights(), _PoisonEmpty():
        model = auto_class.from_config(for_run(config, dtype), dtype=dtype, trust_remote_code=trust_remote_code)
        extend(model)
    prepare(model)
    kept = kept_in_float32(model)
    for module_name, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_floating_point() and kept.search(f"{module_name}.{name}"):
                    tensor.data = tensor.data.float()
    return model


def copy_on_meta(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of what ``build_on_meta`` has built, with parameters in another dtype."""
    copied, kept = copy.deepcopy(model), kept_in_float32(model)
    for name, param in copied.named_parameters():
        if param.is_floating_point() and not kept.search(name):
            param.data = param.data.to(dtype)
    return copied


def model_of_checkpoint(
    folder: Path,
    names: Iterable[str],
    dtype: torch.dtype = torch.float32,
    extend: Callable[[nn.Module], None] = lambda model: None,
) -> nn.Module:
    """Build the model of a checkpoint on meta, from its config; with a value head if its tensors' ``names`` have one.

    For ``extend`` see ``build_on_meta``.

    Raises:
        ValueError: transformers has no such class for the config.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    check_no_kernels(config, str(folder), "checkpoint")
    kinds: list[Any] = [AutoModelForImageTextToText, AutoModelForCausalLM]
    if any(name.startswith("score.") for name in names):
        config.num_labels, kinds = 1, [AutoModelForTokenClassification]
    auto_class = next((kind for kind in kinds if type(config) in kind._model_mapping), None)
    if auto_class is None:
        raise ValueError(f"{folder} has a {type(config).__name__}, for which transformers has no such model.")
    model: Any = build_on_meta(auto_class, config, dtype, extend=extend)
    model.tie_weights()  # moving to meta undid it
    return model


def kept_in_float32(model: nn.Module) -> re.Pattern:
    """Return a pattern to search in names: parameters that the model's class keeps in float32 in any dtype."""
    strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return re.compile("|".join(name.replace("*", ".*") for name in sorted(strict)) or r"(?!)")


def materialize(model: nn.Module, device: torch.device | str, shards: torch.device | str | None = None) -> None:
    """Allocate this rank's shards, poisoned, and move buffers to ``device``.

    Moving off the meta device breaks ties between parameters, so they are tied again. Under FSDP's CPU offload policy
    ``shards`` are on ``cpu``.
    """

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor.to(device)
        filled = torch.empty_like(tensor, device=shards if isinstance(tensor, DTensor) and shards else device)
        _poison(local_tensor(filled))
        return filled

    model._apply(move)
    tie = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()


def check_initialized(model: nn.Module, device: torch.device | str = "cpu") -> None:
    """Refuse a loaded model that still holds poison, in this rank's shards or in any buffer; collective.

    Raises:
        UninitializedError: on every rank, naming the first offenders and the ranks that hold them. It can't tell a
            checkpoint that itself holds NaN from a missing tensor, and the message says so.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    bad = [name for name, tensor in tensors.items() if _is_poisoned(local_tensor(tensor.detach()))]
    found = torch.tensor(len(bad), device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    if not found:
        return
    holders: dict[str, list[int]] = {}
    for rank, names in enumerate(gathered(bad)):
        for name in names:
            holders.setdefault(name, []).append(rank)
    holds = [f"{name} on rank {', '.join(map(str, ranks[:4]))}" for name, ranks in holders.items()]
    raise UninitializedError(
        f"{len(holders)} parameters or buffers of {type(model).__name__} hold NaN after loading: they were not "
        f"filled, or the checkpoint itself holds NaN. First: {listed(holds)}."
    )


def check_no_kernels(config: PretrainedConfig, path: str, setting: str = "--model") -> None:
    """Raise ``SettingError`` if a config, as read from a file, asks for code of the hub.

    A file's ``_attn_implementation`` or ``_experts_implementation`` with a slash names a repository of kernels.
    transformers downloads and imports it, whatever ``trust_remote_code`` is. The file's value wins over an argument.
    """
    for name in ("_attn_implementation", "_experts_implementation"):
        for value in (getattr(part, name, None) for part in config_parts(config)):
            if "/" in str(value):
                rule = f"its config.json has {name}={value}, a repository of kernels, which would be run."
                works = "the config without it; kernels that you chose go into model.override_config"
                raise SettingError(f"{setting}.path" if setting[0] != "-" else setting, path, rule, works)


def quantisation_of(config: PretrainedConfig | Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the quantisation that a config, or one nested in it, gives its weights; None without one."""
    fields = config if isinstance(config, Mapping) else config.to_dict()
    found = fields.get("quantization_config") or fields.get("compression_config")
    if found is not None:
        return dict(found) if isinstance(found, Mapping) else found.to_dict()
    nested = (value for name, value in fields.items() if name.endswith("_config") and isinstance(value, Mapping))
    return next((of for value in nested if (of := quantisation_of(value)) is not None), None)


def check_not_quantised(config: PretrainedConfig, path: str, setting: str = "actor_rollout_ref.model") -> None:
    """Raise ``SettingError`` if the weights of a checkpoint are quantised (MXFP4, FP8 or the like)."""
    found = quantisation_of(config)
    if found is None:
        return
    kind = found.get("quant_method", "unknown")
    rule = f"its config says that the weights are quantised ({kind}); weights to train are bfloat16 or float32."
    works = "the same model in bfloat16: from_pretrained with a quantization_config that dequantises, if there is "
    works += f"one for {kind}, then save_pretrained"
    if kind in DEQUANTISED:
        works = f"the folder that `python -m epfsdp2.recipes.dequantise {path} <new folder>` writes"
        if not Path(path).is_dir():
            works += f", where {path} is downloaded to a folder first (hf download)"
    raise SettingError(f"{setting}.path", path, rule, works)


def _poison(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype != torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).min)


def _is_poisoned(tensor: torch.Tensor) -> bool:
    if tensor.is_meta:
        return True
    if tensor.dtype in (torch.bool, torch.uint8):  # whose smallest value, 0, is common
        return False
    for chunk in tensor.reshape(-1).split(_CHUNK):
        floating = chunk.is_floating_point() or chunk.is_complex()
        if bool((chunk.isnan() if floating else chunk == torch.iinfo(chunk.dtype).min).any()):
            return True
    return False


class _PoisonEmpty(TorchFunctionMode):
    """While a model is built, ``torch.empty`` returns poisoned memory for small tensors, and meta for large ones.

    Parameters go to meta anyway, and no large buffer is left empty on purpose.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not torch.empty or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        shape = func(*args, **{**kwargs, "device": "meta"})
        if shape.numel() > _SMALL:
            return shape
        filled = func(*args, **kwargs)
        _poison(filled)
        return filled


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move each parameter to meta as it is registered."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and not param.is_meta:
            kind = type(param)
            kwargs = {k: v for k, v in param.__dict__.items() if not k.startswith("_")}
            meta = kind(param.to("meta"), requires_grad=param.requires_grad)
            meta.__dict__.update(kwargs)
            module._parameters[name] = meta

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
