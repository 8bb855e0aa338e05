"""Split the heads of a mixer among the ranks that share a row, for rows that are mostly one sequence.

Linear attention and state spaces have projections per token around a recurrence per head. A rank projects its slice of
the tokens, and all-to-alls around the recurrence exchange tokens for heads (``shared_mixers.py``):

    project  [1, s, D] -> [1, H, s, d]  ->  [1, H / sp, S, d]  -> mix ->  [1, S, F / sp]  ->  [1, s, F]  -> finish

The family's code runs the recurrence on a copy of the module with the weights and sizes of these heads, whose
projections return their inputs.

Shapes: ``S`` tokens of the whole row, ``s = S / sp`` of this rank, ``n`` of a sequence, ``H`` heads, ``F`` features
before the last projection.
"""

import functools
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..model.families import SPREAD_OVER_HEADS

__all__ = ["HeadParts", "head_parts_of"]


class HeadParts(ABC):
    """This rank's part of the heads of a mixer, whose row the ranks of ``group`` share."""

    count: ClassVar[str]  # attribute: the number of heads
    shared: ClassVar[str | None] = None  # attribute: the number of groups of heads that share weights
    # Children whose weights are read without a call, or that are called for each sequence of a row.
    not_called_once: ClassVar[tuple[str, ...]] = ()

    def __init__(self, module: Any, group: dist.ProcessGroup):
        self.module, self.group = module, group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    @classmethod
    def divides(cls, module: Any, size: int) -> bool:
        """Return whether the heads can be divided equally among ``size`` ranks."""
        groups = size if cls.shared is None else getattr(module, cls.shared)
        return getattr(module, cls.count) % size == 0 and (groups % size == 0 or size % groups == 0)

    @property
    def heads(self) -> int:
        """Number of heads of this rank."""
        return getattr(self.module, self.count) // self.size

    @abstractmethod
    def project(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Project ``[1, s, D]`` to the inputs of the recurrence, ``[1, H, s, d]`` each; ``H`` are heads or groups."""

    @abstractmethod
    def mix(self, *parts: torch.Tensor) -> torch.Tensor:
        """Run the recurrence of one sequence for this rank's heads: ``[1, n, h * d]`` each -> ``[1, n, F / sp]``."""

    @abstractmethod
    def finish(self, hidden: torch.Tensor, mixed: torch.Tensor) -> Any:
        """Compute what the mixer returns from ``[1, s, D]`` and ``[1, s, F]``."""

    def _own(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return x.chunk(self.size, dim)[self.rank]

    def _copied(self, x: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
        """Divide a dim by heads; with fewer heads than ranks, copy each head for the ranks that need it."""
        return x.unflatten(dim, (heads, -1)).repeat_interleave(max(1, self.size // heads), dim)

    def _by_head(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        """``[1, s, heads * d]`` -> ``[1, heads, s, d]``."""
        return self._copied(x, heads, 2).transpose(1, 2)

    def _convolution(self, conv: nn.Conv1d, *parts: tuple[int, int]) -> "_Operator":
        """Return the convolution of this rank's channels; ``parts`` are the channels and heads of the input's parts."""

        def own(weight: torch.Tensor) -> torch.Tensor:
            by_part = zip(weight.split([channels for channels, _ in parts]), parts, strict=True)
            return torch.cat([self._own(self._copied(w, heads, 0)).flatten(0, 1) for w, (_, heads) in by_part])

        weight, bias = own(conv.weight), None if conv.bias is None else own(conv.bias)
        padding = weight.shape[2] - 1
        return _Operator(
            lambda x: nn.functional.conv1d(x, weight, bias, padding=padding, groups=x.shape[1]), weight, bias
        )

    def _copy(self, **attributes: Any) -> Any:
        """Copy the mixer with attributes, parameters or modules replaced; in eval mode, so nothing is fused."""
        # FSDP's class of a unit can't be copied; the family's class comes after it and FSDPModule.
        cls: Any = type(self.module).__mro__[2 if isinstance(self.module, FSDPModule) else 0]
        part = object.__new__(cls)
        vars(part).update(vars(self.module) | dict.fromkeys(_IN_FINISH, _same) | attributes, training=False)
        return part


def _run(part: Any, given: torch.Tensor, **kwargs: Any) -> Any:
    return inspect.unwrap(type(part).forward)(part, given, **kwargs)


def _same(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x


_IN_FINISH = ("norm", "out_proj", "o_norm", "o_proj")  # modules that run in ``finish``


class _Operator:
    """Replaces a projection or convolution, with the weights that families' code reads from it."""

    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor], weight: torch.Tensor, bias: Any = None):
        self._call, self.weight, self.bias = call, weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._call(x)


class _Mamba2(HeadParts):
    """Mamba2: heads have their own ``x`` and ``dt``, and share ``B`` and ``C`` within groups."""

    count, shared, not_called_once = "num_heads", "n_groups", ("conv1d",)

    def project(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        module = self.module
        inner, heads, of_groups = module.intermediate_size, module.num_heads, module.n_groups * module.ssm_state_size
        self._gate, x, b, c, dt = module.in_proj(hidden).split([inner, inner, of_groups, of_groups, heads], dim=-1)
        return [self._by_head(y, of) for y, of in ((x, heads), (b, module.n_groups), (c, module.n_groups), (dt, heads))]

    def mix(self, *parts: torch.Tensor) -> torch.Tensor:
        # In place of the gate, which comes first and is applied in ``finish``, anything of its size.
        return _run(self._part, torch.cat([parts[0], *parts], dim=-1))

    @functools.cached_property
    def _part(self) -> Any:
        module = self.module
        inner, groups = module.intermediate_size // self.size, max(1, module.n_groups // self.size)
        of_groups = module.n_groups * module.ssm_state_size, module.n_groups
        return self._copy(
            in_proj=_Operator(_same, module.in_proj.weight),
            conv1d=self._convolution(module.conv1d, (module.intermediate_size, module.num_heads), of_groups, of_groups),
            num_heads=self.heads,
            n_groups=groups,
            intermediate_size=inner,
            conv_dim=inner + 2 * groups * module.ssm_state_size,
            **{name: self._own(getattr(module, name)) for name in ("A_log", "D", "dt_bias")},
        )

    def finish(self, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        return self.module.out_proj(self.module.norm(mixed, self._gate).to(hidden.dtype))


class _Mamba1(HeadParts):
    """Mamba: every channel is a head; the projection to ``dt``, ``B`` and ``C`` sums over all of them."""

    count = "intermediate_size"
    not_called_once = ("conv1d", "x_proj", "dt_proj", "dt_layernorm", "b_layernorm", "c_layernorm")

    @classmethod
    def divides(cls, module: Any, size: int) -> bool:
        fast = inspect.unwrap(type(module).forward).__globals__.get("is_fast_path_available")  # writes a bias
        return super().divides(module, size) and not fast

    def project(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        return [self._by_head(y, self.module.intermediate_size) for y in self.module.in_proj(hidden).chunk(2, dim=-1)]

    def mix(self, *parts: torch.Tensor) -> torch.Tensor:
        return _run(self._part, torch.cat(parts, dim=-1))

    @functools.cached_property
    def _part(self) -> Any:
        module = self.module
        x_weight = self._own(module.x_proj.weight, 1)
        weight, bias = self._own(module.dt_proj.weight), self._own(module.dt_proj.bias)
        return self._copy(
            in_proj=_Operator(_same, module.in_proj.weight),
            conv1d=self._convolution(module.conv1d, (module.intermediate_size, module.intermediate_size)),
            x_proj=lambda x: _Sum.apply(nn.functional.linear(x, x_weight), self.group),
            dt_proj=_Operator(lambda x: nn.functional.linear(x, weight, bias), weight, bias),
            intermediate_size=self.heads,
            A_log=self._own(module.A_log),
            D=self._own(module.D),
        )

    def finish(self, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        return self.module.out_proj(mixed)


class _Sum(torch.autograd.Function):
    """All-reduce in forward and in backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return _Sum.apply(grad, ctx.group), None


class _Lightning(HeadParts):
    """Lightning attention: each head has queries, keys, values and a decay."""

    count = "num_attention_heads"

    def project(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        return [self._by_head(self.module.qkv_proj(hidden), self.module.num_attention_heads)]

    def mix(self, *parts: torch.Tensor) -> torch.Tensor:
        return _run(self._part, *parts, position_embeddings=None, attention_mask=None)[0]

    @functools.cached_property
    def _part(self) -> Any:
        module = self.module
        return self._copy(
            qkv_proj=_same,
            output_gate=lambda x: x.new_tensor(math.inf),  # open; the gate is applied in ``finish``
            num_attention_heads=self.heads,
            diagonal_decay=self._own(module.diagonal_decay, 1),
            **{name: self._own(getattr(module, name)) for name in ("slope_rate", "query_decay", "key_decay")},
        )

    def finish(self, hidden: torch.Tensor, mixed: torch.Tensor) -> tuple[torch.Tensor, None]:
        module = self.module
        normed = module.norm(mixed)
        return module.out_proj(torch.sigmoid(module.output_gate(hidden)) * normed), None


class _DeltaAttention(HeadParts):
    """Kimi Delta Attention: each head has queries, keys, values, forget gates of its channels, and one rate."""

    count, not_called_once = "num_heads", ("conv1d",)

    def project(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        module = self.module
        parts = [module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden)]
        parts += [module.forget_gate(hidden).flatten(2), module.b_proj(hidden)]
        return [self._by_head(x, module.num_heads) for x in parts]

    def mix(self, *parts: torch.Tensor) -> torch.Tensor:
        q, k, v, forget, rates = parts
        module = self.module
        part = self._copy(
            q_proj=lambda _: q,
            k_proj=lambda _: k,
            v_proj=lambda _: v,
            b_proj=lambda _: rates,
            forget_gate=lambda _: forget.unflatten(2, (self.heads, -1)),
            conv1d=self._convolution(module.conv1d, *[(module.qkv_dim, module.num_heads)] * 3),
            qkv_dim=module.qkv_dim // self.size,
            **dict.fromkeys(("g_a_proj", "g_b_proj", "g_proj"), _same),
        )
        return _run(part, q)

    def finish(self, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        module = self.module
        gate = module.g_proj(hidden) if hasattr(module, "g_proj") else module.g_b_proj(module.g_a_proj(hidden))
        by_head = (x.unflatten(2, (module.num_heads, -1)) for x in (mixed, gate))
        return module.o_proj(module.o_norm(*by_head).flatten(2))


class _GatedDeltaRule(HeadParts):
    """Gated delta rule: value heads have their own rates, and share queries and keys within groups."""

    count, shared, not_called_once = "num_v_heads", "num_k_heads", ("conv1d",)

    def project(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        module = self.module
        if hasattr(module, "in_proj_qkvz"):
            mixed = module.in_proj_qkvz(hidden), module.in_proj_ba(hidden)
            *qkvz, b, a = module.fix_query_key_value_ordering(*mixed)
            q, k, v, self._gate = (x.flatten(2) for x in qkvz)
        else:
            q, k, v = module.in_proj_qkv(hidden).split([module.key_dim, module.key_dim, module.value_dim], dim=-1)
            self._gate, b, a = module.in_proj_z(hidden), module.in_proj_b(hidden), module.in_proj_a(hidden)
        of = module.num_k_heads, module.num_k_heads, *[module.num_v_heads] * 3
        return [self._by_head(x, heads) for x, heads in zip((q, k, v, b, a), of, strict=True)]

    def mix(self, *parts: torch.Tensor) -> torch.Tensor:
        q, k, v, b, a = parts
        module = self.module
        keys = max(1, module.num_k_heads // self.size)
        sizes = {"num_k_heads": keys, "num_v_heads": self.heads}
        sizes |= {"key_dim": q.shape[2], "value_dim": v.shape[2], "conv_dim": 2 * q.shape[2] + v.shape[2]}
        of_keys = module.key_dim, module.num_k_heads
        z = v.unflatten(2, (self.heads, -1))  # anything of this size; the gate is applied in ``finish``
        part = self._copy(
            in_proj_qkvz=_same,
            in_proj_ba=_same,
            fix_query_key_value_ordering=lambda *_: (q, k, v, z, b, a),
            in_proj_qkv=lambda _: torch.cat([q, k, v], dim=-1),
            in_proj_z=lambda _: z,
            in_proj_b=lambda _: b,
            in_proj_a=lambda _: a,
            conv1d=self._convolution(module.conv1d, of_keys, of_keys, (module.value_dim, module.num_v_heads)),
            A_log=self._own(module.A_log),
            dt_bias=self._own(module.dt_bias),
            **sizes,
        )
        return _run(part, v)

    def finish(self, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        width = self.module.head_v_dim
        normed = self.module.norm(mixed.reshape(-1, width), self._gate.reshape(-1, width))
        return self.module.out_proj(normed.view_as(mixed))


_OWN = {"weight", "bias"}
_KINDS: dict[str, type[HeadParts]] = {
    "delta attention": _DeltaAttention,
    "gated delta rule": _GatedDeltaRule,
    "lightning": _Lightning,
    "mamba": _Mamba1,
    "mamba2": _Mamba2,
}


def head_parts_of(module: Any, size: int) -> type[HeadParts] | None:
    """Return the class that splits the heads of a mixer among ``size`` ranks; None if they can't be split."""
    names = (SPREAD_OVER_HEADS.get(each.__name__) for each in type(module).__mro__)
    name = next(filter(None, names), None)
    if name is None or not _KINDS[name].divides(module, size):
        return None
    children = [getattr(module, child) for child in _KINDS[name].not_called_once]
    # Ranks with other rows may make fewer calls, which would leave them out of FSDP's gathers; adapters need a call.
    called = any(isinstance(child, FSDPModule) or {n for n, _ in child.named_parameters()} - _OWN for child in children)
    return None if called else _KINDS[name]
