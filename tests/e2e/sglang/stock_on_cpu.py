"""Lets verl's fsdp2 engine, its critic and its SGLang adapter run without a GPU.

The workers of an actor import this module as ``external_lib``. A critic's worker reads no such setting before it loads
its model, and imports the module by unpickling ``CriticModel``.
"""

from dataclasses import dataclass
from typing import Any

from verl.utils import model as verl_models
from verl.workers.config import HFModelConfig
from verl.workers.engine.fsdp import transformer_impl

from epfsdp2.rollout.sglang import shims

__all__ = ["CriticModel"]


@dataclass
class CriticModel(HFModelConfig):
    """verl's settings of a critic's model."""


def _load_critic(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
    """Load a model with a value head; verl's function asks for flash attention."""
    from transformers import AutoModelForTokenClassification

    return AutoModelForTokenClassification.from_pretrained(local_path, dtype=torch_dtype, config=model_config)


shims.send_from_cpu()
verl_models.load_valuehead_model = _load_critic
# A reference policy is offloaded to pinned memory, which needs a GPU. Its parameters are on the CPU anyway.
transformer_impl.CPUOffloadPolicy = lambda pin_memory: None
