"""Experts cut over ``etp``: the order of collectives, and updates by verl's worker.

``test_dispatch.py`` has rows and sums of every routing, ``tests/parity`` every family. Loading, resuming and weight
syncs have theirs beside the meshes without ``etp``.
"""

import torch
import torch.distributed as dist

from tests.support.engine.recorder import Recorder
from tests.support.engine.sharded import sharded_model
from tests.support.models.tiny import VOCAB, save_qwen3_moe, token_loss
from tests.support.ranks import run_ranks
from tests.support.trainer.ppo import check_ppo_updates

WORLD = 4


def _same_order(folder, cases):
    rank = dist.get_rank()
    for ep, fsdp_size, options in cases:
        model, _ = sharded_model(folder, WORLD, ep, fsdp_size, 2, **options)
        with Recorder(model.train()) as recorder:
            for step in range(2):
                generator = torch.Generator().manual_seed(100 * step + rank)
                token_loss(model, torch.randint(0, VOCAB, (1, 5 + 7 * rank), generator=generator)).backward()
        everyone = [None] * WORLD
        dist.all_gather_object(everyone, recorder.events)
        assert all(events == everyone[0] for events in everyone), (ep, fsdp_size, options)
        last = recorder.events[::-1]
        # The backward of each experts module ends before its reduction begins.
        for i in range(2):
            reduced = last.index(("reduce", f"layers.{i}.experts"))
            assert ("all-to-all", torch.float32) in last[reduced : last.index(("backward", f"experts {i}"))]


def _updates_and_order(folder, ordered, updates):
    _same_order(folder, ordered)
    check_ppo_updates(folder, updates)


def test_etp_in_ppo_updates_equals_the_plain_model_and_collectives_come_in_one_order(tmp_path):
    folder = save_qwen3_moe(tmp_path, num_hidden_layers=2, mlp_only_layers=[])
    ordered = [(1, 2, {"expert_shard_dim": 1}), (2, -1, {"dispatch_chunks": 2, "checkpointing": "full"})]
    offload = {"param_offload": True, "optimizer_offload": True, "activation_checkpointing": "full"}
    shared = {"ulysses_sequence_parallel_size": 2, "dynamic": True, "dispatch_chunks": 2}
    updates = [
        {"ep": 2, "etp_size": 2, **offload, **shared},
        {"ep": 1, "etp_size": 2, "fsdp_size": 2, "offload_policy": True},
    ]
    run_ranks(_updates_and_order, WORLD, folder, ordered, updates, timeout=300)
