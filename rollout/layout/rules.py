"""Rules by which servers shard a tensor: what of it a tensor-parallel rank keeps, and where in which parameter.

Which rule holds for which name stands in ``slices.py``, and in a server's ``layout.py`` where it differs.

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

__all__ = [
    "LATENT_ATTENTION",
    "TRANSPOSED_EXPERTS",
    "Family",
    "NamedRules",
    "Rule",
    "as_many_heads",
    "attention_norm",
    "columns",
    "compressions",
    "decay",
    "down_experts",
    "fused_qkv",
    "gate_or_up",
    "gate_up_experts",
    "halved_heads",
    "indexer",
    "linear_gate_or_decay",
    "linear_output_gate",
    "linear_qkv",
    "named_rules",
    "own_experts",
    "padded_vocabulary",
    "qkv_projection",
    "replicated",
    "row_parallel",
    "stacked_halves",
    "stacked_thirds",
    "state_columns",
    "transposed_experts",
    "transposed_experts_bias",
    "transposed_gate_up",
    "up_experts",
    "vocabulary",
    "without_first_dim",
]

# Takes a tensor, the tensor-parallel size and rank, the model's heads, and the group that its name's pattern found.
Rule = Callable[[TensorSpec, int, int, Heads, str], Iterable[TargetSlice]]
NamedRules = tuple[tuple[re.Pattern[str], Rule], ...]

_FUSED_EXPERTS = {
    "gate_up_proj": "w13_weight",
    "up_proj": "w13_weight",
    "down_proj": "w2_weight",
    "gate_up_proj_bias": "w13_bias",
    "down_proj_bias": "w2_bias",
}


def named_rules(*pairs: tuple[str, Rule]) -> NamedRules:
    """Compile the ends of names."""
    return tuple((re.compile(f"{pattern}$"), rule) for pattern, rule in pairs)


@dataclass(frozen=True)
class Family:
    """How the layout of a family differs from the common rules.

    Args:
        renamed: pairs of the trainer's and the worker's substring of a parameter name.
        rules: rules that take precedence over the common ones.
        is_stacked: whether checkpoints, and with them the worker's loader, have experts as stacks alone.
        is_transposed: whether the trainer's experts have inputs as rows, and the worker's have outputs.
    """

    renamed: tuple[tuple[str, str], ...] = ()
    rules: NamedRules = ()
    is_stacked: bool = False
    is_transposed: bool = False

    def renamed_slices(self, slices: Iterable[TargetSlice]) -> list[TargetSlice]:
        """Drop empty slices and rename the others to the worker's parameter names."""
        found = []
        for part in slices:
            parameter = part.parameter
            for own, theirs in self.renamed:
                parameter = parameter.replace(own, theirs)
            if part.block.numel:
                found.append(replace(part, parameter=parameter))
        return found


def padded_vocabulary(rows: int) -> int:
    """Return the rows of a vocabulary in vLLM, which pads it (``DEFAULT_VOCAB_PADDING_SIZE``)."""
    return -(-rows // 64) * 64


def _part(tensor: TensorSpec, dim: int, tp: int, rank: int, within: tuple[int, int] | None = None) -> IndexRange:
    """Return the rank's part of ``within = (start, stop)`` along ``dim``; ``within`` defaults to the whole dim."""
    start, stop = within or (0, tensor.shape[dim])
    size, rest = divmod(stop - start, tp)
    if rest:
        raise ValueError(
            f"{tensor.name} has {stop - start} along dim {dim}, which tensor parallelism {tp} does not divide."
        )
    return IndexRange.of(tensor.shape).with_dim(dim, start + rank * size, start + (rank + 1) * size)


def _at(tensor: TensorSpec, dim: int = 0, offset: int = 0) -> tuple[int, ...]:
    return tuple(offset if d == dim else 0 for d in range(len(tensor.shape)))


def columns(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    """Shard a column-parallel weight, or anything else that is sharded along its first dim."""
    return [TargetSlice(_part(tensor, 0, tp, rank), tensor.name, _at(tensor))]


def row_parallel(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    return [TargetSlice(_part(tensor, 1, tp, rank), tensor.name, _at(tensor))]


def replicated(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    return [TargetSlice(IndexRange.of(tensor.shape), tensor.name, _at(tensor))]


def vocabulary(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    rows = tensor.shape[0]
    each = padded_vocabulary(rows) // tp
    block = IndexRange.of(tensor.shape).with_dim(0, min(rank * each, rows), min((rank + 1) * each, rows))
    return [TargetSlice(block, tensor.name, _at(tensor))]


def gate_or_up(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    """Shard gate and up, which vLLM stores one after the other; in some families they are ``w1`` and ``w3``."""
    is_lettered = kind in ("w1", "w3")
    own, fused = (kind, "w13") if is_lettered else (f"{kind}_proj", "gate_up_proj")
    offset = tensor.shape[0] // tp if kind in ("up", "w3") else 0
    name = tensor.name.replace(f".{own}.", f".{fused}.")
    return [TargetSlice(_part(tensor, 0, tp, rank), name, _at(tensor, 0, offset))]


def without_first_dim(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    return [TargetSlice(IndexRange.of(tensor.shape), tensor.name, _at(tensor)[1:])]


# Attention


def _heads_of(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> tuple[IndexRange, int]:
    """Return the rows of the rank's heads of this kind, and how many rows precede them in the fused parameter."""

    def of(total: int) -> tuple[int, int]:
        """Return the first head of this rank and the number of its heads."""
        if total % tp and tp % total:
            raise ValueError(f"{tensor.name} has {total} heads, which tensor parallelism {tp} does not divide.")
        each = max(1, total // tp)
        return (rank * each if total >= tp else rank * total // tp), each

    counts = {"q": of(heads.queries), "k": of(heads.keys), "v": of(heads.keys)}
    before = {"q": 0, "k": counts["q"][1], "v": counts["q"][1] + counts["k"][1]}
    first, each = counts[kind]
    rows = IndexRange.of(tensor.shape).with_dim(0, first * heads.dim, (first + each) * heads.dim)
    return rows, before[kind] * heads.dim


def qkv_projection(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    """Place queries, keys and values one after the other in vLLM's fused parameter."""
    block, before = _heads_of(tensor, tp, rank, heads, kind)
    name = tensor.name.replace(f"{kind}_proj", "qkv_proj")
    found = [TargetSlice(block, name, _at(tensor, 0, before))]
    if kind == "k" and heads.values_are_keys:
        found.append(TargetSlice(block, name, _at(tensor, 0, before + block.shape[0])))
    return found


def fused_qkv(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    """Shard queries, keys and values, stored one after the other in one parameter, each by its own heads."""
    start = 0
    for part, count in (("q", heads.queries), ("k", heads.keys), ("v", heads.keys)):
        rows, before = _heads_of(tensor, tp, rank, heads, part)
        block = rows.with_dim(0, start + rows.low[0], start + rows.high[0])
        yield TargetSlice(block, tensor.name, _at(tensor, 0, before))
        start += count * heads.dim


def halved_heads(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    """Place queries or keys of which a worker stores the even rows of each head before the odd ones."""
    return [replace(part, form="halves") for part in qkv_projection(tensor, tp, rank, heads, kind)]


def as_many_heads(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    """Place queries, keys and values of equally many heads, as in a vision tower, in vLLM's fused parameter."""
    before = "qkv".index(kind) * tensor.shape[0] // tp
    return [
        TargetSlice(_part(tensor, 0, tp, rank), tensor.name.replace(f"{kind}_proj", "qkv_proj"), _at(tensor, 0, before))
    ]


def stacked_thirds(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    """Shard queries, keys and values of equally many heads, stored one after the other, each by itself."""
    return _stacked(tensor, tp, rank, 3)


def stacked_halves(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    """Shard gate and up, stored one after the other, each by itself."""
    return _stacked(tensor, tp, rank, 2)


def _stacked(tensor: TensorSpec, tp: int, rank: int, number: int) -> list[TargetSlice]:
    each = tensor.shape[0] // number
    parts = [_part(tensor, 0, tp, rank, (i * each, (i + 1) * each)) for i in range(number)]
    return [TargetSlice(part, tensor.name, _at(tensor, 0, i * each // tp)) for i, part in enumerate(parts)]


def attention_norm(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    """Shard a norm over the full width of queries or keys by heads."""
    return [TargetSlice(_heads_of(tensor, tp, rank, heads, kind)[0], tensor.name, _at(tensor))]


def compressions(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    """Replicate latent attention's first projections; vLLM may store that of queries above the other."""
    offset = heads.query_rank if kind.startswith("kv") else 0
    name = tensor.name.replace(kind, "fused_qkv_a_proj") if heads.query_rank else tensor.name
    return [TargetSlice(IndexRange.of(tensor.shape), name, _at(tensor, 0, offset))]


def indexer(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    """Replicate an indexer's keys and, below them in the same parameter, the weights of its heads."""
    offset = heads.index_rows if kind == "weights_proj" else 0
    name = tensor.name.replace(f".{kind}.", ".wk_weights_proj.")
    return [TargetSlice(IndexRange.of(tensor.shape), name, _at(tensor, 0, offset))]


# Linear attention


def linear_qkv(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    """Shard queries, keys and values, stored one after the other, each by itself."""
    keys, name = heads.linear_keys, tensor.name.replace("in_proj_qkv.", "in_proj_qkvz.")
    borders = (0, keys, 2 * keys, tensor.shape[0])
    parts = [_part(tensor, 0, tp, rank, span) for span in zip(borders, borders[1:], strict=False)]
    return [TargetSlice(part, name, _at(tensor, 0, at // tp)) for part, at in zip(parts, borders, strict=False)]


def linear_output_gate(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    """Place the gate, as wide as the values, below queries, keys and values, as vLLM stores it."""
    name = tensor.name.replace("in_proj_z", "in_proj_qkvz")
    return [
        TargetSlice(_part(tensor, 0, tp, rank), name, _at(tensor, 0, (2 * heads.linear_keys + tensor.shape[0]) // tp))
    ]


def linear_gate_or_decay(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    """Place the decay below the gate, as vLLM stores it."""
    name = tensor.name.replace(f"in_proj_{kind}", "in_proj_ba")
    return [TargetSlice(_part(tensor, 0, tp, rank), name, _at(tensor, 0, (kind == "a") * tensor.shape[0] // tp))]


# State spaces


def state_columns(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    """Shard what Mamba2 stores one after the other, by heads or by groups; each worker has a single group whole."""
    inner, group_rows, groups = heads.state
    one = (1, 0) if groups == 1 else (tp, rank)
    parts = [(inner, tp, rank), (group_rows, *one), (group_rows, *one)]
    if kind == "in_proj":  # a gate before, a time step for each head behind
        parts = [(inner, tp, rank), *parts, (tensor.shape[0] - 2 * inner - 2 * group_rows, tp, rank)]
    found, start, at = [], 0, 0
    for rows, size, place in parts:
        found.append(TargetSlice(_part(tensor, 0, size, place, (start, start + rows)), tensor.name, _at(tensor, 0, at)))
        start, at = start + rows, at + rows // size
    return found


def decay(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    """Shard a state's decay by heads; vLLM stores the negative exponential of its logarithm."""
    return [TargetSlice(_part(tensor, 0, tp, rank), tensor.name.replace(kind, "A"), _at(tensor), "decay")]


# Experts


def _experts_name(tensor: TensorSpec) -> str:
    module, _, own = tensor.name.rpartition(".")
    return f"{module}.{_FUSED_EXPERTS[own]}"


def own_experts(tensor: TensorSpec, workers: int, worker: int, is_transposed: bool) -> list[TargetSlice]:
    """Return what a worker keeps under expert parallelism: whole experts in linear order."""
    each, more = divmod(tensor.shape[0], workers)
    first = worker * each + min(worker, more)
    block = IndexRange.of(tensor.shape).with_dim(0, first, first + each + (worker < more))
    form: SliceForm = "transposed" if is_transposed and len(tensor.shape) == 3 else ""
    return [TargetSlice(block, _experts_name(tensor), _at(tensor), form)]


def gate_up_experts(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    half = tensor.shape[1] // 2
    gate = _part(tensor, 1, tp, rank, (0, half))
    up = _part(tensor, 1, tp, rank, (half, 2 * half))
    name = _experts_name(tensor)
    return TargetSlice(gate, name, _at(tensor)), TargetSlice(up, name, _at(tensor, 1, half // tp))


def up_experts(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    """Shard the up projection of experts that have no gate."""
    return [TargetSlice(_part(tensor, 1, tp, rank), _experts_name(tensor), _at(tensor))]


def down_experts(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    return [TargetSlice(_part(tensor, 2, tp, rank), _experts_name(tensor), _at(tensor))]


def transposed_experts(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    """Shard ``[E, D, 2 I]``, gate and up column by column, and ``[E, I, D]``; vLLM stores both with outputs as rows."""
    part = _part(tensor, 2 if kind == "gate_up_proj" else 1, tp, rank)
    return [TargetSlice(part, _experts_name(tensor), _at(tensor), "transposed")]


def transposed_gate_up(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    """Shard ``[E, D, 2 I]``, gate before up, each by itself; vLLM stores outputs as rows."""
    half = tensor.shape[2] // 2
    for i in (0, 1):
        part = _part(tensor, 2, tp, rank, (i * half, (i + 1) * half))
        yield TargetSlice(part, _experts_name(tensor), _at(tensor, 1, i * half // tp), "transposed")


def transposed_experts_bias(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    """Place zeros on all ranks but the first for a bias of outputs, since the ranks' results are summed."""
    if kind == "gate_up_proj_bias":
        return [TargetSlice(_part(tensor, 1, tp, rank), _experts_name(tensor), _at(tensor))]
    return [TargetSlice(IndexRange.of(tensor.shape), _experts_name(tensor), _at(tensor), "zeros" if rank else "")]


# Of families that several servers shard in the same way

LATENT_ATTENTION = named_rules(
    (r"\.self_attn\.(q|q_b|kv_b)_proj\.weight", columns),
    (r"\.self_attn\.(q_a_proj|kv_a_proj_with_mqa)\.weight", compressions),
)
TRANSPOSED_EXPERTS = named_rules(
    (r"\.experts\.(gate_up_proj|down_proj)", transposed_experts),
    (r"\.experts\.(gate_up_proj_bias|down_proj_bias)", transposed_experts_bias),
    (r"\.self_attn\.(sinks)", columns),
)
