"""Descriptions of layouts: tensors, parallel sizes, and blocks of tensors in a worker's parameters."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...engine.topology.index_ranges import IndexRange, ShardStep

__all__ = ["Channels", "Heads", "SYNC_MODES", "Rollout", "SliceForm", "SyncMode", "TargetSlice", "TensorSpec", "Tower"]

# Change of a block's values before a worker stores them. ``transposed`` swaps the last two dims. ``decay`` is
# ``-exp(values)`` in float32. ``halves`` places the even rows of each head before the odd ones.
SliceForm = Literal["", "transposed", "zeros", "decay", "halves"]
# Each worker holds a part of the vision tower, the whole tower, or none of it.
Tower = Literal["sharded", "whole", "none"]
# Rollout quantisation with per-row (output channel) scales.
Channels = Literal["", "fp8", "int8"]
# A trainer rank sends every tensor whole to its worker, or only the worker's slices.
SyncMode = Literal["full", "sliced"]
SYNC_MODES: tuple[SyncMode, ...] = ("full", "sliced")


@dataclass(frozen=True)
class TensorSpec:
    """Name, global shape and sharding of a trainer tensor; fused experts are ``[E, 2 I, D]`` and ``[E, D, I]``."""

    name: str
    shape: tuple[int, ...]
    itemsize: int  # bytes per element in the dtype in which it is sent
    cuts: tuple[ShardStep, ...] = ()  # over the trainer's mesh axes, outermost first

    @property
    def nbytes(self) -> int:
        return IndexRange.of(self.shape).numel * self.itemsize


@dataclass(frozen=True)
class Rollout:
    """The parallel sizes of one rollout replica.

    With ``expert_parallel`` (vLLM's ``enable_expert_parallel``, SGLang's ``ep_size``) each of the ``tp * dp`` workers
    keeps whole experts, else a part of every expert. Other tensors are sharded over ``tp`` alone.
    """

    tp: int = 1
    dp: int = 1
    expert_parallel: bool = False
    tower: Tower = "sharded"  # of a vision model
    server: str = ""  # verl's name of the server (``rollout/servers.py``); "" for the default
    block: int = 0  # rows and columns of a block of weights in FP8 that share a scale; 0 without blocks
    channels: Channels = ""

    @property
    def is_quantised(self) -> bool:
        return self.block > 0 or self.channels != ""

    @property
    def workers(self) -> int:
        return self.tp * self.dp


@dataclass(frozen=True)
class Heads:
    """Sizes of a model's attention that decide its sharding, and its family (``model_type``)."""

    queries: int  # query heads; twice as many if each has an output gate in the same tensor
    keys: int  # key-value heads
    dim: int  # rows of a head
    family: str = ""
    values_are_keys: bool = False  # whether servers store the keys' weights as the values' weights too
    layers: tuple[tuple[int, int, bool], ...] = ()  # ``(keys, dim, values_are_keys)`` of each, where layers differ
    value_dim: int = 0  # rows of a head's values, if not ``dim``
    query_rank: int = 0  # rows of the queries' compression in latent attention, above the keys' in the worker
    index_rows: int = 0  # key rows of the indexer of sparse attention
    linear_keys: int = 0  # key rows of linear attention
    state: tuple[int, int, int] = (0, 0, 0)  # of Mamba2: rows of all heads, rows of all groups' states, groups
    decoder_layers: int = 0  # further layers are those of multi-token prediction; 0: none

    @classmethod
    def of(cls, config: Any) -> "Heads":
        """Read the sizes from a Hugging Face config."""
        family, config = config.model_type, config.get_text_config()
        # From transformers 5.19 on, sizes that differ between layers (Gemma 4, Step-3.7) are in configs of these.
        differ = getattr(config, "is_heterogeneous", False)
        first = config.per_layer_config[0] if differ else config

        def size(name: str) -> int:
            return getattr(first, name, None) or 0

        queries, dim = size("num_attention_heads"), size("head_dim")
        keys, dim = size("num_key_value_heads") or queries, dim or config.hidden_size // queries
        heads = cls(queries, keys, dim, family, decoder_layers=config.num_hidden_layers)
        if keys := size("linear_num_key_heads"):
            gated = getattr(config, "attn_output_gate", True)
            return replace(heads, queries=queries * (1 + gated), linear_keys=keys * config.linear_key_head_dim)
        if groups := size("mamba_n_groups"):  # Granite
            inner = config.mamba_n_heads * config.mamba_d_head
            return replace(heads, state=(inner, groups * config.mamba_d_state, groups))
        if states := size("mamba_num_heads"):  # Nemotron-H
            groups = config.n_groups
            return replace(heads, state=(states * config.mamba_head_dim, groups * config.ssm_state_size, groups))
        if hasattr(config, "attention_k_eq_v"):  # Gemma 4
            shares = config.attention_k_eq_v
            keys, dim = shares and size("num_global_key_value_heads"), size("global_head_dim")
            if differ:
                keys, dim = (full := config.per_layer_config["full_attention"]).num_key_value_heads, full.head_dim
            own, whole = (heads.keys, heads.dim, False), (keys or heads.keys, dim or heads.dim, shares)
            layers = (whole if kind == "full_attention" else own for kind in config.layer_types)
            return replace(heads, layers=tuple(layers))
        if family == "mimo_v2_flash":  # transformers' class doubles the key heads of layers with a window
            layers = ((heads.keys * (1 + kind.startswith("sliding")), dim, False) for kind in config.layer_types)
            return replace(heads, value_dim=config.v_head_dim, layers=tuple(layers))
        if size("index_topk"):
            heads = replace(heads, index_rows=config.index_head_dim)
        return replace(heads, query_rank=size("q_lora_rank") if size("kv_lora_rank") or size("o_lora_rank") else 0)

    def is_draft(self, name: str) -> bool:
        """Return whether a tensor is of a multi-token prediction layer that follows the decoder's."""
        number = re.match(r"model\.layers\.(\d+)\.", name)  # no tower's
        return number is not None and int(number[1]) >= self.decoder_layers > 0

    def of_layer(self, name: str) -> "Heads":
        """Return the sizes of the layer of the tensor ``name``."""
        number = _LAYER.search(name)
        if number is None or not self.layers:
            return self
        keys, dim, values_are_keys = self.layers[int(number[1])]
        return replace(self, keys=keys, dim=dim, values_are_keys=values_are_keys, layers=())


_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class TargetSlice:
    """A block of a trainer tensor, and the index ``at`` of its first element in a worker's parameter.

    ``at`` is shorter than the block's shape where the parameter lacks leading dims of size 1.
    """

    block: IndexRange
    parameter: str
    at: tuple[int, ...]
    form: SliceForm = ""

    @property
    def end(self) -> tuple[int, ...]:
        """Index in the parameter where the block ends, exclusive in each dim."""
        return self.moved(self.block.shape)

    def moved(self, by: Sequence[int]) -> tuple[int, ...]:
        """Return ``at`` plus ``by``, which counts in the dims of the trainer's tensor."""
        steps = list(by[len(by) - len(self.at) :])
        if self.form == "transposed":
            steps[-2:] = reversed(steps[-2:])
        return tuple(low + step for low, step in zip(self.at, steps, strict=True))
