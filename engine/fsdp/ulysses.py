"""Ulysses sequence parallelism (https://arxiv.org/abs/2309.14509) for whatever is on transformers' attention interface.

The ranks of a group hold the same packed row, each an equal slice of its tokens. What a model does to each token alone
is done to the slice. Attention needs the whole row, and does each head alone: an all-to-all brings a rank all tokens of
its part of the heads, the attention that was configured runs, and another all-to-all brings the slices back.

    q, k, v    [B, H, S/sp, D]  ->  [B, H/sp, S, D]  ->  attention  ->  [B, S, H/sp, D]  ->  [B, S/sp, H, D]

The model is handed its slice of the tokens and the positions of the whole row. From these its own code makes the masks
of the whole row (each kind of layer its own) and rotary embeddings, of which each rank keeps its slice.

Shapes: ``B`` rows (1 where they are packed), ``S`` tokens of the whole row, ``s = S / sp`` of this rank, ``H`` heads.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    find_packed_sequence_indices,
    packed_sequence_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import SettingError
from ..model.layers import attention_modules
from ..model.packed_attention import NAME as PACKED
from ..model.packing import PackedSequences, find_mixers
from ..model.shared_mixers import to_heads, to_tokens
from ..moe.find import UnsupportedModelError
from ..topology.mesh import divisors

__all__ = [
    "SETTING",
    "SequenceParallel",
    "check_attention_splits",
    "gather_parts",
    "heads_to_split",
    "own_part",
]

SETTING = "engine.ulysses_sequence_parallel_size"
_HANDLE = "_epfsdp2_sequence"
_OF_TOKENS = ("vision_config", "audio_config")  # configs of models that put other things among the tokens


def check_attention_splits(model: Any, size: int) -> None:
    """The heads of every layer's attention have to divide by the ranks.

    Args:
        model: may be on the meta device.

    Raises:
        UnsupportedModelError: see ``heads_to_split``.
        SettingError: with the sizes that divide the heads.
    """
    heads = heads_to_split(model)
    if heads % size:
        raise SettingError(
            SETTING,
            size,
            f"has to divide the number of attention heads of {type(model).__name__}, {heads}.",
            f"{SETTING}= one of {divisors(heads)}",
        )


def heads_to_split(model: Any) -> int:
    """How many heads the ranks that share a row are to divide; the greatest common divisor where layers differ.

    Args:
        model: may be on the meta device.

    Raises:
        UnsupportedModelError: tokens of a row meet elsewhere than in attention on transformers' interface and in
            modules that take whole sequences, so that rows can't be shared at all.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    if any(hasattr(model.config, key) for key in _OF_TOKENS):
        raise UnsupportedModelError(f"{name} puts what is no text among the tokens, after they would have been cut.")
    if getattr(config, "index_topk", None):
        raise UnsupportedModelError(f"an indexer of {name} chooses among the keys of a whole row before its attention.")
    mixers = find_mixers(model)
    if mixers.why_not is not None:
        raise UnsupportedModelError(f"{name}: {mixers.why_not}.")
    choosing = sorted({type(m).__name__ for fqn, m in mixers.others.items() if fqn in attention_modules(model)})
    if choosing:
        raise UnsupportedModelError(f"{' and '.join(choosing)} of {name} looks at the keys of a whole row.")
    return math.gcd(config.num_attention_heads, *(getattr(config, "num_attention_heads_per_layer", None) or ()))


def own_part(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """This rank's slice of what is of the whole row; all of it without a group.

    Raises:
        ValueError: ``dim`` does not divide by the ranks of the group.
    """
    if group is None:
        return tensor
    size = dist.get_world_size(group)
    if tensor.shape[dim] % size:
        raise ValueError(f"{tensor.shape[dim]} tokens can't be cut into {size} equal slices.")
    return tensor.chunk(size, dim)[dist.get_rank(group)]


def gather_parts(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The slices of all ranks, one after the other along dim 0; no gradient flows."""
    if group is None:
        return tensor
    part = tensor.detach().contiguous().view(torch.uint8)  # no backend has every integer
    whole = part.new_empty(dist.get_world_size(group) * part.shape[0], *part.shape[1:])
    dist.all_gather_into_tensor(whole, part, group=group)
    return whole.view(tensor.dtype)


class SequenceParallel:
    """Has a model compute slices; install it before the model is sharded.

    From then on the model is called with ``input_ids [B, s]`` and ``position_ids [B, S]``, which start anew where a
    sequence does, and without an attention mask.

    Args:
        model: a causal LM or the like; its config names the attention that is to run.
        group: the ranks that share rows, in the order of the slices.
        packed: what was installed in the model; needed where layers carry a state along a row.

    Raises:
        UnsupportedModelError, SettingError: see ``check_attention_splits``.
        ValueError: layers carry a state along a row, and nothing keeps its sequences apart.
    """

    running: ClassVar["SequenceParallel | None"] = None
    """That of the model whose forward is under way: transformers' masks are asked for without saying by whom."""

    def __init__(self, model: Any, group: dist.ProcessGroup, packed: PackedSequences | None = None):
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        check_attention_splits(model, self.size)
        if packed is not None:
            packed.share(group)
        elif find_mixers(model).others:
            raise ValueError(f"the rows of {type(model).__name__} are shared by their sequences, and are not packed.")
        self._positions = torch.empty(0)
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, always_call=True)
        for module in model.modules():
            if _embeds_positions(module):
                module.register_forward_hook(self._cut_embeddings)
        for module in attention_modules(model).values():
            module.register_forward_pre_hook(self._cut_positions, with_kwargs=True)
            setattr(module, _HANDLE, self)
        name = model.config.get_text_config()._attn_implementation
        _wrap(ALL_ATTENTION_FUNCTIONS, name, _attention)
        if name != PACKED:  # whose masks are of the whole row whatever a rank has of it
            _wrap(ALL_MASK_ATTENTION_FUNCTIONS, name, _mask)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        positions = kwargs.get("position_ids")
        if positions is None:
            raise ValueError("the positions of the whole row are needed: position_ids [B, S].")
        self._positions, SequenceParallel.running = positions, self

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        SequenceParallel.running = None

    def _cut_embeddings(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return own_part(output, 1, self.group)
        return type(output)(own_part(part, 1, self.group) for part in output)

    def _cut_positions(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Positions that scale queries are of these queries; the attention itself gets all again."""
        if kwargs.get("position_ids") is None:
            return None
        return args, {**kwargs, "position_ids": own_part(kwargs["position_ids"], 1, self.group)}

    def mask(self, make: Callable[..., Any], *, mask_function: Callable[..., Any], **kwargs: Any) -> Any:
        """That of the whole row: which tokens see each other is a function of their places in it.

        Args:
            make: transformers' maker of masks for the attention that runs.
            mask_function: the family's. gpt-oss and AFMoE (transformers 5.9) do not ask for the sequences of a row to
                be kept apart, so they are here, for all.
        """
        sequences = find_packed_sequence_indices(self._positions)
        if sequences is not None:
            mask_function = and_masks(mask_function, packed_sequence_mask_function(sequences))
            kwargs["allow_is_causal_skip"] = False
        for length in ("q_length", "kv_length"):
            kwargs[length] *= self.size
        return make(mask_function=mask_function, **kwargs)

    def attend(
        self,
        attention: Callable[..., Any],
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Run ``attention`` on the whole row for this rank's heads.

        Args:
            query: ``[B, H, s, D]``; ``key`` and ``value`` may have fewer heads, and ``value`` another ``D``.
            attention_mask: of the whole row, or None.

        Returns:
            ``[B, s, H, D]``, and no weights.

        Raises:
            UnsupportedModelError: the attention is handed a tensor of which is not known how it would be cut.
        """
        unknown = [n for n, x in kwargs.items() if isinstance(x, torch.Tensor) and n not in ("position_ids", "s_aux")]
        if unknown:
            raise UnsupportedModelError(
                f"{type(module).__name__} hands its attention {', '.join(unknown)}, and how to cut that is not known."
            )
        heads, kv_heads = query.shape[1], key.shape[1]
        copies = math.lcm(kv_heads, self.size) // kv_heads
        own: dict[str, Any] = {}
        if copies > 1:  # each rank needs those of its queries, and they may be those of other ranks' too
            key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
            own["num_key_value_groups"] = heads // (kv_heads * copies)
        kwargs["position_ids"] = self._positions  # by which flash attention keeps sequences apart
        if kwargs.get("s_aux") is not None:  # which eager attention reads off the module
            own["sinks"] = kwargs["s_aux"] = kwargs["s_aux"].chunk(self.size)[self.rank]
        output, _ = attention(_Part(module, own), *self._to_heads(query, key, value), attention_mask, **kwargs)
        return self._to_tokens(output), None

    def _to_heads(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """``[B, H, s, D]`` each -> ``[B, H / sp, S, D]`` each, in one exchange."""
        return to_heads(self.group, *tensors)

    def _to_tokens(self, output: torch.Tensor) -> torch.Tensor:
        """``[B, S, H / sp, D]`` -> ``[B, s, H, D]``."""
        return to_tokens(self.group, output)


def _embeds_positions(module: nn.Module) -> bool:
    """Whether it computes something of each position and of nothing that is trained: a rotary embedding."""
    takes_positions = "position_ids" in inspect.signature(type(module).forward).parameters
    return takes_positions and next(module.parameters(), None) is None


def _wrap(interface: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Put ``wrapper`` around a function of an interface of transformers, once."""
    real = inner = interface[name]
    while isinstance(inner, functools.partial):
        if inner.func is wrapper:
            return
        inner = inner.args[0] if inner.args else inner.func
    interface.register(name, functools.partial(wrapper, real))


def _attention(real: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    parallel = getattr(module, _HANDLE, None)
    return real(module, *args, **kwargs) if parallel is None else parallel.attend(real, module, *args, **kwargs)


def _mask(real: Callable[..., Any], **kwargs: Any) -> Any:
    parallel = SequenceParallel.running
    return real(**kwargs) if parallel is None else parallel.mask(real, **kwargs)


class _Part:
    """An attention module as it is with the heads of one rank.

    Args:
        own: attributes that are other than the module's.
    """

    def __init__(self, module: nn.Module, own: dict[str, Any]):
        self._module, self._own = module, own

    def __getattr__(self, name: str) -> Any:
        return self._own[name] if name in self._own else getattr(self._module, name)
