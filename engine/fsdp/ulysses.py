"""Ulysses sequence parallelism (https://arxiv.org/abs/2309.14509) for whatever is on transformers' attention interface.

The ranks of a group hold the same packed row, each an equal slice of its tokens. What a model does to each token alone
is done to the slice. Attention needs the whole row, and does each head alone: an all-to-all brings a rank all tokens of
its part of the heads, the attention that was configured runs, and another all-to-all brings the slices back.

    q, k, v    [B, H, S/sp, D]  ->  [B, H/sp, S, D]  ->  attention  ->  [B, S, H/sp, D]  ->  [B, S/sp, H, D]

The model is handed its slice of the tokens and the positions of the whole row. From these its own code makes rotary
embeddings, of which each rank keeps its slice; masks are of the sequences (``packing/attention.py``). A model with
a vision tower gets all tokens, puts images among their embeddings, and what its decoder gets is cut. Layers that
carry a state along the row are shared otherwise (``packing/shared_mixers.py``).

Shapes: ``B`` rows (1 where they are packed), ``S`` tokens of the whole row, ``s = S / sp`` of this rank, ``H`` heads.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import SettingError
from ..model.layers import attention_modules, decoder_layers
from ..moe.find import UnsupportedModelError
from ..packing.exchange import to_heads, to_tokens
from ..packing.sequences import PackedSequences, find_mixers
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
# Tensors that attention may get: those that are sliced here, and those of the whole row for every head.
_KNOWN = ("position_ids", "s_aux", "cu_seq_lens_q", "cu_seq_lens_k")
# Arguments of an attention module that are of its queries, and their dim of tokens (Beam scales queries by the second).
_OF_QUERIES = {"position_ids": -1, "attention_scaling": -2}


def check_attention_splits(model: Any, size: int) -> None:
    """Check that the ranks divide the heads of every layer's attention.

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
    """Return the number of heads that sharing ranks have to divide; the greatest common divisor if layers differ.

    Args:
        model: may be on the meta device.

    Raises:
        UnsupportedModelError: tokens of a row meet elsewhere than in attention on transformers' interface and in
            modules that take whole sequences, so that rows can't be shared at all.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    if hasattr(model.config, "audio_config") and not hasattr(model.config, "vision_config"):
        raise UnsupportedModelError(f"{name} puts audio among the tokens, which verl would have cut before that.")
    if getattr(config, "index_topk", None):
        raise UnsupportedModelError(f"an indexer of {name} chooses among the keys of a whole row before its attention.")
    mixers = find_mixers(model)
    if mixers.why_not is not None:
        raise UnsupportedModelError(f"{name}: {mixers.why_not}.")
    choosing = sorted({type(m).__name__ for fqn, m in mixers.others.items() if fqn in attention_modules(model)})
    if choosing:
        raise UnsupportedModelError(f"{' and '.join(choosing)} of {name} takes whole sequences.")
    return math.gcd(config.num_attention_heads, *(getattr(config, "num_attention_heads_per_layer", None) or ()))


def own_part(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return this rank's slice of a tensor of the whole row; all of it without a group.

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
    """Gather the slices of all ranks along dim 0; without gradient."""
    if group is None:
        return tensor
    part = tensor.detach().contiguous().view(torch.uint8)  # no backend has every integer
    whole = part.new_empty(dist.get_world_size(group) * part.shape[0], *part.shape[1:])
    dist.all_gather_into_tensor(whole, part, group=group)
    return whole.view(tensor.dtype)


class SequenceParallel:
    """Has a model compute slices; install it before the model is sharded.

    From then on the model is called with ``input_ids [B, s]`` (``[B, S]`` if its config has a vision tower's, as verl
    does it), with ``position_ids [B, S]`` or ``[4, B, S]`` and without an attention mask.

    Args:
        model: a causal LM or the like; its config names the attention that is to run.
        group: the ranks that share rows, in the order of the slices.
        packed: what keeps the sequences of the model's rows apart.

    Raises:
        UnsupportedModelError, SettingError: see ``check_attention_splits``.
    """

    def __init__(self, model: Any, group: dist.ProcessGroup, packed: PackedSequences):
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        check_attention_splits(model, self.size)
        packed.share(group)
        self._positions = torch.empty(0)
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        decoder = model.get_submodule(decoder_layers(model)[0].rsplit(".", 2)[0])  # above layers.0
        decoder.register_forward_pre_hook(self._cut_inputs, with_kwargs=True)
        for module in decoder.modules():
            if _embeds_positions(module):
                module.register_forward_hook(self._cut_embeddings)
        for module in attention_modules(decoder).values():
            module.register_forward_pre_hook(self._cut_positions, with_kwargs=True)
            setattr(module, _HANDLE, self)
        _wrap(ALL_ATTENTION_FUNCTIONS, model.config.get_text_config()._attn_implementation, _attention)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        positions = kwargs.get("position_ids")
        if positions is None:
            raise ValueError("the positions of the whole row are needed: position_ids [B, S].")
        self._positions = positions if positions.dim() == 2 else positions[0]

    def _cut_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Slice the embeddings of the whole row, text with images in their places, before the decoder."""
        whole = kwargs.get("inputs_embeds")
        if whole is None:
            return None
        own: dict[str, Any] = {"inputs_embeds": own_part(whole, 1, self.group)}
        seen = kwargs.get("visual_pos_masks")  # of tokens that features of images are added to in early layers
        if seen is not None:
            own["visual_pos_masks"] = own_part(seen, 1, self.group)
            counts = seen.view(self.size, -1).sum(1).tolist()  # of one row
            features = kwargs["deepstack_visual_embeds"]
            own["deepstack_visual_embeds"] = [each.split(counts)[self.rank] for each in features]
        return args, {**kwargs, **own}

    def _cut_embeddings(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return own_part(output, -2, self.group)
        return type(output)(own_part(part, -2, self.group) for part in output)

    def _cut_positions(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Slice the positions that scale queries to those of these queries; the attention itself gets all of them."""
        whole = {name: (kwargs[name], dim) for name, dim in _OF_QUERIES.items() if kwargs.get(name) is not None}
        return args, kwargs | {name: own_part(tensor, dim, self.group) for name, (tensor, dim) in whole.items()}

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
            UnsupportedModelError: the attention gets a tensor of which is not known how it would be sliced.
        """
        unknown = [n for n, x in kwargs.items() if isinstance(x, torch.Tensor) and n not in _KNOWN]
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
        heads_of_rank = to_heads(self.group, query, key, value)
        output, _ = attention(_Part(module, own), *heads_of_rank, attention_mask, **kwargs)
        return to_tokens(self.group, output), None


def _embeds_positions(module: nn.Module) -> bool:
    """Tell whether it computes something of each position and of nothing that is trained: a rotary embedding."""
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


class _Part:
    """An attention module as it is with the heads of one rank.

    Args:
        own: attributes that are other than the module's.
    """

    def __init__(self, module: nn.Module, own: dict[str, Any]):
        self._module, self._own = module, own

    def __getattr__(self, name: str) -> Any:
        return self._own[name] if name in self._own else getattr(self._module, name)
