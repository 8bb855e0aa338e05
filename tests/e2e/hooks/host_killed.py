"""A test hook: on the host whose name ends in ``b``, the second step waits in one of its parts to be killed.

verl's workers take this module as ``model.external_lib``. ``EPFSDP2_TEST_PART`` is ``update``, ``sync`` or ``save``,
and the file ``EPFSDP2_TEST_REACHED`` is written there; while it is there nothing waits. For ``generation`` this file is
the run's reward function, too: answers of the second step wait for their scores.

Batches are written down as by ``batches.py``.
"""

import itertools
import os
import socket
import time
from pathlib import Path

import batches  # noqa: F401

from epfsdp2.recipes.quickstart.task import compute_score as _stock_score

PART, _REACHED = os.environ["EPFSDP2_TEST_PART"], Path(os.environ["EPFSDP2_TEST_REACHED"])
OF_A_TRAINER = ("update", "sync", "save")
FIRST_ANSWERS = 64  # of a step
_WAIT_SECONDS = 300
_times, _scores = itertools.count(1), itertools.count(1)


def compute_score(*args, **kwargs):
    if PART == "generation" and next(_scores) == FIRST_ANSWERS + 8 and not _REACHED.exists():
        _REACHED.write_text(str(time.time()))
        time.sleep(20)  # the step waits
    return _stock_score(*args, **kwargs)


def _waits(stock):
    def waiting(*args, **kwargs):
        if next(_times) == 2 and not _REACHED.exists():
            _REACHED.write_text(str(time.time()))
            time.sleep(_WAIT_SECONDS)
        return stock(*args, **kwargs)

    return waiting


if socket.gethostname().endswith("b") and PART in OF_A_TRAINER:
    from epfsdp2.engine.integration.engine import EPFSDP2Engine
    from epfsdp2.rollout import sync

    if PART == "update":
        EPFSDP2Engine.train_batch = _waits(EPFSDP2Engine.train_batch)
    elif PART == "save":
        EPFSDP2Engine.save_checkpoint = _waits(EPFSDP2Engine.save_checkpoint)
    else:
        sync.RolloutWeights.tensors = _waits(sync.RolloutWeights.tensors)
