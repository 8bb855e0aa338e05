"""A rank that is killed in the middle of a save leaves nothing that looks like a checkpoint and is none."""

import os
import random
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from epfsdp2.engine.checkpoint import state as checkpoint
from tests.support.engine.checkpoints import ALL, build_trainer, save_checkpoint
from tests.support.models.tiny import save_qwen3_moe
from tests.support.ranks import run_ranks


def _save_until_killed(folder, out, moment):
    """Save step after step, with weights that name it; rank 1 is killed after ``moment`` of the second save's time."""
    model, _, optimizer, schedule = build_trainer(folder, 2)
    optimizer.init_state()
    for step in range(1, 1000):
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(step)
        dist.barrier()
        (out / f"begun_{dist.get_rank()}").write_text(str(step))
        began = time.monotonic()
        save_checkpoint(out / f"global_step_{step}", model, optimizer, schedule, ALL, step)
        if step == 2 and dist.get_rank() == 1:  # the first is slower
            later = moment * (time.monotonic() - began)
            threading.Timer(later, os.kill, (os.getpid(), signal.SIGKILL)).start()


def _load_all(folder, outs):
    """Load every folder that has a checkpoint's name."""
    model, _, optimizer, schedule = build_trainer(folder, 2)
    for out in outs:
        steps = sorted(int(p.name.removeprefix("global_step_")) for p in out.glob("global_step_*") if p.suffix == "")
        for step in steps:
            checkpoint.load_checkpoint(out / f"global_step_{step}", model, optimizer, schedule, ALL)
            assert all((param.to_local() == step).all() for param in model.parameters())
        # The step before it was complete; the one that was being saved may have been.
        begun = max(int((out / f"begun_{rank}").read_text() or 0) for rank in range(2))  # one may end while it writes
        assert steps[-1] in (begun - 1, begun), (steps, begun)


@pytest.mark.parametrize("moments", [2, pytest.param(20, marks=pytest.mark.long)])
def test_save_with_a_rank_killed_at_a_random_moment_leaves_a_complete_checkpoint(tmp_path, moments):
    folder, pick = save_qwen3_moe(tmp_path / "model"), random.Random(0)
    outs = [tmp_path / f"{i}" for i in range(moments)]
    for out in outs:
        out.mkdir()
        with pytest.raises((ProcessExitedException, ProcessRaisedException)):  # the killed rank's, or the other's
            run_ranks(_save_until_killed, 2, folder, out, pick.uniform(0, 1.2))
    run_ranks(_load_all, 2, folder, outs)
