"""The section of ``gpu_check.py`` on attention of packed rows: kernels that take lengths, beside sdpa by sequence."""

import functools
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from unittest import mock

import torch
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    causal_mask_function,
    eager_mask,
    sliding_window_overlay,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.experts.layer import seconds_of
from benchmarks.gpu.gpu_rows import DEVICE, HAS_GPU, NEEDS_A_GPU, Row
from epfsdp2.engine.packing import varlen
from epfsdp2.engine.packing.attention import PackedAttention, PackedMask, lengths_of
from tests.support.models.tiny import relative_error

__all__ = ["attention"]

SDPA = "sdpa"
# Heads of queries, heads of keys, columns of both, columns of values.
QWEN3_30B, DEEPSEEK = (32, 4, 128, 128), (16, 16, 192, 128)
TOKENS = 8192
LENGTHS = tuple(1 << i for i in range(7, 14))
UNEVEN, WINDOW = ((700, 1, 2000, 129, 64, 3), 512) if HAS_GPU else ((7, 1, 12, 3), 5)
_Sizes = tuple[int, int, int, int]


class PackedRow:
    """Heads of a row of random numbers, and their attention within sequences.

    Args:
        lengths: of the sequences.
        sizes: heads of queries, heads of keys, columns of both, columns of values.
        window: keys that a query sees; None for all before it.
    """

    def __init__(self, lengths: Sequence[int], sizes: _Sizes, window: int | None = None):
        ends = [0, *itertools.accumulate(lengths)]
        self.spans = tuple(itertools.pairwise(ends))
        heads, kv_heads, dim, wide = sizes
        self._module = SimpleNamespace(is_causal=True, num_key_value_groups=heads // kv_heads)
        generator = torch.Generator(DEVICE).manual_seed(0)
        shapes = ((heads, dim), (kv_heads, dim), (kv_heads, wide), (heads, wide))
        draws = [torch.randn(1, ends[-1], *shape, device=DEVICE, generator=generator) for shape in shapes]
        if HAS_GPU:
            draws = [each.bfloat16() for each in draws]
        self.leaves = [each.transpose(1, 2).requires_grad_() for each in draws[:3]]
        self._grad = draws[3]
        function = (
            causal_mask_function if window is None else and_masks(causal_mask_function, sliding_window_overlay(window))
        )
        asked = {"batch_size": 1, "mask_function": function, "local_size": window, "device": DEVICE}
        self._mask = PackedMask(ALL_MASK_ATTENTION_FUNCTIONS[SDPA], eager_mask, asked)
        self._lengths = lengths_of(self.spans, torch.device(DEVICE))

    def results(self, name: str, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """Return the output ``[1, S, H, D]``, and the gradients of queries, keys and values.

        Args:
            name: of a kernel that takes lengths, or ``SDPA``, which is called for each sequence.
        """
        lengths = None if name == SDPA else self._lengths
        packed = PackedAttention(ALL_ATTENTION_FUNCTIONS[SDPA], False, lambda: self.spans, lambda: lengths)
        leaves = [leaf.to(dtype or leaf.dtype) for leaf in self.leaves]
        why_not = varlen.why_not_in_one_call(self._module, *leaves, self._mask, {})
        assert name == SDPA or why_not is None, why_not
        with mock.patch.object(varlen, "fastest", lambda device: name):
            output, _ = packed.attend(self._module, *leaves, self._mask)
        return [output.detach(), *torch.autograd.grad(output, leaves, self._grad.to(output.dtype))]


def attention() -> Iterator[Row]:
    """Attention of packed rows by each kernel that takes lengths, beside sdpa by sequence: values, gradients, times."""
    names = [SDPA, *(varlen.available() if HAS_GPU else ())]
    for what, sizes, window in (
        ("grouped heads", QWEN3_30B, None),
        ("a window", QWEN3_30B, WINDOW),
        ("latent attention", DEEPSEEK, None),
    ):
        row = PackedRow(UNEVEN, sizes, window)
        exact = row.results(SDPA, torch.float64)
        errors = {name: max(map(relative_error, row.results(name), exact)) for name in names}
        bound = 2 * errors[SDPA] if HAS_GPU else 1e-5
        value = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
        yield Row(f"{what}, beside float64", value, f"<= {bound:.1e}", max(errors.values()) <= bound)
    if not HAS_GPU:
        yield Row("times", NEEDS_A_GPU)
        return
    ratios: dict[str, list[float]] = {name: [] for name in names}
    for sizes, length in [*((QWEN3_30B, length) for length in LENGTHS), (DEEPSEEK, LENGTHS[2]), (DEEPSEEK, LENGTHS[5])]:
        row = PackedRow([length] * (TOKENS // length), sizes)
        times = {name: seconds_of(functools.partial(row.results, name), DEVICE) for name in names}
        for name in names:
            ratios[name].append(times[name] / min(times.values()))
        yield Row(f"{TOKENS // length} x {length} tokens, heads of {sizes[2]}", _milliseconds(times))
    new = PackedRow([length + 1 for length in LENGTHS[:-1]], QWEN3_30B)
    yield Row("lengths that are new, first pass", _milliseconds({name: _first(new, name) for name in names}))
    yield _order({name: statistics.geometric_mean(ratios[name]) for name in names})


def _order(means: dict[str, float]) -> Row:
    """Return whether the kernel in use is the fastest, and the right entry of ``varlen.FASTEST``.

    Args:
        means: times by name, each the mean over lengths of the ratio to the least.
    """
    order = sorted(means, key=lambda name: means[name])
    taken = varlen.fastest(torch.device(DEVICE)) or SDPA
    value = ", ".join(f"{name} {means[name]:.2f}" for name in order)
    entry = f"{torch.cuda.get_device_capability()}: {tuple(order[: order.index(SDPA)])}"
    return Row("mean over lengths, beside the least", f"{value}; FASTEST {entry}", f"{taken} first", order[0] == taken)


def _first(row: PackedRow, name: str) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    row.results(name)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _milliseconds(times: dict[str, float]) -> str:
    return ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in times.items())
