"""A thousand steps of random routing: no hang, and memory that does not grow."""

import gc

import psutil
import pytest
import torch
import torch.distributed as dist

from epfsdp2.engine.optim.clip import ClippedStep
from epfsdp2.engine.optim.multi_optimizer import build_multi_optimizer
from tests.support.engine.sharded import sharded_model
from tests.support.models.tiny import VOCAB, save_qwen3_moe, token_loss
from tests.support.ranks import run_ranks

WORLD, STEPS, WARM_UP = 4, 1000, 200
GROWTH_BYTES = 8 << 20  # bound on growth after the warm-up, for allocators and caches of a rank


def _live_tensors():
    gc.collect()
    return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())


def _anonymous(process):
    """Return the resident bytes without mapped files (libraries), which the kernel drops and reads again."""
    memory = process.memory_info()
    return memory.rss - memory.shared


def _soak(folder):
    rank = dist.get_rank()
    model, meshes = sharded_model(folder, WORLD, 2, expert_shard_dim=1, checkpointing="full")
    model.train()
    optimizer = build_multi_optimizer(model, lambda params: torch.optim.AdamW(params, lr=1e-4))
    step_if_finite = ClippedStep(1.0, meshes)
    generator = torch.Generator().manual_seed(rank)
    process, before = psutil.Process(), None
    for step in range(STEPS):
        if step == WARM_UP:
            before = _anonymous(process), _live_tensors()
        # 2 to 23 tokens, equal or random: some experts, and some ranks, receive no tokens.
        length = int(torch.randint(2, 24, (), generator=generator))
        kinds = 1 if step % 7 == rank else VOCAB
        ids = torch.randint(0, kinds, (1, length), generator=generator)
        token_loss(model, ids).backward()
        step_if_finite(optimizer)
        optimizer.zero_grad()
    assert step_if_finite.skipped == 0
    grown, tensors = _anonymous(process) - before[0], _live_tensors() - before[1]
    assert grown < GROWTH_BYTES, f"{grown >> 20} MB more after {STEPS - WARM_UP} steps"
    assert tensors <= 0, f"{tensors} more tensors after {STEPS - WARM_UP} steps"


@pytest.mark.long
def test_soak_of_a_thousand_steps_with_random_routing_leaves_memory_flat(tmp_path):
    run_ranks(_soak, WORLD, save_qwen3_moe(tmp_path, num_hidden_layers=2, mlp_only_layers=[]), timeout=1500)
