"""The matrix multiplications of an update on one rank, without anything beside them: what no engine is faster than.

Those of the linears, of attention's causal scores and of the experts, whose rows are spread evenly over the ranks. As
with activation checkpointing the layers' forward is there twice, the head's once. torch multiplies them one after the
other, in the shapes of the model, in memory that is there.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Matmul", "matmuls", "multiplying", "seconds", "with_backward"]


@dataclass(frozen=True)
class Matmul:
    """``times`` products ``[m, k] @ [k, n]``."""

    m: int
    k: int
    n: int
    times: int = 1

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n * self.times


def with_backward(m: int, k: int, n: int, forwards: int, times: int = 1) -> Iterator[Matmul]:
    """A product's forward, so many times, and the gradients of both of its factors."""
    yield Matmul(m, k, n, forwards * times)
    yield Matmul(m, n, k, times)
    yield Matmul(k, m, n, times)


def matmuls(config: Any, lengths: Sequence[int]) -> Iterator[Matmul]:
    """Of one update of a Qwen3-MoE on a rank that has sequences of such lengths.

    Args:
        config: the model's.
    """
    tokens, hidden, heads, dim = sum(lengths), config.hidden_size, config.num_attention_heads, config.head_dim
    layers, experts, inner = config.num_hidden_layers, config.num_experts, config.moe_intermediate_size
    keys = config.num_key_value_heads * dim
    for out in (heads * dim, keys, keys, experts):
        yield from with_backward(tokens, hidden, out, 2, layers)
    yield from with_backward(tokens, heads * dim, hidden, 2, layers)
    for length in lengths:  # half of the scores are of later tokens
        for k, n in ((dim, -(-length // 2)), (-(-length // 2), dim)):
            yield from with_backward(length, k, n, 2, layers * heads)
    rows = -(-tokens * config.num_experts_per_tok // experts)  # of an expert: tokens of all ranks, experts of one
    for k, n in ((hidden, 2 * inner), (inner, hidden)):
        yield from with_backward(rows, k, n, 2, layers * experts)
    yield from with_backward(tokens, hidden, config.vocab_size, 1)


def multiplying(products: Sequence[Matmul], dtype: torch.dtype = torch.float32) -> Callable[[], None]:
    """Return what multiplies all of them, in memory that is there."""
    operands = {
        (p.m, p.k, p.n): [torch.randn(shape, dtype=dtype) for shape in ((p.m, p.k), (p.k, p.n), (p.m, p.n))]
        for p in products
    }

    def multiply() -> None:
        for product in products:
            a, b, out = operands[product.m, product.k, product.n]
            for _ in range(product.times):
                torch.mm(a, b, out=out)

    return multiply


def seconds(products: Sequence[Matmul]) -> float:
    """Seconds to multiply all of them."""
    multiply = multiplying(products)
    began = time.monotonic()
    multiply()
    return time.monotonic() - began
