"""Chooses what a weight sync sends to a rollout, and rejects rollouts that no sync mode could serve.

The driver and the trainer's ranks call the same functions. Each takes verl's rollout config, as a mapping or as its
dataclass, and reads nothing else of the run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from ...engine.errors import SettingError
from ...engine.topology.mesh import divisors
from .sglang_layout import FAMILIES as SGLANG_FAMILIES
from .specs import Channels, Server, Tower
from .vllm_layout import FP8_FAMILIES, Rollout, SyncMode, known_families, loads_own_experts, padded_vocabulary

__all__ = [
    "BACKEND",
    "BLOCK",
    "COMPRESSED",
    "EXTENSION",
    "OVERRIDES",
    "SGLANG_LOADER",
    "check_rollout_parallelism",
    "check_sglang_sizes",
    "choose_mode",
    "compressed_kind",
    "has_our_extension",
    "quantisation_settings",
    "rollout_of",
]

EXTENSION = "epfsdp2.rollout.vllm_worker.WeightSyncExtension"
SGLANG_LOADER = "epfsdp2.rollout.sglang.loader.load"
# The checkpoint-engine backends that can send slices; all others broadcast full tensors.
BACKEND = "epfsdp2_p2p"
_SLICE_BACKENDS = ("naive", BACKEND)
_ROLLOUT = "actor_rollout_ref.rollout"
_VLLM = f"{_ROLLOUT}.engine_kwargs.vllm"
_TP = f"{_ROLLOUT}.tensor_model_parallel_size"
_SGLANG = f"{_ROLLOUT}.engine_kwargs.sglang"
OVERRIDES = f"{_VLLM}.hf_overrides.quantization_config"
_SETTING = "engine.rollout_sync"
_SERVERS: dict[str, str] = {"vllm": "vLLM", "sglang": "SGLang"}
COMPRESSED = "compressed-tensors"
BLOCK = 128  # of a rollout.quantization=fp8, whose kind verl chooses (``_apply_quantization``)
_QUANTISES = "SGLang quantises the weights and needs full tensors for that."
_MOVES = "SGLang stores experts in another order or more than once."
_CUTS = "it cuts the model in ways that transfer plans do not know."
# Of SGLang's arguments the values that slices can serve, besides none at all, and why they can serve no other.
_SGLANG_ARGUMENTS: dict[str, tuple[tuple[object, ...], str]] = {
    "quantization": ((), _QUANTISES),
    "torchao_config": (("",), _QUANTISES),
    "load_format": (
        ("auto", "safetensors", "pt", "npcache", "dummy", "mistral", "fastsafetensors", "runai_streamer"),
        "a loader of this kind changes the weights, or takes the place of the model's.",
    ),
    "moe_runner_backend": (("auto", "triton"), "this kernel stores experts in another order."),
    "moe_a2a_backend": (("none",), _MOVES),
    "ep_num_redundant_experts": ((0,), _MOVES),
    "enable_eplb": ((False,), _MOVES),
    "init_expert_location": (("trivial",), _MOVES),
    "enable_dp_attention": ((False,), _CUTS),
    "moe_dense_tp_size": ((), _CUTS),
    "moe_dp_size": ((1,), _CUTS),
    "attn_cp_size": ((1,), _CUTS),
    "speculative_algorithm": ((), "a draft model would be sent the slices of the model."),
}
# What a family needs besides where SGLang runs on a GPU; on a CPU it is so in any case.
_NO_FUSION = ("disable_shared_experts_fusion", True, "SGLang may store the shared expert as one of the others.")
_SGLANG_ON_GPU: dict[str, tuple[str, object, str]] = {
    "deepseek_v3": _NO_FUSION,
    "glm4_moe": _NO_FUSION,
}


@dataclass(frozen=True)
class _Obstacle:
    """A setting and its value that leave ``full`` as the only mode, with the reason and a value that would not."""

    setting: str
    value: object
    reason: str
    works: str


_DISAGGREGATED = _Obstacle(
    f"{_ROLLOUT}.disaggregation.enabled", True, "prefill and decode workers shard the model differently.", "False"
)


def rollout_of(config: Any) -> Rollout:
    """Read how one rollout replica is sharded."""
    tp, dp = _size(config, "tensor_model_parallel_size"), _size(config, "data_parallel_size")
    server: Server = "sglang" if _rollout_name(config) == "sglang" else "vllm"
    block = BLOCK if server == "vllm" and config.get("quantization") == "fp8" else 0
    channels: Channels = "" if block or server != "vllm" else compressed_kind(_overrides(config))[0]
    has_experts = _size(config, "expert_parallel_size") > 1
    return Rollout(tp, dp, has_experts, _tower(_vllm(config)), server, block, channels)


def compressed_kind(config: Any) -> tuple[Channels, str]:
    """Return what a config of compressed-tensors has weights held in; where slices can't serve it, "" and the reason.

    Args:
        config: vLLM's ``quantization_config``.
    """
    if isinstance(config, str) and "_per_" in config:  # of vLLM's own
        return "", "each worker quantises what it has fused and cut, in parameters that are in bfloat16 until then."
    if not isinstance(config, Mapping) or config.get("quant_method") != COMPRESSED:
        return "", "vLLM quantises the weights and needs full tensors for that."
    groups = list((config.get("config_groups") or {}).values())
    if len(groups) != 1 or list(groups[0].get("targets") or ()) != ["Linear"]:
        return "", "ranks quantise all linears in one way, so it needs one group, of targets [Linear]."
    weights, inputs = groups[0].get("weights") or {}, groups[0].get("input_activations") or {}
    if weights.get("strategy") == "tensor":
        return "", "vLLM's workers quantise fused weights with one scale for each tensor anew, by their own largest."
    kind = {"float": "fp8", "int": "int8"}.get(weights.get("type", "int"), "")
    if weights.get("num_bits") != 8 or weights.get("strategy") != "channel" or not weights.get("symmetric", True):
        return "", "ranks quantise to 8 bits with one scale for each row (strategy channel), around zero."
    if not inputs.get("dynamic") or inputs.get("type", "int") != weights.get("type", "int"):
        return "", "only a calibration has scales of inputs; ranks serve dynamic ones, of the weights' type."
    if config.get("kv_cache_scheme"):
        return "", "only a calibration has scales of the cache (kv_cache_scheme)."
    return cast(Channels, kind), ""


def _overrides(config: Any) -> Any:
    overrides = _vllm(config).get("hf_overrides")
    return overrides.get("quantization_config") if isinstance(overrides, Mapping) else None


def _tower(vllm: Mapping[str, Any]) -> Tower:
    limits = vllm.get("limit_mm_per_prompt") or {}
    if vllm.get("language_model_only") or all(limits.get(kind) == 0 for kind in ("image", "video")):
        return "none"
    return "whole" if vllm.get("mm_encoder_tp_mode") == "data" else "sharded"


def _is_disaggregated(config: Any) -> bool:
    disaggregation = config.get("disaggregation")
    return disaggregation is not None and bool(disaggregation.get("enabled"))


def has_our_extension(config: Any) -> bool:
    """Tell whether vLLM's workers run this package's extension, the only one that can load slices."""
    return _vllm(config).get("worker_extension_cls") == EXTENSION


def choose_mode(
    requested: str, config: Any, family: str | None, *, untested: str = "", backend: str = "naive"
) -> tuple[SyncMode, str]:
    """Return the sync mode for a rollout and, where ``auto`` had to fall back to ``full``, the reason.

    Args:
        requested: ``engine.rollout_sync``.
        family: ``model_type`` of the model; None skips the check where it is not known yet.
        untested: the reason why the layout of the rollout's version is unknown (``versions.unknown_layout``).
        backend: name of the checkpoint-engine backend.

    Raises:
        SettingError: ``requested`` names a mode that this rollout does not support.
    """
    rollout = rollout_of(config)
    if requested == "full":
        return "full", ""
    found = _obstacle(config, family, untested, backend)
    server = _SERVERS[rollout.server]
    if found is None and requested == "expert_local" and not rollout.expert_parallel:
        workers = rollout.workers
        reason = f"{server} runs without expert parallelism, so every worker keeps a part of every expert."
        found = _Obstacle(f"{_ROLLOUT}.expert_parallel_size", 1, reason, str(workers) if workers > 1 else "")
    if found is None and requested == "expert_local" and rollout.is_quantised:
        reason = "ranks quantise the slices that they send, and this mode sends whole tensors beside the experts."
        found = _Obstacle(*quantisation_settings(config)[0], reason, "null")
    if found is None and requested == "expert_local" and family is not None and not loads_own_experts(family):
        reason = f"its checkpoints have experts as stacks, of which {server}'s loader takes no part."
        found = _Obstacle("actor_rollout_ref.model", family, reason, "")
    if found is None:
        return ("sliced" if requested == "auto" else cast(SyncMode, requested)), ""
    if requested == "auto":
        # A worker of vLLM that keeps the whole model receives the same bytes in either mode, as fast.
        is_as_good = rollout.keeps_all and rollout.server == "vllm" and not rollout.is_quantised
        return "full", "" if is_as_good else f"{found.setting}={found.value}: {found.reason}"
    works = f"{_SETTING}=auto" + (f", or {found.setting}={found.works}" if found.works else "")
    raise SettingError(_SETTING, requested, f"can't be with {found.setting}={found.value}: {found.reason}", works)


def _obstacle(config: Any, family: str | None, untested: str, backend: str) -> _Obstacle | None:
    if _rollout_name(config) != "vllm":
        return _obstacle_elsewhere(config, family, untested, backend)
    vllm = _vllm(config)
    extension = vllm.get("worker_extension_cls")
    if backend not in _SLICE_BACKENDS:
        reason = "this backend sends full tensors."
        return _Obstacle(f"{_ROLLOUT}.checkpoint_engine.backend", backend, reason, "naive")
    if extension != EXTENSION:
        reason = "only this package's extension can load slices."
        return _Obstacle(f"{_VLLM}.worker_extension_cls", extension, reason, EXTENSION)
    pipeline = _size(config, "pipeline_model_parallel_size")
    if pipeline > 1:
        reason = "transfer plans do not support pipeline-parallel rollouts."
        return _Obstacle(f"{_ROLLOUT}.pipeline_model_parallel_size", pipeline, reason, "1")
    if _is_disaggregated(config):
        return _DISAGGREGATED
    for setting, value in quantisation_settings(config):
        if (setting, value) != (f"{_ROLLOUT}.quantization", "fp8"):
            kind, reason = compressed_kind(value)
            if not kind or setting != OVERRIDES:
                return _Obstacle(setting, value, reason, "null")
        if backend != "naive":
            reason = "ranks quantise slices for the workers beside them alone."
            return _Obstacle(setting, value, reason, "null")
        if family is not None and family not in FP8_FAMILIES:
            known = ", ".join(sorted(FP8_FAMILIES))
            reason = f"which weights of a {family} vLLM quantises is not known (known: {known})."
            return _Obstacle(setting, value, reason, "null")
    placement = vllm.get("expert_placement_strategy") or "linear"
    if placement != "linear":
        reason = "transfer plans assume that experts are placed in linear order."
        return _Obstacle(f"{_VLLM}.expert_placement_strategy", placement, reason, "linear")
    if untested:
        return _Obstacle("vllm", "installed", f"{untested}, and a layout may have changed.", "")
    if family is not None and family not in known_families():
        known = ", ".join(sorted(known_families()))
        return _Obstacle("actor_rollout_ref.model", family, f"how vLLM cuts it is not known here (known: {known}).", "")
    return None


def _obstacle_elsewhere(config: Any, family: str | None, untested: str, backend: str) -> _Obstacle | None:
    """Return ``_obstacle`` of a rollout that is not vLLM: SGLang takes slices of some families."""
    name = _rollout_name(config)
    if name != "sglang":
        return _Obstacle(f"{_ROLLOUT}.name", name, "it takes full tensors alone.", "vllm")
    if backend not in _SLICE_BACKENDS:
        reason = "this backend sends full tensors."
        return _Obstacle(f"{_ROLLOUT}.checkpoint_engine.backend", backend, reason, "naive")
    tp, experts = _size(config, "tensor_model_parallel_size"), _size(config, "expert_parallel_size")
    for size in ("data_parallel_size", "pipeline_model_parallel_size"):
        if _size(config, size) > 1:
            return _Obstacle(f"{_ROLLOUT}.{size}", _size(config, size), _CUTS, "1")
    if experts not in (1, tp):
        reason = "slices know a part of every expert on each worker, or whole ones spread over all of them."
        return _Obstacle(f"{_ROLLOUT}.expert_parallel_size", experts, reason, "1")
    if _is_disaggregated(config):
        return _DISAGGREGATED
    if config.get("quantization"):
        return _Obstacle(f"{_ROLLOUT}.quantization", config.get("quantization"), _QUANTISES, "null")
    sglang = _sglang(config)
    loaders = sglang.get("custom_weight_loader") or []
    if SGLANG_LOADER not in loaders:
        reason = "only this package's loader can load slices."
        return _Obstacle(f"{_SGLANG}.custom_weight_loader", list(loaders), reason, f"[{SGLANG_LOADER}]")
    if untested:
        return _Obstacle("sglang", "installed", f"{untested}, and a layout may have changed.", "")
    for name, (served, reason) in _SGLANG_ARGUMENTS.items():
        if (value := sglang.get(name)) is not None and value not in served:
            return _Obstacle(f"{_SGLANG}.{name}", value, reason, str(served[0]) if served else "null")
    if family is not None and family not in SGLANG_FAMILIES:
        known = ", ".join(sorted(SGLANG_FAMILIES))
        reason = f"how SGLang cuts it was not compared (known: {known})."
        return _Obstacle("actor_rollout_ref.model", family, reason, "")
    if family in _SGLANG_ON_GPU and sglang.get("device") != "cpu":
        name, needed, reason = _SGLANG_ON_GPU[family]
        if sglang.get(name) != needed:
            return _Obstacle(f"{_SGLANG}.{name}", sglang.get(name), reason, str(needed))
    return None


def _rollout_name(config: Any) -> str:
    return config.get("name") or "vllm"


def quantisation_settings(config: Any) -> list[tuple[str, object]]:
    """Return the settings, with their values, that make vLLM quantise the weights that it receives."""
    qat = config.get("qat")
    asked = [
        (f"{_ROLLOUT}.quantization", config.get("quantization")),
        (f"{_VLLM}.quantization", _vllm(config).get("quantization")),
        (OVERRIDES, _overrides(config)),
        (f"{_ROLLOUT}.qat.enable", qat is not None and qat.get("enable")),
    ]
    return [(setting, value) for setting, value in asked if value]


def check_rollout_parallelism(config: Any, ranks: int, model: Any) -> None:
    """Reject parallel sizes that vLLM would refuse after its start, or that no sync mode could serve.

    Args:
        ranks: number of trainer ranks, each of which feeds one vLLM worker; 0 where the workers are separate processes.
        model: the model's text config; None skips the checks that need it.

    Raises:
        SettingError: names the first such setting and a value that works.
    """
    vllm, rollout = _vllm(config), rollout_of(config)
    pipeline = _size(config, "pipeline_model_parallel_size")
    for name, own, size in (
        ("tensor_parallel_size", "tensor_model_parallel_size", rollout.tp),
        ("data_parallel_size", "data_parallel_size", rollout.dp),
        ("pipeline_parallel_size", "pipeline_model_parallel_size", pipeline),
    ):
        if size < 1:
            raise SettingError(f"{_ROLLOUT}.{own}", size, "has to be at least 1.", f"{_ROLLOUT}.{own}=1")
        given = vllm.get(name)
        if given is not None and given != size:
            rule = f"verl finds each rank's worker by {_ROLLOUT}.{own}={size}, so another value feeds the wrong ones."
            raise SettingError(f"{_VLLM}.{name}", given, rule, f"{_ROLLOUT}.{own}={given}, and no {_VLLM}.{name}")
    if vllm.get("enable_eplb"):
        rule = (
            "vLLM's loaders place experts in their start-up order while the router uses the rebalanced one, so after a "
            "sync the weights would be silently wrong."
        )
        raise SettingError(f"{_VLLM}.enable_eplb", True, rule, f"{_VLLM}.enable_eplb=False")
    experts = _size(config, "expert_parallel_size")
    if experts not in (1, rollout.workers):
        rule = f"vLLM spreads experts over all {rollout.workers} workers of a replica (tensor x data parallel)."
        setting = f"{_ROLLOUT}.expert_parallel_size"
        raise SettingError(setting, experts, rule, f"{setting}={rollout.workers}, or 1")
    replica = rollout.workers * pipeline
    if ranks % replica and not _is_disaggregated(config):
        rule = f"a replica of vLLM takes {replica} workers, and the {ranks} trainer ranks are not a multiple of that."
        works = [tp for tp in divisors(ranks) if ranks % (rollout.dp * pipeline * tp) == 0]
        others = f"{_ROLLOUT}.data_parallel_size=1"
        raise SettingError(_TP, rollout.tp, rule, f"{_TP} one of {works}" if works else others)
    if model is not None:
        _check_tensor_parallel(rollout, model)


def check_sglang_sizes(config: Any) -> None:
    """Reject sizes among SGLang's arguments, which win over verl's own, by which verl finds each rank's worker.

    Raises:
        SettingError: names the first that differs.
    """
    tp, dp = _size(config, "tensor_model_parallel_size"), _size(config, "data_parallel_size")
    for name, own, size in (
        ("tp_size", "tensor_model_parallel_size", tp * dp),
        ("dp_size", "data_parallel_size", dp),
        ("pp_size", "pipeline_model_parallel_size", _size(config, "pipeline_model_parallel_size")),
        ("ep_size", "expert_parallel_size", _size(config, "expert_parallel_size")),
    ):
        given = _sglang(config).get(name)
        if given is not None and given != size:
            rule = f"verl finds each rank's worker by its own sizes, and {_ROLLOUT}.{own}={_size(config, own)}."
            raise SettingError(f"{_SGLANG}.{name}", given, rule, f"{_ROLLOUT}.{own}, and no {_SGLANG}.{name}")


def _check_tensor_parallel(rollout: Rollout, model: Any) -> None:
    """Check what vLLM itself asserts of a tensor-parallel size.

    Sources: ``ModelConfig.verify_with_parallel_config``, ``FusedMoEConfig.__post_init__``, the attention and experts
    of ``models/qwen3_moe.py``, ``VocabParallelEmbedding``.
    """
    vocabulary = padded_vocabulary(model.vocab_size)
    heads = getattr(model, "num_attention_heads", 0)
    keys = heads if getattr(model, "kv_lora_rank", None) else getattr(model, "num_key_value_heads", None) or heads
    experts = _first(model, "num_experts", "num_local_experts", "n_routed_experts")
    if rollout.expert_parallel and not experts:
        setting = f"{_ROLLOUT}.expert_parallel_size"
        raise SettingError(setting, rollout.workers, "vLLM spreads experts, and the model has none.", f"{setting}=1")
    # Under expert parallelism experts are not sharded; without it data-parallel workers shard them too.
    dp = rollout.dp if experts else 1
    whose = " of an expert" if experts else ""
    size = 0 if rollout.expert_parallel else _first(model, "moe_intermediate_size", "intermediate_size")

    def reasons(tp: int) -> list[str]:
        found = {
            f"{heads} attention heads": heads % tp == 0,
            f"{keys} key-value heads": keys % tp == 0 or (keys > 0 and tp % keys == 0),
            f"the intermediate size {size}{whose}, in {tp * dp} parts": size % (tp * dp) == 0,
            f"{experts} experts (at least as many as ranks)": not experts or tp <= experts,
            f"a vocabulary of {model.vocab_size}, padded to {vocabulary}": vocabulary % tp == 0,
        }
        return [what for what, holds in found.items() if not holds]

    if wrong := reasons(rollout.tp):
        works = [tp for tp in divisors(heads) if not reasons(tp)]
        spread = f"{_ROLLOUT}.expert_parallel_size={rollout.workers}"
        raise SettingError(
            _TP, rollout.tp, f"vLLM can't cut {wrong[0]} so.", f"{_TP} one of {works}" if works else spread
        )


def _first(model: Any, *names: str) -> int:
    return next((value for name in names if (value := getattr(model, name, None))), 0)


def _size(config: Any, name: str) -> int:
    size = config.get(name)
    return 1 if size is None else size


def _vllm(config: Any) -> Mapping[str, Any]:
    return (config.get("engine_kwargs") or {}).get("vllm") or {}


def _sglang(config: Any) -> Mapping[str, Any]:
    return (config.get("engine_kwargs") or {}).get("sglang") or {}
