"""Which of a run's steps can be resumed from, and what ``recipes/resilient`` has a trainer save before it ends."""

import inspect
import re
import time

import pytest

from epfsdp2.engine.checkpoint.atomic_folder import MANIFEST
from epfsdp2.recipes.resilient.saving.checkpoints import NOTICE, latest, saved_steps
from tests.support.trainer.resilient import command_of, save_step


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda actor: (actor / MANIFEST).unlink(), "actor was not saved to its end"),
        (lambda actor: (actor / "weights").write_bytes(b"wei"), r"weights \(3 of 7 bytes\)"),
        (lambda actor: (actor / "weights").unlink(), r"weights \(0 of 7 bytes\)"),
        (lambda actor: (actor.parent / "data.pt").write_bytes(b"PK"), "data.pt was not saved to its end"),
        (lambda actor: (actor.parent / "critic.partial").mkdir(), "critic was not saved to its end"),
        (lambda actor: actor.rename(actor.with_name("actor.partial")), "actor was not saved to its end"),
    ],
)
def test_last_complete_checkpoint_beside_broken_ones_is_taken(tmp_path, damage, fault):
    assert latest(tmp_path) is None
    for step in (2, 10):
        save_step(tmp_path, step)
    assert latest(tmp_path).step == 10
    damage(tmp_path / "global_step_10" / "actor")
    assert latest(tmp_path).step == 2
    assert re.search(fault, saved_steps(tmp_path)[-1].fault)


def test_last_complete_checkpoint_of_an_async_trainer_has_its_queue(tmp_path):
    for step in (2, 4):
        save_step(tmp_path, step)
    (tmp_path / "global_step_2" / "transfer_queue").mkdir()
    (tmp_path / "global_step_4" / "transfer_queue.tmp").mkdir()
    assert latest(tmp_path).step == 4
    assert latest(tmp_path, with_queue=True).step == 2
    assert saved_steps(tmp_path, with_queue=True)[-1].fault == "transfer_queue was not saved to its end"
    assert not command_of(tmp_path).saves_queue
    assert command_of(tmp_path, trainer__v1={"trainer_mode": "colocate_async"}).saves_queue


def test_notice_of_an_end_makes_the_trainer_save_at_the_end_of_each_step(tmp_path):
    from omegaconf import OmegaConf

    from epfsdp2.recipes.resilient.saving.notice import SaveOnNotice

    config = OmegaConf.create({"trainer": {"default_local_dir": str(tmp_path), "save_freq": 100}})
    OmegaConf.set_struct(config, True)
    callback = SaveOnNotice(config)
    time.sleep(1.2)
    assert config.trainer.save_freq == 100
    (tmp_path / NOTICE).touch()
    deadline = time.monotonic() + 20
    while config.trainer.save_freq != 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert config.trainer.save_freq == 1
    callback.stop()


def test_notice_is_still_needed_and_verl_reads_save_freq_at_each_step():
    from verl.trainer.ppo.v1 import trainer_base

    text = inspect.getsource(trainer_base)
    assert "should_save_ckpt_esi" not in text and "SIGTERM" not in text
    step = text[text.index("while current_epoch <") :]
    assert "self.config.trainer.save_freq > 0" in step and "self.global_steps % self.config.trainer.save_freq" in step
    assert "self.checkpoint_callback = build_checkpoint_callback(config)" in text
