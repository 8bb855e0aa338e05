"""A disk that is full in the middle of a save: a small tmpfs."""

import subprocess
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from epfsdp2.engine.checkpoint import state as checkpoint
from epfsdp2.engine.optim.multi_optimizer import build_multi_optimizer
from epfsdp2.engine.topology.rank_consistency import RankMismatchError
from tests.support.engine.checkpoints import save_checkpoint
from tests.support.engine.sharded import sharded_model
from tests.support.models.tiny import save_qwen3_moe
from tests.support.ranks import run_ranks

ALL = {"model", "optimizer", "extra"}


@contextmanager
def _small_disk(folder, kilobytes):
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def _trainer(folder):
    model, _ = sharded_model(folder, dist.get_world_size(), 2)
    optimizer = build_multi_optimizer(model, lambda params: torch.optim.AdamW(params, lr=1e-2))
    optimizer.init_state()
    return model, optimizer


def _saves(folder, out):
    save_checkpoint(out, *_trainer(folder), None, ALL, 1)


def _does_not_fit(folder, disk):
    model, optimizer = _trainer(folder)
    save_checkpoint(disk / "global_step_1", model, optimizer, None, ALL, 1)
    with pytest.raises((OSError, RankMismatchError), match="No space left on device"):
        save_checkpoint(disk / "global_step_2", model, optimizer, None, ALL, 2)
    dist.barrier()
    assert [path.name for path in disk.iterdir()] == ["global_step_1"]
    checkpoint.load_checkpoint(disk / "global_step_1", model, optimizer, None, ALL)


def test_save_on_a_full_disk_keeps_the_last_checkpoint_and_frees_the_space(tmp_path):
    folder, measured = save_qwen3_moe(tmp_path / "model"), tmp_path / "measured"
    run_ranks(_saves, 2, folder, measured)
    size = sum(path.stat().st_size for path in measured.rglob("*"))
    with _small_disk(tmp_path / "disk", 3 * size // 2048) as disk:
        run_ranks(_does_not_fit, 2, folder, disk)
