"""Training with the weights that a rollout in FP8 or INT8 computes with (``engine.rollout_quantization_aware``)."""

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
    """Have a sharded model compute with its weights rounded as they are sent to a rollout in FP8 or INT8.

    Each is rounded where FSDP has gathered it, and has the bits of the values and scales that are sent, times each
    other. A matrix is gathered whole there, or is cut at borders of blocks (``check_rounding``).

    Args:
        which: True for all weights that the rollout quantises, or the experts' alone.
        channels: what the rollout holds weights in where each row has a scale; "" for FP8 by blocks.
        server: verl's name of the rollout.

    Raises:
        SettingError: which weights of the family a rollout quantises is not known.
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
