"""Rules by which servers shard a tensor: the blocks that a tensor-parallel rank keeps, and their parameters.

``slices.py`` and a server's ``layout.py`` assign rules to names.

Sources: vLLM ``model_executor/layers/linear.py``, ``vocab_parallel_embedding.py``, ``fused_moe/routed_experts.py``,
``fused_moe/expert_map_manager.py``, ``mamba/gdn/qwen_gdn_linear_attn.py``, ``model_executor/models/deepseek_v2.py``,
``gpt_oss.py``, ``llama4.py``, ``mllama4.py``, ``mamba/mamba_mixer.py``, ``mamba/mamba_mixer2.py``,
``mamba/short_conv.py``.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ...engine.topology.index_ranges import IndexRange
from .specs import Heads, SliceForm, TargetSlice, TensorSpec

# Servers use the rules themselves as ``rules.columns``.
__all__ = ["LATENT_ATTENTION", "Family", "NamedRules", "named_rules", "padded_vocabulary", "whole_slice"]

# Arguments: the tensor, tensor-parallel size and rank, the model's heads, and the group that the pattern matched.
Rule = Callable[[TensorSpec, int, int, Heads, str], Iterable[TargetSlice]]
NamedRules = tuple[tuple[re.Pattern[str], Rule], ...]


def named_rules(*pairs: tuple[str, Rule]) -> NamedRules:
    """Compile patterns of the ends of names."""
    return tuple((re.compile(f"{pattern}$"), rule) for pattern, rule in pairs)


@dataclass(frozen=True)
class Family:
    """Differences of a family's layout from the common rules."""

    renamed: tuple[tuple[str, str], ...] = ()  # the trainer's and the worker's substring of a parameter name
    rules: NamedRules = ()  # before the common ones
    is_transposed: bool = False  # experts have inputs as rows in the trainer, outputs as rows in the worker


def padded_vocabulary(rows: int) -> int:
    """Return the rows of a padded vocabulary (vLLM's ``DEFAULT_VOCAB_PADDING_SIZE``)."""
    return -(-rows // 64) * 64


def whole_slice(tensor: TensorSpec, at: int = 0, name: str = "", form: SliceForm = "") -> TargetSlice:
    """Return the whole tensor as a slice that begins at row ``at`` of a parameter, by default its own."""
    return _place(tensor, IndexRange.of(tensor.shape), at=at, name=name, form=form)


def _place(
    tensor: TensorSpec, block: IndexRange, dim: int = 0, at: int = 0, name: str = "", form: SliceForm = ""
) -> TargetSlice:
    corner = tuple(at if d == dim else 0 for d in range(len(tensor.shape)))
    return TargetSlice(block, name or tensor.name, corner, form)


def _cut(
    tensor: TensorSpec,
    parts: Iterable[tuple[int, int, int]],
    dim: int = 0,
    into: int | None = None,
    at: int = 0,
    name: str = "",
    form: SliceForm = "",
) -> list[TargetSlice]:
    """Shard consecutive parts of ``dim``, each by itself, and concatenate the kept shards.

    Args:
        parts: ``(size, number of shards, index of the kept shard)`` of each.
        into: dim of the parameter along which they are concatenated, from ``at`` on; ``dim`` by default.
    """
    found, start = [], 0
    for size, shards, index in parts:
        each, rest = divmod(size, shards)
        if rest:
            raise ValueError(
                f"{tensor.name} has {size} along dim {dim}, which tensor parallelism {shards} does not divide."
            )
        low = start + index * each
        block = IndexRange.of(tensor.shape).with_dim(dim, low, low + each)
        found.append(_place(tensor, block, dim if into is None else into, at, name, form))
        start, at = start + size, at + each
    return found


def cut(dim: int = 0, parts: int = 1, into: int | None = None, theirs: str = "", form: SliceForm = "") -> Rule:
    """Make a rule that shards each of ``parts`` equal parts of ``dim`` by itself; ``theirs`` replaces the kind."""

    def rule(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
        name = tensor.name.replace(kind, theirs) if theirs else tensor.name
        return _cut(tensor, [(tensor.shape[dim] // parts, tp, rank)] * parts, dim, into, name=name, form=form)

    return rule


def fused(own: str, theirs: str, *kinds: str) -> Rule:
    """Make a rule that concatenates tensors of equally many rows in a fused parameter, in the order of ``kinds``.

    Args:
        own, theirs: the modules of a tensor, with ``{}`` for its kind, and of the parameter.
    """

    def rule(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
        rows, name = tensor.shape[0], tensor.name.replace(f".{own.format(kind)}.", f".{theirs}.")
        return _cut(tensor, [(rows, tp, rank)], at=kinds.index(kind) * rows // tp, name=name)

    return rule


columns = cut()
row_parallel = cut(1)
stacked_halves = cut(parts=2)  # gate and up
stacked_thirds = cut(parts=3)  # queries, keys and values of equally many heads
decay = cut(theirs="A", form="decay")  # of a state, by heads; vLLM stores the negative exponential of its logarithm
transposed_experts = cut(1, form="transposed")  # down, [E, I, D]; servers have outputs as rows
transposed_gate_up = cut(2, 2, into=1, form="transposed")  # [E, D, 2 I], gate before up
gate_or_up = fused("{}_proj", "gate_up_proj", "gate", "up")
w1_or_w3 = fused("{}", "w13", "w1", "w3")  # gate and up of some families
as_many_heads = fused("{}_proj", "qkv_proj", "q", "k", "v")  # queries, keys and values of a vision tower
linear_gate_or_decay = fused("in_proj_{}", "in_proj_ba", "b", "a")


def replicated(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    return [whole_slice(tensor)]


def vocabulary(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    rows = tensor.shape[0]
    each = padded_vocabulary(rows) // tp
    low, high = (min(end * each, rows) for end in (rank, rank + 1))
    return [_place(tensor, IndexRange.of(tensor.shape).with_dim(0, low, high))]


def without_first_dim(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    return [TargetSlice(IndexRange.of(tensor.shape), tensor.name, (0,) * (len(tensor.shape) - 1))]


# Attention


def _parts_of_heads(tensor: TensorSpec, tp: int, rank: int, heads: Heads) -> dict[str, tuple[int, int, int]]:
    """Return the ``parts`` of ``_cut`` for queries, keys and values; with fewer heads than ranks, ranks share heads."""
    found = {}
    values = heads.value_dim or heads.dim
    for kind, count, dim in (("q", heads.queries, heads.dim), ("k", heads.keys, heads.dim), ("v", heads.keys, values)):
        if count % tp and tp % count:
            raise ValueError(f"{tensor.name} has {count} heads, which tensor parallelism {tp} does not divide.")
        found[kind] = (count * dim, min(count, tp), rank * min(count, tp) // tp)
    return found


def qkv_projection(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    """Concatenate queries, keys and values in a fused parameter."""
    at, name = 0, tensor.name.replace(f"{kind}_proj", "qkv_proj")
    for own, part in _parts_of_heads(tensor, tp, rank, heads).items():
        if own == kind or (own == "v" and kind == "k" and heads.values_are_keys):
            yield from _cut(tensor, [part], at=at, name=name)
        at += part[0] // part[1]


def halved_heads(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    """``qkv_projection`` for a worker that stores the even rows of each head before the odd ones."""
    return [replace(part, form="halves") for part in qkv_projection(tensor, tp, rank, heads, kind)]


def by_heads(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    """Shard queries, keys or values by heads, or all three in one tensor."""
    parts = _parts_of_heads(tensor, tp, rank, heads)
    return _cut(tensor, [parts[kind]] if kind in parts else parts.values())


def compressions(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    """Replicate latent attention's compressions; with a query rank, vLLM fuses them, queries first."""
    name = tensor.name.replace(kind, "fused_qkv_a_proj") if heads.query_rank else tensor.name
    return [whole_slice(tensor, heads.query_rank if kind.startswith("kv") else 0, name)]


def compressed_keys(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    """Replicate a compressor's keys and their gates, concatenated in one parameter."""
    at, name = tensor.shape[0] if kind == "gate" else 0, tensor.name.replace(f".{kind}_proj.", ".fused_wkv_wgate.")
    return [whole_slice(tensor, at, name)]


def indexer(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    """Replicate an indexer's keys and head weights, concatenated in one parameter."""
    at, name = heads.index_rows if kind == "weights_proj" else 0, tensor.name.replace(f".{kind}.", ".wk_weights_proj.")
    return [whole_slice(tensor, at, name)]


# Linear attention and state spaces


def linear_qkv(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    """Shard the concatenated queries, keys and values, each by itself."""
    keys, name = heads.linear_keys, tensor.name.replace("in_proj_qkv.", "in_proj_qkvz.")
    return _cut(tensor, [(rows, tp, rank) for rows in (keys, keys, tensor.shape[0] - 2 * keys)], name=name)


def linear_output_gate(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    """Place the gate, which has as many rows as the values, below queries, keys and values."""
    rows, name = tensor.shape[0], tensor.name.replace("in_proj_z", "in_proj_qkvz")
    return _cut(tensor, [(rows, tp, rank)], at=(2 * heads.linear_keys + rows) // tp, name=name)


def state_columns(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    """Shard Mamba2's concatenated projections by heads or groups; a single group is replicated."""
    inner, group_rows, groups = heads.state
    group = (group_rows, 1, 0) if groups == 1 else (group_rows, tp, rank)
    parts = [(inner, tp, rank), group, group]
    if kind == "in_proj":  # a gate before, a time step for each head behind
        parts = [(inner, tp, rank), *parts, (tensor.shape[0] - 2 * inner - 2 * group_rows, tp, rank)]
    return _cut(tensor, parts)


# Experts, under the names of the trainer's stacks; ``slices.py`` renames them


def own_experts(tensor: TensorSpec, workers: int, worker: int, is_transposed: bool) -> list[TargetSlice]:
    """Return a worker's whole experts under expert parallelism, in linear order."""
    each, more = divmod(tensor.shape[0], workers)
    first = worker * each + min(worker, more)
    block = IndexRange.of(tensor.shape).with_dim(0, first, first + each + (worker < more))
    return [_place(tensor, block, form="transposed" if is_transposed and len(tensor.shape) == 3 else "")]


def _summed_bias(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    """Replicate the bias of outputs as zeros on all ranks but the first, because the ranks' results are summed."""
    return [whole_slice(tensor, form="zeros" if rank else "")]


# Rules of families that several servers share

LATENT_ATTENTION = named_rules(
    (r"\.self_attn\.(q|q_b|kv_b)_proj\.weight", columns),
    (r"\.self_attn\.(q_a_proj|kv_a_proj_with_mqa)\.weight", compressions),
)
TRANSPOSED_EXPERTS = named_rules(
    (r"\.experts\.(gate_up_proj)", cut(2, form="transposed")),  # [E, D, 2 I], gate and up column by column
    (r"\.experts\.(down_proj)", transposed_experts),
    (r"\.experts\.(gate_up_proj_bias)", cut(1)),
    (r"\.experts\.(down_proj_bias)", _summed_bias),
    (r"\.self_attn\.(sinks)", columns),
)
