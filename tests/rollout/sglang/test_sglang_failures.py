"""A sync to SGLang that fails ends in time on all ranks of its replica; SGLang is a stand-in."""

import asyncio
import contextlib
import itertools
import json
import sys
import time
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from epfsdp2.engine.topology.rank_consistency import RankMismatchError, check_agreement
from epfsdp2.rollout import servers
from epfsdp2.rollout.sglang import adapter
from epfsdp2.rollout.transport.watched_sockets import WeightSyncError
from tests.support.ranks import run_ranks

TIMEOUT, LONG = 1.5, 60.0  # seconds; the latter where nothing is to run into it
TENSORS = 4


class _Request:
    def __init__(self, serialized_named_tensors, load_format, flush_cache):
        self.headers = [json.loads(packed) for packed in serialized_named_tensors]


def _sglang():
    """Return the modules that the adapter imports of SGLang; a bucket is sent as its header alone."""
    serializer = SimpleNamespace(serialize=lambda tensors: tensors[0][0])
    modules = {
        "sglang.srt.managers.io_struct": {"UpdateWeightsFromTensorReqInput": _Request},
        "sglang.srt.utils": {"MultiprocessingSerializer": serializer},
        "sglang.srt.utils.patch_torch": {"monkey_patch_torch_reductions": lambda: None},
    }
    found = {name: ModuleType(name) for name in ("sglang", "sglang.srt", "sglang.srt.managers", *modules)}
    for name, members in modules.items():
        vars(found[name]).update(members)
    return found


async def _never(*arguments):
    await asyncio.sleep(600)


class _Server:
    """SGLang's server on the replica's first rank: notes the headers of each request."""

    def __init__(self):
        self.requests = []

    async def update_weights_from_tensor(self, request):
        self.requests.append(request.headers)

    async def flush_cache(self):
        pass


class _Weights:
    """One worker's tensors, a bucket each; making number ``fails_at`` raises. Records that the generator was closed."""

    def __init__(self, mode="sliced", fails_at=None):
        self.mode, self.has_checksums, self._fails_at, self.closed = mode, False, fails_at, False
        self.is_on_trial = False

    def for_rollout(self, config, worker):
        return self

    def __iter__(self):
        return self.tensors()

    def tensors(self):
        try:
            for number in range(TENSORS):
                if number == self._fails_at:
                    raise ValueError("no memory left")
                yield f"tensor.{number}", torch.ones(1 << 17)
        finally:
            self.closed = True

    def check_plans(self, failure):
        check_agreement({}, failure=failure)

    def planned_layouts(self):
        return [{}, {}]

    def report(self, transfer):
        return f"{transfer.tensors} tensors"


class _Stock:
    """The parts of verl's adapter that the mix-in uses."""

    def __init__(self, server):
        self.device_mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("dp", "infer_tp", "infer_pp"))
        self.config = SimpleNamespace(checkpoint_engine=SimpleNamespace(update_weights_bucket_megabytes=1))
        self.rollout_rank = dist.get_rank()
        self._engine = server if self.rollout_rank == 0 else None

    async def _init_server_adapter(self):
        pass

    async def update_weights(self, weights, global_steps, wire_format, **kwargs):
        for _ in weights:
            dist.barrier(self.device_mesh["infer_tp"].get_group())  # verl gathers a bucket of each rank
            if self._engine is not None:
                await self._engine.update_weights_from_tensor(SimpleNamespace(headers=[]))


class _Adapter(adapter.Updates, _Stock):
    pass


@contextlib.contextmanager
def _replica(server, timeout=LONG):
    with pytest.MonkeyPatch.context() as patch:
        for name, module in _sglang().items():
            patch.setitem(sys.modules, name, module)
        servers.install(timeout)
        patch.setattr(adapter, "_SHM_BYTES", 1 << 19)
        yield _Adapter(server)


def _sends_all():
    server = _Server()
    with _replica(server) as replica:
        for _ in range(2):
            asyncio.run(replica.update_weights(_Weights()))
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
        weights = _Weights(mode, at if dist.get_rank() == failing else None)
        with _replica(_Server()) as replica:
            cause = f"worker {failing}: its trainer rank failed: ValueError: no memory left"
            _fails(replica, weights, WeightSyncError, cause)

    with _replica(_Server()) as replica, pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:  # a rank without memory for its buckets
            patch.setattr(adapter, "shared_memory", lambda nbytes: torch.empty(-nbytes))
        _fails(replica, _Weights(), WeightSyncError, "worker 1: its trainer rank failed: RuntimeError: ")


async def _raises(*arguments):
    raise ConnectionError("nobody listens")


async def _slow(request):
    await asyncio.sleep(0.4 * TIMEOUT)


def _unreachable():
    with _replica(_Server()) as replica:
        if dist.get_rank() == 0:
            replica._init_server_adapter = _raises
        with pytest.raises(RankMismatchError, match="nobody listens"):
            asyncio.run(replica.update_weights(_Weights()))

    server, cause = _Server(), "worker 0: SGLang did not take the update: ConnectionError: nobody listens"
    server.update_weights_from_tensor = _raises
    with _replica(server) as replica:
        _fails(replica, _Weights(), WeightSyncError, cause)


def _times_out():
    server = _Server()
    server.update_weights_from_tensor = _never
    cause = "worker 0: SGLang did not take the update: .*it did not answer within 1.5 s"
    with _replica(server, TIMEOUT) as replica:
        _fails(replica, _Weights(), WeightSyncError, cause)

    server = _Server()
    server.flush_cache = _never
    with _replica(server, TIMEOUT) as replica:
        if dist.get_rank() == 0:
            cause = "SGLang's server did not answer after the update within 1.5 s"
            _fails(replica, _Weights(), WeightSyncError, cause)
        else:
            asyncio.run(replica.update_weights(_Weights()))

    server = _Server()
    server.update_weights_from_tensor = _slow
    with _replica(server, TIMEOUT) as replica:  # each tensor has the time-out for itself
        asyncio.run(replica.update_weights(_Weights("full")))

    server = _Server()
    server.update_weights_from_tensor = _never
    cause = "SGLang did not take the update within 1.5 s, after 1 tensors"
    if dist.get_rank() > 0:
        cause = "another rank took no part in a collective within 3 s"
    with _replica(server, TIMEOUT) as replica:
        _fails(replica, _Weights("full"), WeightSyncError, cause)
        if dist.get_rank() == 0:  # take part in the collective that the other rank has left, to use the group again
            time.sleep(3 * TIMEOUT)
            dist.all_reduce(torch.zeros(1), group=replica.device_mesh["infer_tp"].get_group())


@pytest.mark.parametrize("function", [_sends_all, _failing_ranks, _unreachable, _times_out])
def test_sglang_sync_sends_every_bucket_once_or_ends_in_time_on_all_ranks_with_the_cause(function):
    run_ranks(function, 2)
