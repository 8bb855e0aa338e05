"""Two trainer ranks and a rollout rank of one group in threads, which start faster than processes."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist

from epfsdp2.rollout.remote.process_group import Members, SyncGroup

__all__ = ["three_members"]

_MEMBERS = Members(2, 3)


@contextmanager
def three_members(timeout_seconds: float) -> Iterator[tuple[list[SyncGroup], Callable[..., list]]]:
    """The members, and a ``map`` that calls a function for all of them at the same time."""
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool, mock.patch.dict("os.environ", GLOO_SOCKET_IFNAME="lo"):

        def each(function: Callable, *arguments) -> list:
            return list(pool.map(function, *arguments))

        members = each(lambda rank: SyncGroup(store, rank, _MEMBERS, "cpu", timeout_seconds), range(3))
        try:
            yield members, each
        finally:
            for member in members:
                member.close()
