"""A sync to an SGLang with sessions begins one before its first bucket, and ends it after the last or a failure."""

import abc
import asyncio
import itertools
import sys
from types import ModuleType

import pytest
import torch.distributed as dist

from epfsdp2.rollout.sglang import shims
from epfsdp2.rollout.transport.watched_sockets import WeightSyncError
from tests.rollout.sglang.stand_ins import TENSORS, Server, Weights, replica_of
from tests.support.ranks import run_ranks

BEGIN, UPDATE, FLUSH, END = "begin", "update", "flush", "end"


class _Sessions(Server):
    """As SGLang 0.5.21: refuses an update outside a session, and a session inside another."""

    def __init__(self, refuses=None):
        super().__init__()
        self.calls, self.is_open, self._refuses = [], False, refuses

    def _called(self, name, allowed):
        self.calls.append(name)
        if not allowed or name == self._refuses:
            raise ConnectionError(f"400, {name}")

    async def begin_weight_update(self, selector="all"):
        self._called(BEGIN, not self.is_open)
        self.is_open = True

    async def end_weight_update(self):
        self._called(END, self.is_open)
        self.is_open = False

    async def update_weights_from_tensor(self, request):
        self._called(UPDATE, self.is_open)

    async def flush_cache(self):
        self.calls.append(FLUSH)


def _sync(replica, weights, **kwargs):
    asyncio.run(replica.update_weights(weights, **kwargs))


def _whole():
    for mode in ("sliced", "full"):
        server = _Sessions()
        with replica_of(server) as replica:
            for _ in range(2):
                _sync(replica, Weights(mode))
        sent = [BEGIN, *[UPDATE] * TENSORS, END] + ([FLUSH] if mode == "sliced" else [])
        assert server.calls == (sent * 2 if dist.get_rank() == 0 else []), mode


def _by_verl():
    """Weights of another engine, and of another wire format, are sent by verl's update alone."""
    server = _Sessions()
    with replica_of(server) as replica:
        _sync(replica, list(range(TENSORS)))
        _sync(replica, Weights(), wire_format="delta_flush")
        assert server.calls == ([BEGIN, *[UPDATE] * TENSORS, END] * 2 if dist.get_rank() == 0 else [])
        server.calls.clear()
        _sync(replica, [], peft_config={"r": 8}, base_sync_done=True)  # adapters need no session
        replica._verl_has_sessions = True  # a verl that opens them itself
        server.is_open = True
        _sync(replica, Weights("full"))
        assert server.calls == ([UPDATE] * TENSORS if dist.get_rank() == 0 else [])


def _failing():
    for mode, refuses in (("sliced", BEGIN), ("sliced", UPDATE), ("full", BEGIN)):
        server = _Sessions(refuses)
        cause = f"worker 0: SGLang did not take the update: .*400, {refuses}"
        with replica_of(server) as replica, pytest.raises(WeightSyncError, match=cause):
            _sync(replica, Weights(mode))
        assert server.calls[-1:] == ([END] if dist.get_rank() == 0 else []) and not server.is_open

    for mode, failing in itertools.product(("sliced", "full"), (0, 1)):
        server = _Sessions()
        with replica_of(server) as replica, pytest.raises(WeightSyncError, match="no memory left"):
            _sync(replica, Weights(mode, fails_at=2 if dist.get_rank() == failing else None))
        assert server.calls[-1:] == ([END] if dist.get_rank() == 0 else []) and not server.is_open
        with replica_of(server) as replica:
            _sync(replica, Weights(mode))

    server = _Sessions(END)
    with replica_of(server) as replica:
        if dist.get_rank() == 0:
            with pytest.raises(WeightSyncError, match="SGLang did not take the update: ConnectionError: 400, end"):
                _sync(replica, Weights())
        else:
            _sync(replica, Weights())


@pytest.mark.parametrize("function", [_whole, _by_verl, _failing])
def test_sglang_sync_holds_one_session_from_before_its_first_bucket_to_its_last_or_to_a_failure(function):
    run_ranks(function, 2)


@pytest.mark.parametrize("abstract", [(), ("begin_weight_update", "end_weight_update")])
@pytest.mark.parametrize("implemented", [True, False])
def test_sglang_sessions_are_added_to_a_client_that_lacks_them_alone(monkeypatch, abstract, implemented):
    async def theirs(self):
        return "theirs"

    @abc.abstractmethod
    async def lacking(self):
        pass

    base = abc.ABCMeta("EngineBase", (), dict.fromkeys(abstract, lacking))

    async def request(self, endpoint, payload=None):
        return endpoint, payload

    own = {"_make_async_request": request} | (dict.fromkeys(abstract, theirs) if implemented else {})
    client = abc.ABCMeta("AsyncHttpServerAdapter", (base,), own)
    name = "verl.workers.rollout.sglang_rollout.http_server_engine"
    module = ModuleType(name)
    module.AsyncHttpServerAdapter = client
    monkeypatch.setitem(sys.modules, "verl.workers.rollout.sglang_rollout", ModuleType("sglang_rollout"))
    monkeypatch.setitem(sys.modules, name, module)
    needed = bool(abstract) and not implemented
    assert [shims.add_sessions() for _ in range(2)] == [needed] * 2
    assert hasattr(client(), "begin_weight_update") == bool(abstract)
    if needed:
        assert asyncio.run(client().begin_weight_update()) == ("begin_weight_update", {"selector": "all"})
        assert asyncio.run(client().end_weight_update()) == ("end_weight_update", None)
