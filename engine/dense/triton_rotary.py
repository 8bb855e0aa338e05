"""The kernel of ``rotary.py``: a program rotates some heads of a token, with the rounding of torch's operators."""

import torch
import triton
import triton.language as tl

__all__ = ["rotate"]

_HEADS = 16  # that a program rotates


# Only builtins of Triton's language, as in ``moe/gemm/triton_rows.py``.
@triton.jit
def _sum_of_products(a, b, c, d, dtype):
    """``a b + c d``, each product rounded first."""
    return ((a * b).to(dtype).to(tl.float32) + (c * d).to(dtype).to(tl.float32)).to(dtype)


# The number of tokens differs from one micro-batch to the next.
@triton.jit(do_not_specialize=["TOKENS"])
def rotate_heads(
    x,
    cos,
    sin,
    out,
    TOKENS,
    ALL_HEADS,
    HALF,
    WIDTH,
    x_batch,
    x_head,
    x_token,
    cos_batch,
    cos_token,
    out_batch,
    out_head,
    out_token,
    INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    """Rotate pairs of columns; columns from ``2 HALF`` on are copied."""
    batch, token = (tl.program_id(0) // TOKENS).to(tl.int64), (tl.program_id(0) % TOKENS).to(tl.int64)
    heads, pair = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK)
    dtype = out.dtype.element_ty
    x += batch * x_batch + token * x_token
    out += batch * out_batch + token * out_token
    from_head, to_head = (heads.to(tl.int64) * x_head)[:, None], (heads.to(tl.int64) * out_head)[:, None]
    in_pair, in_head = pair < HALF, heads < ALL_HEADS
    mask = in_head[:, None] & in_pair[None, :]
    at = batch * cos_batch + token * cos_token + pair
    cos_1, cos_2 = tl.load(cos + at, mask=in_pair).to(tl.float32), tl.load(cos + at + HALF, mask=in_pair).to(tl.float32)
    sin_1, sin_2 = tl.load(sin + at, mask=in_pair).to(tl.float32), tl.load(sin + at + HALF, mask=in_pair).to(tl.float32)
    first, second = pair, pair + HALF
    from_first, from_second, to_first, to_second = first, second, first, second
    if INTERLEAVED:
        if BACKWARD:
            to_first, to_second = 2 * pair, 2 * pair + 1
        else:
            from_first, from_second = 2 * pair, 2 * pair + 1
    a = tl.load(x + from_head + from_first[None, :], mask=mask).to(tl.float32)
    b = tl.load(x + from_head + from_second[None, :], mask=mask).to(tl.float32)
    if BACKWARD:
        y = _sum_of_products(a, cos_1[None, :], b, sin_2[None, :], dtype)
        z = _sum_of_products(b, cos_2[None, :], -a, sin_1[None, :], dtype)
    else:
        y = _sum_of_products(a, cos_1[None, :], -b, sin_1[None, :], dtype)
        z = _sum_of_products(b, cos_2[None, :], a, sin_2[None, :], dtype)
    tl.store(out + to_head + to_first[None, :], y, mask=mask)
    tl.store(out + to_head + to_second[None, :], z, mask=mask)
    if REST > 0:
        rest = 2 * HALF + tl.arange(0, REST)
        mask = in_head[:, None] & (rest < WIDTH)[None, :]
        tl.store(out + to_head + rest[None, :], tl.load(x + from_head + rest[None, :], mask=mask), mask=mask)


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool, is_backward: bool = False
) -> torch.Tensor:
    """Rotate ``[B, H, T, D]`` by ``[B or 1, T, d]``, or the gradients of what was rotated; strides are kept."""
    x = x if x.stride(3) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty_like(x)
    (batches, heads, tokens, width), part = x.shape, cos.shape[2]
    if out.numel():
        most = min(_HEADS, triton.next_power_of_2(heads))
        rest = triton.next_power_of_2(width - part) if width > part else 0
        strides = *x.stride()[:3], cos.stride(0) if len(cos) > 1 else 0, cos.stride(1), *out.stride()[:3]
        rotate_heads[(batches * tokens, triton.cdiv(heads, most))](
            x,
            cos,
            sin,
            out,
            tokens,
            heads,
            part // 2,
            width,
            *strides,
            INTERLEAVED=is_interleaved,
            BACKWARD=is_backward,
            HEADS=most,
            BLOCK=triton.next_power_of_2(part // 2),
            REST=rest,
        )
    return out
