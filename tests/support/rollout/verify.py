"""Computes the tensors of each vLLM worker from a full checkpoint in plain torch, and compares digests.

``vllm_extension.ReadableWorker`` computes the worker's digests.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from epfsdp2.engine.errors import first_of
from epfsdp2.rollout.layout.rules import padded_vocabulary

__all__ = ["compare", "digest", "expected_digests", "expected_tensors"]


def digest(tensor: torch.Tensor) -> str:
    """Return dtype, shape and a hash of the values, e.g. ``float32[8, 128, 96]:0a1b...``; ``-0.0`` equals ``0.0``."""
    plain = tensor.detach().cpu().contiguous()
    if plain.element_size() > 1:
        plain = plain + 0  # reading back through a matrix product turns -0.0 into 0.0
    dtype = str(plain.dtype).removeprefix("torch.")
    data = hashlib.blake2b(plain.reshape(-1).view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()
    return f"{dtype}{list(plain.shape)}:{data}"


def expected_digests(
    state: Mapping[str, torch.Tensor], config: Any, tp_size: int = 1, tp_rank: int = 0, dtype: torch.dtype | None = None
) -> dict[str, str]:
    """Return the ``digest`` of each of the ``expected_tensors`` by vLLM's name."""
    return {name: digest(tensor) for name, tensor in expected_tensors(state, config, tp_size, tp_rank, dtype)}


def expected_tensors(
    state: Mapping[str, torch.Tensor], config: Any, tp_size: int = 1, tp_rank: int = 0, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(vLLM's name, tensor)`` for each tensor that a tensor-parallel rank of a Qwen3-MoE holds.

    Args:
        state: full checkpoint weights, experts fused (``...experts.gate_up_proj`` ``[E, 2 I, D]``, ``...down_proj``
            ``[E, D, I]``) or one by one (``...experts.<e>.gate_proj.weight`` ``[I, D]`` ...).
        config: the model's HF config.
        tp_size, tp_rank: vLLM's tensor-parallel size and rank.
        dtype: vLLM's dtype where it differs from the checkpoint's.

    Raises:
        KeyError: ``state`` lacks a tensor of the model.
        ValueError: ``state`` has a tensor that the model lacks.

    Source: vLLM ``model_executor/models/qwen3_moe.py``.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    used: set[str] = set()

    def take(name: str) -> torch.Tensor:
        used.add(name)
        return state[name] if dtype is None else state[name].to(dtype)

    def heads_of(tensor: torch.Tensor, total: int) -> torch.Tensor:
        """Return this rank's heads; with fewer heads than ranks, neighbouring ranks hold the same one."""
        each = max(1, total // tp_size)
        first = tp_rank * each if total >= tp_size else tp_rank // (tp_size // total)
        return tensor[first * head_dim : (first + each) * head_dim]

    def part(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.chunk(tp_size, dim)[tp_rank]

    def vocabulary(tensor: torch.Tensor) -> torch.Tensor:
        padding = padded_vocabulary(tensor.shape[0]) - tensor.shape[0]
        return part(torch.cat([tensor, tensor.new_zeros(padding, tensor.shape[1])]), 0)

    embedding = take("model.embed_tokens.weight")
    yield "model.embed_tokens.weight", vocabulary(embedding)
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        attention = f"{layer}.self_attn"
        for kind in ("weight", *(("bias",) if getattr(config, "attention_bias", False) else ())):
            qkv = [
                heads_of(take(f"{attention}.{name}_proj.{kind}"), total)
                for name, total in (("q", heads), ("k", kv_heads), ("v", kv_heads))
            ]
            yield f"{attention}.qkv_proj.{kind}", torch.cat(qkv)
        yield f"{attention}.o_proj.weight", part(take(f"{attention}.o_proj.weight"), 1)
        for name in ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{name}.weight", take(f"{layer}.{name}.weight")
        mlp = f"{layer}.mlp"
        if f"{mlp}.gate.weight" in state:
            yield f"{mlp}.gate.weight", take(f"{mlp}.gate.weight")
            gate_up_EFD, down_EDI = _fused_experts(f"{mlp}.experts", config.num_experts, state, take)
            gate_EID, up_EID = gate_up_EFD.chunk(2, 1)
            yield f"{mlp}.experts.w13_weight", torch.cat([part(gate_EID, 1), part(up_EID, 1)], 1)
            yield f"{mlp}.experts.w2_weight", part(down_EDI, 2)
        else:
            gate_up = [part(take(f"{mlp}.{name}_proj.weight"), 0) for name in ("gate", "up")]
            yield f"{mlp}.gate_up_proj.weight", torch.cat(gate_up)
            yield f"{mlp}.down_proj.weight", part(take(f"{mlp}.down_proj.weight"), 1)
    yield "model.norm.weight", take("model.norm.weight")
    tied = config.tie_word_embeddings and "lm_head.weight" not in state
    yield "lm_head.weight", vocabulary(embedding if tied else take("lm_head.weight"))
    if unknown := sorted(set(state) - used):
        raise ValueError(f"{len(unknown)} tensors are not part of a Qwen3-MoE: {', '.join(unknown[:5])}")


def _fused_experts(prefix: str, experts: int, state: Mapping[str, torch.Tensor], take) -> tuple:
    if f"{prefix}.gate_up_proj" in state:
        return take(f"{prefix}.gate_up_proj"), take(f"{prefix}.down_proj")
    gate_up = [torch.cat([take(f"{prefix}.{e}.{name}_proj.weight") for name in ("gate", "up")]) for e in range(experts)]
    return torch.stack(gate_up), torch.stack([take(f"{prefix}.{e}.down_proj.weight") for e in range(experts)])


def compare(expected: Mapping[str, str], found: Mapping[str, str], most: int = 10) -> str:
    """Describe how two maps of digests differ; empty when they are equal.

    Args:
        expected: digest by name, computed from the checkpoint.
        found: digest by name, read back from the worker.
        most: number of differences to list.
    """
    lines = []
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            lines.append(f"{name}: missing, should be {expected[name]}")
        elif name not in expected:
            lines.append(f"{name}: unexpected, is {found[name]}")
        elif expected[name] != found[name]:
            lines.append(f"{name}: is {found[name]}, should be {expected[name]}")
    if not lines:
        return ""
    total = len(expected.keys() | found.keys())
    return "\n".join([f"{len(lines)} of {total} tensors differ:", *first_of(lines, most)])
