"""A worker extension that computes linear attention by transformers' rule, because vLLM's CPU kernels refuse float32.

Only with it can a test see a difference of these families that is smaller than bfloat16's rounding.
"""

import torch
import torch.nn.functional as F
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

from tests.support.rollout.vllm_extension import ReadableWorker

__all__ = ["PlainLinearAttention"]


def _core(
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
    layer_name: gdn_attention.LayerNameType,
) -> None:
    """Compute convolution and rule of each sequence, from its states in vLLM's cache, and write both there again."""
    context = get_forward_context()
    layer = context.no_compile_layers[gdn_attention._resolve_layer_name(layer_name)]
    if context.attn_metadata is None:
        return  # a forward that only measures memory
    metadata = context.attn_metadata[layer.prefix]
    # [slots, width - 1, channels] and [slots, heads, keys, values]
    convolved, states = layer.kv_cache[:2]
    decay = -layer.A_log.exp() * F.softplus(a + layer.dt_bias)
    starts = metadata.non_spec_query_start_loc.tolist()
    for i, slot in enumerate(metadata.non_spec_state_indices_tensor.tolist()):
        if i >= metadata.num_decodes and not metadata.has_initial_state[i]:
            convolved[slot], states[slot] = 0, 0
        part = slice(starts[i], starts[i + 1])
        inputs = torch.cat([convolved[slot], mixed_qkv[part]])
        convolved[slot] = inputs[-convolved.shape[1] :]
        outputs = F.silu(F.conv1d(inputs.T, layer.conv1d.weight, groups=inputs.shape[1])).T
        query, key, value = layer.rearrange_mixed_qkv(outputs)
        shared = value.shape[2] // query.shape[2]
        core_attn_out[part], states[slot] = torch_chunk_gated_delta_rule(
            query.repeat_interleave(shared, dim=2),
            key.repeat_interleave(shared, dim=2),
            value,
            g=decay[None, part],
            beta=b[None, part].sigmoid(),
            initial_state=states[slot][None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )


# Where there is AMX, vLLM packs the convolution's weights for kernels in bfloat16.
torch.cpu._is_amx_tile_supported = lambda: False
gdn_attention.cpu_gdn_attention_core = _core


class PlainLinearAttention(ReadableWorker):
    pass
