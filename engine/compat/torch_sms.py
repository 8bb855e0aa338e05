"""Set how many SMs of a GPU this process's GEMMs leave to other kernels: torch's private carve-out (2.11 to 2.13)."""

import torch

from .private_names import look_up

__all__ = ["leave_sms", "sms_left"]


def leave_sms(count: int) -> None:
    """Leave ``count`` SMs to the kernels of collectives; 0 changes nothing.

    Raises:
        MissingNameError: this torch has no such setting.
    """
    if count:
        name = "torch._C:_set_sm_carveout_experimental"
        look_up(name, known="2.7 and up", instead="engine.communication_sms=0")(count)


def sms_left() -> int:
    """Return how many SMs are left at present."""
    left = getattr(torch._C, "_get_sm_carveout_experimental", lambda: None)()
    return left or 0
