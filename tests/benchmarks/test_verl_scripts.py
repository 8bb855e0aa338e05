"""A script of verl runs with stand-ins; the command that it would start is composed and checked."""

import json
from pathlib import Path

import pandas as pd
import pytest

from benchmarks.scripts.verl_scripts import ADDED, checks, composed, examine, record, small_model

DATA = sorted((Path(__file__).parents[1] / "e2e" / "trainers" / "data").glob("*.json"))
SCRIPTS = {
    "on.sh": 'uv run python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path="$HOME/Qwen3-30B-A3B" "$@"',
    "not_on.sh": "ray job submit -- python3 -m verl.experimental.fully_async_policy.fully_async_main a.b=1",
    "sft.sh": 'save_path=$2\nshift 2\ntorchrun --nproc_per_node=8 -m verl.trainer.sft_trainer engine=fsdp "$@"',
    "other.sh": 'python3 -m verl.trainer.main_ppo model_engine=veomni "$@"',
    "none.sh": "python3 -m something.else",
}


def test_verl_script_record_runs_the_script_and_adds_the_words(tmp_path):
    (tmp_path / "verl").mkdir()
    found = {}
    for name, text in SCRIPTS.items():
        (tmp_path / "verl" / name).write_text(f"set -eu\n{text}\n")
        found[name] = record(tmp_path / "verl", name, tmp_path / "home")
    assert found["other.sh"] is None and found["none.sh"] is None
    assert found["on.sh"]["arguments"] == ["actor_rollout_ref.model.path=$HOME/Qwen3-30B-A3B", *ADDED]
    assert found["on.sh"]["added"] == "behind the script's name"
    assert found["not_on.sh"]["arguments"] == ["a.b=1", ADDED[0]]  # no experts that it knows of
    assert found["not_on.sh"]["added"] == "behind the script's last argument"
    assert found["sft.sh"]["module"] == "verl.trainer.sft_trainer"
    assert found["sft.sh"]["arguments"] == ["engine=fsdp", ADDED[0]]


@pytest.mark.parametrize("file", DATA, ids=lambda file: file.stem)
@pytest.mark.filterwarnings("ignore:Disabled critic")
def test_verl_scripts_recorded_compose_and_pass_the_drivers_checks(file, tmp_path):
    facts = json.loads(file.read_text())
    assert composed(facts["module"], facts["arguments"])
    # The SFT script's model is dense; here as in the end-to-end run it gets experts. One script's data have images.
    images = tmp_path / "images.parquet" if "qwen3_5" in file.stem else None
    name = "Qwen3.5-35B-A3B" if images else "Qwen3-30B-A3B"
    node = "model.path" if "sft" in facts["module"] else "actor_rollout_ref.model.path"
    small = [f"{node}={small_model(name, tmp_path)}"]
    if images:
        pd.DataFrame({"prompt": ["?"], "images": [[b""]]}).to_parquet(images)
        small.append(f"data.train_files={images}")
    assert checks(facts["module"], [*facts["arguments"], *small]) == "passes"


def test_verl_script_that_is_refused_is_quoted_with_its_first_sentence(tmp_path):
    arguments = ["actor_rollout_ref.model.path=x/Qwen3-30B-A3B", "actor_rollout_ref.actor.use_dynamic_bsz=True"]
    wrong = [*arguments, "actor_rollout_ref.actor.fsdp_config.param_ofload=True", *ADDED]
    row = examine({"module": "verl.trainer.main_ppo", "arguments": wrong, "added": ""}, tmp_path)
    assert row["stock"] != "yes" and row["composes"] == "yes"
    expected = "actor_rollout_ref.actor.fsdp_config.param_ofload=True: verl's FSDP engine has no such setting."
    assert row["checks"] == expected
