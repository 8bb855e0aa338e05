"""The plan of the run that is under way: printed at start, beside what is measured after each update and at the end."""

import contextlib
import io
import shlex

import pytest
import torch.distributed as dist

from epfsdp2.engine.memory_plan import IMBALANCE, Batch
from tests.support.models import save_qwen3_moe
from tests.support.ppo import of_this_rank, ppo_batch, ppo_samples, ppo_worker
from tests.support.ranks import run_ranks

UPDATES = 10  # of the optimizer's schedule in tests/support/verl_worker.py


def _trains_to_the_end(folder, settings):
    from verl.utils import tensordict_utils as tu

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        worker = ppo_worker(folder, **settings)
        for update in range(UPDATES):
            batch = ppo_batch(of_this_rank(worker, ppo_samples()))
            tu.assign_non_tensor(batch, update_lr_scheduler=True)
            metrics = tu.get(worker.train_batch(batch), "metrics")
    if dist.get_rank():
        assert said.getvalue().count("[epfsdp2]") == 0
        return
    print(said.getvalue(), metrics)


def test_x(tmp_path):
    run_ranks(_trains_to_the_end, 2, save_qwen3_moe(tmp_path), {"ep": 2})
