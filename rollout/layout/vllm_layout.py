"""Computes which elements of a model each trainer rank holds and which each vLLM worker keeps.

This module is arithmetic without torch, so a layout can be computed for any cluster on any machine. The trainer's side
follows from how each parameter is sharded (``engine/topology/index_ranges.py``). The workers' side follows how vLLM
shards a model under tensor, expert and data parallelism:

* a column-parallel weight is sharded along its outputs, a row-parallel one along its inputs, a vocabulary along its
  rows, padded to a multiple of 64;
* attention is sharded by heads; with more ranks than key-value heads, neighbouring ranks hold the same head;
* under tensor parallelism every expert is sharded along its intermediate dim; under expert parallelism a worker keeps
  whole experts in linear order, and the first workers keep one more where the number does not divide;
* everything else is replicated on each worker.

Differences between families stand in one table (``_FAMILIES``). Tests compare the result with the layout
that they trace from vLLM's own loaders (``tests/support/loader_trace.py``).

Sources: vLLM ``model_executor/layers/linear.py``, ``vocab_parallel_embedding.py``, ``fused_moe/routed_experts.py``,
``fused_moe/expert_map_manager.py``.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol

from ...engine.compat import versions
from ...engine.topology.index_ranges import IndexRange, ShardStep, shard_range

__all__ = [
    "SYNC_MODES",
    "Heads",
    "TargetSlice",
    "Rollout",
    "SyncMode",
    "TensorSpec",
    "TrainerTopology",
    "holders",
    "has_known_rows",
    "known_families",
    "padded_vocabulary",
    "target_slices",
]

SyncMode = Literal["full", "expert_local", "sliced"]
SYNC_MODES: tuple[SyncMode, ...] = ("full", "expert_local", "sliced")


@dataclass(frozen=True)
class TensorSpec:
    """Name, global shape and sharding of a trainer tensor; fused experts are ``[E, 2 I, D]`` and ``[E, D, I]``.

    Args:
        itemsize: bytes per element in the dtype in which it is sent.
        cuts: sharding steps over the trainer's mesh axes, outermost first.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    cuts: tuple[ShardStep, ...] = ()

    @property
    def nbytes(self) -> int:
        return IndexRange.of(self.shape).numel * self.itemsize


class TrainerTopology(Protocol):
    """The part of ``engine.topology.mesh.Topology`` that planning a transfer uses."""

    @property
    def world(self) -> int: ...

    @property
    def dp_replicate(self) -> int: ...

    @property
    def fsdp(self) -> int: ...

    def coordinate(self, fsdp_rank: int) -> Mapping[str, int]: ...


@dataclass(frozen=True)
class Rollout:
    """The parallel sizes of one rollout replica.

    Args:
        expert_parallel: vLLM's ``enable_expert_parallel``, which spreads experts over all ``tp * dp`` workers.
    """

    tp: int = 1
    dp: int = 1
    expert_parallel: bool = False

    @property
    def workers(self) -> int:
        """Number of workers in a replica."""
        return self.tp * self.dp

    @property
    def keeps_all(self) -> bool:
        """Whether each worker keeps the whole model."""
        return self.tp == 1 and not self.expert_parallel


@dataclass(frozen=True)
class Heads:
    """Attention head counts and head dim of a model, and its family (``model_type``), which may have its own rules."""

    queries: int
    keys: int
    dim: int
    family: str = ""

    @classmethod
    def of(cls, config: Any) -> "Heads":
        """Read them from a Hugging Face text config."""
        queries = config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // queries
        return cls(queries, getattr(config, "num_key_value_heads", None) or queries, dim, config.model_type)


@dataclass(frozen=True)
class TargetSlice:
    """A block of a trainer tensor and its position in a worker's parameter, whose index ``at`` is the block's corner.

    ``at`` is shorter than the block's shape where the parameter lacks leading dims of size 1.
    """

    block: IndexRange
    parameter: str
    at: tuple[int, ...]

    @property
    def end(self) -> tuple[int, ...]:
        """The position in the parameter where the block ends, exclusive in each dim."""
        shape = self.block.shape[len(self.block.shape) - len(self.at) :]
        return tuple(low + size for low, size in zip(self.at, shape, strict=True))


def holders(tensor: TensorSpec, topology: TrainerTopology) -> dict[IndexRange, list[int]]:
    """Map each shard of a tensor to the ranks of one trainer replica that hold it; shards do not overlap."""
    held: dict[IndexRange, list[int]] = {}
    for rank in range(topology.fsdp):
        block = shard_range(tensor.shape, tensor.cuts, topology.coordinate(rank))
        if block.numel:
            held.setdefault(block, []).append(rank)
    return held


def target_slices(
    tensor: TensorSpec, rollout: Rollout, worker: int, heads: Heads, mode: SyncMode = "sliced"
) -> list[TargetSlice]:
    """Return the blocks of a tensor that a worker receives; they do not overlap and none is empty.

    Args:
        worker: index in its replica.
        mode: ``sliced`` sends what the worker keeps; ``expert_local`` sends its experts and all other tensors unsliced;
            ``full`` sends everything.

    Raises:
        ValueError: vLLM could not shard the tensor by this tensor-parallel size either.
    """
    whole = [TargetSlice(IndexRange.of(tensor.shape), tensor.name, (0,) * len(tensor.shape))]
    is_experts = _EXPERTS.search(tensor.name) is not None
    if mode == "full" or (not is_experts and mode == "expert_local"):
        return whole
    family = _FAMILIES.get(heads.family, _Family())
    if is_experts and rollout.expert_parallel:
        return family.renamed_slices(_own_experts(tensor, rollout.workers, worker))
    if mode == "expert_local":
        return whole
    rank = worker % rollout.tp
    for pattern, rule in (*family.rules, *_RULES):
        found = pattern.search(tensor.name)
        if found:
            return family.renamed_slices(rule(tensor, rollout.tp, rank, heads, found[1]))
    return family.renamed_slices(whole)


def padded_vocabulary(rows: int) -> int:
    """Return the rows of a vocabulary in vLLM, which pads it (``DEFAULT_VOCAB_PADDING_SIZE``)."""
    return -(-rows // 64) * 64


def has_known_rows(name: str) -> bool:
    """Tell whether a vLLM worker records which rows of this tensor it holds: those of vocabularies and experts."""
    return (_EXPERTS.search(name) or _VOCABULARY.search(name)) is not None


def _own_experts(tensor: TensorSpec, workers: int, worker: int) -> list[TargetSlice]:
    each, more = divmod(tensor.shape[0], workers)
    first = worker * each + min(worker, more)
    block = IndexRange.of(tensor.shape).with_dim(0, first, first + each + (worker < more))
    return [TargetSlice(block, _vllm_experts(tensor.name), (0,) * len(tensor.shape))]


def _vllm_experts(name: str) -> str:
    return name.replace("experts.gate_up_proj", "experts.w13_weight").replace("experts.down_proj", "experts.w2_weight")


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


def _gate_up_experts(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    half = tensor.shape[1] // 2
    gate = _part(tensor, 1, tp, rank, (0, half))
    up = _part(tensor, 1, tp, rank, (half, 2 * half))
    name = _vllm_experts(tensor.name)
    return TargetSlice(gate, name, _at(tensor)), TargetSlice(up, name, _at(tensor, 1, half // tp))


def _down_experts(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    return [TargetSlice(_part(tensor, 2, tp, rank), _vllm_experts(tensor.name), _at(tensor))]


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
    return IndexRange.of(tensor.shape).with_dim(0, first * heads.dim, (first + each) * heads.dim), before[
        kind
    ] * heads.dim


def _qkv_projection(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    """vLLM's fused parameter holds queries, keys and values one after the other."""
    block, before = _heads_of(tensor, tp, rank, heads, kind)
    return [TargetSlice(block, tensor.name.replace(f"{kind}_proj", "qkv_proj"), _at(tensor, 0, before))]


def _attention_norm(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    """A norm over the full width of queries or keys is sharded by heads."""
    return [TargetSlice(_heads_of(tensor, tp, rank, heads, kind)[0], tensor.name, _at(tensor))]


def _gate_or_up(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    name = tensor.name.replace(f"{kind}_proj", "gate_up_proj")
    offset = tensor.shape[0] // tp if kind == "up" else 0
    return [TargetSlice(_part(tensor, 0, tp, rank), name, _at(tensor, 0, offset))]


def _row_parallel(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    return [TargetSlice(_part(tensor, 1, tp, rank), tensor.name, _at(tensor))]


def _vocabulary(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    rows = tensor.shape[0]
    each = padded_vocabulary(rows) // tp
    block = IndexRange.of(tensor.shape).with_dim(0, min(rank * each, rows), min((rank + 1) * each, rows))
    return [TargetSlice(block, tensor.name, _at(tensor))]


def _without_first_dim(tensor: TensorSpec, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[TargetSlice]:
    return [TargetSlice(IndexRange.of(tensor.shape), tensor.name, _at(tensor)[1:])]


_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
_VOCABULARY = re.compile(r"(?:^|\.)(embed_tokens|lm_head)\.weight$")
_Rule = Callable[[TensorSpec, int, int, Heads, str], Iterable[TargetSlice]]
_RULES: list[tuple[re.Pattern[str], _Rule]] = [
    (re.compile(r"\.experts\.(gate_up_proj)$"), _gate_up_experts),
    (re.compile(r"\.experts\.(down_proj)$"), _down_experts),
    (re.compile(r"\.self_attn\.(q|k|v)_proj\.(?:weight|bias)$"), _qkv_projection),
    (re.compile(r"\.(gate|up)_proj\.(?:weight|bias)$"), _gate_or_up),
    (re.compile(r"\.(o|down)_proj\.weight$"), _row_parallel),
    (_VOCABULARY, _vocabulary),
]


@dataclass(frozen=True)
class _Family:
    """How vLLM's layout of a family differs from the common rules.

    Args:
        renamed: pairs of the trainer's and vLLM's substring of a parameter name.
        rules: rules that take precedence over the common ones.
    """

    renamed: tuple[tuple[str, str], ...] = ()
    rules: tuple[tuple[re.Pattern[str], _Rule], ...] = ()

    def renamed_slices(self, slices: Iterable[TargetSlice]) -> list[TargetSlice]:
        """Drop empty slices and rename the others to vLLM's parameter names."""
        found = []
        for part in slices:
            parameter = part.parameter
            for own, theirs in self.renamed:
                parameter = parameter.replace(own, theirs)
            if part.block.numel:
                found.append(TargetSlice(part.block, parameter, part.at))
        return found


_FAMILIES = {
    **dict.fromkeys(("dots1", "glm4_moe", "olmoe", "qwen2_moe", "qwen3_moe"), _Family()),
    **dict.fromkeys(("llama", "qwen3"), _Family()),  # dense
    "ernie4_5_moe": _Family(
        ((".gate.moe_statics.", ".gate."),),
        ((re.compile(r"\.moe_statics\.(e_score_correction_bias)$"), _without_first_dim),),
    ),
    "hunyuan_v1_moe": _Family(((".mlp.gate.wg.", ".mlp.gate."),)),
    "minimax_m2": _Family(
        ((".mlp.", ".block_sparse_moe."),),
        ((re.compile(r"\.self_attn\.(q|k)_norm\.weight$"), _attention_norm),),
    ),
    "mixtral": _Family(((".mlp.", ".block_sparse_moe."),)),
}
# The vLLM releases that have the layout above, for families where not all do. vLLM dropped its own models of these two
# in 0.23 and 0.29 and runs transformers' instead, whose shared experts' gate and up it fuses since 0.27.
_RELEASES = {"dots1": ">=0.27", "hunyuan_v1_moe": "<0.29"}


@cache
def known_families() -> frozenset[str]:
    """Return the families (``model_type``) whose layout in the installed vLLM these rules describe.

    Tests compare it with what vLLM's own loaders do.
    """
    return frozenset(f for f in _FAMILIES if f not in _RELEASES or versions.vllm_in(_RELEASES[f]))
