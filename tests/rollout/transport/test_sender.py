"""The sender of buckets, with verl's receiver at the other end."""

import asyncio
import os
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from epfsdp2.rollout.transport import sender
from epfsdp2.rollout.vllm.adapter import WeightSyncError, send_weights


def _send(weights) -> tuple[dict, list]:
    """Send to verl's receiver in a thread; return the tensors and the names in each bucket."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

    handle, tensors, buckets = f"ipc:///tmp/epfsdp2-test-{os.getpid()}.sock", {}, []

    def on_bucket(weights, is_last):
        tensors.update((name, tensor.clone()) for name, tensor in weights)
        buckets.append([name for name, _ in weights])

    receiver = BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True)
    thread = threading.Thread(target=receiver.receive_weights, args=(on_bucket,), daemon=True)
    thread.start()
    arguments = dict(zmq_handle=handle, bucket_megabytes=1, use_shm=True, timeout_seconds=30.0, rank=0)
    asyncio.run(send_weights(weights, **arguments))
    thread.join(30)
    assert not thread.is_alive()
    return tensors, buckets


@pytest.fixture
def make_again():
    """Make the class of senders anew in this test, and after it."""
    sender.sender_class.cache_clear()
    yield sender.sender_class.cache_clear
    sender.sender_class.cache_clear()


def test_bucket_contents_equal_those_of_verls_sender(monkeypatch, caplog, make_again):
    assert sender.fingerprint() in sender._KNOWN
    dtypes = (torch.float32, torch.bfloat16, torch.uint8, torch.int64)
    weights = [(f"{i}", torch.randn(90_000 + i).to(dtypes[i % 4])) for i in range(20)]
    weights += [("empty", torch.empty(0, 3)), ("scalar", torch.tensor(2.0))]
    ours, buckets = _send(iter(weights))
    assert sender.sender_class().__name__ == "StreamSender"
    make_again()
    # Where the source is unknown, here because it is not installed, verl's class is used.
    monkeypatch.setattr(sender.inspect, "getsource", mock.Mock(side_effect=OSError("could not get source code")))
    with caplog.at_level("WARNING", "epfsdp2"):
        theirs, their_buckets = _send(iter(weights))
        assert sender.sender_class().__name__ == "BucketedWeightSender"
    assert caplog.text.count("is not that of verl 0.9.1") == 1
    assert buckets == their_buckets and len(buckets) > 3
    assert all(torch.equal(ours[name], tensor) and torch.equal(theirs[name], tensor) for name, tensor in weights)


def _full_buckets():
    for i in range(3):
        yield f"{i}", torch.full((200_000,), float(i))


def test_bucket_memory_when_given_back_has_no_views(monkeypatch):
    """Memory with references stays reserved on the GPU, beside vLLM's cache."""
    references, cls = [], sender.sender_class()
    cleanup = cls._cleanup

    def count(self):
        references.append(torch._C._storage_Use_Count(self.buffer.untyped_storage()._cdata))
        cleanup(self)

    monkeypatch.setattr(cls, "_cleanup", count)
    tensors, _ = _send(_full_buckets())
    assert [tensors[f"{i}"][0] for i in range(3)] == [0, 1, 2]
    alone = torch.empty(4)
    assert references == [torch._C._storage_Use_Count(alone.untyped_storage()._cdata)]


def test_bucket_before_it_is_sent_waits_for_its_own_stream_and_not_the_device(monkeypatch, make_again):
    """The next round is in flight on other streams."""
    waits = []
    stream = SimpleNamespace(synchronize=lambda: waits.append("stream"))
    device = SimpleNamespace(
        current_stream=lambda: stream, synchronize=lambda: waits.append("device"), empty_cache=lambda: None
    )
    monkeypatch.setattr("verl.utils.device.get_torch_device", lambda: device)
    _, buckets = _send(_full_buckets())
    assert waits == ["stream"] * len(buckets) and len(buckets) == 3


def test_tensor_larger_than_shared_memory_is_refused_with_the_setting_to_raise():
    weights = iter([("small", torch.ones(2)), ("large", torch.zeros(300_000))])
    with pytest.raises(WeightSyncError, match="Weight large.* is too large to fit in the bucket.*_megabytes.1 MB"):
        _send(weights)


def test_tensor_larger_than_device_memory_of_a_bucket_is_sent_alone_by_verls_method(monkeypatch):
    """The tensors before it are sent first, and the next bucket begins empty."""
    sent = []
    cls = sender.sender_class()
    for method in ("_init_socket", "_init_buffer", "_cleanup"):
        monkeypatch.setattr(cls, method, lambda self: None)
    one = cls("", bucket_size_mb=1)
    one.buffer = torch.empty(1 << 20, dtype=torch.uint8)
    one.socket = SimpleNamespace(
        send_pyobj=lambda message: sent.append([*message["bucket_meta"], message["is_last"]]), recv=lambda: b""
    )
    monkeypatch.setattr(cls.__base__, "_direct_send_large_weight", lambda self, name, tensor: sent.append([name]))

    async def weights():
        for name, size in (("a", 10), ("large", 1 << 20), ("b", 10), ("c", 1 << 18)):
            yield name, torch.zeros(size)

    asyncio.run(one.async_send_weights(weights()))
    assert sent == [["a", False], ["large"], ["b", False], ["c", True]]
