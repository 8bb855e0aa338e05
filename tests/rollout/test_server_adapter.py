"""The watched adapter over a fake of verl's, and the watched sockets, without vLLM."""

import asyncio
import concurrent.futures
import glob
import importlib
import inspect
import itertools
import os
import subprocess
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import zmq

from epfsdp2.rollout.vllm import adapter as server_adapter
from epfsdp2.rollout.vllm.adapter import Updates, WeightSyncError, send_weights
from epfsdp2.rollout.vllm.server import EXTENSION, VLLM


@pytest.fixture
def handle():
    path = f"/tmp/rl-colocate-zmq-test{os.getpid()}x{time.monotonic_ns()}-replica-0-rank-0.sock"
    before = set(glob.glob("/dev/shm/verl_weights_*"))
    yield f"ipc://{path}"
    assert not os.path.exists(path)
    assert set(glob.glob("/dev/shm/verl_weights_*")) <= before


class Weights:
    """Four tensors, which record whether they were closed."""

    closed = False

    def __iter__(self):
        return ((f"tensor.{i}", torch.full((200_000,), float(i))) for i in range(4))

    def close(self):
        self.closed = True


def send(handle: str, weights, timeout_seconds=1.0, **kwargs):
    settings = {"zmq_handle": handle, "bucket_megabytes": 1, "use_shm": True, "rank": 5, **kwargs}
    return asyncio.run(send_weights(weights, timeout_seconds=timeout_seconds, **settings))


def receive(handle: str, buckets: int | None, seconds: float = 0.0) -> threading.Thread:
    """Start a worker that receives so many buckets, each for some time, and then stops without an answer."""

    def work():
        socket = zmq.Context().socket(zmq.REP)
        socket.connect(handle)
        for _ in itertools.count() if buckets is None else range(buckets):
            message = socket.recv_pyobj()
            time.sleep(seconds)
            socket.send(b"")
            if message.get("is_last"):
                break
        socket.close(linger=1000)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("buckets", [0, 2], ids=["nobody", "first bucket"])
def test_send_weights_to_a_silent_worker_times_out(handle, buckets):
    weights = Weights()
    if buckets:
        receive(handle, buckets)
    importlib.import_module("verl.workers.rollout.vllm_rollout.bucketed_weight_transfer")  # seconds, at the first send
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=rf"rank 5 after {buckets} tensors .*within 1 s") as caught:
        send(handle, weights)
    assert time.monotonic() - started < 6
    assert weights.closed
    assert f"last: {'tensor.2' if buckets else 'none'}" in str(caught.value)


def test_send_weights_times_each_message_and_closes_the_source(handle):
    weights = Weights()
    worker = receive(handle, None, seconds=0.3)
    started = time.monotonic()
    send(handle, weights, 0.6)
    worker.join(5)
    assert weights.closed and not worker.is_alive()
    assert time.monotonic() - started > 1.2  # twice the time-out


def test_send_weights_raises_the_receiving_calls_failure_at_once(handle, monkeypatch):
    failed = concurrent.futures.Future()
    monkeypatch.setattr(
        server_adapter, "_failure_of_call", lambda future: future.exception() if future.done() else None
    )
    threading.Timer(0.5, failed.set_exception, [RuntimeError("vLLM's own words")]).start()
    weights, started = Weights(), time.monotonic()
    with pytest.raises(WeightSyncError, match="RuntimeError: vLLM's own words") as caught:
        send(handle, weights, 60.0, future=failed)
    assert time.monotonic() - started < 10
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert weights.closed


def test_send_weights_times_out_on_a_call_that_never_returns(handle, monkeypatch):
    monkeypatch.setattr(server_adapter, "_failure_of_call", lambda future: None)

    async def never():
        await asyncio.sleep(600)

    receive(handle, None)
    with pytest.raises(WeightSyncError, match="did not finish the update within 1 s"):
        send(handle, Weights(), future=never())


def test_send_weights_without_memory_for_a_bucket_takes_part_in_the_exchange(handle, monkeypatch):
    """Other ranks wait for its part: a generator that has not begun would do nothing when it is closed."""
    done = []

    def exchange():
        try:
            done.append("begun")
            yield "a", torch.ones(2)
        finally:
            done.append("ended")

    sender = mock.Mock(async_send_weights=mock.AsyncMock(side_effect=OSError("no space left")))
    monkeypatch.setattr(server_adapter, "sender_class", lambda: lambda *args, **kwargs: sender)
    with pytest.raises(WeightSyncError, match="after 0 tensors .*no space left"):
        send(handle, exchange())
    assert done == ["begun", "ended"]


class StockAdapter:
    """Fakes the parts of verl's ServerAdapter that the mix-in uses."""

    def __init__(self, handle: str, extension: str | None):
        self.zmq_handle, self.use_shm, self.rollout_rank, self._has_server = handle, True, 0, True
        self.config = {"engine_kwargs": {"vllm": {"worker_extension_cls": extension}}}
        self.config = type("Config", (dict,), {})(self.config)
        self.config.checkpoint_engine = SimpleNamespace(update_weights_bucket_megabytes=1)
        self.calls = []

        names = ("clear_kv_cache", "set_global_steps")
        self.server_handle = SimpleNamespace(
            **{name: SimpleNamespace(remote=partial(self._call, name)) for name in names}
        )

    async def _call(self, *call):
        self.calls.append(call)

    async def _execute_method(self, method, non_block, kwargs):
        self.calls.append((method, kwargs))
        return None

    async def update_weights(self, weights, global_steps=None, wire_format="named_tensors", **kwargs):
        self.calls.append(("stock", wire_format))


class Adapter(Updates, StockAdapter):
    pass


class FakeWorkerWeights:
    """Fakes the parts of ``RolloutWeights`` that the adapter uses."""

    is_quantised_here = is_on_trial = False

    def __init__(self, mode: str = "sliced", has_checksums: bool = True):
        self.mode, self.has_checksums, self.transfer, self.failures = mode, has_checksums, None, []

    def tensors(self):
        yield "a", torch.ones(2)

    def planned_layouts(self):
        return [{"a": "[2] from 0"}]

    def check_plans(self, failure):
        self.failures.append(failure)
        if failure is not None:
            raise failure

    def report(self, transfer):
        self.transfer = transfer
        return "a report"


def sync(adapter, weights, **arguments):
    staged = SimpleNamespace(stages=lambda config, worker: [(weights, {})])
    asyncio.run(adapter.update_weights(staged, **arguments))


def test_adapter_checks_layouts_before_the_first_sync_and_prints_reports(handle, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    adapter = Adapter(handle, EXTENSION)
    syncs = [FakeWorkerWeights(), FakeWorkerWeights(has_checksums=False)]
    for weights in syncs:
        receive(handle, None)
        sync(adapter, weights)
    asked = [(name, *rest) for name, *rest in adapter.calls if name != "clear_kv_cache"]
    timeout = {"sync_timeout_seconds": Updates.timeout_seconds}
    assert asked == [
        ("epfsdp2_check_layout", {"layouts": [{"a": "[2] from 0"}]}),
        ("update_weights_from_ipc", {"use_shm": True, **timeout, "verify": True}),
        ("update_weights_from_ipc", {"use_shm": True, **timeout}),
    ]
    assert [weights.failures for weights in syncs] == [[None], []]
    # The checksums are the second tensor.
    assert [weights.transfer.tensors for weights in syncs] == [2, 1]
    assert all(weights.transfer.wire_seconds > 0 and weights.transfer.load_seconds > 0 for weights in syncs)
    assert capsys.readouterr().out == "[epfsdp2] a report\n" * 2


def test_adapter_loads_the_stages_of_a_sync_one_after_the_other(handle, monkeypatch):
    """A stage is loaded when the next one is asked for, and the cache is cleared once."""
    adapter, loaded = Adapter(handle, EXTENSION), []

    async def sends(source, **kwargs):
        loaded.append([name for name, _ in source])

    class Staged:
        def stages(self, config, worker):
            yield FakeWorkerWeights("full", has_checksums=False), {"peft_config": {"r": 4}, "base_sync_done": False}
            assert loaded == [["a"]]
            yield FakeWorkerWeights("adapters", has_checksums=False), {"peft_config": {"r": 4}, "base_sync_done": True}

    monkeypatch.setattr(server_adapter, "send_weights", sends)
    asyncio.run(adapter.update_weights(Staged()))
    taken = {"use_shm": True, "sync_timeout_seconds": Updates.timeout_seconds, "peft_config": {"r": 4}}
    assert [call for call in adapter.calls if call[0] == "update_weights_from_ipc"] == [
        ("update_weights_from_ipc", {**taken, "base_sync_done": done}) for done in (False, True)
    ]
    assert len(loaded) == 2 and [name for name, *_ in adapter.calls].count("clear_kv_cache") == 1


@pytest.mark.parametrize("extension", ["theirs.Extension", None])
def test_adapter_in_full_mode_with_another_extension_sends_only_tensors_and_clears_the_cache(
    handle, capsys, monkeypatch, extension
):
    monkeypatch.setenv("RANK", "1")
    adapter, weights = Adapter(handle, extension), FakeWorkerWeights("full")
    receive(handle, None)
    sync(adapter, weights, global_steps=3)
    sent = ("update_weights_from_ipc", {"use_shm": True})
    assert adapter.calls == [sent, ("clear_kv_cache",), ("set_global_steps", 3)]
    assert weights.transfer.tensors == 1 and weights.failures == []
    assert capsys.readouterr().out == ""


def test_adapter_with_differing_layouts_raises_before_sending(handle):
    class Disagrees(Adapter):
        async def _execute_method(self, method, non_block, kwargs):
            await super()._execute_method(method, non_block, kwargs)

            async def fails():
                raise RuntimeError("worker 0 of a replica: they differ")

            return fails()

    adapter, weights = Disagrees(handle, EXTENSION), FakeWorkerWeights()
    for _ in range(2):  # it is asked again
        with pytest.raises(WeightSyncError, match="RuntimeError: worker 0 of a replica: they differ"):
            sync(adapter, weights)
    assert [name for name, *_ in adapter.calls] == ["epfsdp2_check_layout"] * 2


def test_adapter_on_trial_sends_what_the_comparison_leaves(handle):
    """Full tensors without checksums, and later ones without a comparison; slices are compared again by a new group."""

    class OnTrial(FakeWorkerWeights):
        is_on_trial, becomes = True, "full"

        def check_plans(self, failure):
            self.failures.append(failure)
            self.mode, self.has_checksums = self.becomes, False

    adapter = Adapter(handle, EXTENSION)
    full, later, again = OnTrial(), FakeWorkerWeights("full", has_checksums=False), OnTrial()
    again.becomes = "sliced"
    for weights in (full, later, again, again):
        receive(handle, None)
        sync(adapter, weights)
    assert [len(weights.failures) for weights in (full, later, again)] == [1, 0, 2]
    updates = [kwargs for name, *kwargs in adapter.calls if name == "update_weights_from_ipc"]
    assert len(updates) == 4 and not any("verify" in kwargs for (kwargs,) in updates)


def test_adapter_whose_server_does_not_clear_its_cache_ends_in_time(handle, monkeypatch):
    monkeypatch.setattr(Updates, "timeout_seconds", 1.0)
    adapter = Adapter(handle, EXTENSION)
    adapter.server_handle.clear_kv_cache = SimpleNamespace(remote=lambda: asyncio.sleep(600))
    receive(handle, None)
    with pytest.raises(WeightSyncError, match="vLLM's server did not answer after the update within 1 s"):
        asyncio.run(adapter.update_weights(Weights()))


def test_adapter_passes_deltas_to_verls_method(handle):
    adapter = Adapter(handle, None)
    asyncio.run(adapter.update_weights(Weights(), wire_format="delta_flush"))
    assert adapter.calls == [("stock", "delta_flush")]


def test_adapter_module_imports_nothing_heavy():
    heavy = "{'ray', 'verl', 'vllm'}"
    code = f"import sys, epfsdp2.rollout.vllm.adapter; assert not {heavy} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_install_registers_the_adapter_whose_methods_verl_still_has(monkeypatch):
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY, get_rollout_class
    from verl.workers.rollout.vllm_rollout import ServerAdapter

    monkeypatch.setitem(_ROLLOUT_REGISTRY, ("vllm", "async"), None)
    monkeypatch.setattr(Updates, "timeout_seconds", None)
    VLLM.install(7.0)
    adapter = get_rollout_class("vllm", "async")
    assert adapter.__mro__[1:3] == (Updates, ServerAdapter) and adapter.timeout_seconds == 7.0
    update = list(inspect.signature(ServerAdapter.update_weights).parameters)
    assert update[1:4] == ["weights", "global_steps", "wire_format"], update
    assert {"method", "non_block", "kwargs"} <= set(inspect.signature(ServerAdapter._execute_method).parameters)
