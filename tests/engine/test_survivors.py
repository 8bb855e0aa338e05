"""A checkpoint written after a failure by the ranks that are left, while their main threads wait in a collective."""

import contextlib
import io
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig

from epfsdp2.engine.checkpoint import state as checkpoint
from epfsdp2.engine.checkpoint.atomic_folder import verify_files
from epfsdp2.engine.survivors.watch import Watch
from epfsdp2.recipes.resilient.saving import survivors
from epfsdp2.recipes.resilient.saving.checkpoints import latest
from tests.support.engine.checkpoints import ALL, build_trainer, raise_full_disk, train_step
from tests.support.engine.sharded import whole_tensors
from tests.support.models.tiny import VOCAB, save_qwen3_moe
from tests.support.ranks import run_ranks
from tests.support.trainer.ppo import ppo_worker

WORLD, EP, FSDP = 4, 2, 2  # two replicas of two ranks


def _batch(seed):
    return torch.randint(0, VOCAB, (8, 11), generator=torch.Generator().manual_seed(seed))


def _watch(trainer, root: Path, model_folder: Path, role: str = "actor") -> Watch:
    model, meshes, optimizer, schedule = trainer
    describe = AutoConfig.from_pretrained(model_folder).save_pretrained
    folder = root / survivors.FOLDER
    return Watch(folder, role, model, optimizer, schedule, None, ALL, meshes.topology, describe)


def _everything(trainer):
    """Whole parameters and optimizer state by name."""
    model, _, optimizer, _ = trainer
    states = {f"{n}.{key}": t for n, entry in optimizer.state_dict()["state"].items() for key, t in entry.items()}
    whole = whole_tensors({**dict(model.named_parameters()), **states})
    return {name: tensor.clone() for name, tensor in whole.items()}


def _data() -> bytes:
    data = io.BytesIO()
    torch.save({"place": 3}, data)
    return data.getvalue()


@contextlib.contextmanager
def _in_second_layer(model, action):
    """Run an action where the parameters of a layer are gathered, after which the forward goes on."""
    handle = model.model.layers[1].self_attn.register_forward_pre_hook(lambda *_: action())
    yield
    handle.remove()


def _saved_in_a_forward(folder, root, dead):
    survivors._ANSWER_SECONDS = 4.0
    rank = dist.get_rank()
    trainer = build_trainer(folder, EP, FSDP)
    if rank not in dead:
        watch = _watch(trainer, root, folder)
    for seed in range(2):
        train_step(trainer, _batch(seed))
        if rank not in dead:
            watch.updated()
    wanted = _everything(trainer)

    def save():
        if rank == dead[0]:
            survivors.save_step(root, 2, {"actor": 2}, _data())
        dist.barrier()  # where the others wait meanwhile

    with _in_second_layer(trainer[0], save):
        train_step(trainer, _batch(2))
    assert latest(root).step == 2
    resumed = build_trainer(folder, 1, -1)
    checkpoint.load_checkpoint(root / "global_step_2" / "actor", resumed[0], resumed[2], resumed[3], ALL)
    found = _everything(resumed)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert resumed[3].last_epoch == 2 and checkpoint.read_facts(root / "global_step_2" / "actor")["step"] == 2


@pytest.mark.parametrize("dead", [(3, 0), (1, 2)])
def test_ranks_that_hold_a_whole_replica_among_them_save_what_resumes_on_another_mesh(tmp_path, dead):
    folder, root = save_qwen3_moe(tmp_path / "model"), tmp_path / "run"
    run_ranks(_saved_in_a_forward, WORLD, folder, root, dead)
    verify_files(root / "global_step_2" / "actor")
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert not list(root.glob("global_step_2/*.partial*")) and not list(root.rglob("rank-*"))


def _not_saved(folder, root):
    survivors._ANSWER_SECONDS = 4.0
    rank = dist.get_rank()
    trainer = build_trainer(folder, EP, FSDP)
    if rank != 1:
        watch = _watch(trainer, root, folder)
        train_step(trainer, _batch(0))
        watch.updated()
    else:
        train_step(trainer, _batch(0))
    if rank == 1:
        with pytest.raises(survivors.CantSaveError, match="no rank of the critic answers"):
            survivors.save_step(root, 1, {"actor": 1, "critic": 1}, _data())
        with pytest.raises(survivors.CantSaveError, match=r"ranks \[0, 1\] of a replica after 2 updates"):
            survivors.save_step(root, 2, {"actor": 2}, _data())
    dist.barrier()
    if rank == 3:
        trainer[2].step()  # an optimizer that has begun
    dist.barrier()
    if rank == 1:
        with pytest.raises(survivors.CantSaveError, match=r"shards of the actor's ranks \[1\].*3 has None"):
            survivors.save_step(root, 1, {"actor": 1}, _data())
    dist.barrier()


def test_ranks_that_lack_a_shard_of_the_step_save_nothing(tmp_path):
    run_ranks(_not_saved, WORLD, save_qwen3_moe(tmp_path / "model"), tmp_path / "run")
    assert not list((tmp_path / "run").glob("global_step_*"))


def _engine_counts_updates(folder, root):
    worker = ppo_worker(folder, 2, survivors_folder=str(root / survivors.FOLDER))
    engine = worker.engine
    watch = engine._survivors
    assert watch._updates == 0
    engine.optimizer.step()
    assert watch._updates is None
    engine.lr_scheduler_step()
    assert watch._updates == 1
    worker.save_checkpoint(str(root / "saved"), global_step=1)
    worker.load_checkpoint(str(root / "saved"))
    assert watch._updates == 0
    assert ppo_worker(folder, 2).engine._survivors is None


def test_engine_that_is_told_of_a_folder_counts_its_updates_from_the_last_load(tmp_path):
    run_ranks(_engine_counts_updates, 2, save_qwen3_moe(tmp_path / "model"), tmp_path / "run")


def _disk_is_full(folder, root):
    rank = dist.get_rank()
    trainer = build_trainer(folder, EP, FSDP)
    watch = _watch(trainer, root, folder)
    if rank == 0:  # the first of a replica writes the model's config, too
        watch._describe = raise_full_disk
    if rank == 1:
        with pytest.raises(survivors.CantSaveError, match="rank 0: OSError: .*No space left"):
            survivors.save_step(root, 1, {"actor": 0}, _data())
    dist.barrier()


def test_rank_that_cannot_write_leaves_no_checkpoint_and_says_why(tmp_path):
    run_ranks(_disk_is_full, WORLD, save_qwen3_moe(tmp_path / "model"), tmp_path / "run")
    assert latest(tmp_path / "run") is None and not list((tmp_path / "run").glob("global_step_1/*"))
