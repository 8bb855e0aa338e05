"""vLLM's attention backend of a CPU with ``attention.attend``; the cache has plain rows of a key and its value."""

from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from .attention import attend

__all__ = ["Backend", "register"]


def register() -> None:
    """Replace vLLM's backend of a CPU in models that are built later."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{Backend.__module__}.{Backend.__qualname__}")


class _Attention(CPUAttentionBackendImpl):
    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        size = kv_cache.shape[2]
        slots = slot_mapping[slot_mapping >= 0].long()
        pairs = torch.cat((key, value), dim=-1)[: len(slot_mapping)][slot_mapping >= 0]
        kv_cache[slots // size, :, slots % size] = pairs

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write attention ``[tokens, H, D]`` of each request's scheduled tokens, whose keys are in the cache."""
        if attn_metadata is None:  # to warm up
            return output
        size = kv_cache.shape[2]
        starts, lengths = attn_metadata.query_start_loc.tolist(), attn_metadata.seq_lens.tolist()
        for number, (first, end, length) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
            if first == end:
                continue
            blocks = attn_metadata.block_table[number, : -(-length // size)].long()
            pairs = kv_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length]
            keys, values = pairs.chunk(2, dim=-1)
            output[first:end] = attend(query[first:end].transpose(0, 1), keys, values, self.scale).transpose(0, 1)
        return output


class Backend(CPUAttentionBackend):
    """vLLM makes it in place of ``CPUAttentionBackend``."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return _Attention
