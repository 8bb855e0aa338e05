"""A worker whose linear layers stay as in a checkpoint, as on a GPU, where verl's own loader writes to them."""

from unittest import mock

import torch
from vllm.model_executor.layers import linear, vocab_parallel_embedding

from epfsdp2.rollout.vllm_worker import WeightSyncExtension


def _unpacked(layer, remove_weight):
    layer.cpu_linear = torch.nn.functional.linear


class Unpacked(WeightSyncExtension):
    def __new__(cls, **kwargs):
        for module in (linear, vocab_parallel_embedding):
            mock.patch.object(module, "dispatch_cpu_unquantized_gemm", _unpacked).start()
        return super().__new__(cls, **kwargs)
