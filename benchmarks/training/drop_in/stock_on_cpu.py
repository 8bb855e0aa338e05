"""Lets verl's fsdp2 engine and its SGLang adapter run without a GPU; verl's workers take it as ``external_lib``.

A reference policy is kept in memory that is not pinned, as torch pins only beside a GPU; a critic attends with sdpa
instead of flash attention, which verl's code names; and tensors on the CPU reach SGLang by the shim that this engine's
adapter has.
"""

from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import AutoModelForTokenClassification
from verl.utils import model as verls_models
from verl.workers.engine.fsdp import transformer_impl

from epfsdp2.rollout.sglang import cpu_shim


def _unpinned(pin_memory: bool) -> CPUOffloadPolicy:
    return CPUOffloadPolicy(pin_memory=False)


def _critic(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> nn.Module:
    return AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, attn_implementation="sdpa"
    )


transformer_impl.CPUOffloadPolicy = _unpinned
verls_models.load_valuehead_model = _critic
cpu_shim.install()
