"""vLLM's layout of each family: shards and names of its weights, and the releases that have it.

The common rules are in ``rollout/layout/``. Tests compare the result with the layout that they trace from vLLM's own
loaders (``tests/support/rollout/loader_trace.py``).
"""

import functools
import operator
import os
import re
from dataclasses import replace
from functools import cache
from typing import Any

from ...engine.compat import versions
from ...engine.errors import SettingError
from ...engine.topology.mesh import divisors
from ..layout import rules
from ..layout.rollout_config import ROLLOUT
from ..layout.rules import Family, named_rules, padded_vocabulary
from ..layout.slices import TOWER
from ..layout.specs import Heads, Rollout

__all__ = ["CLASSES", "CLASS_OF_SLICES", "FP8_FAMILIES", "NOT_SERVED", "NOT_SPREAD", "WHOLE"]
__all__ += ["check_sizes", "families", "known_families"]

_TP, _EP = f"{ROLLOUT}.tensor_model_parallel_size", f"{ROLLOUT}.expert_parallel_size"

# By names that mean the same in each family that has them.
_RULES = named_rules(
    (r"\.(vision_tower|embed_vision)\..*", rules.replicated),  # transformers' own module
    (r"\.visual\..*\.attn\.(qkv)\.(?:weight|bias)", rules.stacked_thirds),
    (r"\.visual\..*\.attn\.(proj)\.weight", rules.row_parallel),
    (r"^vision_model\..*\.self_attn\.(q|k|v)_proj\.(?:weight|bias)", rules.as_many_heads),
    (r"(patch_embedding\.linear|multi_modal_projector\.linear_1|visual\.merger\.proj)\.weight", rules.columns),
    (r"\.((?:linear_)?fc1)\.(?:weight|bias)", rules.columns),
    (r"\.(x_proj|w2|output_linear|(?:linear_)?fc2)\.weight", rules.row_parallel),
    (r"\.linear_attn\.(conv1d|in_proj_qkv)\.weight", rules.linear_qkv),
    (r"\.linear_attn\.(A_log|dt_bias|in_proj_qkvz\.weight|in_proj_ba\.weight)", rules.columns),
    (r"\.linear_attn\.(in_proj_z)\.weight", rules.linear_output_gate),
    (r"\.linear_attn\.in_proj_(b|a)\.weight", rules.linear_gate_or_decay),
    (r"\.(?:mamba|mixer)\.(conv1d|in_proj)\.(?:weight|bias)", rules.state_columns),
    (r"\.(?:mamba|mixer)\.(dt_bias|dt_proj\.weight|dt_proj\.bias|D|norm\.weight)", rules.columns),
    (r"\.(?:mamba|mixer)\.(A_log)", rules.decay),
    (r"\.mixer\.(up_proj|shared_experts\.up_proj)\.(?:weight|bias)", rules.columns),
    (r"\.shared_mlp\.(input)_linear\.weight", rules.stacked_halves),
    (r"\.conv\.(conv)\.(?:weight|bias)", rules.columns),
    (r"\.conv\.(in_proj)\.(?:weight|bias)", rules.stacked_thirds),
    (r"\.feed_forward\.(w1|w3)\.weight", rules.w1_or_w3),
    (r"\.attn\.(Wqkv)\.weight", rules.by_heads),
    (r"\.self_attn\.(?:sinks|(g|gate)_proj\.weight)", rules.columns),
    (r"\.self_attn\.indexer\.(wk|weights_proj)\.weight", rules.indexer),
    (r"\.moe_statics\.(e_score_correction_bias)", rules.without_first_dim),
)
# A language model beside a vision tower, whose linears are sharded by the same size.
_BESIDE_A_TOWER = (
    *((name, name.removeprefix("model.")) for name in TOWER if name.startswith("model.")),
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
)
_GRANITE = ((".router.layer.", ".gate."), (".router.", ".gate."))  # up to transformers 5.12, and in 5.19
_LLAMA4 = named_rules(
    (r"^(?!vision_model\.).*\.self_attn\.(q|k)_proj\.weight", rules.halved_heads),
    (r"\.experts\.(gate_up_proj)", rules.transposed_gate_up),
    (r"\.experts\.(down_proj)", rules.transposed_experts),
)
_MAMBA1 = named_rules(
    (r"\.mamba\.(in_proj)\.(?:weight|bias)", rules.stacked_halves),
    (r"\.mamba\.(conv1d)\.(?:weight|bias)", rules.columns),
)
_DEEPSEEK_V4 = named_rules(
    (r"\.self_attn\.(q_a_proj|kv_proj)\.weight", rules.compressions),
    (r"\.self_attn\.(q_b|o_a)_proj\.weight", rules.columns),
    (r"\.self_attn\.(o_b)_proj\.weight", rules.row_parallel),
    (r"\.compressor\.(?:indexer\.)?(kv|gate)_proj\.weight", rules.compressed_keys),
)
_DEEPSEEK_V4_NAMES = (
    (".fused_qkv_a_proj.", ".fused_wqa_wkv."),
    *((f".{own}_proj.", f".w{own}.") for own in ("q_b", "o_a", "o_b")),
    (".q_a_norm.", ".q_norm."),
    (".compressor.kv_norm.", ".compressor.norm."),
    (".compressor.indexer.kv_norm.", ".indexer.compressor.norm."),
    *((f".compressor.indexer.{own}", f".indexer.compressor.{own}") for own in ("fused_wkv_wgate", "position_bias")),
    (".compressor.indexer.scorer.", ".indexer."),  # since transformers 5.19
    (".compressor.indexer.", ".indexer."),
    (".position_bias", ".ape"),
    (".sinks", ".attn_sink"),
    (".self_attn.", ".attn."),
    (".mlp.", ".ffn."),
    (".input_layernorm.", ".attn_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
    *((f".{own}.", f".hc_{own.removesuffix('_hc')}_") for own in ("attn_hc", "ffn_hc")),
    (".hc_head.hc_", ".hc_head_"),
)
_LAGUNA = named_rules((r"\.(?:mlp|shared_experts)\.(gate|up)_proj\.weight", rules.columns))
_MINIMAX = named_rules((r"\.self_attn\.(q|k)_norm\.weight", rules.by_heads))
_FAMILIES = {
    **dict.fromkeys(("dots1", "flex_olmo", "glm4_moe", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next"), Family()),
    **dict.fromkeys(("cohere2_moe", "dbrx", "gemma4_text", "mellum", "qwen3_5_moe_text", "solar_open"), Family()),
    **dict.fromkeys(("gemma3_text", "llama", "mistral", "qwen2", "qwen3"), Family()),  # dense
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"),
        Family(rules=rules.LATENT_ATTENTION),
    ),
    "afmoe": Family(((".router.gate.", ".gate."),)),
    "axk1": Family(((".mlp.post_mlp_layernorm.", ".post_mlp_layernorm."),), rules.LATENT_ATTENTION),
    "deepseek_v4": Family(_DEEPSEEK_V4_NAMES, _DEEPSEEK_V4),
    "ernie4_5_moe": Family(((".gate.moe_statics.", ".gate."),)),
    "exaone_moe": Family(((".gate.e_score_correction_bias", ".e_score_correction_bias"),)),
    "gpt_oss": Family(
        ((".self_attn.", ".attn."), ("model.embed_tokens.", "model.embedding.")),
        rules.TRANSPOSED_EXPERTS,
        is_transposed=True,
    ),
    **dict.fromkeys(("granitemoe", "granitemoehybrid", "granitemoeshared", "granitemoe_swa"), Family(_GRANITE)),
    "hy_v3": Family(((".shared_experts.", ".shared_mlp."), (".e_score_correction_bias", ".expert_bias"))),
    "hunyuan_v1_moe": Family(((".mlp.gate.wg.", ".mlp.gate."),)),
    "jamba": Family(((".self_attn.", "."),), _MAMBA1),
    "laguna": Family(((".mlp.gate.e_score", ".mlp.experts.e_score"), (".shared_experts.", ".shared_expert.")), _LAGUNA),
    "lfm2_moe": Family(((".conv.", ".short_conv."), (".expert_bias", ".gate.e_score_correction_bias"))),
    **dict.fromkeys(("llama4", "llama4_text"), Family(rules=_LLAMA4, is_transposed=True)),
    "mimo_v2_flash": Family(((".sinks", ".attention_sink_bias"),)),
    "minimax_m2": Family(((".mlp.", ".block_sparse_moe."),), _MINIMAX),
    "mixtral": Family(((".mlp.", ".block_sparse_moe."),)),
    "nemotron_h": Family((("model.embeddings.", "model.embed_tokens."),)),
    "phimoe": Family(((".mlp.router.", ".block_sparse_moe.gate."), (".mlp.", ".block_sparse_moe."))),
    **dict.fromkeys(
        ("gemma4", "glm4v_moe", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"), Family(_BESIDE_A_TOWER)
    ),
}
_GEMMA_EXPERTS = ((".experts.", ".moe.experts."), (".router.per_expert_scale", ".moe.per_expert_scale"))
# vLLM before 0.27 runs these families with transformers' code and fuses nothing. Shared experts of K-EXAONE and Solar
# Open stay whole, because transformers' tensor-parallel plan does not name them.
_APART = named_rules((r"\.(?:self_attn\.(q|k|v)_proj\.(?:weight|bias)|(gate|up)_proj\.weight)", rules.columns))
_WHOLE_SHARED = named_rules((r"\.(shared_experts)\..*", rules.replicated))
# Release -> the families that had another layout before.
_BEFORE = {
    "0.31": {"gemma4": Family((*_BESIDE_A_TOWER, *_GEMMA_EXPERTS)), "gemma4_text": Family(_GEMMA_EXPERTS)},
    "0.27": {
        "dots1": Family(rules=_APART),
        **dict.fromkeys(("exaone_moe", "solar_open"), Family(rules=(*_WHOLE_SHARED, *_APART))),
    },
}
NOT_SPREAD = frozenset({"dbrx"})
"""Families without expert parallelism: their loader in vLLM puts all experts into each worker."""


def _quantised(but: str) -> re.Pattern[str]:
    """Return a pattern of the experts and linears of a layer, except names that contain ``but``."""
    linears = r"\w+_proj(?:_with_mqa)?|(?:input|output)_linear|indexer\.wq_b|linear_attn\.in_proj_\w+"
    return re.compile(rf"\.layers\.\d+\.(?!.*{but})(?:.*\.)?(?:experts\.(?:gate_up|down)_proj|(?:{linears})\.weight)$")


# Families whose quantised weights were compared with vLLM's. Left out are families with transposed experts (gpt_oss,
# llama4) or a vision tower, and nemotron_h, whose experts the CPU build lacks. In lfm2_moe and phimoe verl's setting
# also quantises the router. In dbrx only one of the two formats quantises the experts.
# The first sync compares the names with a worker's.
_FP8 = (
    *("afmoe", "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe", "gemma3_text"),
    *("gemma4_text", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "granitemoe", "granitemoehybrid", "granitemoeshared"),
    *("hunyuan_v1_moe", "hy_v3", "laguna", "llama", "minimax_m2", "mistral", "mixtral", "olmoe", "qwen2", "qwen2_moe"),
    *("qwen3", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "solar_open"),
)
FP8_FAMILIES: dict[str, re.Pattern[str]] = {
    **dict.fromkeys(_FP8, _quantised(but=r"indexer\.weights_proj")),
    "flex_olmo": _quantised(but=r"experts\."),
    "jamba": _quantised(but=r"mamba\."),
}
# The vLLM releases that have the layout above, for families where not all do. vLLM 0.29 dropped its own model of
# hunyuan_v1_moe and runs transformers' instead. vLLM 0.24 can't load granitemoeshared, Laguna's correction bias, or
# an unquantised gpt_oss. It can't load Qwen3.5 without its vision tower, and its CPU build can't run the tower.
# The CPU build of 0.29 has no experts without a gate (nemotron_h).
_SINCE_0_27 = ("gpt_oss", "granitemoeshared", "laguna", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text")
# First traced there, with transformers 5.19.
_SINCE_0_32 = ("axk1", "deepseek_v32", "deepseek_v4", "granitemoe_swa", "mellum", "mimo_v2_flash")
_RELEASES = {"hunyuan_v1_moe": "<0.29", "nemotron_h": "<0.28", **dict.fromkeys(_SINCE_0_27, ">=0.27")}
_RELEASES |= dict.fromkeys(_SINCE_0_32, ">=0.32")

CLASSES = {"kimi_k25": "KimiK25ForConditionalGeneration", "phimoe": "PhiMoEForCausalLM"}
"""Families that vLLM implements only under the class name of published checkpoints. Under transformers' class name it
starts transformers' code, and for phimoe fails: 0.24 finds no bias of the head, later ones stop at the first token."""

CLASS_OF_SLICES = {"exaone_moe": ("<0.27", "ExaoneMoeForCausalLM")}
"""Families that these vLLM releases implement twice -> the releases, and the class name with the known layout."""

_FLAT = "vLLM's class reads the flat config of the published code, which transformers' class does not have."
_STATELESS = (
    "vLLM has dropped its class and runs transformers' instead, without the state of its attention: rollouts would "
    "be of another model."
)
NOT_SERVED = {
    "ernie4_5_vl_moe": ("==0.27.*", _FLAT, "moe_num_experts"),
    "minimax": (">=0.23", _STATELESS, ""),
}
"""Families that vLLM can't start or computes differently from transformers -> the releases, the reason, and the config
key whose override (hf_overrides) makes it work."""

WHOLE = {"mistral4": ("<0.28", "vLLM runs transformers' class, whose plan for tensor parallelism has no attention.")}
"""Families that vLLM can't shard -> the releases and the reason."""


@cache
def _families(is_latent: bool) -> dict[str, Family]:
    older = [layouts for release, layouts in _BEFORE.items() if not versions.vllm_in(f">={release}")]
    found = functools.reduce(operator.or_, older, _FAMILIES)
    unfused = () if is_latent else rules.LATENT_ATTENTION[1:]
    own = {name: tuple(rule for rule in family.rules if rule not in unfused) for name, family in found.items()}
    return {name: replace(family, rules=(*own[name], *_RULES)) for name, family in found.items()}


def families() -> dict[str, Family]:
    """Return the installed vLLM's differences from the common rules, by family (``model_type``)."""
    # vLLM fuses the first projections only for its latent attention kernel, which this variable disables.
    return _families(not int(os.environ.get("VLLM_MLA_DISABLE", "0")))


@cache
def known_families() -> frozenset[str]:
    """Return the families (``model_type``) whose layout in the installed vLLM these rules describe."""
    return frozenset(f for f in _FAMILIES if f not in _RELEASES or versions.vllm_in(_RELEASES[f]))


def check_sizes(rollout: Rollout, model: Any) -> None:
    """Check the tensor-parallel size by vLLM's own assertions.

    Sources: ``ModelConfig.verify_with_parallel_config``, ``FusedMoEConfig.__post_init__``, the attention and experts
    of ``models/qwen3_moe.py`` and ``models/deepseek_v4``, ``VocabParallelEmbedding``.
    """
    vocabulary = padded_vocabulary(model.vocab_size)
    heads = getattr(model, "num_attention_heads", 0)
    keys = heads if getattr(model, "kv_lora_rank", None) or not heads else Heads.of(model).keys
    sizes = getattr(model, "ffn_config", model)  # DBRX
    experts = _first(sizes, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    family = getattr(model, "model_type", "")
    if rollout.expert_parallel and (family in NOT_SPREAD or not experts):
        no_experts = "vLLM spreads experts, and the model has none."
        rule = f"vLLM's loader of a {family} spreads no experts." if family in NOT_SPREAD else no_experts
        raise SettingError(_EP, rollout.workers, rule, f"{_EP}=1")
    # Under expert parallelism experts are not sharded; without it data-parallel workers shard them too.
    dp, whose = (rollout.dp, " of an expert") if experts else (1, "")
    size = _first(sizes, "moe_intermediate_size", "ffn_hidden_size", "intermediate_size")
    size = 0 if rollout.expert_parallel else size
    groups = _first(model, "o_groups")  # DeepSeek-V4

    def reasons(tp: int) -> list[str]:
        found = {
            f"{heads} attention heads": heads % tp == 0,
            f"{keys} key-value heads": keys % tp == 0 or (keys > 0 and tp % keys == 0),
            f"{groups} groups of attention outputs": groups % tp == 0,
            f"the intermediate size {size}{whose}, in {tp * dp} parts": size % (tp * dp) == 0,
            f"{experts} experts (at least as many as ranks)": not experts or tp <= experts,
            f"a vocabulary of {model.vocab_size}, padded to {vocabulary}": vocabulary % tp == 0,
        }
        return [what for what, holds in found.items() if not holds]

    if wrong := reasons(rollout.tp):
        works = [tp for tp in divisors(heads) if not reasons(tp)]
        best = f"{_TP} one of {works}" if works else f"{_EP}={rollout.workers}"
        raise SettingError(_TP, rollout.tp, f"vLLM can't cut {wrong[0]} so.", best)


def _first(model: Any, *names: str) -> int:
    return next((value for name in names if (value := getattr(model, name, None))), 0)
