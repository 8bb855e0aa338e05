"""A sync to SGLang that can't go on ends in time on all ranks of its replica; SGLang and its server are stand-ins."""

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
    """Return what the adapter imports of SGLang; a bucket is sent as its header alone."""
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
    """One worker's tensors, a bucket each; the generator records that it was closed.

    Args:
        fails_at: number of the tensor that this rank can't make; None for none.
    """

    def __init__(self, mode="sliced", fails_at=None):
        self.mode, self.has_checksums, self._fails_at, self.closed = mode, False, fails_at, False

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
            dist.barrier(self.device_mesh["infer_tp"].get_group())  # verl gathers what each rank has
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
        asyncio.run(replica.update_weights(_Weights()))
        asyncio.run(replica.update_weights(_Weights()))
    if dist.get_rank() > 0:
        return
    syncs = server.requests[:TENSORS], server.requests[TENSORS:]
    for number, requests in enumerate(syncs):
        for headers in zip(*requests, strict=True):  # those of one worker
            assert [entry[0] for header in headers for entry in header["entries"]] == [
                f"tensor.{i}" for i in range(TENSORS)
            ]
            assert [header["is_last"] for header in headers] == [False] * (TENSORS - 1) + [True]
            assert [header["layouts"] for header in headers] == [[{}, {}] if number == 0 else None] + [None] * (
                TENSORS - 1
            )


def test_sglang_adapter_sends_every_bucket_of_each_rank_once():
    run_ranks(_sends_all, 2)


def _ends(cases):
    """Every rank raises the cause, and before its time; what is left of the exchange was taken part in."""
    for failing, at, mode in cases:
        weights = _Weights(mode, at if dist.get_rank() == failing else None)
        with _replica(_Server()) as replica:
            started = time.monotonic()
            cause = f"worker {failing}: its trainer rank failed: ValueError: no memory left"
            with pytest.raises(WeightSyncError, match=cause):
                asyncio.run(replica.update_weights(weights))
            assert time.monotonic() - started < LONG / 2 and weights.closed


def test_sglang_sync_of_a_rank_whose_weights_fail_ends_on_all_ranks_with_the_cause():
    run_ranks(_ends, 2, list(itertools.product((0, 1), (0, 2, TENSORS - 1), ("sliced", "full"))))


def _begins_to_drain():
    """A rank without memory for its buckets takes part in the exchange nevertheless."""
    weights = _Weights()
    with _replica(_Server()) as replica, pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(adapter, "shared_memory", lambda nbytes: torch.empty(-nbytes))
        with pytest.raises(WeightSyncError, match="worker 1: its trainer rank failed: RuntimeError: "):
            asyncio.run(replica.update_weights(weights))
        assert weights.closed


def _unreachable():
    async def unknown():
        raise ValueError("no such actor")

    with _replica(_Server()) as replica, pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(replica, "_init_server_adapter", unknown)
        with pytest.raises(RankMismatchError, match="no such actor"):
            asyncio.run(replica.update_weights(_Weights()))


def test_sglang_server_that_is_unknown_ends_the_first_sync_on_all_ranks():
    run_ranks(_unreachable, 2)


def test_sglang_sync_of_a_rank_without_memory_for_buckets_ends_on_all_ranks():
    run_ranks(_begins_to_drain, 2)


def _times_out(cases):
    for method, failure in cases:
        server, weights = _Server(), _Weights()
        setattr(server, method, _never)
        with _replica(server, TIMEOUT) as replica:
            started = time.monotonic()
            if dist.get_rank() == 0 or failure.startswith("worker 0"):
                with pytest.raises(WeightSyncError, match=failure):
                    asyncio.run(replica.update_weights(weights))
                assert TIMEOUT <= time.monotonic() - started < LONG / 2
            else:
                asyncio.run(replica.update_weights(weights))
            assert weights.closed


def test_sglang_server_that_does_not_answer_ends_the_sync_in_time():
    update = "worker 0: SGLang did not take the update: .*it did not answer within 1.5 s"
    flush = "SGLang's server did not answer after the update within 1.5 s"
    run_ranks(_times_out, 2, [("update_weights_from_tensor", update), ("flush_cache", flush)])


def _full_times_out():
    server, weights = _Server(), _Weights("full")
    server.update_weights_from_tensor = _never
    failure = "SGLang did not take the update within 1.5 s, after 1 tensors"
    if dist.get_rank() > 0:
        failure = "another rank took no part in a collective within 3 s"
    with _replica(server, TIMEOUT) as replica:
        with pytest.raises(WeightSyncError, match=failure):
            asyncio.run(replica.update_weights(weights))
        assert weights.closed
        if dist.get_rank() == 0:
            _is_too_late(replica)


def _is_too_late(replica):
    """Take part in what another rank has stopped waiting for, so that the group can be used again."""
    time.sleep(3 * TIMEOUT)
    dist.all_reduce(torch.zeros(1), group=replica.device_mesh["infer_tp"].get_group())


def test_sglang_server_that_does_not_answer_to_full_tensors_ends_the_sync_in_time():
    run_ranks(_full_times_out, 2)


def _waits_for_each_tensor():
    async def slow(request):
        await asyncio.sleep(0.4 * TIMEOUT)

    server = _Server()
    server.update_weights_from_tensor = slow
    with _replica(server, TIMEOUT) as replica:
        asyncio.run(replica.update_weights(_Weights("full")))


def test_sglang_server_that_takes_full_tensors_slowly_is_waited_for():
    run_ranks(_waits_for_each_tensor, 2)


def _absent():
    if dist.get_rank() == 1:
        replica = _Stock(None)
        check_agreement({})
        _is_too_late(replica)
        return
    refused = pytest.raises(WeightSyncError, match="another rank took no part in a collective within 3 s")
    with _replica(_Server(), TIMEOUT) as replica, refused:
        asyncio.run(replica.update_weights(_Weights()))


def test_sglang_sync_without_another_rank_of_the_replica_ends_in_time():
    run_ranks(_absent, 2)
