"""Chooses what a weight sync sends to a rollout, and rejects rollouts that no sync mode could serve.

The driver and the trainer's ranks call the same functions. Each takes verl's rollout config, as a mapping or as its
dataclass, and reads nothing else of the run.
"""

from dataclasses import dataclass
from typing import Any, cast

from ...engine.errors import SettingError
from ...engine.topology.mesh import divisors
from .rollout_config import (
    EXTENSION,
    OVERRIDES,
    ROLLOUT,
    SGLANG_LOADER,
    VLLM,
    compressed_kind,
    has_our_extension,
    is_disaggregated,
    quantisation_settings,
    rollout_name,
    rollout_of,
    server_arguments,
    size_of,
)
from .sglang_layout import FAMILIES as SGLANG_FAMILIES
from .vllm_layout import (
    FP8_FAMILIES,
    NOT_SPREAD_IN_VLLM,
    Rollout,
    SyncMode,
    known_families,
    loads_own_experts,
    padded_vocabulary,
)

__all__ = ["BACKEND", "check_rollout_parallelism", "check_sglang_sizes", "choose_mode"]

# The checkpoint-engine backends that can send slices; all others broadcast full tensors.
BACKEND = "epfsdp2_p2p"
_SLICE_BACKENDS = ("naive", BACKEND)
_TP = f"{ROLLOUT}.tensor_model_parallel_size"
_SGLANG = f"{ROLLOUT}.engine_kwargs.sglang"
_SETTING = "engine.rollout_sync"
_SERVERS: dict[str, str] = {"vllm": "vLLM", "sglang": "SGLang"}
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
    f"{ROLLOUT}.disaggregation.enabled", True, "prefill and decode workers shard the model differently.", "False"
)


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
        found = _Obstacle(f"{ROLLOUT}.expert_parallel_size", 1, reason, str(workers) if workers > 1 else "")
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
    if rollout_name(config) != "vllm":
        return _obstacle_elsewhere(config, family, untested, backend)
    vllm = server_arguments(config)
    if backend not in _SLICE_BACKENDS:
        reason = "this backend sends full tensors."
        return _Obstacle(f"{ROLLOUT}.checkpoint_engine.backend", backend, reason, "naive")
    if not has_our_extension(config):
        reason = "only this package's extension can load slices."
        return _Obstacle(f"{VLLM}.worker_extension_cls", vllm.get("worker_extension_cls"), reason, EXTENSION)
    pipeline = size_of(config, "pipeline_model_parallel_size")
    if pipeline > 1:
        reason = "transfer plans do not support pipeline-parallel rollouts."
        return _Obstacle(f"{ROLLOUT}.pipeline_model_parallel_size", pipeline, reason, "1")
    if is_disaggregated(config):
        return _DISAGGREGATED
    for setting, value in quantisation_settings(config):
        if (setting, value) != (f"{ROLLOUT}.quantization", "fp8"):
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
        return _Obstacle(f"{VLLM}.expert_placement_strategy", placement, reason, "linear")
    if untested:
        return _Obstacle("vllm", "installed", f"{untested}, and a layout may have changed.", "")
    if family is not None and family not in known_families():
        known = ", ".join(sorted(known_families()))
        return _Obstacle("actor_rollout_ref.model", family, f"how vLLM cuts it is not known here (known: {known}).", "")
    return None


def _obstacle_elsewhere(config: Any, family: str | None, untested: str, backend: str) -> _Obstacle | None:
    """Return ``_obstacle`` of a rollout that is not vLLM: SGLang takes slices of some families."""
    name = rollout_name(config)
    if name != "sglang":
        return _Obstacle(f"{ROLLOUT}.name", name, "it takes full tensors alone.", "vllm")
    if backend not in _SLICE_BACKENDS:
        reason = "this backend sends full tensors."
        return _Obstacle(f"{ROLLOUT}.checkpoint_engine.backend", backend, reason, "naive")
    tp, experts = size_of(config, "tensor_model_parallel_size"), size_of(config, "expert_parallel_size")
    for size in ("data_parallel_size", "pipeline_model_parallel_size"):
        if size_of(config, size) > 1:
            return _Obstacle(f"{ROLLOUT}.{size}", size_of(config, size), _CUTS, "1")
    if experts not in (1, tp):
        reason = "slices know a part of every expert on each worker, or whole ones spread over all of them."
        return _Obstacle(f"{ROLLOUT}.expert_parallel_size", experts, reason, "1")
    if is_disaggregated(config):
        return _DISAGGREGATED
    if config.get("quantization"):
        return _Obstacle(f"{ROLLOUT}.quantization", config.get("quantization"), _QUANTISES, "null")
    sglang = server_arguments(config, "sglang")
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


def check_rollout_parallelism(config: Any, ranks: int, model: Any) -> None:
    """Reject parallel sizes that vLLM would refuse after its start, or that no sync mode could serve.

    Args:
        ranks: number of trainer ranks, each of which feeds one vLLM worker; 0 where the workers are separate processes.
        model: the model's text config; None skips the checks that need it.

    Raises:
        SettingError: names the first such setting and a value that works.
    """
    vllm, rollout = server_arguments(config), rollout_of(config)
    pipeline = size_of(config, "pipeline_model_parallel_size")
    for name, own, size in (
        ("tensor_parallel_size", "tensor_model_parallel_size", rollout.tp),
        ("data_parallel_size", "data_parallel_size", rollout.dp),
        ("pipeline_parallel_size", "pipeline_model_parallel_size", pipeline),
    ):
        if size < 1:
            raise SettingError(f"{ROLLOUT}.{own}", size, "has to be at least 1.", f"{ROLLOUT}.{own}=1")
        given = vllm.get(name)
        if given is not None and given != size:
            rule = f"verl finds each rank's worker by {ROLLOUT}.{own}={size}, so another value feeds the wrong ones."
            raise SettingError(f"{VLLM}.{name}", given, rule, f"{ROLLOUT}.{own}={given}, and no {VLLM}.{name}")
    if vllm.get("enable_eplb"):
        rule = (
            "vLLM's loaders place experts in their start-up order while the router uses the rebalanced one, so after a "
            "sync the weights would be silently wrong."
        )
        raise SettingError(f"{VLLM}.enable_eplb", True, rule, f"{VLLM}.enable_eplb=False")
    experts = size_of(config, "expert_parallel_size")
    if experts not in (1, rollout.workers):
        rule = f"vLLM spreads experts over all {rollout.workers} workers of a replica (tensor x data parallel)."
        setting = f"{ROLLOUT}.expert_parallel_size"
        raise SettingError(setting, experts, rule, f"{setting}={rollout.workers}, or 1")
    replica = rollout.workers * pipeline
    if ranks % replica and not is_disaggregated(config):
        rule = f"a replica of vLLM takes {replica} workers, and the {ranks} trainer ranks are not a multiple of that."
        works = [tp for tp in divisors(ranks) if ranks % (rollout.dp * pipeline * tp) == 0]
        others = f"{ROLLOUT}.data_parallel_size=1"
        raise SettingError(_TP, rollout.tp, rule, f"{_TP} one of {works}" if works else others)
    if model is not None:
        _check_tensor_parallel(rollout, model)


def check_sglang_sizes(config: Any) -> None:
    """Reject sizes among SGLang's arguments, which win over verl's own, by which verl finds each rank's worker.

    Raises:
        SettingError: names the first that differs.
    """
    tp, dp = size_of(config, "tensor_model_parallel_size"), size_of(config, "data_parallel_size")
    for name, own, size in (
        ("tp_size", "tensor_model_parallel_size", tp * dp),
        ("dp_size", "data_parallel_size", dp),
        ("pp_size", "pipeline_model_parallel_size", size_of(config, "pipeline_model_parallel_size")),
        ("ep_size", "expert_parallel_size", size_of(config, "expert_parallel_size")),
    ):
        given = server_arguments(config, "sglang").get(name)
        if given is not None and given != size:
            rule = f"verl finds each rank's worker by its own sizes, and {ROLLOUT}.{own}={size_of(config, own)}."
            raise SettingError(f"{_SGLANG}.{name}", given, rule, f"{ROLLOUT}.{own}, and no {_SGLANG}.{name}")


def _check_tensor_parallel(rollout: Rollout, model: Any) -> None:
    """Check what vLLM itself asserts of a tensor-parallel size.

    Sources: ``ModelConfig.verify_with_parallel_config``, ``FusedMoEConfig.__post_init__``, the attention and experts
    of ``models/qwen3_moe.py``, ``VocabParallelEmbedding``.
    """
    vocabulary = padded_vocabulary(model.vocab_size)
    heads = getattr(model, "num_attention_heads", 0)
    keys = heads if getattr(model, "kv_lora_rank", None) else getattr(model, "num_key_value_heads", None) or heads
    sizes = getattr(model, "ffn_config", model)  # DBRX
    experts = _first(sizes, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    if rollout.expert_parallel and getattr(model, "model_type", "") in NOT_SPREAD_IN_VLLM:
        setting, rule = f"{ROLLOUT}.expert_parallel_size", f"vLLM's loader of a {model.model_type} spreads no experts."
        raise SettingError(setting, rollout.workers, rule, f"{setting}=1")
    if rollout.expert_parallel and not experts:
        setting = f"{ROLLOUT}.expert_parallel_size"
        raise SettingError(setting, rollout.workers, "vLLM spreads experts, and the model has none.", f"{setting}=1")
    # Under expert parallelism experts are not sharded; without it data-parallel workers shard them too.
    dp = rollout.dp if experts else 1
    whose = " of an expert" if experts else ""
    size = (
        0 if rollout.expert_parallel else _first(sizes, "moe_intermediate_size", "ffn_hidden_size", "intermediate_size")
    )

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
        spread = f"{ROLLOUT}.expert_parallel_size={rollout.workers}"
        raise SettingError(
            _TP, rollout.tp, f"vLLM can't cut {wrong[0]} so.", f"{_TP} one of {works}" if works else spread
        )


def _first(model: Any, *names: str) -> int:
    return next((value for name in names if (value := getattr(model, name, None))), 0)
