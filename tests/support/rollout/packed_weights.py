"""Reads back the weights that vLLM's CPU build packs: linear layers, experts, convolutions and FP8 values.

A linear layer is applied to the identity matrix: each output is 1 * w plus zeros. The permutation that packs experts
and FP8 values is found by packing indices.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from epfsdp2.rollout.layout.layout_check import named_layers, prefix_of
from epfsdp2.rollout.vllm.loaded_weights import expert_tensors

__all__ = ["packed_weights", "unpack_by_index"]


def packed_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(name, tensor)`` of the weights that ``running_weights`` leaves out on a CPU.

    A head is the matrix that multiplies the hidden states, even if it is tied to the embedding.
    """
    heads = {id(layer) for name, layer in model.named_modules(remove_duplicate=False) if name.endswith("lm_head")}
    for name, layer in named_layers(model):
        prefix = prefix_of(name)
        if hasattr(layer, "w13_weight"):
            yield from ((prefix + own, tensor) for own, tensor in expert_tensors(layer, *_experts(layer)).items())
            continue
        if (outputs := getattr(layer, "_wo_a_packed", None)) is not None:  # DeepSeek-V4's, whose parameter is emptied
            yield f"{prefix}wo_a.packed", outputs
        for own, tensor in layer._parameters.items():
            if tensor is not None and tensor.dtype == torch.float8_e4m3fn:
                yield prefix + own, unpack_by_index(tensor.detach(), torch.ops._C.convert_weight_packed)
        if hasattr(layer, "_cpu_unpacked_conv_weight"):
            # A convolution of linear attention is packed on processors with AMX, and this is kept beside.
            yield f"{prefix}weight", layer._cpu_unpacked_conv_weight[:, None]
        elif hasattr(layer, "cpu_linear"):
            is_table = hasattr(layer, "shard_indices") and id(layer) not in heads
            yield f"{prefix}weight", layer.weight.detach() if is_table else _packed_linear(layer)
    for name, layer in model.named_modules(remove_duplicate=False):
        # A tied embedding was read above as a table; here the packed copy that it holds as the head is read.
        if name.endswith("lm_head") and hasattr(layer, "cpu_linear") and type(layer).__name__ != "ParallelLMHead":
            yield f"{name}.weight", _packed_linear(layer)


def _packed_linear(layer: Any) -> torch.Tensor:
    """Return the ``[out, in]`` matrix of a packed linear layer."""
    size = getattr(layer, "input_size_per_partition", None) or getattr(layer, "embedding_dim", None) or layer.input_size
    dtype = getattr(layer, "params_dtype", None) or layer.weight.dtype
    return layer.quant_method.apply(layer, torch.eye(size, dtype=dtype)).t().contiguous()


def _experts(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both weights of experts as they were loaded; INT8 values as they were packed."""
    method, moe, w13, w2 = layer.quant_method, layer.moe_config, layer.w13_weight.detach(), layer.w2_weight.detach()
    kernel = getattr(method, "cpu_fused_moe", None)
    pack: Callable[[torch.Tensor], torch.Tensor]
    if w13.dtype == torch.float8_e4m3fn or type(kernel).__name__ == "SGLFusedMOE":
        pack = torch.ops._C.convert_weight_packed
    elif kernel is None or kernel.forward_method.__name__ == "forward_grouped_gemm":
        # From 0.29 on the kernel is another object, with one class per instruction set. INT8 kernels have no such set.
        isa = getattr(method.moe_kernel.fused_experts if kernel is None else kernel, "isa", None)
        if isa is None:
            return w13, w2
        pack = functools.partial(_prepack, isa=isa)
    elif w13.numel():
        return w13, w2
    else:  # one closure per expert, applied to the identity like any linear layer
        up, down = torch.eye(moe.hidden_dim), torch.eye(moe.intermediate_size_per_partition)
        return (
            torch.stack([linear(up.to(moe.in_dtype)).t() for linear in layer.gate_up_linear]),
            torch.stack([linear(down.to(moe.in_dtype)).t() for linear in layer.down_linear]),
        )
    return unpack_by_index(w13, pack), unpack_by_index(w2, pack)


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
