"""A test hook: something fails in the middle of the second weight sync, as ``EPFSDP2_TEST_FAULT`` says.

``raise``: the vLLM worker raises. ``kill_worker``: it is killed. ``kill_trainer``: the trainer rank that feeds it is.
When it happened goes into the file ``EPFSDP2_TEST_FAULT_TIME``.
"""

import os
import re
import signal
import time
from pathlib import Path
from unittest import mock

from epfsdp2.rollout import vllm_worker


class FailsInTheSecondSync(vllm_worker.WeightSyncExtension):
    syncs = 0

    def update_weights_from_ipc(self, *args, **kwargs):
        self.syncs += 1
        if self.syncs != 2 or os.environ["VERL_REPLICA_RANK"] != "0":
            return super().update_weights_from_ipc(*args, **kwargs)
        with mock.patch.object(vllm_worker._Reload, "load", _after_the_first_bucket(vllm_worker._Reload.load)):
            return super().update_weights_from_ipc(*args, **kwargs)


def _after_the_first_bucket(load):
    buckets = 0

    def failing(reload, weights):
        nonlocal buckets
        buckets += 1
        if buckets == 2:
            Path(os.environ["EPFSDP2_TEST_FAULT_TIME"]).write_text(str(time.time()))
            _fail(os.environ["EPFSDP2_TEST_FAULT"])
        load(reload, weights)

    return failing


def _fail(kind: str) -> None:
    if kind == "raise":
        raise RuntimeError("a fault that the test injected")
    os.kill(os.getpid() if kind == "kill_worker" else _sender(), signal.SIGKILL)
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
