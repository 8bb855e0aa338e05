"""What has to hold of the engine's settings, whatever the model and the ranks are."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import SettingError
from ..settings.values import DTYPES
from .derived import expert_settings, param_dtype
from .engine_settings import check_fields

__all__ = ["check_settings"]


def check_settings(config: Any) -> None:
    """Refuse values that no model and no number of ranks could make right.

    Raises:
        SettingError: naming the first such setting.
    """
    check_fields(config)
    for rule in _BETWEEN_SETTINGS:
        rule(config)


def _only_all_to_all(config: Any) -> None:
    for name, value, default in _given_dispatch(config):
        if config.dispatcher == "deepep" and name != "dispatcher":
            rule = "is for all_to_all: DeepEP (engine.dispatcher=deepep) sends a layer's tokens at once."
            raise SettingError(f"engine.{name}", value, rule, f"engine.{name}={default}")


def _only_whole_experts(config: Any) -> None:
    if config.dispatcher == "deepep" and config.etp_size > 1:
        rule = f"sends rows to ranks that hold experts whole, and engine.etp_size={config.etp_size} cuts them."
        raise SettingError("engine.dispatcher", "deepep", rule, "engine.dispatcher=all_to_all, or engine.etp_size=1")


def _only_with_ep(config: Any) -> None:
    for name, value, default in _given_dispatch(config):
        if config.ep_size == 1:
            rule = "no token is sent where a rank holds all experts (engine.ep_size=1)."
            raise SettingError(f"engine.{name}", value, rule, f"engine.{name}={default}, or a larger ep_size")


def _given_dispatch(config: Any) -> list[tuple[str, Any, Any]]:
    """Name, value and plain value of the settings of dispatch that ask for something."""
    plain = {"dispatch_chunks": 1, "overlap_shared_experts": False, "dispatcher": "all_to_all"}
    default, values = expert_settings(), ((name, getattr(config, name)) for name in plain)
    return [(name, value, plain[name]) for name, value in values if value not in (plain[name], default[name])]


def _only_eager_attention_over_ranks(config: Any) -> None:
    size = config.ulysses_sequence_parallel_size
    if size > 1 and config.compile_dense:
        rule = (
            "what is compiled may hold no collective, and with sequence parallelism "
            f"(engine.ulysses_sequence_parallel_size={size}) attention does."
        )
        raise SettingError("engine.compile_dense", True, rule, "engine.compile_dense=False")


def _float16_of_float32(config: Any) -> None:
    if param_dtype(config) is torch.float16 and DTYPES[config.model_dtype] is not torch.float32:
        rule = "parameters that are computed with in float16 are kept in float32."
        raise SettingError("engine.model_dtype", config.model_dtype, rule, "engine.model_dtype=fp32")


_BETWEEN_SETTINGS: Sequence[Callable[[Any], None]] = (
    _only_all_to_all,
    _only_whole_experts,
    _only_with_ep,
    _only_eager_attention_over_ranks,
    _float16_of_float32,
)
