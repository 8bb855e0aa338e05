"""Differentiable all-to-alls between ranks that share rows: of tokens, of heads, and of one slice to all ranks.

Shapes: ``S`` tokens of the whole row, ``s = S / sp`` of this rank, ``H`` heads.
"""

import torch
import torch.distributed as dist

__all__ = ["Exchange", "gather", "to_heads", "to_tokens"]


class Exchange(torch.autograd.Function):
    """All-to-all along dim 0, with the reverse all-to-all as gradient.

    ``send`` and ``receive`` are the rows for, and from, each rank; equally many if None.
    """

    @staticmethod
    def forward(ctx, x, group, send=None, receive=None):
        ctx.group, ctx.send, ctx.receive = group, send, receive
        arrived = x.new_empty(x.shape[0] if receive is None else sum(receive), *x.shape[1:])
        dist.all_to_all_single(arrived, x.contiguous(), output_split_sizes=receive, input_split_sizes=send, group=group)
        return arrived

    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad, ctx.group, ctx.receive, ctx.send), None, None, None


def gather(group: dist.ProcessGroup, x: torch.Tensor, tokens: list[int] | None = None) -> torch.Tensor:
    """Gather ``[..., s, D]`` of all ranks into ``[..., S, D]``; the gradient is the sum of all ranks'.

    ``tokens`` has the ``s`` of each rank; they are equal if None.
    """
    size, sent = dist.get_world_size(group), x.movedim(-2, 0)
    return Exchange.apply(torch.cat([sent] * size), group, [len(sent)] * size, tokens).movedim(0, -2)


def to_heads(group: dist.ProcessGroup, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Exchange ``[B, H, s, D]`` each for ``[B, H / sp, S, D]`` each, in one all-to-all."""
    size = dist.get_world_size(group)
    by_rank = [x.unflatten(1, (size, -1)).permute(1, 3, 0, 2, 4) for x in tensors]  # [sp, s, B, H / sp, D]
    arrived = Exchange.apply(torch.cat([x.flatten(2) for x in by_rank], dim=-1), group).flatten(0, 1)
    parts = arrived.split([x.shape[2:].numel() for x in by_rank], dim=-1)
    return [
        part.unflatten(-1, x.shape[2:]).permute(1, 2, 0, 3).to(x.dtype) for part, x in zip(parts, by_rank, strict=True)
    ]


def to_tokens(group: dist.ProcessGroup, output: torch.Tensor) -> torch.Tensor:
    """Exchange ``[B, S, H / sp, D]`` for ``[B, s, H, D]``."""
    by_rank = output.unflatten(1, (dist.get_world_size(group), -1)).transpose(0, 1)  # [sp, B, s, H / sp, D]
    return Exchange.apply(by_rank, group).permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous()
