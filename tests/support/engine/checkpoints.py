"""A trainer of a few steps whose state the tests of checkpoints save and load."""

import errno

import torch
import torch.distributed as dist

from epfsdp2.engine.checkpoint.state import Snapshot
from epfsdp2.engine.optim.clip import clip_grad_norm_
from epfsdp2.engine.optim.lr_scheduler import MultiLRScheduler
from epfsdp2.engine.optim.multi_optimizer import build_multi_optimizer
from epfsdp2.engine.optim.muon import Muon
from tests.support.engine.sharded import sharded_model
from tests.support.models.tiny import token_loss

__all__ = ["ALL", "build_trainer", "raise_full_disk", "save_checkpoint", "train_step"]

ALL = {"model", "optimizer", "extra"}


def build_trainer(folder, ep, fsdp_size=-1, dim="auto", muon=False):
    model, meshes = sharded_model(folder, dist.get_world_size(), ep, fsdp_size, expert_shard_dim=dim)
    matrices = (lambda groups: Muon(groups, lr=1e-2, weight_decay=0.01)) if muon else None
    optimizer = build_multi_optimizer(model, lambda params: torch.optim.AdamW(params, lr=1e-2), matrices)
    schedule = MultiLRScheduler(
        optimizer, lambda inner: torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1 / (step + 1))
    )
    return model, meshes, optimizer, schedule


def save_checkpoint(
    folder, model, optimizer, lr_scheduler, contents, step, describe=lambda folder: None, device="cpu", with_base=True
):
    """Write a folder in the foreground; collective."""
    Snapshot.of(model, optimizer, lr_scheduler, contents, step, with_base=with_base).write(folder, describe, device)


def train_step(trainer, ids):
    model, meshes, optimizer, schedule = trainer
    optimizer.zero_grad()
    rank, each = dist.get_rank(), len(ids) // dist.get_world_size()
    token_loss(model, ids[rank * each : (rank + 1) * each]).backward()
    clip_grad_norm_(model.parameters(), 1.0, meshes)
    optimizer.step()
    schedule.step()


def raise_full_disk(*args):
    raise OSError(errno.ENOSPC, "No space left on device")
