"""Runs with a multi-token prediction layer, which learns to draft as the policy does."""

import json
import os
import subprocess
from dataclasses import replace
from statistics import mean

import pytest
from safetensors.torch import load_file

from epfsdp2.recipes.quickstart.commands import warmup_command
from epfsdp2.recipes.quickstart.model import build_tokenizer
from epfsdp2.recipes.quickstart.task import write_datasets
from tests.e2e.models.small_families import settings
from tests.e2e.runs import differences, finished, overrides
from tests.rollout.served_families import SERVED
from tests.support.models.mtp import DRAFTS, save_with_mtp

pytestmark = [pytest.mark.e2e, pytest.mark.long, DRAFTS]

MTP = "actor_rollout_ref.model.mtp"
RUNS = {
    "trained": ["engine.mtp_loss_coef=1.0"],
    "trained and drafting in the rollout": [
        *(f"{MTP}.{name}=True" for name in ("enable", "enable_train", "detach_encoder", "enable_rollout")),
        f"{MTP}.mtp_loss_scaling_factor=1.0",
    ],
}
# Cached states of linear attention are copied by a Triton kernel where there are drafts.
MORE = {"glm4_moe": [], "qwen3_next": ["actor_rollout_ref.rollout.enable_prefix_caching=False"]}


def _save(folder, family):
    tokenizer, recipe = build_tokenizer(), SERVED[family].family
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    sizes = {**recipe.sizes, "hidden_size": 128, "max_position_embeddings": 128, "vocab_size": len(tokenizer), **ids}
    save_with_mtp(folder, replace(recipe, sizes=sizes), 1)
    tokenizer.save_pretrained(folder)
    return folder


def _check_agreement(steps, prefix):
    agreement = [step[f"{prefix}/mtp_agreement"] for step in steps]
    assert mean(agreement[-3:]) > mean(agreement[:3]) + 0.1, agreement
    assert steps[-1][f"{prefix}/mtp_loss"] < steps[0][f"{prefix}/mtp_loss"]


@pytest.mark.parametrize(("family", "name"), [*(("glm4_moe", name) for name in RUNS), ("qwen3_next", [*RUNS][1])])
def test_drafts_of_a_grpo_run_agree_more_and_more_with_the_policy(tmp_path, family, name):
    options = overrides(*RUNS[name], *settings(family), *MORE[family])
    steps = finished(tmp_path / "run", 16, "--model", str(_save(tmp_path / "model", family)), *options).steps()
    _check_agreement(steps, "actor")
    assert max(differences(steps)) < (1e-5 if SERVED[family].dtype == "float32" else 2e-2)


def test_drafts_of_a_supervised_run_agree_more_and_more_with_the_policy(tmp_path):
    steps, metrics = 40, tmp_path / "metrics.jsonl"
    write_datasets(tmp_path / "data", 1, copies=26, right_share=0.6)
    values = {
        "model": _save(tmp_path / "model", "glm4_moe"),
        "warmup_data": tmp_path / "data/warmup.parquet",
        "warmup_batch_size": 64,
        "warmup_batch_of_a_rank": 32,
        "warmup_lr": 2e-3,
        "warmup_steps": steps,
        "output": tmp_path,
    }
    command = [*warmup_command(values), "engine.mtp_loss_coef=1.0"]
    environment = {**os.environ, "VERL_FILE_LOGGER_PATH": str(metrics)}
    done = subprocess.run(command, env=environment, timeout=500, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    logged = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    _check_agreement([data for data in logged if "train/mtp_loss" in data], "train")
    (exported,) = (tmp_path / "warmup" / f"global_step_{steps}" / "huggingface").glob("*.safetensors")
    assert "model.layers.2.eh_proj.weight" in load_file(exported)
