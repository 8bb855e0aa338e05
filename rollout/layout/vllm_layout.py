"""Where every element of a model is: on the trainer's ranks, and on the rollout's workers.

Arithmetic alone, without torch: a placement can be computed for any cluster, anywhere. The trainer's side follows from
the cuts of each parameter (``engine/topology/index_ranges.py``). The workers' side is how vLLM lays a model out under
tensor, expert and data parallelism:

* a column-parallel weight is cut along its outputs, a row-parallel one along its inputs, vocabularies along their rows,
  padded to a multiple of 64;
* attention is cut by heads; with more ranks than key-value heads, neighbours hold the same head;
* under tensor parallelism every expert is cut along its intermediate dim; under expert parallelism a worker holds whole
  experts, in linear order, the first ones one more where they do not divide;
* everything else is whole on each worker.

What a family has of its own is in one table; ``vllm/loader_trace.py`` is the other way to know all this, and the
measure of it.

Sources: vLLM ``model_executor/layers/linear.py``, ``vocab_parallel_embedding.py``, ``fused_moe/routed_experts.py``,
``fused_moe/expert_map_manager.py``.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol

from packaging.specifiers import SpecifierSet

from ...engine.compat import versions
from ...engine.topology.index_ranges import IndexRange, ShardStep, shard_range

__all__ = [
    "STREAMS",
    "VOCABULARY_MULTIPLE",
    "Heads",
    "Need",
    "Rollout",
    "Stream",
    "Tensor",
    "Topology",
    "holders",
    "is_numbered",
    "known_families",
    "needs",
]

Stream = Literal["full", "expert_local", "sliced"]
STREAMS: tuple[Stream, ...] = ("full", "expert_local", "sliced")
VOCABULARY_MULTIPLE = 64


@dataclass(frozen=True)
class Tensor:
    """A tensor as the trainer has it: fused experts are ``[E, 2 I, D]`` and ``[E, D, I]``.

    Args:
        itemsize: bytes of an element when it is sent.
        cuts: over the trainer's axes, outermost first.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    cuts: tuple[ShardStep, ...] = ()

    @property
    def nbytes(self) -> int:
        return IndexRange.of(self.shape).numel * self.itemsize


class Topology(Protocol):
    """What is asked of the trainer's arrangement; ``engine.topology.mesh.Topology`` is one."""

    @property
    def world(self) -> int: ...

    @property
    def dp_replicate(self) -> int: ...

    @property
    def fsdp(self) -> int: ...

    def coordinate(self, fsdp_rank: int) -> Mapping[str, int]: ...


@dataclass(frozen=True)
class Rollout:
    """How one replica of the rollout is parallel.

    Args:
        expert_parallel: vLLM's ``enable_expert_parallel``: experts are spread over all ``tp * dp`` workers.
    """

    tp: int = 1
    dp: int = 1
    expert_parallel: bool = False

    @property
    def workers(self) -> int:
        """Workers of a replica."""
        return self.tp * self.dp

    @property
    def keeps_all(self) -> bool:
        """Whether each worker keeps the whole model."""
        return self.tp == 1 and not self.expert_parallel


@dataclass(frozen=True)
class Heads:
    """Attention heads of a model, and of which family (``model_type``) it is, for what that has of its own."""

    queries: int
    keys: int
    dim: int
    family: str = ""

    @classmethod
    def of(cls, config: Any) -> "Heads":
        """From a Hugging Face text config."""
        queries = config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // queries
        return cls(queries, getattr(config, "num_key_value_heads", None) or queries, dim, config.model_type)


@dataclass(frozen=True)
class Need:
    """A box of a trainer's tensor, and where a worker puts it: from corner ``at`` of its parameter ``parameter``.

    Leading dims of size 1 that the parameter does not have are dropped: ``at`` is shorter then.
    """

    box: IndexRange
    parameter: str
    at: tuple[int, ...]

    @property
    def end(self) -> tuple[int, ...]:
        """The corner of the parameter opposite ``at``."""
        shape = self.box.shape[len(self.box.shape) - len(self.at) :]
        return tuple(low + size for low, size in zip(self.at, shape, strict=True))


def holders(tensor: Tensor, topology: Topology) -> dict[IndexRange, list[int]]:
    """Who holds what, within one replica of the trainer: box -> its ranks there. Boxes don't overlap."""
    held: dict[IndexRange, list[int]] = {}
    for rank in range(topology.fsdp):
        box = shard_range(tensor.shape, tensor.cuts, topology.coordinate(rank))
        if box.numel:
            held.setdefault(box, []).append(rank)
    return held


def needs(tensor: Tensor, rollout: Rollout, worker: int, heads: Heads, stream: Stream = "sliced") -> list[Need]:
    """What a worker takes of a tensor; boxes don't overlap, and none is empty.

    Args:
        worker: index in its replica.
        stream: ``sliced``, what the worker keeps; ``expert_local``, its experts whole and everything else whole;
            ``full``, everything.

    Raises:
        ValueError: if vLLM could not cut the tensor so either.
    """
    whole = [Need(IndexRange.of(tensor.shape), tensor.name, (0,) * len(tensor.shape))]
    is_experts = _EXPERTS.search(tensor.name) is not None
    if stream == "full" or (not is_experts and stream == "expert_local"):
        return whole
    family = _FAMILIES.get(heads.family, _Family())
    if is_experts and rollout.expert_parallel:
        return family.named(_whole_experts(tensor, rollout.workers, worker))
    if stream == "expert_local":
        return whole
    rank = worker % rollout.tp
    for pattern, rule in (*family.rules, *_RULES):
        found = pattern.search(tensor.name)
        if found:
            return family.named(rule(tensor, rollout.tp, rank, heads, found[1]))
    return family.named(whole)


def is_numbered(name: str) -> bool:
    """Whether a worker of vLLM knows which rows of a tensor it has: those of a vocabulary and of experts."""
    return (_EXPERTS.search(name) or _VOCABULARY.search(name)) is not None


def _whole_experts(tensor: Tensor, workers: int, worker: int) -> list[Need]:
    each, more = divmod(tensor.shape[0], workers)
    first = worker * each + min(worker, more)
    box = IndexRange.of(tensor.shape).with_dim(0, first, first + each + (worker < more))
    return [Need(box, _vllm_experts(tensor.name), (0,) * len(tensor.shape))]


def _vllm_experts(name: str) -> str:
    return name.replace("experts.gate_up_proj", "experts.w13_weight").replace("experts.down_proj", "experts.w2_weight")


def _part(tensor: Tensor, dim: int, tp: int, rank: int, within: tuple[int, int] | None = None) -> IndexRange:
    """The rank's part of ``[start, stop)`` along ``dim``, of all of it by default."""
    start, stop = within or (0, tensor.shape[dim])
    size, rest = divmod(stop - start, tp)
    if rest:
        raise ValueError(
            f"{tensor.name} has {stop - start} along dim {dim}, which tensor parallelism {tp} does not cut."
        )
    return IndexRange.of(tensor.shape).with_dim(dim, start + rank * size, start + (rank + 1) * size)


def _at(tensor: Tensor, dim: int = 0, offset: int = 0) -> tuple[int, ...]:
    return tuple(offset if d == dim else 0 for d in range(len(tensor.shape)))


def _experts_up(tensor: Tensor, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[Need]:
    half = tensor.shape[1] // 2
    gate = _part(tensor, 1, tp, rank, (0, half))
    up = _part(tensor, 1, tp, rank, (half, 2 * half))
    name = _vllm_experts(tensor.name)
    return Need(gate, name, _at(tensor)), Need(up, name, _at(tensor, 1, half // tp))


def _experts_down(tensor: Tensor, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[Need]:
    return [Need(_part(tensor, 2, tp, rank), _vllm_experts(tensor.name), _at(tensor))]


def _heads_of(tensor: Tensor, tp: int, rank: int, heads: Heads, kind: str) -> tuple[IndexRange, int]:
    """The rows of the rank's heads of this kind, and how many rows of other kinds are before them in a fused one."""

    def of(total: int) -> tuple[int, int]:
        """First head of this rank, and how many."""
        if total % tp and tp % total:
            raise ValueError(f"{tensor.name} has {total} heads, which tensor parallelism {tp} does not cut.")
        each = max(1, total // tp)
        return (rank * each if total >= tp else rank * total // tp), each

    counts = {"q": of(heads.queries), "k": of(heads.keys), "v": of(heads.keys)}
    before = {"q": 0, "k": counts["q"][1], "v": counts["q"][1] + counts["k"][1]}
    first, each = counts[kind]
    return IndexRange.of(tensor.shape).with_dim(0, first * heads.dim, (first + each) * heads.dim), before[
        kind
    ] * heads.dim


def _attention_in(tensor: Tensor, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[Need]:
    """Queries, keys and values lie one after the other in vLLM's fused parameter."""
    box, before = _heads_of(tensor, tp, rank, heads, kind)
    return [Need(box, tensor.name.replace(f"{kind}_proj", "qkv_proj"), _at(tensor, 0, before))]


def _attention_norm(tensor: Tensor, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[Need]:
    """A norm over the whole width of queries or keys, of which a rank has the part of its heads."""
    return [Need(_heads_of(tensor, tp, rank, heads, kind)[0], tensor.name, _at(tensor))]


def _gate_or_up(tensor: Tensor, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[Need]:
    name = tensor.name.replace(f"{kind}_proj", "gate_up_proj")
    offset = tensor.shape[0] // tp if kind == "up" else 0
    return [Need(_part(tensor, 0, tp, rank), name, _at(tensor, 0, offset))]


def _row_parallel(tensor: Tensor, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[Need]:
    return [Need(_part(tensor, 1, tp, rank), tensor.name, _at(tensor))]


def _vocabulary(tensor: Tensor, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[Need]:
    rows = tensor.shape[0]
    each = -(-rows // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE // tp
    box = IndexRange.of(tensor.shape).with_dim(0, min(rank * each, rows), min((rank + 1) * each, rows))
    return [Need(box, tensor.name, _at(tensor))]


def _without_first_dim(tensor: Tensor, tp: int, rank: int, heads: Heads, kind: str) -> Iterable[Need]:
    return [Need(IndexRange.of(tensor.shape), tensor.name, _at(tensor)[1:])]


_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
_VOCABULARY = re.compile(r"(?:^|\.)(embed_tokens|lm_head)\.weight$")
_Rule = Callable[[Tensor, int, int, Heads, str], Iterable[Need]]
_RULES: list[tuple[re.Pattern[str], _Rule]] = [
    (re.compile(r"\.experts\.(gate_up_proj)$"), _experts_up),
    (re.compile(r"\.experts\.(down_proj)$"), _experts_down),
    (re.compile(r"\.self_attn\.(q|k|v)_proj\.(?:weight|bias)$"), _attention_in),
    (re.compile(r"\.(gate|up)_proj\.(?:weight|bias)$"), _gate_or_up),
    (re.compile(r"\.(o|down)_proj\.weight$"), _row_parallel),
    (_VOCABULARY, _vocabulary),
]


@dataclass(frozen=True)
class _Family:
    """What a family has of its own in vLLM.

    Args:
        renamed: parts of names that are others there.
        rules: that come before the common ones.
    """

    renamed: tuple[tuple[str, str], ...] = ()
    rules: tuple[tuple[re.Pattern[str], _Rule], ...] = ()

    def named(self, needs: Iterable[Need]) -> list[Need]:
        """Those that are not empty, under vLLM's names."""
        found = []
        for need in needs:
            parameter = need.parameter
            for own, theirs in self.renamed:
                parameter = parameter.replace(own, theirs)
            if need.box.numel:
                found.append(Need(need.box, parameter, need.at))
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
# Releases of vLLM with the layout of a family, where not all have it. vLLM has no model of its own for these any more,
# since 0.23 and 0.29: it runs transformers' model, whose gate and up of shared experts it joins since 0.27.
_RELEASES = {"dots1": SpecifierSet(">=0.27"), "hunyuan_v1_moe": SpecifierSet("<0.29")}


@cache
def known_families() -> frozenset[str]:
    """Families (``model_type``) whose layout in the installed vLLM these rules describe.

    Tests compare it with what vLLM's own loaders do. Another machine's vLLM is taken for a new one.
    """
    version = versions.installed("vllm")
    return frozenset(f for f in _FAMILIES if version is None or f not in _RELEASES or version in _RELEASES[f])
