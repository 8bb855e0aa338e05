"""The value model behind verl's engine interface: the same sharding, a token-classification head with one output."""

from typing import Any

import torch
from transformers import AutoModelForTokenClassification
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead

from .actor import DEVICES, EPFSDP2Engine
from .config import STRATEGY

__all__ = ["EPFSDP2EngineWithValueHead"]


@EngineRegistry.register(model_type="value_model", backend=[STRATEGY], device=DEVICES)
class EPFSDP2EngineWithValueHead(EPFSDP2Engine, FSDPEngineWithValueHead):
    """Critic, from a causal-LM checkpoint (the head starts at random) or from one with a ``score`` head."""

    def _auto_class(self) -> Any:
        config = self.model_config.hf_config
        config.num_labels = 1
        # As verl's own value engine sets them: values are regressed, so nothing is dropped.
        config.classifier_dropout = 0.0
        config.hidden_dropout = 0.0
        return AutoModelForTokenClassification

    def _initialize_missing(self, name: str, tensor: torch.Tensor) -> bool:
        """A causal LM's checkpoint has no ``score``; each rank draws its rows, equal on all replicas."""
        if not name.startswith("score."):
            return False
        generator = torch.Generator().manual_seed(self.engine_config.seed + self.meshes.fsdp_rank)
        std = getattr(self.model_config.hf_config, "initializer_range", 0.02)
        scale = std if name.endswith("weight") else 0.0
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)
        return True
