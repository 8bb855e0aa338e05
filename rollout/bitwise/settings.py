"""Settings under which vLLM and the trainer were shown to compute the same bits; all others are refused."""

from collections.abc import Mapping
from typing import Any

import torch

from ...engine.compat import versions
from ...engine.errors import SettingError
from ..layout.rollout_config import ROLLOUT, server_arguments, size_of

__all__ = ["BITWISE", "check_bitwise", "check_model", "why_not"]

BITWISE = "epfsdp2_bitwise"  # key of vLLM's ``additional_config``
_SETTING = "engine.rollout_bitwise"
_FAMILIES = ("qwen3", "qwen3_moe")
_VERSIONS = {"vllm": ("0.27.1",), "transformers": ("5.9.0",), "torch": ("2.13.0",)}
_DTYPES = (torch.bfloat16, torch.float32)
_WORKERS = 2  # most of a replica
# A CPU's product of float32 with a larger inner dim may sum otherwise for other numbers of columns.
_LARGEST_INNER = 512
# Files with the operators of these families: a module of another file may compute otherwise.
_FILES = ("torch.nn.", "transformers.activations", *(f"transformers.models.{name}." for name in _FAMILIES))


def check_bitwise(
    engine: Any,
    model: Mapping[str, Any],
    rollout: Mapping[str, Any],
    module: Any,
    device: str,
    dtype: torch.dtype,
) -> None:
    """Check that the run is one for which trainer and vLLM were shown to compute the same bits.

    Args:
        module: the model on the meta device; None where it is not on this machine, which its workers check.
        dtype: of the trainer's forward.

    Raises:
        SettingError: for the first setting with which an operator differs, or was not shown to be the same.
    """
    if not engine.rollout_bitwise:
        return
    off, vllm = f"{_SETTING}=False", server_arguments(rollout, "vllm")
    tp, dp, ep = (size_of(rollout, f"{kind}_parallel_size") for kind in ("tensor_model", "data", "expert"))
    asked, whole = rollout.get("dtype") or "bfloat16", "experts differ first: vLLM divides them between its workers."
    computed = str(dtype).removeprefix("torch.")
    told, named = vllm.get("additional_config") or {}, rollout.get("name")
    quantised = rollout.get("quantization")
    rules = [
        ("engine.batch_invariant", engine.batch_invariant, True, "its bits depend on micro-batches."),
        ("engine.chunked_logits", engine.chunked_logits, True, "whole logits are reduced in another order."),
        ("engine.fp32_modules", engine.fp32_modules, [], "vLLM computes in one dtype."),
        (f"{ROLLOUT}.name", named, "vllm", "it was not shown for this server."),
        (f"{ROLLOUT}.tensor_model_parallel_size", tp, min(tp, _WORKERS), "sums of more workers were not shown."),
        (f"{ROLLOUT}.data_parallel_size", dp, 1, whole),
        (f"{ROLLOUT}.expert_parallel_size", ep, 1, whole),
        (f"{ROLLOUT}.enforce_eager", bool(rollout.get("enforce_eager")), True, "compiled operators differ."),
        (
            f"{ROLLOUT}.dtype",
            asked,
            computed if dtype in _DTYPES else "bfloat16",
            f"the trainer computes in {computed}.",
        ),
        (f"{ROLLOUT}.quantization", quantised or None, None, "its linears differ first."),
        ("actor_rollout_ref.model.lora_rank", model.get("lora_rank") or 0, 0, "linears with adapters were not shown."),
        (
            f"{ROLLOUT}.engine_kwargs.vllm.additional_config.{BITWISE}",
            told.get(BITWISE),
            True,
            "without it vLLM's workers do not know.",
        ),
    ]
    if device != "cpu":
        raise SettingError(_SETTING, True, "attention differs first: it was shown on a CPU alone.", off)
    for name, value, works, rule in rules:
        if value != works:
            raise SettingError(name, value, f"{_SETTING}=True rules it out: {rule}", f"{name}={works}, or {off}")
    if why := _of_versions():
        raise SettingError(_SETTING, True, why, off)
    if module is not None:
        check_model(module)
        width, wide = module.config.get_text_config().hidden_size, dtype is torch.float32
        if tp > 1 and wide and width > _LARGEST_INNER:
            rule = f"lm_head, cut between workers in float32, differs first: {width} elements are summed otherwise."
            raise SettingError(f"{ROLLOUT}.tensor_model_parallel_size", tp, rule, "1, or bfloat16")


def check_model(model: Any) -> None:
    """Check that a model has the operators of the shown families alone.

    Raises:
        SettingError: with the first operator, or the first part of its attention or gates, that differs.
    """
    if why := _first_other(model):
        raise SettingError(_SETTING, True, why, f"{_SETTING}=False")


def why_not(config: Any) -> str:
    """Return why a vLLM worker with this ``VllmConfig`` can't compute the trainer's bits; empty if it can."""
    model, parallel = config.model_config, config.parallel_config
    family, mode = model.hf_text_config.model_type, model.logprobs_mode
    if family not in _FAMILIES:
        return f"it was shown for {' and '.join(_FAMILIES)}, and not for {family}."
    workers, ep = parallel.world_size_across_dp, parallel.enable_expert_parallel
    if workers > _WORKERS or workers != parallel.tensor_parallel_size or ep:
        return "it was shown for one worker, and for two that share each tensor."
    if config.lora_config or config.quant_config or config.speculative_config:
        return "it was shown without adapters, quantisation and a draft model."
    if model.dtype not in _DTYPES or not model.enforce_eager or mode != "processed_logprobs":
        return "it was shown in float32 and bfloat16, with enforce_eager and logprobs_mode=processed_logprobs."
    return _of_versions()


def _of_versions() -> str:
    for name, shown in _VERSIONS.items():
        version = versions.installed(name)
        if version is None or version.partition("+")[0] not in shown:
            return f"it was shown with {name} {', '.join(shown)}, and {version} is installed."
    return ""


def _first_other(model: Any) -> str:
    for name, module in model.named_modules():
        if not any(True for _ in module.children()) and not type(module).__module__.startswith(_FILES):
            return f"{name} ({type(module).__name__}) differs first: it was shown for {' and '.join(_FAMILIES)}."
    config = model.config.get_text_config()
    found = {
        "a rotary embedding with scaling": (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        != "default",
        "attention with biases": getattr(config, "attention_bias", False),
        "attention in windows": getattr(config, "use_sliding_window", False),
        "attention with dropout": getattr(config, "attention_dropout", 0),
        "a gate other than silu": getattr(config, "hidden_act", "silu") != "silu",
        "a model of another family": config.model_type not in _FAMILIES,
    }
    return next((f"{name} differs first." for name, differs in found.items() if differs), "")
