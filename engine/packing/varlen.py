"""Attention of a packed row by one call of a kernel that accepts the lengths of its sequences.

On a GPU it replaces the calls of sdpa per sequence (``attention.py``), whose launches take longer than short sequences.
With cuDNN, torch's choice on sm_90 and sm_100, each new length also costs a plan. On a B200 it took 0.44 s forward and
0.55 s backward with torch 2.11 (https://github.com/modelscope/FunASR/issues/3704).

    q, k, v  [1, H, S, D]  ->  [S, H, D]  ->  attention within sequences  ->  [1, S, H, D]

The device and the module decide the kernel, never the lengths. So a sequence's result does not depend on its row, and
ranks with the same GPU agree. For the same reason kernels do not split keys among blocks.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["FASTEST", "attend_row", "available", "fastest", "why_not_in_one_call"]

FASTEST: dict[tuple[int, int], tuple[str, ...]] = {(9, 0): ("fa3", "torch")}
"""Names in ``available`` that are faster than sdpa per sequence, the fastest first, by compute capability.

The default from ``(8, 0)`` on is ``("torch",)``. Not measured here: on an H100 FlashAttention 3 is published with 1.5
to 2 times the speed of 2, which torch has (https://arxiv.org/abs/2407.08608). ``make gpu-check ARGS=attention`` checks
it.
"""
_DTYPES = (torch.bfloat16, torch.float16)
_DIMS = (*range(8, 193, 8), 256)  # FlashAttention's head dims; others have no backward on sm_86, sm_89 and sm_120


@functools.cache
def available() -> dict[str, tuple[Callable[..., Any], set[str]]]:
    """Return the kernels that are installed, torch's (FlashAttention 2) and FlashAttention 3.

    Each comes with the names of its arguments besides tensors and lengths.
    """
    from torch.nn.attention.varlen import varlen_attn  # imports all of Dynamo

    # torch 2.11 has no ``enable_gqa`` and accepts fewer heads of keys.
    own = {"scale", "window_size", "enable_gqa", "num_splits"} & {*inspect.signature(varlen_attn).parameters}
    found: dict[str, tuple[Callable[..., Any], set[str]]] = {"torch": (varlen_attn, own)}
    with contextlib.suppress(ImportError):
        from flash_attn_interface import flash_attn_varlen_func

        own = {"softmax_scale", "causal", "window_size", "num_splits", "deterministic"}
        found["fa3"] = flash_attn_varlen_func, own
    return found


def fastest(device: torch.device) -> str | None:
    """Return the name of the kernel for packed rows on a device; None to call sdpa per sequence."""
    capability = _capability(device)
    if capability is None or capability < (8, 0):
        return None
    return next((name for name in FASTEST.get(capability, ("torch",)) if name in available()), None)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU; None for any other device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and not torch.version.hip else None


def why_not_in_one_call(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, kwargs: Mapping[str, Any]
) -> str | None:
    """Return why ``attend_row`` would differ from sdpa per sequence with a ``PackedMask``; None if it would not."""
    is_causal = kwargs.get("is_causal")
    if not mask.is_causal and mask.window is None:
        return "its mask is neither causal nor a causal window"
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        return "it is not causal"
    if kwargs.get("dropout"):
        return "it has dropout"
    changes = [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]
    if changes:
        return f"it has {' and '.join(changes)}"
    dtypes = {query.dtype, key.dtype, value.dtype}
    if len(dtypes) > 1 or query.dtype not in _DTYPES:
        return f"it computes in {', '.join(sorted(map(str, dtypes)))}"
    dim = query.shape[3]
    if dim not in _DIMS or value.shape[3] > dim:
        return f"its heads have {dim} and {value.shape[3]} columns"
    return None


def attend_row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Mapping[str, Any],
    window: int | None,
    scale: float | None,
) -> torch.Tensor:
    """Compute causal attention within each sequence of a row, by the ``fastest`` kernel of its device.

    ``[1, H, S, D]`` -> ``[1, S, H, D]``, with the columns of ``value``, which may be fewer.

    Args:
        lengths: ``cu_seq_lens_q [sequences + 1]`` and ``max_length_q``.
        window: keys that a query sees, with its own; None for all before it.
        scale: of scores; None for ``1 / sqrt(D)``.
    """
    function, own = available()[fastest(query.device) or ""]
    wide = value.shape[3]
    if wide < query.shape[3]:  # latent attention; kernels accept one number of columns
        value = F.pad(value, (0, query.shape[3] - wide))
    q, k, v = (_tokens_first(each) for each in (query, key, value))
    values = {
        "scale": scale,
        "softmax_scale": scale,
        "causal": True,
        "window_size": (-1 if window is None else window - 1, 0),
        "enable_gqa": q.shape[1] != k.shape[1],
        "num_splits": 1,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    ends, longest = lengths["cu_seq_lens_q"], lengths["max_length_q"]
    output = function(q, k, v, ends, ends, longest, longest, **{name: values[name] for name in own})
    # Older FlashAttention 3 also returns the log-sum-exp.
    return (output[0] if isinstance(output, tuple) else output)[None, ..., :wide]


def _tokens_first(heads: torch.Tensor) -> torch.Tensor:
    tokens = heads[0].transpose(0, 1)
    return tokens if tokens.stride(-1) == 1 else tokens.contiguous()
