"""A mesh without a process group, by private arguments of ``DeviceMesh`` (torch 2.11 to 2.15)."""

from torch.distributed.device_mesh import DeviceMesh

__all__ = ["lone_mesh"]


def lone_mesh(ranks: int) -> DeviceMesh | None:
    """Return a CPU mesh whose first rank is this process; None if torch has no such arguments.

    DTensors on it compute with their local shards as on any mesh, and raise if they would communicate.
    """
    try:
        return DeviceMesh("cpu", list(range(ranks)), _init_backend=False, _rank=0)
    except TypeError:
        return None
