"""The bucket that an exchange receives into, with verl's receiver at the other end."""

import asyncio
import os
import threading
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from epfsdp2.engine.model.layers import layer_names
from epfsdp2.rollout.layout.specs import Rollout
from epfsdp2.rollout.sync import RolloutSync, SyncSettings
from epfsdp2.rollout.transport import sender
from epfsdp2.rollout.transport.cast import CastOnCopy
from epfsdp2.rollout.transport.sender import Bucket
from epfsdp2.rollout.vllm.adapter import send_weights
from tests.support.engine.sharded import sharded_model
from tests.support.models.tiny import save_qwen3_moe
from tests.support.ranks import run_ranks

MEMORY = 30_000


class Worker:
    """Reads each message like verl's receiver and then overwrites the bucket."""

    def __init__(self, memory: torch.Tensor):
        self.memory, self.tensors, self.ends, self.sent = memory, {}, [], []

    def send(self, metadata, is_last):
        for name, where in metadata.items():
            stop = where["offset"] + where["dtype"].itemsize * where["shape"].numel()
            values = self.memory[where["offset"] : stop].view(where["dtype"]).view(where["shape"])
            self.tensors[name] = values.clone()
            values.zero_()
            self.sent.append((name, where["offset"]))
        self.ends.append(is_last)


def _sync(folder, memory=MEMORY):
    model, meshes = sharded_model(folder, 2, 2)
    dtypes = {name: torch.bfloat16 for name, _ in model.named_parameters() if "norm" not in name}
    return RolloutSync(model, meshes, layer_names(model), dtypes, SyncSettings("sliced", memory))


def _copied(weights):
    """Copy every tensor, like a sender without receive buffers."""
    return {name: torch.empty(t.shape, dtype=t.dtype).copy_(t) for name, t in weights.tensors()}


def _receives_in_place(folder):
    rank, sync = dist.get_rank(), _sync(folder)
    new_weights = partial(sync.worker_weights, "sliced", Rollout(2), rank)
    wanted = _copied(new_weights())
    for size, fits in ((1 << 16, True), (1 << 13, False), (1 << 16, True)):
        memory = torch.zeros(size, dtype=torch.uint8)
        worker, into = Worker(memory), new_weights()
        bucket = Bucket(memory, worker.send)
        elsewhere, in_place = set(), 0
        for name, tensor in into.tensors(bucket):
            if isinstance(tensor, CastOnCopy) or tensor.untyped_storage().data_ptr() != memory.data_ptr():
                elsewhere.add(name)
            else:
                in_place += tensor.nbytes
            bucket.put(name, tensor)
        bucket.finish()
        assert worker.ends == [False] * (len(worker.ends) - 1) + [True]
        assert worker.tensors.keys() == wanted.keys()
        assert all(torch.equal(worker.tensors[name], wanted[name]) for name in wanted)
        # Received and locally cast blocks lie behind the copied ones, and their buffers are not allocated twice.
        first = min((at for name, at in worker.sent if name not in elsewhere), default=size)
        assert (first < size) == fits
        assert all(at < first for name, at in worker.sent if name in elsewhere)
        assert (len(elsewhere) < len(wanted)) == fits
        exchange = sync.exchange("sliced", Rollout(2), rank)
        kept = [
            own.block.numel * own.tensor.itemsize
            for blocks in exchange._local_blocks
            for own in blocks
            if own.buffer_range
        ]
        assert kept and in_place == (into.traffic.received + sum(kept) if fits else 0)
        held = sum(buffer.nbytes for buffer in exchange._send_buffers)
        assert into.traffic.peak >= held and into.traffic.peak <= MEMORY


def test_bucket_with_room_receives_rounds_in_place(tmp_path):
    run_ranks(_receives_in_place, 2, save_qwen3_moe(tmp_path))


def _worker_fails(folder):
    """A worker that fails on rank 1 does not stop rank 0's weights and receives no later rounds."""
    rank, sync = dist.get_rank(), _sync(folder)
    weights = sync.worker_weights("sliced", Rollout(2), rank)
    memory, calls = torch.zeros(1 << 16, dtype=torch.uint8), []
    worker = Worker(memory)

    def send(metadata, is_last):
        calls.append(is_last)
        if rank == 1 and len(calls) == 2:
            raise RuntimeError("the worker is gone")
        worker.send(metadata, is_last)

    bucket, tensors = Bucket(memory, send), weights.tensors
    blocks = tensors(bucket)
    try:
        for name, tensor in blocks:
            bucket.put(name, tensor)
        bucket.finish()
        assert rank == 0
    except RuntimeError:
        assert rank == 1
        bucket.close()
    blocks.close()
    assert len(calls) == 2 or rank == 0
    assert weights.traffic.received == weights.min_received_bytes()


def test_bucket_whose_worker_fails_raises_and_blocks_no_rank(tmp_path):
    run_ranks(_worker_fails, 2, save_qwen3_moe(tmp_path))


def _received(handle: str) -> tuple[threading.Thread, dict, list]:
    """Receive with verl's receiver in a thread; return what it collects."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

    tensors, buckets = {}, []

    def on_bucket(weights, is_last):
        tensors.update((name, tensor.clone()) for name, tensor in weights)
        buckets.append([name for name, _ in weights])

    receiver = BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True)
    thread = threading.Thread(target=receiver.receive_weights, args=(on_bucket,), daemon=True)
    thread.start()
    return thread, tensors, buckets


def _send(handle: str, weights):
    thread, tensors, buckets = _received(handle)
    arguments = dict(zmq_handle=handle, bucket_megabytes=1, use_shm=True, timeout_seconds=30.0, rank=0)
    transfer = asyncio.run(send_weights(weights, **arguments))
    thread.join(30)
    assert not thread.is_alive()
    return tensors, buckets, transfer


def _through_verls(folder, handle):
    rank, sync = dist.get_rank(), _sync(folder)
    new_weights = partial(sync.worker_weights, "sliced", Rollout(2), rank)
    wanted = _copied(new_weights())
    for _ in range(2):
        tensors, _, transfer = _send(f"{handle}-{rank}.sock", new_weights().tensors)
        assert tensors.keys() == wanted.keys() and transfer.tensors == len(wanted)
        assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)
        assert min(transfer.gather_seconds, transfer.wire_seconds, transfer.load_seconds) > 0


def test_bucket_with_rounds_in_place_is_read_by_verls_receiver(tmp_path):
    run_ranks(_through_verls, 2, save_qwen3_moe(tmp_path), f"ipc:///tmp/epfsdp2-test-{os.getpid()}")


def test_bucket_contents_equal_those_of_verls_sender(monkeypatch):
    handle = f"ipc:///tmp/epfsdp2-test-{os.getpid()}.sock"
    dtypes = (torch.float32, torch.bfloat16, torch.uint8, torch.int64)
    weights = [(f"{i}", torch.randn(90_000 + i).to(dtypes[i % 4])) for i in range(20)]
    weights += [("empty", torch.empty(0, 3)), ("scalar", torch.tensor(2.0))]
    ours, buckets, transfer = _send(handle, iter(weights))
    assert not transfer.is_verl_sender
    sender._class.cache_clear()
    monkeypatch.setattr(sender, "_KNOWN", set())
    theirs, their_buckets, transfer = _send(handle, iter(weights))
    assert transfer.is_verl_sender
    sender._class.cache_clear()
    assert buckets == their_buckets and len(buckets) > 3
    assert all(torch.equal(ours[name], tensor) and torch.equal(theirs[name], tensor) for name, tensor in weights)


def _views_of_the_bucket(bucket):
    (into,) = bucket.allocate([4000], 4000)
    for i in range(3):
        yield f"{i}", into.view(torch.float32)[:100].fill_(i)
        bucket.flush()


def test_bucket_memory_when_given_back_has_no_views(monkeypatch):
    """What is still referenced stays reserved on the GPU, beside vLLM's cache."""
    references, cls = [], sender._class()
    cleanup = cls._cleanup

    def count(self):
        references.append(torch._C._storage_Use_Count(self.buffer.untyped_storage()._cdata))
        cleanup(self)

    monkeypatch.setattr(cls, "_cleanup", count)
    tensors, _, _ = _send(f"ipc:///tmp/epfsdp2-test-{os.getpid()}.sock", _views_of_the_bucket)
    assert [tensors[f"{i}"][0] for i in range(3)] == [0, 1, 2]
    alone = torch.empty(4)
    assert references == [torch._C._storage_Use_Count(alone.untyped_storage()._cdata)]


def test_bucket_before_it_is_sent_waits_for_its_own_stream_and_not_the_device(monkeypatch):
    """The next round is in flight on other streams."""
    waits = []
    stream = SimpleNamespace(synchronize=lambda: waits.append("stream"))
    device = SimpleNamespace(
        current_stream=lambda: stream, synchronize=lambda: waits.append("device"), empty_cache=lambda: None
    )
    sender._class.cache_clear()
    monkeypatch.setattr("verl.utils.device.get_torch_device", lambda: device)
    try:
        _, buckets, _ = _send(f"ipc:///tmp/epfsdp2-test-{os.getpid()}.sock", _views_of_the_bucket)
    finally:
        sender._class.cache_clear()
    assert waits == ["stream"] * len(buckets) and len(buckets) == 4


def test_sender_fingerprint_of_installed_verl_is_known():
    assert sender.fingerprint() in sender._KNOWN


def test_new_sender_with_unknown_fingerprint_uses_verls_and_warns_once(monkeypatch, caplog):
    sender._class.cache_clear()
    monkeypatch.setattr(sender, "_KNOWN", set())
    with caplog.at_level("WARNING", "epfsdp2"):
        classes = {sender._class().__name__ for _ in range(2)}
    sender._class.cache_clear()
    assert classes == {"VerlSender"} and caplog.text.count("is not that of verl 0.9.1") == 1


@pytest.mark.parametrize("change", ["a method is gone", "the source is not installed"])
def test_new_sender_without_verls_source_uses_verls(monkeypatch, caplog, change):
    if change == "a method is gone":
        monkeypatch.setattr(sender, "_METHODS", (*sender._METHODS, "renamed_since"))
    else:
        monkeypatch.setattr(sender.inspect, "getsource", mock.Mock(side_effect=OSError("could not get source code")))
    sender._class.cache_clear()
    with caplog.at_level("WARNING", "epfsdp2"):
        name = sender._class().__name__
    sender._class.cache_clear()
    assert name == "VerlSender" and "is not that of verl 0.9.1" in caplog.text


def test_bucket_refuses_a_larger_tensor():
    bucket = Bucket(torch.zeros(100, dtype=torch.uint8), lambda metadata, is_last: None)
    with pytest.raises(ValueError, match="large has 104 bytes and the bucket 100; raise .*bucket_megabytes"):
        bucket.put("large", torch.zeros(26))


def test_bucket_bounds_bytes_per_message():
    memory = torch.zeros(1000, dtype=torch.uint8)
    worker = Worker(memory)
    bucket = Bucket(memory, worker.send, message_bytes=100)
    tensors = {f"{i}": torch.full((size,), i + 1.0) for i, size in enumerate((10, 10, 10, 100, 5))}
    for name, tensor in tensors.items():
        bucket.put(name, tensor)
    bucket.finish()
    assert worker.ends == [False, False, False, True]
    assert worker.sent == [("0", 0), ("1", 40), ("2", 0), ("3", 0), ("4", 0)]
    assert all(torch.equal(worker.tensors[name], tensor) for name, tensor in tensors.items())
