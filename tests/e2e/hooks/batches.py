"""A test hook: each trainer rank saves every mini-batch of an update, by sequence.

verl's workers take this module as ``model.external_lib``. ``EPFSDP2_TEST_BATCHES`` names the folder.
"""

import itertools
import os
from pathlib import Path

import torch

from epfsdp2.engine.integration.engine import EPFSDP2Engine

_KEYS = ("input_ids", "prompts", "responses", "response_mask", "old_log_probs", "advantages", "routed_experts")
_number, _stock = itertools.count(), EPFSDP2Engine.train_batch


def _train_batch(engine, data, loss_function):
    folder = Path(os.environ["EPFSDP2_TEST_BATCHES"])
    folder.mkdir(exist_ok=True)
    found = {key: list(data[key].unbind()) for key in _KEYS if key in data}
    torch.save(found, folder / f"{next(_number):03}-{engine.rank}.pt")
    return _stock(engine, data, loss_function)


EPFSDP2Engine.train_batch = _train_batch
