"""A checkpoint that living ranks write after a failure, while their main threads wait in a collective."""

import io
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig

from epfsdp2.engine import survivors
from epfsdp2.engine.checkpoint import state as checkpoint
from epfsdp2.engine.checkpoint.atomic_folder import verify_files
from epfsdp2.recipes.resilient import callback
from epfsdp2.recipes.resilient.command import FOLDER, complete_steps
from tests.support.engine.checkpoints import ALL, build_trainer, raise_full_disk, train_step
from tests.support.engine.sharded import whole_tensors
from tests.support.models.tiny import VOCAB, save_qwen3_moe
from tests.support.ranks import each_case, run_ranks
from tests.support.trainer.ppo import ppo_worker

WORLD, EP, FSDP = 4, 2, 2  # two replicas of two ranks


def _batch(seed):
    return torch.randint(0, VOCAB, (8, 11), generator=torch.Generator().manual_seed(seed))


def _watch(trainer, root: Path, model_folder: Path, describe=None) -> survivors.Watch:
    model, meshes, optimizer, schedule = trainer
    describe = describe or AutoConfig.from_pretrained(model_folder).save_pretrained
    return survivors.Watch(root / FOLDER, "actor", model, optimizer, schedule, None, ALL, meshes.topology, describe)


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


def _saved_in_a_forward(folder, root, dead):
    """Ranks with a whole replica among them save, during a forward, what resumes on another mesh."""
    trainer, rank = build_trainer(folder, EP, FSDP), dist.get_rank()
    watch = _watch(trainer, root, folder) if rank not in dead else None
    for seed in range(2):
        train_step(trainer, _batch(seed))
        if watch:
            watch.updated()
    wanted = _everything(trainer)

    def save(*_):
        if rank == dead[0]:
            callback.save_step(root, 2, {"actor": 2}, _data())
        dist.barrier()  # the others wait here meanwhile

    # The parameters of this layer are gathered then.
    handle = trainer[0].model.layers[1].self_attn.register_forward_pre_hook(save)
    train_step(trainer, _batch(2))
    handle.remove()
    assert set(complete_steps(root)) == {2}
    resumed = build_trainer(folder, 1, -1)
    checkpoint.load_checkpoint(root / "global_step_2" / "actor", resumed[0], resumed[2], resumed[3], ALL)
    found = _everything(resumed)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert resumed[3].last_epoch == 2 and checkpoint.read_facts(root / "global_step_2" / "actor")["step"] == 2


def _nothing_is_saved(folder, root, dead):
    """Ranks that lack a shard of the step, or can't write, leave no checkpoint and give the reason."""
    trainer, rank = build_trainer(folder, EP, FSDP), dist.get_rank()
    # One rank writes the model's config.
    watch = _watch(trainer, root, folder, raise_full_disk) if rank not in dead else None
    train_step(trainer, _batch(0))
    if watch:
        watch.updated()
    if rank == dead[0]:
        for step, updates, why in (
            (1, {"actor": 1, "critic": 1}, "no living rank holds the critic after 1 updates"),
            (2, {"actor": 2}, "no living rank holds the actor after 2 updates"),
            (1, {"actor": 1}, "rank [02]: OSError: .*No space left"),
        ):
            with pytest.raises(RuntimeError, match=why):
                callback.save_step(root, step, updates, _data())
    dist.barrier()
    if rank == 3:
        trainer[2].step()  # an optimizer that has begun
    dist.barrier()
    if rank == dead[0]:
        with pytest.raises(RuntimeError, match=r"shards of the actor's ranks \[1\] of a replica"):
            callback.save_step(root, 1, {"actor": 1}, _data())
    dist.barrier()
    assert complete_steps(root) == {} and not list(root.glob("global_step_*/*"))


def _engine_counts_updates(folder, root, _):
    """An engine with a folder of messages counts its updates from the last load."""
    worker = ppo_worker(folder, 2, survivors_folder=str(root / FOLDER))
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


def _cases(folder, root):
    callback._ANSWER_SECONDS, survivors._POLL_SECONDS = 3.0, 0.2

    def check(case, *dead):
        case(folder, root / f"run{''.join(map(str, dead))}", dead)

    saves = [(_saved_in_a_forward, 3, 0), (_saved_in_a_forward, 1, 2), (_nothing_is_saved, 1)]
    each_case([*saves, (_engine_counts_updates,)], check)


def test_living_ranks_save_what_resumes_on_another_mesh_or_give_the_reason(tmp_path):
    run_ranks(_cases, WORLD, save_qwen3_moe(tmp_path / "model"), tmp_path)
    for root in (tmp_path / "run30", tmp_path / "run12"):
        verify_files(root / "global_step_2" / "actor")
        assert (root / "latest_checkpointed_iteration.txt").read_text() == "2"
        assert not list(root.glob("global_step_2/*.partial*")) and not list(root.rglob("rank-*"))
