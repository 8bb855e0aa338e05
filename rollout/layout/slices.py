"""The elements of a model that each worker of a rollout keeps, by the sharding rules of servers:

* a column-parallel weight along its outputs, a row-parallel one along its inputs, a padded vocabulary along its rows;
* attention by heads; with more ranks than key-value heads, neighbouring ranks hold the same head;
* under tensor parallelism every expert along its intermediate dim;
* under expert parallelism whole experts in linear order; of a remainder the first workers keep one more each;
* everything else is replicated.

Tests compare the result with layouts traced from the servers' own loaders.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ...engine.quantise.schemes import scheme_of
from . import rules
from .rules import Family, NamedRules, named_rules
from .specs import Heads, Rollout, TargetSlice, TensorSpec

__all__ = ["TOWER", "has_known_rows", "is_experts", "kept_slices", "scale_slices"]

TOWER = ("model.visual.", "model.vision_tower.", "model.embed_vision.", "vision_model.", "multi_modal_projector.")
_EXPERTS = re.compile(r"\.experts\.(?:gate_up|up|down)_proj(?:_bias)?$")
_VOCABULARY = re.compile(r"(?:^|\.)(embed_tokens|wte|lm_head|(?<=^model\.)embeddings)\.(?:weight|bias)$")
# A module of an MTP layer's decoder layer, which is a child of the layer in vLLM.
_DECODER = re.compile(r"(\.layers\.\d+)\.(?!(?:enorm|hnorm|eh_proj|shared_head|final_layernorm)\.)")
_RULES: NamedRules = (
    *named_rules(
        (r"\.experts\.(gate_up_proj)", rules.cut(1, parts=2)),
        (r"\.experts\.(up_proj)", rules.cut(1)),  # of experts that have no gate
        (r"\.experts\.(down_proj)", rules.cut(2)),
        (r"\.(?:self_attn|mixer)\.(q|k|v)_proj\.(?:weight|bias)", rules.qkv_projection),
        (r"\.(gate|up)_proj\.(?:weight|bias)", rules.gate_or_up),
        (r"^mtp\.(fc|layers\.0\.eh_proj)\.weight", rules.columns),
        (r"\.(o|out|down)_proj\.weight", rules.row_parallel),
    ),
    (_VOCABULARY, rules.vocabulary),
)


def kept_slices(
    tensor: TensorSpec, families: Mapping[str, Family], rollout: Rollout, worker: int, heads: Heads
) -> list[TargetSlice]:
    """Return the blocks of a tensor that a worker keeps: none is empty, and any two are equal or disjoint.

    Raises ``ValueError`` if this tensor-parallel size does not divide the tensor. ``families`` are the server's,
    ``worker`` is an index in a replica.
    """
    if rollout.tower == "none" and tensor.name.startswith(TOWER):
        return []
    family = families.get(heads.family, Family())
    found = _slices(tensor, family, rollout, worker, heads)
    return [replace(part, parameter=_renamed(part.parameter, family, heads)) for part in found if part.block.numel]


def _slices(tensor: TensorSpec, family: Family, rollout: Rollout, worker: int, heads: Heads) -> Iterable[TargetSlice]:
    of_experts = is_experts(tensor.name)
    if of_experts and rollout.expert_parallel:
        return rules.own_experts(tensor, rollout.workers, worker, family.is_transposed)
    # Data-parallel workers shard experts too (vLLM's ``FusedMoEParallelConfig.flatten_tp_across_dp_and_pcp``).
    size, rank = (rollout.workers, worker) if of_experts else (rollout.tp, worker % rollout.tp)
    if rollout.tower == "whole" and tensor.name.startswith(TOWER[:-1]):  # all but Llama 4's projector
        size, rank = 1, 0
    for pattern, rule in (*family.rules, *_RULES):
        if found := pattern.search(tensor.name):
            return rule(tensor, size, rank, heads.of_layer(tensor.name), found[1])
    return [rules.whole_slice(tensor)]


def _renamed(parameter: str, family: Family, heads: Heads) -> str:
    if is_experts(parameter):
        module, _, own = parameter.rpartition(".")
        kind = "bias" if own.endswith("bias") else "weight"
        parameter = f"{module}.w2_{kind}" if own.startswith("down") else f"{module}.w13_{kind}"
    for own, theirs in family.renamed:
        parameter = parameter.replace(own, theirs)
    return _DECODER.sub(r"\1.mtp_block.", parameter) if heads.is_draft(parameter) else parameter


def is_experts(name: str) -> bool:
    """Whether a tensor is a stack of experts' weights."""
    return _EXPERTS.search(name) is not None


def has_known_rows(name: str) -> bool:
    """Whether a worker records its first row of this tensor, as for vocabularies and experts."""
    return is_experts(name) or _VOCABULARY.search(name) is not None


def scale_slices(tensor: TensorSpec, slices: Iterable[TargetSlice], rollout: Rollout) -> list[TargetSlice]:
    """Return the slices of a weight's scales; ``ValueError`` if one of its ``slices`` begins or ends inside a block."""
    scheme, block, found = scheme_of(rollout.block, rollout.channels), rollout.block, []
    for part in slices:
        at = (*part.at[:-1], 0)
        if block:
            low, high = part.block.low[-2:], part.block.high[-2:]
            ends = zip(high, tensor.shape[-2:], strict=True)
            if any(i % block for i in (*low, *part.at[-2:])) or any(i % block and i != size for i, size in ends):
                raise ValueError(
                    f"{part.parameter} holds {tensor.name} {list(low)} to {list(high)} at {list(part.at[-2:])}, and "
                    f"blocks of {block} x {block} share a scale."
                )
            at = (*part.at[:-2], *(i // block for i in part.at[-2:]))
        name = f"{part.parameter}_scale_inv" if block else f"{part.parameter}_scale"
        found.append(TargetSlice(scheme.sharing(part.block), name, at))
    return found
