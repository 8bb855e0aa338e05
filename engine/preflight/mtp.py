"""Checks of multi-token prediction layers."""

from collections.abc import Mapping
from typing import Any

from ...rollout.layout.rollout_config import ROLLOUT
from ...rollout.servers import server_of
from ..config.settings import mtp_loss_coef
from ..config.values import ACTOR_MODEL, CHECKPOINT_BACKEND, get_setting
from ..errors import SettingError
from ..head.causal_head import why_whole_logits
from ..lora.settings import LoraSettings
from ..model_files import CONFIG, folder_of, predicted_layers
from ..mtp.layers import MTP_LAYOUTS

__all__ = ["COEF", "check_drafter", "check_mtp"]

COEF = "engine.mtp_loss_coef"


def check_mtp(engine: Any, model: Any, built: Any, setting: str = ACTOR_MODEL) -> int:
    """Check that multi-token prediction layers can be kept, or trained, beside a policy; return their number.

    Args:
        built: the model on the meta device; None if it is not on this machine, which returns 0.
    """
    coef = mtp_loss_coef(engine, model)
    if coef is None or engine.forward_only:
        return 0
    mtp, own = f"{setting}.mtp", engine.mtp_loss_coef is not None
    name, value, off = (COEF, coef, f"{COEF}=null") if own else (f"{mtp}.enable", True, f"{mtp}.enable=False")
    if not own and coef and not get_setting(model, "mtp.detach_encoder"):
        rule = "the loss of drafts trains the layers that draft alone."
        raise SettingError(
            f"{mtp}.detach_encoder", False, rule, f"{mtp}.detach_encoder=True, or {mtp}.enable_train=False"
        )
    if LoraSettings.of(model, setting) is not None:
        raise SettingError(name, value, "layers that draft have no adapters.", f"{off}, or {setting}.lora_rank=0")
    if coef and not get_setting(model, "use_remove_padding", True):
        rule = f"drafts are trained on packed rows ({name}={value})."
        raise SettingError(f"{setting}.use_remove_padding", False, rule, f"{setting}.use_remove_padding=True, or {off}")
    if built is None:
        return 0
    family, kind = built.config.model_type, type(built).__name__
    if family not in MTP_LAYOUTS:
        rule = f"the layers that draft of {kind} are not known; those of {', '.join(MTP_LAYOUTS)} are."
        raise SettingError(name, value, rule, off)
    path = get_setting(model, "local_hf_config_path") or get_setting(model, "hf_config_path")
    count = predicted_layers(folder_of(path or get_setting(model, "path")) / CONFIG)
    if count == 0:
        raise SettingError(name, value, f"the {CONFIG} of {get_setting(model, 'path')} has no such layers.", off)
    if count > 1 and MTP_LAYOUTS[family].place == "beside":
        raise SettingError(name, value, f"of {count} layers that draft of {kind}, only one is known.", off)
    if getattr(built.config.get_text_config(), "chain_hidden_post_norm", False):
        rule = f"the norm between layers that draft of {kind} (chain_hidden_post_norm) is in no published checkpoint."
        raise SettingError(name, value, rule, off)
    whole = "logits are whole" if not engine.chunked_logits else why_whole_logits(built)
    if get_setting(model, "use_fused_kernels"):
        whole = "verl's fused kernels replace the head"
    if coef and whole:
        raise SettingError(name, value, f"drafts are trained in the engine's own head, and {whole}.", off)
    return count


def check_drafter(model: Any, rollout: Mapping[str, Any]) -> None:
    """Check that weight syncs reach the drafter of a rollout that has one."""
    name = f"{ACTOR_MODEL}.mtp.enable_rollout"
    if not (get_setting(model, "mtp.enable") and get_setting(model, "mtp.enable_rollout")):
        return
    server, backend = server_of(rollout), rollout.get("backend") or "naive"
    quantised = server.quantisation_settings(rollout)
    faults = {
        f"{ROLLOUT}.name={server.name} loads the layers that draft in no known way": not server.has_known_drafters,
        f"{CHECKPOINT_BACKEND}={backend} sends the policy's weights alone": backend != "naive",
        f"a drafter is not quantised with {quantised[0][0] if quantised else ''}": bool(quantised),
    }
    for rule in (fault for fault, holds in faults.items() if holds):
        raise SettingError(name, True, f"{rule}.", f"{name}=False")
