"""Reads back the weights that a running vLLM model computes with.

On a GPU these are its parameters. vLLM's CPU build packs linear layers and experts, which are read back exactly through
its own operators: a linear layer is applied to the identity matrix (each output is 1 * w plus zeros), and the
permutation that packs experts is found by packing indices. vLLM's objects are recognized by their attributes.
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


def running_weights(model: torch.nn.Module, packed_linears: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(name, tensor)`` of every parameter and persistent buffer of this rank's part of the model.

    Names are vLLM's, with experts at ``<moe>.experts.w13_weight`` ``[E, 2 I / tp, D]`` and ``...w2_weight``
    ``[E, D, I / tp]`` whatever the version calls the module in between. The language-model head is the matrix that
    multiplies the hidden states, even if it is tied to the embedding. Experts whose kernel has a layout that is not
    known here, such as FlashInfer's TRT-LLM blocks on Blackwell, are left out with a warning.

    Args:
        packed_linears: whether to include linear layers that can only be read by applying them to an identity matrix.
    """
    heads = {id(layer) for name, layer in model.named_modules(remove_duplicate=False) if name.endswith("lm_head")}
    for name, layer in model.named_modules():
        prefix = prefix_of(name)
        if hasattr(layer, "w13_weight"):
            yield from _experts(prefix, layer)
            continue
        for own, tensor in _own_tensors(layer):
            is_table = hasattr(layer, "shard_indices") and id(layer) not in heads
            if own == "weight" and hasattr(layer, "_cpu_unpacked_conv_weight"):
                # The CPU build packs a convolution of linear attention on processors with AMX, and keeps this beside.
                tensor = layer._cpu_unpacked_conv_weight[:, None]
            elif tensor.dtype == torch.float8_e4m3fn and tensor.device.type == "cpu":
                tensor = unpack_by_index(tensor, torch.ops._C.convert_weight_packed)
            elif tensor.dtype == torch.float8_e4m3fn:
                _warn_of("FP8")
                continue
            elif own.endswith("weight_scale_inv") and tensor.device.type != "cpu":
                continue  # its kernel may have packed them with the values
            elif own == "weight" and hasattr(layer, "cpu_linear") and not is_table:
                if not packed_linears:
                    continue
                tensor = _packed_linear(layer)
            yield prefix + own, tensor
    for name, layer in model.named_modules(remove_duplicate=False) if packed_linears else ():
        # A tied embedding was read above as a table; here the packed copy that it holds as the head is read.
        if name.endswith("lm_head") and hasattr(layer, "cpu_linear") and type(layer).__name__ != "ParallelLMHead":
            yield f"{name}.weight", _packed_linear(layer)


def _own_tensors(layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    # A leading underscore marks vLLM's own state (expert maps, attention scales), which checkpoints lack.
    left_out = {name for name in layer._buffers if name.startswith("_")} | layer._non_persistent_buffers_set
    for name, tensor in (layer._parameters | layer._buffers).items():
        if tensor is not None and name not in left_out:
            yield name, tensor.detach()


def _packed_linear(layer: Any) -> torch.Tensor:
    """Return the ``[out, in]`` matrix of a packed CPU linear layer by applying the layer to the identity."""
    size = getattr(layer, "input_size_per_partition", None) or getattr(layer, "embedding_dim", None) or layer.input_size
    dtype = getattr(layer, "params_dtype", None) or layer.weight.dtype
    return layer.quant_method.apply(layer, torch.eye(size, dtype=dtype)).t().contiguous()


def _experts(prefix: str, layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if (weights := _expert_weights(layer)) is None:
        return
    w13, w2 = weights
    size, padded = layer.moe_config.intermediate_size_per_partition, w2.shape[2]
    if size != padded:
        w13, w2 = torch.cat([w13[:, :size], w13[:, padded : padded + size]], dim=1), w2[:, :, :size]
    yield prefix + "w13_weight", w13
    yield prefix + "w2_weight", w2
    for name, tensor in _own_tensors(layer):
        is_packed = name.endswith("_scale_inv") and tensor.device.type != "cpu"
        if name not in ("w13_weight", "w2_weight") and not is_packed:
            yield prefix + name, tensor


def _expert_weights(layer: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return both weights as they were loaded; None if their kernel's layout is not known."""
    method, moe, w13, w2 = layer.quant_method, layer.moe_config, layer.w13_weight.detach(), layer.w2_weight.detach()
    kernel, is_fp8 = getattr(method, "cpu_fused_moe", None), w13.dtype == torch.float8_e4m3fn
    # From 0.29 on the kernel is another object, with one class per instruction set.
    isa: Any = getattr(getattr(getattr(method, "moe_kernel", None), "fused_experts", None), "isa", None)
    pack: Callable[[torch.Tensor], torch.Tensor]
    if (is_fp8 and w13.device.type == "cpu") or type(kernel).__name__ == "SGLFusedMOE":
        pack = torch.ops._C.convert_weight_packed
    elif kernel is None and isa is None:
        backend = "FP8" if is_fp8 else getattr(getattr(method, "unquantized_backend", None), "name", "NONE")
        if backend in _SWAPPED_EXPERT_BACKENDS and moe.is_act_and_mul:
            return torch.cat(w13.chunk(2, dim=1)[::-1], dim=1), w2
        if backend in _PLAIN_EXPERT_BACKENDS + _SWAPPED_EXPERT_BACKENDS:
            return w13, w2
        _warn_of(backend)
        return None
    elif kernel is None or kernel.forward_method.__name__ == "forward_grouped_gemm":
        pack = functools.partial(_prepack, isa=isa if kernel is None else kernel.isa)
    else:  # one closure per expert, applied to the identity like any linear layer
        up, down = torch.eye(moe.hidden_dim), torch.eye(moe.intermediate_size_per_partition)
        return (
            torch.stack([linear(up.to(moe.in_dtype)).t() for linear in layer.gate_up_linear]),
            torch.stack([linear(down.to(moe.in_dtype)).t() for linear in layer.down_linear]),
        )
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
    """Invert a packing that permutes the elements within each matrix.

    Args:
        packed: ``[E, N, K]`` or ``[N, K]``, the output of ``pack``.
        pack: the packing, ``[E, N, K] -> [E, N, K]``; called on one expert whose elements are their own indices.

    Raises:
        RuntimeError: ``pack`` is not a permutation within an expert.
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
