"""The kernel of ``rotary.py``: a program rotates some heads of a token, with the rounding of torch's operators."""

import torch
import triton
import triton.language as tl

from .rotary import Rotation

__all__ = ["rotate"]

_HEADS = 16  # heads that a program rotates


# Only builtins of Triton's language, as in ``moe/gemm/triton_rows.py``.
@triton.jit
def _sum_of_products(a, b, c, d, dtype):
    """Return ``a b + c d``, each product rounded first."""
    return ((a * b).to(dtype).to(tl.float32) + (c * d).to(dtype).to(tl.float32)).to(dtype)


# The number of tokens differs between micro-batches.
@triton.jit(do_not_specialize=["TOKENS"])
def rotate_heads(
    x,
    cos,
    sin,
    out,
    TOKENS,
    ALL_HEADS,
    HALF,
    FIRST,
    REST_FIRST,
    REST_END,
    x_batch,
    x_head,
    x_token,
    cos_batch,
    cos_token,
    out_batch,
    out_head,
    out_token,
    FROM_NEIGHBOURS: tl.constexpr,
    TO_NEIGHBOURS: tl.constexpr,
    TABLE: tl.constexpr,
    ROUNDS_LAST: tl.constexpr,
    BACKWARD: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    """Rotate the ``2 HALF`` columns from ``FIRST`` on; copy the columns from ``REST_FIRST`` to ``REST_END``."""
    batch, token = (tl.program_id(0) // TOKENS).to(tl.int64), (tl.program_id(0) % TOKENS).to(tl.int64)
    heads, pair = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK)
    dtype = tl.float32 if ROUNDS_LAST else out.dtype.element_ty
    x += batch * x_batch + token * x_token
    out += batch * out_batch + token * out_token
    from_head, to_head = (heads.to(tl.int64) * x_head)[:, None], (heads.to(tl.int64) * out_head)[:, None]
    in_pair, in_head = pair < HALF, heads < ALL_HEADS
    mask = in_head[:, None] & in_pair[None, :]
    first, second = pair, pair + HALF
    if TABLE == "neighbours":
        first, second = 2 * pair, 2 * pair + 1
    elif TABLE != "halves":  # one column for both
        second = pair
    cos += batch * cos_batch + token * cos_token
    sin += batch * cos_batch + token * cos_token
    cos_1, cos_2 = tl.load(cos + first, mask=in_pair).to(tl.float32), tl.load(cos + second, mask=in_pair).to(tl.float32)
    sin_1, sin_2 = tl.load(sin + first, mask=in_pair).to(tl.float32), tl.load(sin + second, mask=in_pair).to(tl.float32)
    from_first, from_second = FIRST + pair, FIRST + pair + HALF
    to_first, to_second = from_first, from_second
    if FROM_NEIGHBOURS:
        from_first, from_second = FIRST + 2 * pair, FIRST + 2 * pair + 1
    if TO_NEIGHBOURS:
        to_first, to_second = FIRST + 2 * pair, FIRST + 2 * pair + 1
    a = tl.load(x + from_head + from_first[None, :], mask=mask).to(tl.float32)
    b = tl.load(x + from_head + from_second[None, :], mask=mask).to(tl.float32)
    if BACKWARD:
        y = _sum_of_products(a, cos_1[None, :], b, sin_2[None, :], dtype)
        z = _sum_of_products(b, cos_2[None, :], -a, sin_1[None, :], dtype)
    else:
        y = _sum_of_products(a, cos_1[None, :], -b, sin_1[None, :], dtype)
        z = _sum_of_products(b, cos_2[None, :], a, sin_2[None, :], dtype)
    tl.store(out + to_head + to_first[None, :], y.to(out.dtype.element_ty), mask=mask)
    tl.store(out + to_head + to_second[None, :], z.to(out.dtype.element_ty), mask=mask)
    if REST > 0:
        rest = REST_FIRST + tl.arange(0, REST)
        mask = in_head[:, None] & (rest < REST_END)[None, :]
        tl.store(out + to_head + rest[None, :], tl.load(x + from_head + rest[None, :], mask=mask), mask=mask)


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotation: Rotation, is_backward: bool = False
) -> torch.Tensor:
    """Rotate ``[B, H, T, D]``, or the gradients of it, by tables ``[B or 1, T, width]``; strides are kept."""
    x = x if x.stride(3) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty_like(x)
    (batches, heads, tokens, width), part = x.shape, rotation.columns(cos.shape[2])
    if out.numel():
        most = min(_HEADS, triton.next_power_of_2(heads))
        first, rest = (width - part, (0, width - part)) if rotation.is_last else (0, (part, width))
        neighbours = rotation.reads_neighbours, rotation.writes_neighbours
        strides = *x.stride()[:3], cos.stride(0) if len(cos) > 1 else 0, cos.stride(1), *out.stride()[:3]
        sizes = tokens, heads, part // 2, first, *rest
        rotate_heads[(batches * tokens, triton.cdiv(heads, most))](
            *(x, cos, sin, out, *sizes, *strides),
            FROM_NEIGHBOURS=neighbours[is_backward],
            TO_NEIGHBOURS=neighbours[not is_backward],
            TABLE=rotation.table,
            ROUNDS_LAST=rotation.rounds_last,
            BACKWARD=is_backward,
            HEADS=most,
            BLOCK=triton.next_power_of_2(part // 2),
            REST=triton.next_power_of_2(width - part) if width > part else 0,
        )
    return out
