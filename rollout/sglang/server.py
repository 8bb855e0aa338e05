"""SGLang's description for the trainer: settings that slices support, and checks of its sizes."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from ...engine.errors import SettingError
from ..layout.rollout_config import ROLLOUT, server_arguments, size_of
from ..layout.rules import Family
from ..layout.server import Server, disaggregated
from .layout import FAMILIES, RECORDS_NO_ROUTES

__all__ = ["SGLANG", "SGLANG_LOADER"]

SGLANG_LOADER = "epfsdp2.rollout.sglang.loader.load"
_SGLANG = f"{ROLLOUT}.engine_kwargs.sglang"
_NAME = f"{ROLLOUT}.name"
_LENGTH = f"{ROLLOUT}.max_model_len"
_ROUTES = f"{ROLLOUT}.enable_rollout_routing_replay"
_NO_TOKENIZER = f"{ROLLOUT}.skip_tokenizer_init"
_QUANTISES = "SGLang quantises the weights and needs full tensors for that."
_MOVES = "SGLang stores experts in another order or more than once."
_CUTS = "it cuts the model in ways that transfer plans do not know."
# SGLang's arguments -> the values that slices support besides null, and why they support no other.
_ARGUMENTS: dict[str, tuple[tuple[object, ...], str]] = {
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
# Families that need the flag on a GPU, because SGLang may fuse shared experts there; on a CPU it never does.
_MAY_BE_FUSED, _NO_FUSION = ("deepseek_v3", "glm4_moe"), "disable_shared_experts_fusion"


class _SGLang(Server):
    install_hint = "pip install 'epfsdp2[sglang]'"

    def families(self) -> Mapping[str, Family]:
        return FAMILIES

    def obstacle(self, config: Any, family: str | None) -> SettingError | None:
        tp, experts = size_of(config, "tensor_model_parallel_size"), size_of(config, "expert_parallel_size")
        for name in ("data_parallel_size", "pipeline_model_parallel_size"):
            if (size := size_of(config, name)) > 1:
                return SettingError(f"{ROLLOUT}.{name}", size, _CUTS, "1")
        if experts not in (1, tp):
            reason = "slices know a part of every expert on each worker, or whole ones spread over all of them."
            return SettingError(f"{ROLLOUT}.expert_parallel_size", experts, reason, "1")
        if found := disaggregated(config):
            return found
        if config.get("quantization"):
            return SettingError(f"{ROLLOUT}.quantization", config.get("quantization"), _QUANTISES, "null")
        sglang = server_arguments(config, self.name)
        loaders = sglang.get("custom_weight_loader") or []
        if SGLANG_LOADER not in loaders:
            reason = "only this package's loader can load slices."
            return SettingError(f"{_SGLANG}.custom_weight_loader", list(loaders), reason, f"[{SGLANG_LOADER}]")
        for name, (served, reason) in _ARGUMENTS.items():
            if (value := sglang.get(name)) is not None and value not in served:
                return SettingError(f"{_SGLANG}.{name}", value, reason, str(served[0]) if served else "null")
        if found := self.unknown_family(family, "was not compared"):
            return found
        fusion = sglang.get(_NO_FUSION)
        if family in _MAY_BE_FUSED and sglang.get("device") != "cpu" and fusion is not True:
            reason = "SGLang may store the shared expert as one of the others."
            return SettingError(f"{_SGLANG}.{_NO_FUSION}", fusion, reason, "True")
        return None

    def check_settings(self, config: Any, model: nn.Module | None, requested: str, ranks: int, device: str) -> None:
        tp, dp = size_of(config, "tensor_model_parallel_size"), size_of(config, "data_parallel_size")
        # SGLang uses its own arguments, while verl finds each rank's worker by verl's sizes.
        for name, key, size in (
            ("tp_size", "tensor_model_parallel_size", tp * dp),
            ("dp_size", "data_parallel_size", dp),
            ("pp_size", "pipeline_model_parallel_size", size_of(config, "pipeline_model_parallel_size")),
            ("ep_size", "expert_parallel_size", size_of(config, "expert_parallel_size")),
        ):
            given = server_arguments(config, self.name).get(name)
            if given is not None and given != size:
                rule = f"verl finds each rank's worker by its own sizes, and {ROLLOUT}.{key}={size_of(config, key)}."
                raise SettingError(f"{_SGLANG}.{name}", given, rule, f"{ROLLOUT}.{key}, and no {_SGLANG}.{name}")
        if not config.get("enable_rollout_routing_replay"):
            return
        own: Any = None if model is None else model.config
        if own is not None and own.model_type in RECORDS_NO_ROUTES:
            rule = f"SGLang does not say which layer the routes of a {own.model_type} are of."
            raise SettingError(_ROUTES, True, rule, f"{_ROUTES}=False, or {_NAME}=vllm")
        if config.get("skip_tokenizer_init"):
            rule = f"with {_ROUTES}=True SGLang sends routes as text, which verl 0.9.1 reads where this is False."
            raise SettingError(_NO_TOKENIZER, True, rule, f"{_NO_TOKENIZER}=False")

    def check_rotations(self, kind: str, parameters: Mapping[str, Any], most: int, config: Any) -> int:
        """See ``Server``; SGLang 0.5 chooses longrope's frequencies by the longest running sequence.

        For dynamic NTK it always uses the frequencies of the longest possible one.
        """
        limit = config.get("max_model_len") or most
        if kind == "dynamic":
            if "alpha" not in parameters and parameters["factor"] != 1:
                rule = "SGLang has dynamic NTK's frequencies of the longest sequence for every sequence."
                raise SettingError(_NAME, self.name, rule, f"{_NAME}=vllm")
            return limit
        original = parameters["original_max_position_embeddings"]
        lengths = [int(config.get(f"max_{part}_length") or 0) for part in ("prompt", "response")]
        longest = min(limit, sum(lengths)) if all(lengths) else limit
        if longest > original:
            rule = f"SGLang has longrope's long frequencies for all sequences while one is over {original} tokens."
            raise SettingError(_LENGTH, limit, rule, f"{_LENGTH}={original}, or {_NAME}=vllm")
        return limit


SGLANG = _SGLang("sglang", "SGLang")
