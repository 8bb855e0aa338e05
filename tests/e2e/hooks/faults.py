"""A test hook: something fails in the second weight sync, as ``EPFSDP2_TEST_FAULT=<who>:<how>:<where>`` says.

``who``: ``worker``, one vLLM worker, or ``trainer``, a rank that feeds one. ``how``: ``raise`` or ``kill``. ``where``:
``start``, ``bucket1``, ``bucket2`` or ``finish`` of the worker's update; for a trainer that raises, the ``first`` or a
``middle`` tensor of what it hands on, or ``last``, after all of them. When it happened goes into the file
``EPFSDP2_TEST_FAULT_TIME``.

vLLM's workers take it as their extension; trainer ranks as one of verl's external modules.
"""

import os
import re
import signal
import time
from pathlib import Path

from epfsdp2.rollout.layout import sync_mode

WHO, HOW, WHERE = os.environ["EPFSDP2_TEST_FAULT"].split(":")


def _fail() -> None:
    Path(os.environ["EPFSDP2_TEST_FAULT_TIME"]).write_text(str(time.time()))
    if HOW == "raise":
        raise RuntimeError("a fault that the test injected")
    os.kill(os.getpid() if WHO == "worker" else _sender(), signal.SIGKILL)
    time.sleep(600)


def _sender() -> int:
    """The other process that maps this worker's bucket."""
    (bucket,) = set(re.findall(r"/dev/shm/verl_weights_\w+", Path("/proc/self/maps").read_text()))
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if bucket in maps.read_text() and int(maps.parent.name) != os.getpid():
                return int(maps.parent.name)
        except OSError:
            continue
    raise RuntimeError(f"nobody else maps {bucket}")


def _fails_in_the_worker() -> type:
    from vllm.distributed import get_tp_group

    from epfsdp2.rollout.vllm import worker as vllm_worker

    class Failing(vllm_worker.Reload):
        buckets = 0

        def start(self):
            if WHERE == "start":
                _fail()
            super().start()

        def load(self, weights):
            self.buckets += 1
            if f"bucket{self.buckets}" == WHERE:
                _fail()
            super().load(weights)

        def finish(self):
            if WHERE == "finish":
                _fail()
            super().finish()

    class FailsInTheSecondSync(vllm_worker.WeightSyncExtension):
        syncs = 0

        def update_weights_from_ipc(self, *args, **kwargs):
            self.syncs += 1
            here = os.environ["VERL_REPLICA_RANK"] == "0" and get_tp_group().rank_in_group == 0
            if not here or self.syncs != 2 or (WHO, HOW) == ("trainer", "raise"):
                return super().update_weights_from_ipc(*args, **kwargs)
            whole, vllm_worker.Reload = vllm_worker.Reload, Failing
            try:
                return super().update_weights_from_ipc(*args, **kwargs)
            finally:
                vllm_worker.Reload = whole

    return FailsInTheSecondSync


def _fail_in_the_trainer() -> None:
    """Make the weights of rank 1 raise in the second sync."""
    from epfsdp2.rollout import sync

    stock, syncs = sync.WorkerWeights.tensors, 0

    def failing(worker_weights, receive_buffers=None):
        nonlocal syncs
        syncs += 1
        weights = stock(worker_weights, receive_buffers)
        return _raising(weights) if syncs == 2 and os.environ["RANK"] == "1" else weights

    def _raising(weights):
        for count, tensor in enumerate(weights):
            if count == {"first": 0, "middle": 5}.get(WHERE):
                _fail()
            yield tensor
        _fail()

    sync.WorkerWeights.tensors = failing


def __getattr__(name: str):
    if name == "FailsInTheSecondSync":
        return _fails_in_the_worker()
    raise AttributeError(name)


# Slices are sent to this extension as to the one that it is made of.
sync_mode.EXTENSION = "faults.FailsInTheSecondSync"
if (WHO, HOW) == ("trainer", "raise"):
    _fail_in_the_trainer()
