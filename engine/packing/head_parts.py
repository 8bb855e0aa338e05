"""A part of the heads of a mixer, for the ranks that share a row which is mostly one sequence.

A layer of linear attention or of a state space is projections of each token around a recurrence that each head has for
itself. The projections are computed of a rank's slice of the tokens; an all-to-all brings the rank the whole row for
its heads, the family's own code computes these, and another all-to-all brings the slices back (``shared_mixers.py``):

    project  [1, s, D] -> [1, H, s, d]  ->  [1, H / sp, S, d]  -> mix ->  [1, S, F / sp]  ->  [1, s, F]  -> finish

The family's code is run on a copy of the module whose weights and sizes are those of the heads, and whose projections
hand on what they are given.

Shapes: ``S`` tokens of the whole row, ``s = S / sp`` of this rank, ``n`` of a sequence, ``H`` heads, ``F`` features
before the last projection.
"""

import functools
import inspect
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..model.families import SPREAD_OVER_HEADS

__all__ = ["HeadParts", "head_parts_of"]


class HeadParts:
    """This rank's part of the heads of a mixer.

    Args:
        module: the mixer.
        group: the ranks that share a row.
    """

    not_called_once: ClassVar[tuple[str, ...]] = ()
    """Children whose weights are read without a call, and those that are called for each sequence of a row."""

    def __init__(self, module: Any, group: dist.ProcessGroup):
        self.module, self.group = module, group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    @classmethod
    def divides(cls, module: Any, size: int) -> bool:
        """Whether so many ranks can have parts of equal size."""
        raise NotImplementedError

    @property
    def heads(self) -> int:
        """Of this rank."""
        raise NotImplementedError

    def project(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """``[1, s, D]`` -> what the recurrence takes, ``[1, H, s, d]`` each; ``H`` are heads or groups of them."""
        raise NotImplementedError

    def mix(self, *parts: torch.Tensor) -> torch.Tensor:
        """What the recurrence takes of one sequence and the own heads, ``[1, n, h * d]`` each -> ``[1, n, F / sp]``."""
        raise NotImplementedError

    def finish(self, hidden: torch.Tensor, mixed: torch.Tensor) -> Any:
        """``[1, s, D]`` and ``[1, s, F]`` -> what the mixer returns."""
        raise NotImplementedError

    def _own(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return x.chunk(self.size, dim)[self.rank]

    def _copy(self, **attributes: Any) -> Any:
        """The mixer with some attributes replaced, parameters and modules too; not training, so nothing is fused."""
        # FSDP's class of a unit makes no copies; the family's comes after it and FSDPModule.
        cls: Any = type(self.module).__mro__[2 if isinstance(self.module, FSDPModule) else 0]
        part = object.__new__(cls)
        vars(part).update(vars(self.module) | attributes, training=False)
        return part


def _run(part: Any, given: torch.Tensor, **kwargs: Any) -> Any:
    return inspect.unwrap(type(part).forward)(part, given, **kwargs)


def _same(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x


class _Given:
    """In the place of a projection: what it is called with was projected before."""

    def __init__(self, projection: nn.Linear):
        self.weight = projection.weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


class _Convolution:
    """A causal convolution of some channels."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv1d(x, self.weight, self.bias, padding=self.weight.shape[2] - 1, groups=x.shape[1])


class _Mamba2(HeadParts):
    """Mamba2: heads have ``x`` and ``dt`` of their own and share ``B`` and ``C`` within groups."""

    not_called_once = ("conv1d",)

    @classmethod
    def divides(cls, module: Any, size: int) -> bool:
        groups = module.n_groups
        return module.num_heads % size == 0 and (groups % size == 0 or size % groups == 0)

    @property
    def heads(self) -> int:
        return self.module.num_heads // self.size

    @property
    def _copies(self) -> int:
        """Ranks that have heads of the same group."""
        return max(1, self.size // self.module.n_groups)

    def project(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        module = self.module
        of_groups = module.n_groups * module.ssm_state_size
        inner, heads = module.intermediate_size, module.num_heads
        sizes = [inner, inner, of_groups, of_groups, heads]
        self._gate, x, b, c, dt = module.in_proj(hidden).split(sizes, dim=-1)
        by_group = (y.unflatten(2, (module.n_groups, -1)).repeat_interleave(self._copies, 2) for y in (b, c))
        return [y.transpose(1, 2) for y in (x.unflatten(2, (heads, -1)), *by_group, dt[..., None])]

    def mix(self, *parts: torch.Tensor) -> torch.Tensor:
        x = parts[0]
        return _run(self._part, torch.cat([x, *parts], dim=-1))  # the gate comes first, and is applied in ``finish``

    @functools.cached_property
    def _part(self) -> Any:
        module, conv = self.module, self.module.conv1d
        inner, groups = module.intermediate_size // self.size, max(1, module.n_groups // self.size)
        sizes = [module.intermediate_size, *[module.n_groups * module.ssm_state_size] * 2]
        bias = None if conv.bias is None else self._channels(conv.bias, sizes)
        return self._copy(
            in_proj=_Given(module.in_proj),
            conv1d=_Convolution(self._channels(conv.weight, sizes), bias),
            norm=_same,
            out_proj=_same,
            num_heads=self.heads,
            n_groups=groups,
            intermediate_size=inner,
            conv_dim=inner + 2 * groups * module.ssm_state_size,
            **{name: self._own(getattr(module, name)) for name in ("A_log", "D", "dt_bias")},
        )

    def _channels(self, weight: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        x, b, c = weight.split(sizes)
        groups = (y.unflatten(0, (self.module.n_groups, -1)).repeat_interleave(self._copies, 0) for y in (b, c))
        return torch.cat([self._own(x), *(self._own(y).flatten(0, 1) for y in groups)])

    def finish(self, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        return self.module.out_proj(self.module.norm(mixed, self._gate).to(hidden.dtype))


class _Mamba1(HeadParts):
    """Mamba: every channel is a head; what chooses ``dt``, ``B`` and ``C`` is a sum over all of them."""

    not_called_once = ("conv1d", "x_proj", "dt_proj", "dt_layernorm", "b_layernorm", "c_layernorm")

    @classmethod
    def divides(cls, module: Any, size: int) -> bool:
        fast = inspect.unwrap(type(module).forward).__globals__["is_fast_path_available"]  # it writes a bias
        return module.intermediate_size % size == 0 and not fast

    @property
    def heads(self) -> int:
        return self.module.intermediate_size // self.size

    def project(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        return [y.transpose(1, 2)[..., None] for y in self.module.in_proj(hidden).chunk(2, dim=-1)]

    def mix(self, *parts: torch.Tensor) -> torch.Tensor:
        return _run(self._part, torch.cat(parts, dim=-1))

    @functools.cached_property
    def _part(self) -> Any:
        module, conv, linear = self.module, self.module.conv1d, nn.functional.linear
        choosing = self._own(module.x_proj.weight, 1)
        step = self._own(module.dt_proj.weight), self._own(module.dt_proj.bias)
        return self._copy(
            in_proj=_Given(module.in_proj),
            conv1d=_Convolution(self._own(conv.weight), None if conv.bias is None else self._own(conv.bias)),
            x_proj=lambda x: _Sum.apply(linear(x, choosing), self.group),
            dt_proj=lambda x: linear(x, *step),
            out_proj=_same,
            intermediate_size=self.heads,
            A_log=self._own(module.A_log),
            D=self._own(module.D),
        )

    def finish(self, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        return self.module.out_proj(mixed)


class _Sum(torch.autograd.Function):
    """The sum over the ranks, each of which goes on with it; so are the gradients."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _Sum._of(x, group)

    @staticmethod
    def backward(ctx, grad):
        return _Sum._of(grad, ctx.group), None

    @staticmethod
    def _of(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total


class _Lightning(HeadParts):
    """Lightning attention: queries, keys and values of a head, and its decay."""

    @classmethod
    def divides(cls, module: Any, size: int) -> bool:
        return module.num_attention_heads % size == 0

    @property
    def heads(self) -> int:
        return self.module.num_attention_heads // self.size

    def project(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        qkv = self.module.qkv_proj(hidden)
        return [qkv.unflatten(2, (self.module.num_attention_heads, -1)).transpose(1, 2)]

    def mix(self, *parts: torch.Tensor) -> torch.Tensor:
        return _run(self._part, *parts, position_embeddings=None, attention_mask=None)[0]

    @functools.cached_property
    def _part(self) -> Any:
        module = self.module
        return self._copy(
            qkv_proj=_same,
            norm=_same,
            output_gate=lambda x: x.new_tensor(math.inf),  # open: it is applied in ``finish``
            out_proj=_same,
            num_attention_heads=self.heads,
            diagonal_decay=self._own(module.diagonal_decay, 1),
            **{name: self._own(getattr(module, name)) for name in ("slope_rate", "query_decay", "key_decay")},
        )

    def finish(self, hidden: torch.Tensor, mixed: torch.Tensor) -> tuple[torch.Tensor, None]:
        module = self.module
        normed = module.norm(mixed)
        return module.out_proj(torch.sigmoid(module.output_gate(hidden)) * normed), None


class _DeltaAttention(HeadParts):
    """Kimi Delta Attention: queries, keys, values and forget gates of a head's channels, and one rate of a head."""

    not_called_once = ("conv1d",)

    @classmethod
    def divides(cls, module: Any, size: int) -> bool:
        return module.num_heads % size == 0

    @property
    def heads(self) -> int:
        return self.module.num_heads // self.size

    def project(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        module = self.module
        qkv = [
            getattr(module, name)(hidden).unflatten(2, (module.num_heads, -1))
            for name in ("q_proj", "k_proj", "v_proj")
        ]
        return [x.transpose(1, 2) for x in (*qkv, module.forget_gate(hidden), module.b_proj(hidden)[..., None])]

    def mix(self, *parts: torch.Tensor) -> torch.Tensor:
        q, k, v, forget, rates = parts
        module = self.module
        part = self._copy(
            q_proj=lambda _: q,
            k_proj=lambda _: k,
            v_proj=lambda _: v,
            b_proj=lambda _: rates,
            forget_gate=lambda _: forget.unflatten(2, (self.heads, -1)),
            conv1d=_Convolution(torch.cat([self._own(w) for w in module.conv1d.weight.chunk(3)]), None),
            qkv_dim=module.qkv_dim // self.size,
            o_norm=_same,
            o_proj=_same,
            **dict.fromkeys(("g_a_proj", "g_b_proj", "g_proj"), _same),
        )
        return _run(part, q)

    def finish(self, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        module = self.module
        gate = module.g_proj(hidden) if hasattr(module, "g_proj") else module.g_b_proj(module.g_a_proj(hidden))
        by_head = (x.unflatten(2, (module.num_heads, -1)) for x in (mixed, gate))
        return module.o_proj(module.o_norm(*by_head).flatten(2))


_KINDS: dict[str, type[HeadParts]] = {
    "delta attention": _DeltaAttention,
    "lightning": _Lightning,
    "mamba": _Mamba1,
    "mamba2": _Mamba2,
}


def head_parts_of(module: Any, size: int) -> type[HeadParts] | None:
    """Return how ``size`` ranks share the heads of a mixer; None if they can't."""
    names = (SPREAD_OVER_HEADS.get(each.__name__) for each in type(module).__mro__)
    name = next(filter(None, names), None)
    if name is None or not _KINDS[name].divides(module, size):
        return None
    kind = _KINDS[name]
    # FSDP gathers its units by calls, which have to be as many on ranks that share other rows.
    return None if any(isinstance(getattr(module, child), FSDPModule) for child in kind.not_called_once) else kind
