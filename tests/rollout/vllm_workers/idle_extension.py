"""A worker extension whose engine starts without a forward.

vLLM's CPU build also computes experts that a worker lacks, which reads memory beyond its weights and may crash.
"""

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from tests.rollout.served import latent_attention, ungated_experts
from tests.support.rollout.vllm_extension import ReadableWorker

CPUModelRunner.warming_up_model = lambda runner: None
if not hasattr(torch.ops._C, "convert_weight_packed"):  # without AMX; DeepSeek-V4 packs a weight by it
    torch.ops._C.convert_weight_packed = torch.clone
latent_attention.allow()
ungated_experts.allow()


class NeverComputes(ReadableWorker):
    pass
