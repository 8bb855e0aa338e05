"""``recipes.mismatch`` with rollouts that verl's trainer saved from vLLM."""

import json

import pytest

from epfsdp2.recipes.mismatch.cli import main
from epfsdp2.recipes.quickstart.model import write_model
from tests.e2e.runs import finished, overrides

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def test_top_p_of_a_real_rollout_is_warned_of_and_explains_the_whole_difference(tmp_path):
    write_model(tmp_path / "model", 1)
    folder = tmp_path / "rollouts"
    settings = ["trainer.save_freq=1", "actor_rollout_ref.rollout.top_p=0.7", f"skip.rollout_tq.dump_dir={folder}"]
    settings += ["skip.rollout_tq.enable=True", "skip.rollout_tq.steps=[1,2]", "engine.mismatch_warning=0.001"]
    finished(tmp_path / "run", 2, "--model", str(tmp_path / "model"), *overrides(*settings))
    log = (tmp_path / "run/logs/grpo.log").read_text(errors="replace")
    assert log.count("Find the cause with: python -m epfsdp2.recipes.mismatch") == 1
    checkpoint, config = tmp_path / "run/checkpoints/global_step_1", tmp_path / "run/hydra/.hydra/config.yaml"
    out = tmp_path / "out.json"
    given = [str(checkpoint), str(folder), "--run", str(config), "--previous", str(tmp_path / "model")]
    assert main([*given, "--device", "cpu", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["causes"][0]["name"] == "top p 0.7" and found["causes"][0]["share"] > 0.999
    assert found["rest"]["mean"] < 1e-5
