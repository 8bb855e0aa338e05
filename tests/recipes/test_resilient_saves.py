"""Complete checkpoints, and the callback that saves at SIGTERM and after a failure."""

import inspect
import io
import time

import pytest
import torch
from omegaconf import OmegaConf

from epfsdp2.engine.checkpoint.atomic_folder import MANIFEST
from epfsdp2.recipes.resilient.command import FOLDER, NOTICE, complete_steps
from tests.support.trainer.resilient import command_of, save_step


@pytest.mark.parametrize(
    "damage",
    [
        lambda actor: (actor / MANIFEST).unlink(),
        lambda actor: (actor / "weights").write_bytes(b"wei"),
        lambda actor: (actor / "weights").unlink(),
        lambda actor: (actor.parent / "data.pt").write_bytes(b"PK"),
        lambda actor: (actor.parent / "critic.partial").mkdir(),
        lambda actor: (actor.parent / "transfer_queue").rename(actor.parent / "transfer_queue.tmp"),
        lambda actor: actor.rename(actor.with_name("actor.partial")),
    ],
)
def test_complete_checkpoint_beside_broken_ones_is_found(tmp_path, damage):
    assert complete_steps(tmp_path) == {}
    for step in (2, 10):
        (save_step(tmp_path, step).parent / "transfer_queue").mkdir()
    run = command_of(tmp_path, trainer__v1={"trainer_mode": "colocate_async"})
    assert set(run.complete_steps()) == {2, 10}
    damage(tmp_path / "global_step_10" / "actor")
    assert run.complete_steps() == {2: tmp_path / "global_step_2"}


class _Trainer:
    use_critic = True

    def __init__(self, fails_in: int):
        self.global_steps, self.fails_in = 4, fails_in  # resumed from step 4
        self.train_dataloader = self

    def state_dict(self) -> dict[str, int]:
        return {"prompts": 10 * self.global_steps}

    def step(self) -> None:
        if self.global_steps == self.fails_in:
            raise RuntimeError("a rank is gone")


def _fit(trainer, agent_loop_manager):
    for _ in range(4):
        trainer.global_steps += 1
        trainer.step()


@pytest.fixture
def failing(tmp_path, monkeypatch):
    """A callback on a trainer, and the saves that it asks for."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from epfsdp2.recipes.resilient import callback

    saved = []
    monkeypatch.setattr(PPOTrainer, "fit", _fit)
    monkeypatch.setattr(callback, "save_step", lambda *of: saved.append(of) or tmp_path)
    trainer = {"default_local_dir": str(tmp_path), "save_freq": 9, "critic_warmup": 6}
    config = OmegaConf.create({"trainer": trainer, "engine": {"survivors_folder": str(tmp_path / FOLDER)}})
    OmegaConf.set_struct(config, True)
    callback.SaveBeforeTheEnd(config)
    return PPOTrainer, config, saved


def _wait(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition()


def test_notice_of_an_end_makes_the_trainer_save_at_the_end_of_each_step(failing, tmp_path):
    _, config, _ = failing
    time.sleep(0.5)
    assert config.trainer.save_freq == 9
    (tmp_path / NOTICE).touch()
    _wait(lambda: config.trainer.save_freq == 1)


def test_trainer_that_fails_has_its_ranks_save_the_last_complete_step(failing, tmp_path, capsys):
    trainer_class, _, saved = failing
    with pytest.raises(RuntimeError, match="a rank is gone"):
        trainer_class.fit(_Trainer(fails_in=7), None)
    ((root, step, updates, data),) = saved
    assert (root, step, updates) == (tmp_path, 6, {"actor": 1, "critic": 2})
    assert torch.load(io.BytesIO(data)) == {"prompts": 60}
    assert "have saved step 6" in capsys.readouterr().out


@pytest.mark.parametrize(("fails_in", "is_saved"), [(5, False), (7, True)])
def test_trainer_that_fails_with_nothing_new_saves_nothing(failing, tmp_path, fails_in, is_saved):
    trainer_class, _, saved = failing
    if is_saved:
        save_step(tmp_path, 6)
    with pytest.raises(RuntimeError, match="a rank is gone"):
        trainer_class.fit(_Trainer(fails_in), None)
    assert saved == []


def test_trainer_that_hangs_saves_when_the_recipe_asks(failing, tmp_path):
    trainer_class, _, saved = failing
    trainer_class.fit(_Trainer(fails_in=0), None)
    (tmp_path / NOTICE).write_text(FOLDER)
    _wait(lambda: not (tmp_path / NOTICE).exists())
    assert [step for _, step, _, _ in saved] == [8]


def test_verls_trainer_still_needs_the_callback_and_is_as_it_assumes():
    from verl.trainer.ppo.v1 import trainer_base
    from verl.workers.engine_workers import TrainingWorker

    trainer, text = trainer_base.PPOTrainer, inspect.getsource(trainer_base)
    assert "should_save_ckpt_esi" not in text and "SIGTERM" not in text
    assert "self.checkpoint_callback = build_checkpoint_callback(config)" in text
    fit, save = inspect.getsource(trainer.fit), inspect.getsource(trainer._save_checkpoint)
    assert "self.config.trainer.save_freq > 0" in fit and "self.global_steps % self.config.trainer.save_freq" in fit
    assert "self.step(metrics, self.timing_raw)" in fit and "self.global_steps += 1" in fit
    assert "def fit(self, agent_loop_manager: AgentLoopManager)" in fit
    assert fit.index("self.step(") < fit.index("self._save_checkpoint()") < fit.index("self.on_step_end()")
    assert "torch.save(self.train_dataloader.state_dict(), dataloader_local_path)" in save
    assert "if self.config.trainer.critic_warmup <= self.global_steps:" in inspect.getsource(trainer._step_once)
    # One step of the schedule in each update of a role.
    assert "update_lr_scheduler=batch_idx == total_num_iterations - 1" in inspect.getsource(TrainingWorker)
