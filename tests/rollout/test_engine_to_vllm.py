"""A whole weight sync: experts sharded over two ranks, each sync mode, verl's transport, two real vLLM workers."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig

from epfsdp2.engine.checkpoint.stored_shards import HF
from tests.support.engine.sharded import sharded_model
from tests.support.models.tiny import reference_model, token_loss
from tests.support.ranks import run_ranks
from tests.support.rollout import verify
from tests.support.rollout.verls_transport import send

pytestmark = pytest.mark.e2e


def _train_and_sync(folder: str, syncs: dict[str, str], handles: list[str], etp: int) -> None:
    """Take an optimizer step before each sync, and export each state: the folder and the mode of each sync."""
    from epfsdp2.engine.model.layers import layer_names
    from epfsdp2.engine.optim.multi_optimizer import build_multi_optimizer
    from epfsdp2.rollout.layout.specs import Rollout
    from epfsdp2.rollout.sync import RolloutSync, SyncSettings
    from tests.support.engine.checkpoints import save_checkpoint

    model, meshes = sharded_model(Path(folder), 2, ep=2 // etp, etp=etp)
    optimizer = build_multi_optimizer(model, lambda params: torch.optim.AdamW(params, lr=0.05))
    sync = RolloutSync(model, meshes, layer_names(model), {}, SyncSettings("auto", 5 << 18))
    for i, (export, mode) in enumerate(syncs.items()):
        ids = torch.randint(0, 200, (2, 9), generator=torch.Generator().manual_seed(2 * i + dist.get_rank()))
        optimizer.zero_grad()
        token_loss(model, ids).backward()
        optimizer.step()
        describe = AutoConfig.from_pretrained(folder).save_pretrained
        save_checkpoint(Path(export).parent, model, None, None, {"hf_model"}, i, describe)
        send(sync.weights().for_worker(mode, Rollout(2)).tensors(), handles)


@pytest.mark.parametrize("etp", [1, pytest.param(2, marks=pytest.mark.long)])
def test_vllm_workers_after_a_sync_in_each_mode_hold_and_compute_the_trainers_weights(
    start_engine, checkpoints, tmp_path, etp
):
    folder = checkpoints[0].path
    config = AutoConfig.from_pretrained(folder)
    syncs = {str(tmp_path / mode / HF): mode for mode in ("full", "sliced")}
    engine = start_engine(folder, tp_size=2)
    answers = []
    for _ in syncs:
        engine.call("update_weights_from_ipc", timeout=120.0, use_shm=True, sync_timeout_seconds=100.0)
        answers.append(engine.call("epfsdp2_digests"))
    run_ranks(_train_and_sync, 2, folder, syncs, [engine.handle(rank) for rank in range(2)], etp)
    held = [[answer["digests"] for answer in answered.result()] for answered in answers]
    for export, digests in zip(syncs, held, strict=True):
        weights = {name: p.detach() for name, p in reference_model(export).named_parameters()}
        for rank, found in enumerate(digests):
            assert verify.compare(verify.expected_digests(weights, config, 2, rank), found) == ""
    assert held[0] != held[1]
    assert engine.leftovers() == []
    generated = engine.generate()
    assert generated == start_engine(list(syncs)[-1], tp_size=2).generate()
