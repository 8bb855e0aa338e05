"""A test hook: the second weight sync fails as in ``EPFSDP2_TEST_FAULT=<who> <what>``.

A vLLM worker is ``killed`` or ``raises`` while it loads a bucket, or a trainer ``raises`` after some tensors. When it
happened goes into the file ``EPFSDP2_TEST_FAULT_TIME``. vLLM's workers take this module as their extension; trainer
ranks as one of verl's external modules.
"""

import itertools
import os
import signal
import time
from pathlib import Path

from epfsdp2.rollout.vllm import server

WHO, WHAT = os.environ["EPFSDP2_TEST_FAULT"].split()


def _fail() -> None:
    Path(os.environ["EPFSDP2_TEST_FAULT_TIME"]).write_text(str(time.time()))
    if WHAT == "raises":
        raise RuntimeError("a fault that the test injected")
    os.kill(os.getpid(), signal.SIGKILL)


def _fails_in_the_worker() -> type:
    from vllm.distributed import get_tp_group

    from epfsdp2.rollout.vllm import worker as vllm_worker

    class Failing(vllm_worker.Reload):
        def load(self, weights):
            _fail()

    class FailsInTheSecondSync(vllm_worker.WeightSyncExtension):
        syncs = 0

        def update_weights_from_ipc(self, *args, **kwargs):
            self.syncs += 1
            here = os.environ["VERL_REPLICA_RANK"] == "0" and get_tp_group().rank_in_group == 0
            if not here or self.syncs != 2 or WHO == "trainer":
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

    stock, syncs = sync.RolloutWeights.tensors, 0

    def failing(self):
        nonlocal syncs
        syncs += 1
        weights = stock(self)
        return _raising(weights) if syncs == 2 and os.environ["RANK"] == "1" else weights

    def _raising(weights):
        yield from itertools.islice(weights, 5)
        _fail()

    sync.RolloutWeights.tensors = failing


def __getattr__(name: str):
    if name == "FailsInTheSecondSync":
        return _fails_in_the_worker()
    raise AttributeError(name)


# Slices are sent to this extension as to the one that it is made of.
server.EXTENSION = "faults.FailsInTheSecondSync"
if WHO == "trainer":
    _fail_in_the_trainer()
