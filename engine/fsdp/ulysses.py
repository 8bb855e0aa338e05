"""Ulysses sequence parallelism (https://arxiv.org/abs/2309.14509) for attention on transformers' interface.

The ranks of a group share a packed row. Work per token runs on a slice of the tokens, attention on the whole row and a
part of the heads, between two all-to-alls:

    q, k, v    [B, H, S/sp, D]  ->  [B, H/sp, S, D]  ->  attention  ->  [B, S, H/sp, D]  ->  [B, S/sp, H, D]

The model gets its slice of the tokens and the positions of the whole row. Its own code makes rotary embeddings of the
row, and each rank keeps its slice. A model with a vision tower gets all tokens, inserts images among their embeddings,
and the decoder's inputs are sliced. ``packing/shared_mixers.py`` shares layers that carry a state along the row.

Shapes: ``B`` rows (1 if packed), ``S`` tokens of the whole row, ``s = S / sp`` of this rank, ``H`` heads.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..model.layers import attention_modules, decoder_layers, is_mtp
from ..moe.find import UnsupportedModelError
from ..packing.attention import wrap_attention
from ..packing.exchange import to_heads, to_tokens
from ..packing.sequences import PackedSequences, find_mixers
from ..topology.mesh import check_divides

__all__ = ["SETTING", "SequenceParallel", "check_attention_splits", "gather_parts", "heads_to_split", "own_part"]

SETTING = "engine.ulysses_sequence_parallel_size"
_HANDLE = "_epfsdp2_sequence"
# Tensor arguments of attention functions: sliced here, or the same for every head.
_KNOWN = ("position_ids", "s_aux", "cu_seq_lens_q", "cu_seq_lens_k")
# Arguments of attention modules that are sliced with the queries, by their dim of tokens (Beam has the second).
_PER_QUERY = {"position_ids": -1, "attention_scaling": -2}


def check_attention_splits(model: Any, size: int) -> None:
    """Check that ``size`` divides the attention heads of every layer of a model, which may be on the meta device.

    Raises:
        UnsupportedModelError: see ``heads_to_split``.
        SettingError: with the sizes that divide the heads.
    """
    heads = heads_to_split(model)
    check_divides(SETTING, size, heads, f"the number of attention heads of {type(model).__name__}, {heads}")


def heads_to_split(model: Any) -> int:
    """Return the number of heads that the ranks have to divide; the greatest common divisor if layers differ.

    Raises:
        UnsupportedModelError: tokens are mixed outside attention on transformers' interface, in a module that can't get
            whole sequences.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    if hasattr(model.config, "audio_config") and not hasattr(model.config, "vision_config"):
        raise UnsupportedModelError(f"{name} inserts audio among the tokens, which verl slices before that.")
    mixers = find_mixers(model)
    if mixers.why_not is not None:
        raise UnsupportedModelError(f"{name}: {mixers.why_not}.")
    kinds = {type(m).__name__: inspect.signature(type(m).forward).parameters for m in mixers.others.values()}
    if distant := sorted(kind for kind, parameters in kinds.items() if "relative_distance" in parameters):
        raise UnsupportedModelError(f"{' and '.join(distant)} of {name} gets distances between tokens of a whole row.")
    # From transformers 5.19 on, sizes that differ between layers are in configs of these.
    differ = getattr(config, "is_heterogeneous", False)
    layers = [config.per_layer_config[i] for i in range(config.num_hidden_layers)] if differ else [config]
    heads = (layer.num_attention_heads for layer in layers)
    return math.gcd(*heads, *(getattr(config, "num_attention_heads_per_layer", None) or ()))


def own_part(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return this rank's slice of a tensor of the whole row along ``dim``, or all of it if there is no group."""
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
    part = tensor.detach().contiguous().view(torch.uint8)  # no backend has all integer dtypes
    whole = part.new_empty(dist.get_world_size(group) * part.shape[0], *part.shape[1:])
    dist.all_gather_into_tensor(whole, part, group=group)
    return whole.view(tensor.dtype)


class SequenceParallel:
    """Makes a model compute on slices; install it before the model is sharded.

    From then on the model gets ``input_ids [B, s]`` (``[B, S]`` if it has a vision tower, as in verl), ``position_ids
    [B, S]`` or ``[4, B, S]``, and no attention mask. The ranks of ``group`` share rows, in the order of the slices. For
    ``whole`` see ``SharedMixers``.

    Raises:
        UnsupportedModelError, SettingError: see ``check_attention_splits``.
    """

    def __init__(self, model: Any, group: dist.ProcessGroup, packed: PackedSequences, whole: bool = False):
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        check_attention_splits(model, self.size)
        packed.share(group, whole)
        self._positions = torch.empty(0)
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        fqn = decoder_layers(model)[0].rsplit(".", 2)[0]  # above layers.0
        decoder = model.get_submodule(fqn)
        decoder.register_forward_pre_hook(self._cut_inputs, with_kwargs=True)
        for module in (each for each in decoder.modules() if each not in packed.on_sequences):
            takes_positions = "position_ids" in inspect.signature(type(module).forward).parameters
            if takes_positions and next(module.parameters(), None) is None:  # a rotary embedding
                module.register_forward_hook(self._cut_embeddings)
        for name, module in attention_modules(model).items():
            if name.startswith(f"{fqn}.") or is_mtp(model, name):
                module.register_forward_pre_hook(self._cut_positions, with_kwargs=True)
                setattr(module, _HANDLE, self)
        wrap_attention(model.config.get_text_config()._attn_implementation, _attention)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        positions = kwargs.get("position_ids")
        if positions is None:
            raise ValueError("sequence parallelism needs the positions of the whole row: position_ids [B, S].")
        self._positions = positions if positions.dim() == 2 else positions[0]

    def _cut_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Slice the embeddings of the whole row, text with images, before the decoder."""
        whole = kwargs.get("inputs_embeds")
        if whole is None:
            return None
        own: dict[str, Any] = {"inputs_embeds": own_part(whole, 1, self.group)}
        images = kwargs.get("visual_pos_masks")  # tokens to which early layers add features of images
        if images is not None:
            own["visual_pos_masks"] = own_part(images, 1, self.group)
            counts = images.view(self.size, -1).sum(1).tolist()  # of one row
            features = kwargs["deepstack_visual_embeds"]
            own["deepstack_visual_embeds"] = [each.split(counts)[self.rank] for each in features]
        return args, {**kwargs, **own}

    def _cut_embeddings(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return own_part(output, -2, self.group)
        return type(output)(own_part(part, -2, self.group) for part in output)

    def _cut_positions(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Slice positions that scale queries; ``attend`` passes the attention function all of them."""
        dims = {name: dim for name, dim in _PER_QUERY.items() if kwargs.get(name) is not None}
        return args, kwargs | {name: own_part(kwargs[name], dim, self.group) for name, dim in dims.items()}

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
        """Run ``attention`` on the whole row for this rank's heads: ``[B, H, s, D]`` -> ``[B, s, H, D]``.

        ``key`` and ``value`` may have fewer heads, and ``value`` another ``D``. The mask is of the whole row.

        Raises:
            UnsupportedModelError: it is not known how to slice one of the arguments.
        """
        unknown = [n for n, x in kwargs.items() if isinstance(x, torch.Tensor) and n not in _KNOWN]
        if unknown:
            raise UnsupportedModelError(
                f"{type(module).__name__} passes its attention {', '.join(unknown)}; it is not known how to slice that."
            )
        heads, kv_heads = query.shape[1], key.shape[1]
        copies = math.lcm(kv_heads, self.size) // kv_heads
        own: dict[str, Any] = {}
        if copies > 1:  # ranks whose queries share a head of keys each need it
            key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
            own["num_key_value_groups"] = heads // (kv_heads * copies)
        kwargs["position_ids"] = self._positions  # flash attention separates sequences by them
        if kwargs.get("s_aux") is not None:  # eager attention reads the module's ``sinks`` instead
            own["sinks"] = kwargs["s_aux"] = kwargs["s_aux"].chunk(self.size)[self.rank]
        heads_of_rank = to_heads(self.group, query, key, value)
        output, _ = attention(_Part(module, own), *heads_of_rank, attention_mask, **kwargs)
        return to_tokens(self.group, output), None


def _attention(real: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    parallel = getattr(module, _HANDLE, None)
    return real(module, *args, **kwargs) if parallel is None else parallel.attend(real, module, *args, **kwargs)


class _Part:
    """An attention module with the attributes ``own`` replaced by those of this rank's heads."""

    def __init__(self, module: nn.Module, own: dict[str, Any]):
        self._module, self._own = module, own

    def __getattr__(self, name: str) -> Any:
        return self._own[name] if name in self._own else getattr(self._module, name)
