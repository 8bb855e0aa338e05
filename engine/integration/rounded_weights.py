"""Training with the rounded weights of a rollout in FP8 or INT8 (``engine.rollout_quantization_aware``)."""

from typing import Any, Literal

from ...rollout.layout.rollout_config import BLOCK
from ...rollout.layout.slices import is_experts
from ...rollout.layout.specs import Channels
from ...rollout.servers import is_quantised, server_named
from ..errors import SettingError
from ..fsdp.after_gather import after_gather
from ..quantise.schemes import scheme_of

__all__ = ["compute_as_rollout"]


def compute_as_rollout(model: Any, which: Literal[True, "experts"], channels: Channels = "", server: str = "") -> None:
    """Let a sharded model compute with the weights that a rollout in FP8 or INT8 dequantises, bit for bit.

    Weights are rounded after FSDP's gather, which yields whole matrices or cuts at borders of blocks
    (``check_rounding``).

    Args:
        which: True for all weights that the rollout quantises, "experts" for the experts' only.
        channels: rollout quantisation with per-row scales ("fp8", "int8"); "" for FP8 by blocks.
        server: verl's name of the rollout.

    Raises:
        SettingError: the rollout's quantised weights are not known for the family.
    """
    family, rollout = model.config.model_type, server_named(server)
    if family not in rollout.quantised:
        known = ", ".join(sorted(rollout.quantised))
        rule = f"which weights of a {family} {rollout.title} quantises is not known (known: {known})."
        setting = "engine.rollout_quantization_aware"
        raise SettingError(setting, which, rule, f"{setting}=False")
    names = [name for name, _ in model.named_parameters() if is_quantised(family, name, server)]
    if which == "experts":
        names = [name for name in names if is_experts(name)]
    after_gather(model, names, scheme_of(BLOCK, channels).round_in_place)
