"""FlashAttention's kernels for packed rows, computed one sequence after the other on a CPU.

torch's own ``varlen_attn`` runs as it is, down to the operators that have kernels on a GPU alone.
"""

import contextlib
import itertools
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.attention.varlen  # before sys.modules is restored to a state without it
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from epfsdp2.engine.packing import varlen

__all__ = ["flash_by_sdpa", "varlen_on_a_cpu"]


@contextlib.contextmanager
def varlen_on_a_cpu(name: str = "torch") -> Iterator[list[tuple[Any, ...]]]:
    """Compute packed rows as on an H100 with this kernel; also in float64.

    Yields:
        A list that gets ``(lengths, window_left, num_splits)`` of each forward of a kernel.
    """
    calls: list[tuple[Any, ...]] = []
    modules = {"flash_attn_interface": _flash_attn_interface(calls) if name == "fa3" else None}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, modules))
        stack.enter_context(mock.patch.object(varlen, "_capability", lambda device: (9, 0)))
        stack.enter_context(mock.patch.object(varlen, "_DTYPES", (*varlen._DTYPES, torch.float64)))
        stack.callback(varlen.available.cache_clear)
        varlen.available.cache_clear()
        if name == "torch":
            library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
            library.impl("_flash_attention_forward", _aten_forward(calls), "CPU")
            library.impl("_flash_attention_backward", _aten_backward, "CPU")
        yield calls


def flash_by_sdpa(calls, module, query, key, value, attention_mask, position_ids=None, **kwargs):
    """Compute flash attention's varlen path as transformers calls it, by sdpa; ``calls`` gets ends and longest."""
    assert attention_mask is None and position_ids is None, "transformers would look for sequences in the positions"
    ends, longest = kwargs.pop("cu_seq_lens_q"), kwargs.pop("max_length_q")
    assert kwargs.pop("cu_seq_lens_k") is ends and kwargs.pop("max_length_k") == longest and type(longest) is int
    assert ends.dtype == torch.int32
    calls.append((ends.tolist(), longest))
    sdpa, parts = ALL_ATTENTION_FUNCTIONS["sdpa"], itertools.starmap(slice, itertools.pairwise(ends.tolist()))
    outputs = [sdpa(module, query[:, :, at], key[:, :, at], value[:, :, at], None, **kwargs)[0] for at in parts]
    return torch.cat(outputs, dim=1), None


def _aten_forward(calls):
    def forward(query, key, value, ends, key_ends, longest, longest_key, dropout, is_causal, debug, **kwargs):
        assert not dropout and not debug
        window = kwargs["window_size_left"], kwargs["window_size_right"]
        assert is_causal == (window == (-1, 0))
        _check(query, key, value, ends, key_ends, longest, longest_key)
        calls.append((ends.diff().tolist(), window[0], kwargs.get("num_splits", 1)))
        output = _computed(query, key, value, ends, kwargs.get("scale"), *window)[0]
        sums = query.new_zeros(query.shape[1], query.shape[0], dtype=torch.float32)
        return output, sums, *(query.new_zeros(0) for _ in range(3))

    return forward


def _aten_backward(
    grad, query, key, value, out, sums, ends, key_ends, longest, longest_key, dropout, is_causal, *random, **kwargs
):
    window = kwargs["window_size_left"], kwargs["window_size_right"]
    assert not dropout and is_causal == (window == (-1, 0))
    return _gradients(grad, query, key, value, ends, kwargs.get("scale"), *window)


def _flash_attn_interface(calls):
    """FlashAttention 3's module: the function with those of its parameters that are used, as in September 2025."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, query, key, value, ends, *how):
            ctx.save_for_backward(query, key, value, ends)
            ctx.how = how
            return _computed(query, key, value, ends, *how)[0]

        @staticmethod
        def backward(ctx, grad):
            return *_gradients(grad, *ctx.saved_tensors, *ctx.how), None, None, None, None

    def flash_attn_varlen_func(
        q, k, v, ends, key_ends, longest, longest_key, *, softmax_scale, causal, window_size, num_splits, deterministic
    ):
        assert causal and deterministic == torch.are_deterministic_algorithms_enabled()
        _check(q, k, v, ends, key_ends, longest, longest_key)
        calls.append((ends.diff().tolist(), window_size[0], num_splits))
        return Attention.apply(q, k, v, ends, softmax_scale, *window_size)

    module = ModuleType("flash_attn_interface")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    return module


def _check(query, key, value, ends, key_ends, longest, longest_key):
    """Refuse arguments that FlashAttention refuses or computes wrongly."""
    assert ends.dtype == key_ends.dtype == torch.int32 and torch.equal(ends, key_ends)
    assert type(longest) is int and longest == longest_key == ends.diff().max() and ends[-1] == len(query)
    assert query.shape[2] == key.shape[2] == value.shape[2] and query.shape[2] % 8 == 0
    assert query.shape[1] % key.shape[1] == 0 and key.shape == value.shape
    assert all(each.stride(-1) == 1 for each in (query, key, value))


def _probabilities(query, key, scale, left, right):
    """Return attention probabilities of one sequence, ``[H, n, n]``, and its keys for each head of the queries."""
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
    places = torch.arange(len(query))
    distance = places[:, None] - places
    hidden = (distance < -right) | ((distance > left) & (left >= 0))
    return scores.masked_fill(hidden, float("-inf")).softmax(-1), keys


def _computed(query, key, value, ends, scale, left, right):
    scale = query.shape[2] ** -0.5 if scale is None else scale
    output = torch.empty_like(query)
    wide = [each.double() for each in (query, key, value)]  # kernels keep sums in float32
    for at in itertools.starmap(slice, itertools.pairwise(ends.tolist())):
        values = wide[2][at].repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        probabilities, _ = _probabilities(wide[0][at], wide[1][at], scale, left, right)
        output[at] = torch.einsum("hqk,khd->qhd", probabilities, values)
    return output, scale


def _gradients(grad, query, key, value, ends, scale, left, right):
    found = [torch.empty_like(each) for each in (query, key, value)]
    grad, query, key, value = (each.double() for each in (grad, query, key, value))
    output, scale = _computed(query, key, value, ends, scale, left, right)
    for at in itertools.starmap(slice, itertools.pairwise(ends.tolist())):
        groups = query.shape[1] // key.shape[1]
        probabilities, keys = _probabilities(query[at], key[at], scale, left, right)
        of_probabilities = torch.einsum("qhd,khd->hqk", grad[at], value[at].repeat_interleave(groups, dim=1))
        of_sums = (grad[at] * output[at]).sum(-1).T[..., None]
        of_scores = scale * probabilities * (of_probabilities - of_sums)
        found[0][at] = torch.einsum("hqk,khd->qhd", of_scores, keys)
        found[1][at] = torch.einsum("hqk,qhd->khd", of_scores, query[at]).unflatten(1, (-1, groups)).sum(2)
        found[2][at] = torch.einsum("hqk,qhd->khd", probabilities, grad[at]).unflatten(1, (-1, groups)).sum(2)
    return tuple(found)
