"""A test hook: trainer rank 1 is killed in the third update of the first process that gets there.

verl's workers take this module as ``model.external_lib``. The file ``EPFSDP2_TEST_KILLED`` says when it happened; while
it is there nobody is killed. Batches are written down as by ``batches.py``.
"""

import itertools
import os
import signal
import time
from pathlib import Path

import batches  # noqa: F401

from epfsdp2.engine.integration.engine import EPFSDP2Engine

_stock = EPFSDP2Engine.forward_step
_KILLED = Path(os.environ["EPFSDP2_TEST_KILLED"])
_updates = itertools.count(1)
_train_batch = EPFSDP2Engine.train_batch


def _killed_train_batch(engine, data, loss_function):
    engine.epfsdp2_test_update = next(_updates)
    return _train_batch(engine, data, loss_function)


def _forward_step(engine, micro_batch, loss_function, forward_only):
    update = getattr(engine, "epfsdp2_test_update", 0)
    if not forward_only and update == 3 and engine.rank == 1 and not _KILLED.exists():
        _KILLED.write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    return _stock(engine, micro_batch, loss_function, forward_only)


EPFSDP2Engine.train_batch = _killed_train_batch
EPFSDP2Engine.forward_step = _forward_step
