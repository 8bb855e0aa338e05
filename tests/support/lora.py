"""Adapters of tests: their settings, and values that change the output."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from epfsdp2.engine.lora.settings import LoraSettings
from epfsdp2.engine.topology.dtensor import is_adapter

__all__ = ["SCALING", "SETTINGS", "adapters_of", "lora_settings", "stirred", "whole"]

SETTINGS = {"lora_rank": 4, "lora_alpha": 12, "target_modules": "all-linear"}
SCALING = 3.0


def lora_settings(**changes: Any) -> LoraSettings:
    return LoraSettings.of(SETTINGS | changes, "actor_rollout_ref.model")


def adapters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in model.named_parameters() if is_adapter(name)}


def stirred(model: nn.Module, seed: int = 5) -> Callable[[str], torch.Tensor]:
    """Set adapters that change the output: each is drawn whole, and sharded as its parameter."""

    def read(name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed + len(name) + sum(name.encode()))
        return torch.randn(model.get_parameter(name).shape, generator=generator) * 0.1

    return read


def whole(param: Any) -> torch.Tensor:
    return param.detach().full_tensor()
