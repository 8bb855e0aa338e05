"""What ``recipes/resilient --save-on-failure`` has a trainer's process do; ``tests/engine/survivors`` has the ranks."""

import inspect
import io
import time

import pytest
import torch
from omegaconf import OmegaConf

from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.survivors.messages import read, tell
from epfsdp2.recipes.resilient.cli import check_survivors
from epfsdp2.recipes.resilient.saving import survivors
from tests.support.trainer.resilient import Run, command_of, save_step


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


def _fit(trainer):
    for _ in range(4):
        trainer.global_steps += 1
        trainer.step()


@pytest.fixture
def failing(tmp_path, monkeypatch):
    """A callback on a trainer, and the saves that it asks for."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from epfsdp2.recipes.resilient.saving import failure

    saved = []
    monkeypatch.setattr(PPOTrainer, "fit", _fit)
    monkeypatch.setattr(failure, "save_step", lambda *of: saved.append(of) or tmp_path)
    config = {"trainer": {"default_local_dir": str(tmp_path), "save_freq": 9, "critic_warmup": 6}}
    callback = failure.SaveOnFailure(OmegaConf.create(config))
    yield PPOTrainer, callback, saved
    callback.stop()


def test_trainer_that_fails_has_its_ranks_save_the_last_complete_step(failing, tmp_path, capsys):
    trainer_class, _, saved = failing
    with pytest.raises(RuntimeError, match="a rank is gone"):
        trainer_class.fit(_Trainer(fails_in=7))
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
        trainer_class.fit(_Trainer(fails_in))
    assert saved == []


def test_trainer_that_hangs_saves_when_the_recipe_asks(failing, tmp_path):
    trainer_class, _, saved = failing
    trainer_class.fit(_Trainer(fails_in=0))
    begun = time.monotonic()
    survivors.ask_trainer(tmp_path)
    assert time.monotonic() - begun < survivors._ANSWER_SECONDS
    assert [step for _, step, _, _ in saved] == [8]


def test_messages_are_whole_or_absent(tmp_path):
    assert read(tmp_path, "ask.json") is None
    tell(tmp_path / "new", "ask.json", {"id": "a"})
    assert read(tmp_path / "new", "ask.json") == {"id": "a"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["ask.json"]


def test_verls_trainer_is_as_the_callback_takes_it():
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.workers.engine_workers import TrainingWorker

    fit, save = inspect.getsource(PPOTrainer.fit), inspect.getsource(PPOTrainer._save_checkpoint)
    assert "self.step(metrics, self.timing_raw)" in fit and "self.global_steps += 1" in fit
    assert fit.index("self.step(") < fit.index("self._save_checkpoint()") < fit.index("self.on_step_end()")
    assert "torch.save(self.train_dataloader.state_dict(), dataloader_local_path)" in save
    assert "if self.config.trainer.critic_warmup <= self.global_steps:" in inspect.getsource(PPOTrainer._step_once)
    # One step of the schedule in each update of a role.
    assert "update_lr_scheduler=batch_idx == total_num_iterations - 1" in inspect.getsource(TrainingWorker)


def test_run_with_save_on_failure_gets_the_callback_and_the_folder_of_the_messages(tmp_path):
    run = Run(tmp_path, {"saves": [2], "status": 0})
    assert run.to_the_end("--save-on-failure") == 0, run.said
    (words,) = run.attempts
    folder = tmp_path / "checkpoints" / survivors.FOLDER
    assert f'engine.survivors_folder="{folder}"' in words
    assert "++trainer.checkpoint_callback_class=epfsdp2.recipes.resilient.saving.failure.SaveOnFailure" in words


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"trainer__v1": {"trainer_mode": "colocate_async"}}, "--save-on-failure=colocate_async"),
        ({"trainer__use_v1": False}, "--save-on-failure"),
        ({"trainer__checkpoint_callback_class": "a.B"}, "trainer.checkpoint_callback_class=a.B"),
    ],
)
def test_trainer_that_could_not_be_saved_after_a_failure_is_refused(tmp_path, changes, names):
    check_survivors(command_of(tmp_path))
    with pytest.raises(SettingError, match=names):
        check_survivors(command_of(tmp_path, **changes))
