"""Members of one group that tests share."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from epfsdp2.rollout.remote.process_group import Members, SyncGroup


@pytest.fixture
def together(monkeypatch):
    """Two trainer ranks and a rollout rank in threads, with a time-out of 3 s, and a ``map`` over them."""
    store = dist.HashStore()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with ThreadPoolExecutor(3) as pool:

        def each(function, *arguments):
            return list(pool.map(function, *arguments))

        members = each(lambda rank: SyncGroup(store, rank, Members(2, 3), "cpu", 3.0), range(3))
        yield members, each
        for member in members:
            member.close()
