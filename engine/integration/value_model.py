"""The value model behind verl's engine interface: the same sharding, and a head with one output."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForTokenClassification
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead

from ..config.values import STRATEGY
from ..lora.settings import LoraSettings
from ..model.value_head import give_value_head, has_value_class, prepare_config, value_head
from .engine import DEVICES, EPFSDP2Engine

__all__ = ["EPFSDP2EngineWithValueHead"]


@EngineRegistry.register(model_type="value_model", backend=[STRATEGY], device=DEVICES)
class EPFSDP2EngineWithValueHead(EPFSDP2Engine, FSDPEngineWithValueHead):
    """Critic, from a checkpoint with a ``score`` head, or from a causal LM with random rows of the head.

    Families without a token-classification class in transformers (GLM-4.5, OLMoE, those with images, ...) are a causal
    LM with a one-output head. With adapters, the whole head is trained beside them.
    """

    _is_value_model = True
    _may_be_unused = r"^(lm_head|score)\."  # the checkpoint's head may be another one

    def _plain_module(self) -> nn.Module:
        config = self.model_config.hf_config
        prepare_config(config)
        module: Any = super()._plain_module()
        if not has_value_class(config):
            give_value_head(module)
        return module

    def _lora_settings(self) -> LoraSettings | None:
        settings = super()._lora_settings()
        return None if settings is None else replace(settings, value_head=value_head(self.model_config.hf_config))

    def _auto_class(self) -> Any:
        own = has_value_class(self.model_config.hf_config)
        return AutoModelForTokenClassification if own else super()._auto_class()

    def _initialize(self, name: str, tensor: torch.Tensor, fits: bool) -> bool:
        """Draw the head's rows if the checkpoint has no head that fits; equal on all replicas."""
        if super()._initialize(name, tensor, fits):
            return True
        if fits or not name.startswith(f"{value_head(self.model_config.hf_config)}."):
            return False
        if tensor.is_meta:  # names are only matched yet
            return True
        generator = torch.Generator().manual_seed(self.engine_config.seed + self.meshes.fsdp_rank)
        scale = getattr(self.model_config.hf_config, "initializer_range", 0.02) if name.endswith("weight") else 0.0
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)
        return True
