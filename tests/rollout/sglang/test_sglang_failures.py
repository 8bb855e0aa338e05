"""A sync to SGLang that fails ends in time on all ranks of its replica; SGLang is a stand-in."""

import asyncio
import itertools
import time

import pytest
import torch
import torch.distributed as dist

from epfsdp2.engine.topology.rank_consistency import RankMismatchError
from epfsdp2.rollout.sglang import adapter
from epfsdp2.rollout.transport.watched_sockets import WeightSyncError
from tests.rollout.sglang.stand_ins import LONG, TENSORS, TIMEOUT, Server, Weights, replica_of
from tests.support.ranks import run_ranks


async def _never(*arguments):
    await asyncio.sleep(600)


def _sends_all():
    server = Server()
    with replica_of(server) as replica:
        for _ in range(2):
            asyncio.run(replica.update_weights(Weights()))
    if dist.get_rank() > 0:
        return
    for number, requests in enumerate((server.requests[:TENSORS], server.requests[TENSORS:])):
        for headers in zip(*requests, strict=True):  # those of one worker
            names = [entry[0] for header in headers for entry in header["entries"]]
            assert names == [f"tensor.{i}" for i in range(TENSORS)]
            assert [header["is_last"] for header in headers] == [False] * (TENSORS - 1) + [True]
            layouts = [header["layouts"] for header in headers]
            assert layouts == [None if number else [{}, {}]] + [None] * (TENSORS - 1)


def _fails(replica, weights, error, cause, within=LONG / 2):
    """Every rank raises the cause in time, after it took part in the rest of the exchange."""
    started = time.monotonic()
    with pytest.raises(error, match=cause):
        asyncio.run(replica.update_weights(weights))
    assert time.monotonic() - started < within and weights.closed


def _failing_ranks():
    for failing, at, mode in itertools.product((0, 1), (0, 2, TENSORS - 1), ("sliced", "full")):
        weights = Weights(mode, at if dist.get_rank() == failing else None)
        with replica_of(Server()) as replica:
            cause = f"worker {failing}: its trainer rank failed: ValueError: no memory left"
            _fails(replica, weights, WeightSyncError, cause)

    with replica_of(Server()) as replica, pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:  # a rank without memory for its buckets
            patch.setattr(adapter, "shared_memory", lambda nbytes: torch.empty(-nbytes))
        _fails(replica, Weights(), WeightSyncError, "worker 1: its trainer rank failed: RuntimeError: ")


async def _raises(*arguments):
    raise ConnectionError("nobody listens")


async def _slow(request):
    await asyncio.sleep(0.4 * TIMEOUT)


def _unreachable():
    with replica_of(Server()) as replica:
        if dist.get_rank() == 0:
            replica._init_server_adapter = _raises
        with pytest.raises(RankMismatchError, match="nobody listens"):
            asyncio.run(replica.update_weights(Weights()))

    server, cause = Server(), "worker 0: SGLang did not take the update: ConnectionError: nobody listens"
    server.update_weights_from_tensor = _raises
    with replica_of(server) as replica:
        _fails(replica, Weights(), WeightSyncError, cause)


def _times_out():
    server = Server()
    server.update_weights_from_tensor = _never
    cause = "worker 0: SGLang did not take the update: .*it did not answer within 1.5 s"
    with replica_of(server, TIMEOUT) as replica:
        _fails(replica, Weights(), WeightSyncError, cause)

    server = Server()
    server.flush_cache = _never
    with replica_of(server, TIMEOUT) as replica:
        if dist.get_rank() == 0:
            cause = "SGLang's server did not answer after the update within 1.5 s"
            _fails(replica, Weights(), WeightSyncError, cause)
        else:
            asyncio.run(replica.update_weights(Weights()))

    server = Server()
    server.update_weights_from_tensor = _slow
    with replica_of(server, TIMEOUT) as replica:  # each tensor has the time-out for itself
        asyncio.run(replica.update_weights(Weights("full")))

    server = Server()
    server.update_weights_from_tensor = _never
    cause = "SGLang did not take the update within 1.5 s, after 1 tensors"
    if dist.get_rank() > 0:
        cause = "another rank took no part in a collective within 3 s"
    with replica_of(server, TIMEOUT) as replica:
        _fails(replica, Weights("full"), WeightSyncError, cause)
        if dist.get_rank() == 0:  # take part in the collective that the other rank has left, to use the group again
            time.sleep(3 * TIMEOUT)
            dist.all_reduce(torch.zeros(1), group=replica.device_mesh["infer_tp"].get_group())


@pytest.mark.parametrize("function", [_sends_all, _failing_ranks, _unreachable, _times_out])
def test_sglang_sync_sends_every_bucket_once_or_ends_in_time_on_all_ranks_with_the_cause(function):
    run_ranks(function, 2)
