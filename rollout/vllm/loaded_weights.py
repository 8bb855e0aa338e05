"""Reads back the weights that a running vLLM model computes with, where their layout is known.

On a GPU these are its parameters. vLLM's CPU build packs experts and FP8 values; the permutation is found by packing
indices. Linear layers that it packs are left out. vLLM's objects are recognized by their attributes.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..layout.layout_check import prefix_of

__all__ = ["running_weights", "unpack_by_index"]

logger = logging.getLogger("epfsdp2")

# Kernels that compute with w13_weight and w2_weight as vLLM's loader leaves them, and those that want the up projection
# above the gate (vllm/model_executor/layers/fused_moe/oracle/unquantized.py, 0.24 to 0.32).
_PLAIN_EXPERT_BACKENDS = ("TRITON", "BATCHED_TRITON", "NONE")
_SWAPPED_EXPERT_BACKENDS = ("FLASHINFER_CUTLASS",)


def running_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(name, tensor)`` of parameters and persistent buffers of this rank's part of the model.

    Names are vLLM's, with experts at ``<moe>.experts.w13_weight`` ``[E, 2 I / tp, D]`` and ``...w2_weight``
    ``[E, D, I / tp]`` whatever the version calls the module in between. Experts whose kernel has a layout that is not
    known here, such as FlashInfer's TRT-LLM blocks on Blackwell, are left out with a warning.
    """
    for name, layer in model.named_modules():
        for own, tensor in _experts(layer) if hasattr(layer, "w13_weight") else _others(layer):
            yield prefix_of(name) + own, tensor


def _others(layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in _own_tensors(layer):
        if name == "weight" and hasattr(layer, "_cpu_unpacked_conv_weight"):
            # The CPU build packs a convolution of linear attention on processors with AMX, and keeps this beside.
            yield name, layer._cpu_unpacked_conv_weight[:, None]
        elif name == "weight" and hasattr(layer, "cpu_linear"):
            continue
        elif tensor.dtype != torch.float8_e4m3fn:
            yield name, tensor
        elif tensor.device.type == "cpu":
            yield name, unpack_by_index(tensor, torch.ops._C.convert_weight_packed)
        else:
            _warn_of("FP8")


def _own_tensors(layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    # A leading underscore marks vLLM's own state (expert maps, attention scales), which checkpoints lack.
    left_out = {name for name in layer._buffers if name.startswith("_")} | layer._non_persistent_buffers_set
    for name, tensor in (layer._parameters | layer._buffers).items():
        # A GPU's kernel may have packed scales with the values.
        is_packed = name.endswith("_scale_inv") and tensor is not None and tensor.device.type != "cpu"
        if tensor is not None and name not in left_out and not is_packed:
            yield name, tensor.detach()


def _experts(layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if (weights := _expert_weights(layer)) is None:
        return
    w13, w2 = weights
    size, padded = layer.moe_config.intermediate_size_per_partition, w2.shape[2]
    if size != padded:
        w13, w2 = torch.cat([w13[:, :size], w13[:, padded : padded + size]], dim=1), w2[:, :, :size]
    yield from (dict(_own_tensors(layer)) | {"w13_weight": w13, "w2_weight": w2}).items()


def _expert_weights(layer: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return both weights as they were loaded; None if their kernel's layout is not known."""
    method, w13, w2 = layer.quant_method, layer.w13_weight.detach(), layer.w2_weight.detach()
    kernel, is_fp8 = getattr(method, "cpu_fused_moe", None), w13.dtype == torch.float8_e4m3fn
    # From 0.29 on the kernel is another object, with one class per instruction set.
    isa: Any = getattr(getattr(getattr(method, "moe_kernel", None), "fused_experts", None), "isa", None)
    pack: Callable[[torch.Tensor], torch.Tensor]
    if (is_fp8 and w13.device.type == "cpu") or type(kernel).__name__ == "SGLFusedMOE":
        pack = torch.ops._C.convert_weight_packed
    elif kernel is None and isa is None:
        backend = "FP8" if is_fp8 else getattr(getattr(method, "unquantized_backend", None), "name", "NONE")
        if backend in _SWAPPED_EXPERT_BACKENDS and layer.moe_config.is_act_and_mul:
            return torch.cat(w13.chunk(2, dim=1)[::-1], dim=1), w2
        if backend in _PLAIN_EXPERT_BACKENDS + _SWAPPED_EXPERT_BACKENDS:
            return w13, w2
        _warn_of(backend)
        return None
    elif hasattr(layer, "gate_up_linear"):  # a linear layer for each expert, which oneDNN packs
        return (w13, w2) if w13.numel() else None
    else:
        pack = functools.partial(_prepack, isa=isa if kernel is None else kernel.isa)
    return unpack_by_index(w13, pack), unpack_by_index(w2, pack)


@functools.cache
def _warn_of(backend: str) -> None:
    logger.warning(
        "epfsdp2: weights of vLLM's %s backend can't be read back, because their layout is not known here; of these a "
        "sync verifies what was received, and not what the model computes with. engine_kwargs.vllm.moe_backend=triton "
        "has a known layout.",
        backend,
    )


def _prepack(weight: torch.Tensor, isa: Any) -> torch.Tensor:
    packed = torch.empty_like(weight)
    torch.ops._C.prepack_moe_weight(weight, packed, isa)
    return packed


def unpack_by_index(packed: torch.Tensor, pack: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Invert ``pack``, which permutes the elements within each matrix of ``[E, N, K]``.

    Args:
        packed: ``[E, N, K]`` or ``[N, K]``, the output of ``pack``.

    Raises:
        RuntimeError: ``pack`` does something else.
    """
    rows, columns = packed.shape[-2:]
    index = torch.arange(rows * columns)
    source = torch.zeros_like(index)
    base = 1
    while base <= rows * columns:
        # Pack the indices one base-256 digit at a time: 0..255 is exact in every floating-point dtype of weights.
        digit = (index // base % 256).view(1, rows, columns)
        if packed.element_size() == 1:  # a packing of FP8 values moves their bytes
            source += pack(digit.to(torch.uint8).view(packed.dtype)).view(torch.uint8).flatten().long() * base
        else:
            source += pack(digit.to(packed.dtype)).flatten().long() * base
        base *= 256
    if not torch.equal(source.sort().values, index):
        raise RuntimeError(f"this packing of a {rows} x {columns} expert is not a permutation")
    plain = torch.empty_like(packed).view(-1, rows * columns)
    plain[:, source] = packed.reshape(-1, rows * columns)
    return plain.view(packed.shape)
