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

The rules are in ``rules.py``; which of them a family has, and its names, stand in one table (``_FAMILIES``). Tests
compare the result with the layout that they trace from vLLM's own loaders (``tests/support/rollout/loader_trace.py``).
"""

import re
from collections.abc import Iterable
from functools import cache
from typing import Literal

from ...engine.compat import versions
from ...engine.topology.index_ranges import IndexRange, shard_ranges
from . import rules, sglang_layout
from .rules import Family, NamedRules, named_rules, padded_vocabulary
from .specs import Heads, Rollout, TargetSlice, TensorSpec, TrainerTopology

__all__ = [
    "FP8_FAMILIES",
    "NOT_SPREAD_IN_VLLM",
    "SYNC_MODES",
    "Heads",
    "TargetSlice",
    "Rollout",
    "SyncMode",
    "TensorSpec",
    "TrainerTopology",
    "holders",
    "has_known_rows",
    "is_experts",
    "is_quantised",
    "known_families",
    "loads_own_experts",
    "padded_vocabulary",
    "scale_slices",
    "slices_of_scales",
    "target_slices",
]

SyncMode = Literal["full", "expert_local", "sliced"]
SYNC_MODES: tuple[SyncMode, ...] = ("full", "expert_local", "sliced")


def holders(tensor: TensorSpec, topology: TrainerTopology) -> dict[IndexRange, list[int]]:
    """Map each range that a rank holds of a tensor to the ranks of one trainer replica that hold it; none overlap."""
    held: dict[IndexRange, list[int]] = {}
    for rank in range(topology.fsdp):
        for block in shard_ranges(tensor.shape, tensor.cuts, topology.coordinate(rank)):
            if block.numel:
                held.setdefault(block, []).append(rank)
    return held


def target_slices(
    tensor: TensorSpec, rollout: Rollout, worker: int, heads: Heads, mode: SyncMode = "sliced"
) -> list[TargetSlice]:
    """Return the blocks of a tensor that a worker receives; none is empty, and two are the same or do not overlap.

    Args:
        worker: index in its replica.
        mode: ``sliced`` sends what the worker keeps; ``expert_local`` sends its experts and all other tensors unsliced;
            ``full`` sends everything.

    Raises:
        ValueError: vLLM could not shard the tensor by this tensor-parallel size either.
    """
    whole = [TargetSlice(IndexRange.of(tensor.shape), tensor.name, (0,) * len(tensor.shape))]
    of_experts = is_experts(tensor.name)
    if mode == "full" or (not of_experts and mode == "expert_local"):
        return whole
    families = sglang_layout.FAMILIES if rollout.server == "sglang" else _families()
    family = families.get(heads.family, Family())
    in_tower = tensor.name.startswith(_TOWER)
    if in_tower and rollout.tower == "none":
        return []
    if of_experts and rollout.expert_parallel:
        return family.renamed_slices(rules.own_experts(tensor, rollout.workers, worker, family.is_transposed))
    if mode == "expert_local":
        return whole
    # vLLM cuts experts over data-parallel workers too (``FusedMoEParallelConfig.flatten_tp_across_dp_and_pcp``).
    size, rank = (rollout.workers, worker) if of_experts else (rollout.tp, worker % rollout.tp)
    if in_tower and rollout.tower == "whole" and not tensor.name.startswith("multi_modal_projector."):  # Llama 4's
        size, rank = 1, 0
    for pattern, rule in (*family.rules, *_RULES):
        found = pattern.search(tensor.name)
        if found:
            return family.renamed_slices(rule(tensor, size, rank, heads.of_layer(tensor.name), found[1]))
    return family.renamed_slices(whole)


def is_quantised(family: str, name: str) -> bool:
    """Tell whether vLLM holds this weight of ``FP8_FAMILIES`` in FP8 or INT8 where it is asked to: experts, linears."""
    return family in FP8_FAMILIES and FP8_FAMILIES[family].search(name) is not None


def is_experts(name: str) -> bool:
    """Tell whether this is a stack of experts' weights."""
    return _EXPERTS.search(name) is not None


def scale_slices(tensor: TensorSpec, slices: Iterable[TargetSlice], block: int) -> list[TargetSlice]:
    """Return where the scales of a weight's slices go; their blocks are of the tensor of all scales of the weight.

    Raises:
        ValueError: a slice begins or ends inside of a block, whose scale vLLM could not place either.
    """
    found = []
    for part in slices:
        low, high = part.block.low[-2:], part.block.high[-2:]
        ends = zip(high, tensor.shape[-2:], strict=True)
        if any(i % block for i in (*low, *part.at[-2:])) or any(i % block and i != size for i, size in ends):
            raise ValueError(
                f"{part.parameter} holds {tensor.name} {list(low)} to {list(high)} at {list(part.at[-2:])}, and blocks "
                f"of {block} x {block} share a scale."
            )
        low, high = (tuple(-(-i // block) for i in corner) for corner in (low, high))
        at = (*part.at[:-2], *(i // block for i in part.at[-2:]))
        scales = IndexRange((*part.block.low[:-2], *low), (*part.block.high[:-2], *high))
        found.append(TargetSlice(scales, f"{part.parameter}_scale_inv", at))
    return found


def channel_slices(slices: Iterable[TargetSlice]) -> list[TargetSlice]:
    """Return where the scales of the rows of a weight's slices go; their blocks are of the tensor of all its scales."""
    found = []
    for part in slices:
        scales = IndexRange((*part.block.low[:-1], 0), (*part.block.high[:-1], 1))
        found.append(TargetSlice(scales, f"{part.parameter}_scale", (*part.at[:-1], 0)))
    return found


def slices_of_scales(
    tensor: TensorSpec, slices: Iterable[TargetSlice], rollout: Rollout, family: str
) -> list[TargetSlice]:
    """Return where the scales of a weight's slices go in a worker; none where its values have none.

    Raises:
        ValueError: a slice begins or ends inside of a block (``scale_slices``).
    """
    if not rollout.is_quantised or not is_quantised(family, tensor.name):
        return []
    return scale_slices(tensor, slices, rollout.block) if rollout.block else channel_slices(slices)


def has_known_rows(name: str) -> bool:
    """Tell whether a vLLM worker records which rows of this tensor it holds: those of vocabularies and experts."""
    return is_experts(name) or _VOCABULARY.search(name) is not None


def loads_own_experts(family: str) -> bool:
    """Tell whether the loaders of a family take experts one by one, so that a worker can be sent its own alone."""
    return not _FAMILIES[family].is_stacked


_EXPERTS = re.compile(r"\.experts\.(?:gate_up|up|down)_proj(?:_bias)?$")
_TOWER = ("model.visual.", "model.vision_tower.", "model.embed_vision.", "vision_model.", "multi_modal_projector.")
_VOCABULARY = re.compile(r"(?:^|\.)(embed_tokens|wte|lm_head|(?<=^model\.)embeddings)\.(?:weight|bias)$")
_RULES: NamedRules = (
    *named_rules(
        (r"\.experts\.(gate_up_proj)", rules.gate_up_experts),
        (r"\.experts\.(up_proj)", rules.up_experts),
        (r"\.experts\.(down_proj)", rules.down_experts),
        (r"\.self_attn\.(q|k|v)_proj\.(?:weight|bias)", rules.qkv_projection),
        (r"\.(gate|up)_proj\.(?:weight|bias)", rules.gate_or_up),
        (r"\.(o|down)_proj\.weight", rules.row_parallel),
    ),
    (_VOCABULARY, rules.vocabulary),
)


_LINEAR_ATTENTION = named_rules(
    (r"\.linear_attn\.(conv1d)\.weight", rules.linear_qkv),
    (r"\.linear_attn\.(A_log|dt_bias|in_proj_qkvz\.weight|in_proj_ba\.weight)", rules.columns),
    (r"\.linear_attn\.(out)_proj\.weight", rules.row_parallel),
    (r"\.linear_attn\.(in_proj_qkv)\.weight", rules.linear_qkv),
    (r"\.linear_attn\.(in_proj_z)\.weight", rules.linear_output_gate),
    (r"\.linear_attn\.in_proj_(b|a)\.weight", rules.linear_gate_or_decay),
)
# A language model beside a vision tower, whose linears are sharded by the same size.
_BESIDE_A_TOWER = (
    *((name, name.removeprefix("model.")) for name in _TOWER if name.startswith("model.")),
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
)
_QWEN_TOWER = named_rules(
    (r"\.visual\..*\.attn\.(qkv)\.(?:weight|bias)", rules.stacked_thirds),
    (r"\.visual\..*\.linear_(fc1)\.(?:weight|bias)", rules.columns),
    (r"\.visual\..*\.(?:attn\.proj|linear_(fc2))\.weight", rules.row_parallel),
)
_GEMMA_EXPERTS = ((".experts.", ".moe.experts."), (".router.per_expert_scale", ".moe.per_expert_scale"))
_GLM_TOWER = (*_QWEN_TOWER, *named_rules((r"\.visual\.merger\.(proj)\.weight", rules.columns)))
_MAMBA2 = named_rules(
    (r"\.(?:mamba|mixer)\.(conv1d|in_proj)\.(?:weight|bias)", rules.state_columns),
    (r"\.(?:mamba|mixer)\.(dt_bias|D|norm\.weight)", rules.columns),
    (r"\.(?:mamba|mixer)\.(A_log)", rules.decay),
    (r"\.(?:mamba|mixer)\.(out)_proj\.weight", rules.row_parallel),
)
_GRANITE = Family(
    ((".router.layer.", ".gate."),),
    (
        *named_rules(
            (r"\.shared_mlp\.(input)_linear\.weight", rules.stacked_halves),
            (r"\.shared_mlp\.(output)_linear\.weight", rules.row_parallel),
        ),
        *_MAMBA2,
    ),
    is_stacked=True,
)
_LLAMA4 = named_rules(
    (r"^vision_model\..*\.self_attn\.(q|k|v)_proj\.(?:weight|bias)", rules.as_many_heads),
    (r"^vision_model\..*(fc1\.weight|fc1\.bias|patch_embedding\.linear\.weight)", rules.columns),
    (r"^vision_model\..*\.(fc2)\.weight", rules.row_parallel),
    (r"^multi_modal_projector\.(linear_1)\.weight", rules.columns),
    (r"\.self_attn\.(q|k)_proj\.weight", rules.halved_heads),
    (r"\.experts\.(gate_up_proj)", rules.transposed_gate_up),
    (r"\.experts\.(down_proj)", rules.transposed_experts),
)
_FAMILIES = {
    **dict.fromkeys(("dots1", "flex_olmo", "glm4_moe", "olmoe", "qwen2_moe", "qwen3_moe"), Family()),
    **dict.fromkeys(("cohere2_moe", "solar_open"), Family()),
    **dict.fromkeys(("gemma3_text", "llama", "mistral", "qwen2", "qwen3"), Family()),  # dense
    "dbrx": Family(
        rules=named_rules(
            (r"\.attn\.(Wqkv)\.weight", rules.fused_qkv),
            (r"\.attn\.(out)_proj\.weight", rules.row_parallel),
        ),
        is_stacked=True,
    ),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), Family(rules=rules.LATENT_ATTENTION)),
    "afmoe": Family(((".router.gate.", ".gate."),), named_rules((r"\.self_attn\.(gate)_proj\.weight", rules.columns))),
    "ernie4_5_moe": Family(
        ((".gate.moe_statics.", ".gate."),),
        named_rules((r"\.moe_statics\.(e_score_correction_bias)", rules.without_first_dim)),
    ),
    "exaone_moe": Family(((".gate.e_score_correction_bias", ".e_score_correction_bias"),)),
    "gemma4": Family(
        (*_BESIDE_A_TOWER, *_GEMMA_EXPERTS),
        named_rules((r"\.(vision_tower|embed_vision)\..*", rules.replicated)),  # transformers' own module
        is_stacked=True,
    ),
    "gemma4_text": Family(_GEMMA_EXPERTS, is_stacked=True),
    "glm4v_moe": Family(_BESIDE_A_TOWER, _GLM_TOWER),
    "glm_moe_dsa": Family(
        rules=(
            *rules.LATENT_ATTENTION,
            *named_rules((r"\.self_attn\.indexer\.(wk|weights_proj)\.weight", rules.indexer)),
        )
    ),
    "gpt_oss": Family(
        ((".self_attn.", ".attn."), ("model.embed_tokens.", "model.embedding.")),
        rules.TRANSPOSED_EXPERTS,
        is_stacked=True,
        is_transposed=True,
    ),
    **dict.fromkeys(("granitemoe", "granitemoehybrid", "granitemoeshared"), _GRANITE),
    "hy_v3": Family(((".shared_experts.", ".shared_mlp."), (".e_score_correction_bias", ".expert_bias"))),
    "hunyuan_v1_moe": Family(((".mlp.gate.wg.", ".mlp.gate."),)),
    "jamba": Family(
        ((".self_attn.", "."),),
        named_rules(
            (r"\.mamba\.(in_proj)\.(?:weight|bias)", rules.stacked_halves),
            (r"\.mamba\.(conv1d\.weight|conv1d\.bias|dt_proj\.weight|dt_proj\.bias|D)", rules.columns),
            (r"\.mamba\.(A_log)", rules.decay),
            (r"\.mamba\.(x|out)_proj\.weight", rules.row_parallel),
        ),
    ),
    "laguna": Family(
        ((".mlp.gate.e_score", ".mlp.experts.e_score"), (".shared_experts.", ".shared_expert.")),
        named_rules(
            (r"\.self_attn\.(g)_proj\.weight", rules.columns),
            (r"\.(?:mlp|shared_experts)\.(gate|up)_proj\.weight", rules.columns),
        ),
    ),
    "lfm2_moe": Family(
        ((".conv.", ".short_conv."), (".expert_bias", ".gate.e_score_correction_bias")),
        named_rules(
            (r"\.conv\.(conv)\.(?:weight|bias)", rules.columns),
            (r"\.conv\.(in_proj)\.(?:weight|bias)", rules.stacked_thirds),
            (r"\.feed_forward\.(w1|w3)\.weight", rules.gate_or_up),
            (r"\.(out_proj|feed_forward\.w2)\.weight", rules.row_parallel),
        ),
    ),
    **dict.fromkeys(("llama4", "llama4_text"), Family(rules=_LLAMA4, is_stacked=True, is_transposed=True)),
    "minimax_m2": Family(
        ((".mlp.", ".block_sparse_moe."),),
        named_rules((r"\.self_attn\.(q|k)_norm\.weight", rules.attention_norm)),
    ),
    "mixtral": Family(((".mlp.", ".block_sparse_moe."),)),
    "nemotron_h": Family(
        (("model.embeddings.", "model.embed_tokens."),),
        (
            *named_rules(
                (r"\.mixer\.(q|k|v)_proj\.weight", rules.qkv_projection),
                (r"\.mixer\.(up_proj|shared_experts\.up_proj)\.(?:weight|bias)", rules.columns),
            ),
            *_MAMBA2,
        ),
    ),
    "phimoe": Family(((".mlp.router.", ".block_sparse_moe.gate."), (".mlp.", ".block_sparse_moe."))),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_next"), Family(rules=_LINEAR_ATTENTION)),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), Family(_BESIDE_A_TOWER, _QWEN_TOWER, is_stacked=True)),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), Family(_BESIDE_A_TOWER, (*_QWEN_TOWER, *_LINEAR_ATTENTION))),
}
# vLLM before 0.27 runs these by transformers' code and fuses nothing of it. Of K-EXAONE and Solar Open it keeps shared
# experts whole, which transformers' plan of tensor parallelism does not name.
_APART = named_rules(
    (r"\.self_attn\.(q|k|v)_proj\.(?:weight|bias)", rules.columns),
    (r"\.(gate|up)_proj\.weight", rules.columns),
)
_WHOLE_SHARED = named_rules((r"\.(shared_experts)\..*", rules.replicated))
_BEFORE_0_27 = {
    "dots1": Family(rules=_APART),
    **dict.fromkeys(("exaone_moe", "solar_open"), Family(rules=(*_WHOLE_SHARED, *_APART))),
}
NOT_SPREAD_IN_VLLM = frozenset({"dbrx"})
"""Families whose loader in vLLM puts all experts into each worker, so that expert parallelism can't be."""


def _quantised(*also: str, but: str = "") -> re.Pattern[str]:
    """Match the experts and linears of a layer, with names that few families have, ``but`` for some of them."""
    names = "|".join((r"experts\.(?:gate_up|down)_proj", r"\w+_proj(?:_with_mqa)?\.weight", *also))
    apart = f"(?!.*{but})" if but else ""
    return re.compile(rf"\.layers\.\d+\.{apart}(?:.*\.)?(?:{names})$")


_PLAIN_FP8 = (
    *("afmoe", "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe", "gemma3_text"),
    *("gemma4_text", "glm4_moe", "glm4_moe_lite", "hunyuan_v1_moe", "hy_v3", "laguna", "llama", "minimax_m2"),
    *("mistral", "mixtral", "olmoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "solar_open"),
)
_GRANITE_FP8 = _quantised(r"(?:input|output)_linear\.weight")
# The weights that vLLM quantises, of families in which they were compared. Left out: those whose experts it holds
# transposed (gpt_oss, llama4), those with a vision tower, nemotron_h, whose experts the CPU build lacks, those whose
# router verl has it quantise (lfm2_moe, phimoe), and dbrx, whose experts are quantised in one kind and not in another.
# The names that a worker has are compared before the first sync.
FP8_FAMILIES: dict[str, re.Pattern[str]] = {
    **dict.fromkeys(_PLAIN_FP8, _quantised()),
    "flex_olmo": _quantised(but=r"experts\."),
    "glm_moe_dsa": _quantised(r"indexer\.wq_b\.weight", but=r"indexer\.weights_proj"),
    **dict.fromkeys(("granitemoe", "granitemoehybrid", "granitemoeshared"), _GRANITE_FP8),
    "jamba": _quantised(but=r"mamba\."),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_next"), _quantised(r"linear_attn\.in_proj_\w+\.weight")),
}
# The vLLM releases that have the layout above, for families where not all do. vLLM 0.29 dropped its own model of
# hunyuan_v1_moe and runs transformers' instead. vLLM 0.24 can load neither a gpt_oss that is not quantised, nor
# granitemoeshared, nor Laguna's correction bias, nor a Qwen3.5 without its vision tower, and its CPU build can't run
# one with it. The CPU build of 0.29 has no experts without a gate (nemotron_h).
_SINCE_0_27 = ("gpt_oss", "granitemoeshared", "laguna", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text")
_RELEASES = {
    "hunyuan_v1_moe": "<0.29",
    "nemotron_h": "<0.28",
    **dict.fromkeys(_SINCE_0_27, ">=0.27"),
}


@cache
def _families() -> dict[str, Family]:
    return _FAMILIES if versions.vllm_in(">=0.27") else _FAMILIES | _BEFORE_0_27


@cache
def known_families() -> frozenset[str]:
    """Return the families (``model_type``) whose layout in the installed vLLM these rules describe.

    Tests compare it with what vLLM's own loaders do.
    """
    return frozenset(f for f in _FAMILIES if f not in _RELEASES or versions.vllm_in(_RELEASES[f]))
