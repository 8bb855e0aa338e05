"""Digests of the tensors of vLLM workers: expected ones, from full tensors, and their comparison with found ones.

``vllm_extension.ReadableWorker`` computes the worker's digests.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from epfsdp2.rollout.layout.rules import padded_vocabulary
from epfsdp2.rollout.layout.specs import Heads, Rollout
from tests.support.rollout.units import worker_parameters

__all__ = ["compare", "digest", "expected_digests"]


def digest(tensor: torch.Tensor) -> str:
    """Return dtype, shape and a hash of the values, e.g. ``float32[8, 128, 96]:0a1b...``; ``-0.0`` equals ``0.0``."""
    plain = tensor.detach().cpu().contiguous()
    if plain.element_size() > 1:
        plain = plain + 0  # reading back through a matrix product turns -0.0 into 0.0
    dtype = str(plain.dtype).removeprefix("torch.")
    data = hashlib.blake2b(plain.reshape(-1).view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()
    return f"{dtype}{list(plain.shape)}:{data}"


def expected_digests(
    state: Mapping[str, torch.Tensor], config: Any, tp_size: int = 1, tp_rank: int = 0
) -> dict[str, str]:
    """Return the ``digest`` of each tensor of a tensor-parallel worker, by vLLM's name, from the model's full tensors.

    Vocabularies end with the padding rows of vLLM, which are zeros.
    """
    held = worker_parameters(state, Rollout(tp_size), tp_rank, Heads.of(config))
    held.setdefault("lm_head.weight", held["model.embed_tokens.weight"])
    rows = padded_vocabulary(config.vocab_size) // tp_size
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        held[name] = F.pad(held[name], (0, 0, 0, rows - len(held[name])))
    return {name: digest(tensor) for name, tensor in held.items()}


def compare(expected: Mapping[str, str], found: Mapping[str, str]) -> str:
    """Name the tensors whose digests differ; empty if none does."""
    return ", ".join(name for name in sorted({*expected, *found}) if expected.get(name) != found.get(name))
