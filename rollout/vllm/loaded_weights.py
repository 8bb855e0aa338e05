"""Read back the weights that a running vLLM model computes with, for kernels with a known layout.

vLLM's objects are recognized by their attributes.
"""

import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch

from ..layout.layout_check import named_layers, prefix_of

__all__ = ["expert_tensors", "running_weights"]

logger = logging.getLogger("epfsdp2")

# Kernels that keep the loader's w13_weight and w2_weight, and kernels with the up projection above the gate. Source:
# vllm/model_executor/layers/fused_moe/oracle/unquantized.py, 0.24 to 0.33.
_PLAIN_EXPERT_BACKENDS = ("TRITON", "BATCHED_TRITON", "NONE")
_SWAPPED_EXPERT_BACKENDS = ("FLASHINFER_CUTLASS",)
# Attributes of a layer whose weight vLLM's CPU build has packed.
_PACKED = ("cpu_linear", "_cpu_unpacked_conv_weight")


def running_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(name, tensor)`` of parameters and persistent buffers of this rank's part of the model.

    Names are vLLM's, with experts at ``<moe>.experts.w13_weight`` ``[E, 2 I / tp, D]`` and ``...w2_weight``
    ``[E, D, I / tp]`` in every version. Weights that vLLM's CPU build packs are left out. A GPU kernel with an
    unknown layout, such as FlashInfer's TRT-LLM blocks, is left out with a warning.
    """
    for name, layer in named_layers(model):
        is_packed = any(hasattr(layer, mark) for mark in _PACKED)
        for own, tensor in _experts(layer).items() if hasattr(layer, "w13_weight") else _own_tensors(layer):
            if tensor.device.type == "cpu" and tensor.dtype in (torch.float8_e4m3fn, torch.int8):
                continue  # packed; INT8 by vLLM 0.32, where a processor has AMX
            if tensor.dtype == torch.float8_e4m3fn:
                _warn_of("FP8")
            elif not (is_packed and own == "weight"):
                yield prefix_of(name) + own, tensor


def _own_tensors(layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    # A leading underscore marks vLLM's own state (expert maps, attention scales), which checkpoints lack.
    left_out = {name for name in layer._buffers if name.startswith("_")} | layer._non_persistent_buffers_set
    for name, tensor in (layer._parameters | layer._buffers).items():
        # A GPU's kernel may have packed scales with the values.
        is_packed = name.endswith("_scale_inv") and tensor is not None and tensor.device.type != "cpu"
        if tensor is not None and name not in left_out and not is_packed:
            yield name, tensor.detach()


def _experts(layer: Any) -> dict[str, torch.Tensor]:
    method, w13, w2 = layer.quant_method, layer.w13_weight.detach(), layer.w2_weight.detach()
    # From 0.29 on the CPU build's kernel is another object, with one class per instruction set.
    kernel = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    is_quantised = w13.element_size() == 1  # FP8 or INT8
    if hasattr(method, "cpu_fused_moe") or hasattr(kernel, "isa") or (is_quantised and w13.device.type == "cpu"):
        return {}
    backend = getattr(getattr(method, "unquantized_backend", None), "name", "NONE")
    if w13.dtype == torch.float8_e4m3fn:
        backend = "FP8"
    if backend not in _PLAIN_EXPERT_BACKENDS + _SWAPPED_EXPERT_BACKENDS:
        _warn_of(backend)
        return {}
    if backend in _SWAPPED_EXPERT_BACKENDS and layer.moe_config.is_act_and_mul:
        w13 = torch.cat(w13.chunk(2, dim=1)[::-1], dim=1)
    return expert_tensors(layer, w13, w2)


def expert_tensors(layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the experts' tensors by name, without a kernel's padding, given both weights in the loader's layout."""
    size, padded = layer.moe_config.intermediate_size_per_partition, w2.shape[2]
    if size != padded:
        w13, w2 = torch.cat([w13[:, :size], w13[:, padded : padded + size]], dim=1), w2[:, :, :size]
    return dict(_own_tensors(layer)) | {"w13_weight": w13, "w2_weight": w2}


@functools.cache
def _warn_of(backend: str) -> None:
    logger.warning(
        "epfsdp2: weights of vLLM's %s backend can't be read back, because their layout is not known here. A sync "
        "verifies their received values, but not the running ones. engine_kwargs.vllm.moe_backend=triton has a known "
        "layout.",
        backend,
    )
