"""Contents of checkpoints, saves in the background, and folders that a run can't resume from."""

import pytest
from omegaconf import OmegaConf

from epfsdp2.engine.checkpoint.atomic_folder import MANIFEST
from epfsdp2.engine.preflight.resume import CHECKPOINTS, check_checkpoint
from epfsdp2.engine.preflight.run import check_run
from tests.support.trainer.preflight import MODEL, refused
from tests.support.trainer.settings import engine, saved_checkpoint

ACTOR, CRITIC = "actor_rollout_ref.actor.checkpoint.load_contents", "critic.checkpoint.load_contents"
ALL = ["model", "optimizer", "extra"]


@pytest.mark.parametrize("key", ["save_contents", "load_contents"])
@pytest.mark.parametrize(("model", "node"), CHECKPOINTS.items())
def test_checkpoint_contents_that_are_unknown_are_refused(key, model, node):
    for contents, unknown in ((["model", "hf"], "hf"), (["optim"], "optim"), ("modle", "modle")):
        with refused(f"{node}.{key}", contents, f"there is no {unknown} in a checkpoint"):
            check_checkpoint({key: contents}, model)
    with refused(f"{node}.{key}", "model", f"{node}.{key}=[model]"):
        check_checkpoint({key: "model"}, model)
    for contents in (None, [], ["model"], OmegaConf.create([*ALL, "hf_model"])):
        check_checkpoint({key: contents}, model)


def test_background_save_of_a_critic_is_refused():
    check_checkpoint({"async_save": True}, MODEL)
    with refused("critic.checkpoint.async_save", True):
        check_checkpoint({"async_save": True}, "critic.model")


def test_adapters_alone_and_their_base_in_one_checkpoint_are_refused():
    for with_base in (False, True):
        check_checkpoint({"save_lora_only": not with_base}, MODEL, with_base)
    with refused("actor_rollout_ref.actor.checkpoint.save_lora_only", True, "contradicts engine.save_frozen_base=True"):
        check_checkpoint({"save_lora_only": True}, MODEL, with_base=True)


def _resumes(model, root, contents, mode="auto", from_path=None, **rollout):
    resume = {"mode": mode, "from_path": from_path, "folder": str(root), **rollout.pop("resume", {})}
    check_run(engine(), 2, model, {"resume": resume, **rollout}, checkpoint={"load_contents": contents}, device="cpu")


@pytest.mark.parametrize(
    ("saved", "loaded", "words"),
    [
        (["hf_model"], ALL, "holds no state to resume from"),
        (["optimizer", "extra"], ["optimizer", "extra"], "holds no state to resume from"),
        (["model", "hf_model"], ["hf_model"], "is without model"),
        (ALL, [], "is without model"),
        (["model", "extra"], ALL, "holds no optimizer state"),
    ],
)
def test_resume_from_a_folder_that_lacks_what_is_loaded_is_refused(model, tmp_path, saved, loaded, words):
    root = tmp_path / "runs"
    step = saved_checkpoint(root, 3, saved)
    weights = [f"model.path={step}/actor/huggingface"] if saved == ["hf_model"] else []
    for place in ({}, {"mode": "resume_path", "from_path": str(step)}):
        with refused(ACTOR, loaded, words, *weights):
            _resumes(model, root, loaded, **place)
    _resumes(model, root, loaded, mode="disable")
    _resumes(model, tmp_path / "no run yet", loaded)


def test_resume_with_the_model_and_any_of_the_rest_passes(model, tmp_path):
    saved_checkpoint(tmp_path / "runs", 3, ALL)
    for loaded in (ALL, ["model"], [*ALL, "hf_model"]):
        _resumes(model, tmp_path / "runs", loaded)


def test_resume_of_a_critic_is_checked_where_the_run_has_one(model, tmp_path):
    root = tmp_path / "runs"
    saved_checkpoint(root, 3, ALL)
    saved_checkpoint(root, 3, ["hf_model"], "critic")
    critic = {"critic_path": model["path"], "resume": {"critic_contents": ["hf_model"]}}
    with refused(CRITIC, ["hf_model"]):
        _resumes(model, root, ALL, adv_estimator="gae", **critic)
    _resumes(model, root, ALL, adv_estimator="grpo", **critic)


def test_resume_from_an_incomplete_or_damaged_folder_is_refused(model, tmp_path):
    root = tmp_path / "runs"
    step = saved_checkpoint(root, 3, ALL)
    (step / "actor/trainer_state.json").write_text("{")
    with refused("trainer.resume_mode", "auto", "trainer_state.json is damaged"):
        _resumes(model, root, ALL)
    (step / "actor" / MANIFEST).unlink()
    with refused("trainer.resume_mode", "auto", "no complete checkpoint of this engine"):
        _resumes(model, root, ALL)
    (step / "actor").rename(step / "elsewhere")  # such as on another machine
    _resumes(model, root, ALL)
