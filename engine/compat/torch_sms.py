"""The number of SMs that GEMMs leave to other kernels: torch's private carve-out (2.11 to 2.13)."""

import torch

from .private_names import look_up

__all__ = ["leave_sms", "sms_left"]

_BESIDE_COLLECTIVES = 16  # NCCL's CTAs for an all-gather within a node of H100s


def leave_sms(count: int, has_collectives: bool = False) -> None:
    """Leave ``count`` SMs to the kernels of collectives; 0 changes nothing.

    Args:
        count: -1 for 16 if ``has_collectives``, else 0.
        has_collectives: whether collectives run beside the GEMMs.

    Raises:
        MissingNameError: this torch has no such setting.
    """
    if count < 0:
        count = _BESIDE_COLLECTIVES if has_collectives else 0
    if count:
        name = "torch._C:_set_sm_carveout_experimental"
        look_up(name, known="2.7 and up", instead="engine.communication_sms=0")(count)


def sms_left() -> int:
    """Return the number of SMs that GEMMs leave now."""
    return getattr(torch._C, "_get_sm_carveout_experimental", lambda: None)() or 0
