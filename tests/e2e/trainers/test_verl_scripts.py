"""verl's own scripts with two words more, on a small machine: their arguments are recorded in ``data``.

``benchmarks/scripts/verl_scripts.py --record`` wrote these files: what a script gives its trainer, and the two words
behind it. A small model, small data and what a machine without GPUs needs come last.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from epfsdp2.recipes.quickstart import task
from epfsdp2.recipes.quickstart.commands import overrides as quickstart
from epfsdp2.recipes.quickstart.model import write_model
from tests.e2e.runs import differences, leftovers, overrides, running, unused

pytestmark = [pytest.mark.e2e, pytest.mark.long]

DATA = Path(__file__).parent / "data"
GRPO = DATA / "examples-grpo_trainer-run_qwen3_30b_a3b_fsdp.json"
SFT = DATA / "examples-sft-gsm8k-run_qwen3_8b_fsdp.json"
FULLY_ASYNC = DATA / "verl-experimental-fully_async_policy-shell-dapo_30b_a3b_base_math_fsdp.json"
RUNS = "engine=epfsdp2 was asked for, and is the one that runs"
SAME = 1e-5
# The answers of a model that is not trained are all wrong, so that no advantage would move it.
MOVES = "actor_rollout_ref.actor.entropy_coeff=0.01"


def _steps(tmp_path, steps, script):
    write_model(tmp_path / "model", 1)
    options = ["--model", str(tmp_path / "model"), "--steps", "2", "--batch-size", "8", *overrides(MOVES)]
    before = leftovers()
    with running(tmp_path / "run", *options, program=("verl_script", str(script))) as run:
        run.wait()
    logged = [step for step in run.steps() if "actor/grad_norm" in step]
    assert len(logged) == steps, run.text()[-3000:]
    assert all(step["actor/grad_norm"] > 0 for step in logged)
    assert run.living() == [] and unused(leftovers() - before) == set()
    return logged, (tmp_path / "run" / "logs" / "grpo.log").read_text(errors="replace")


def test_sft_script_with_two_words_trains(tmp_path):
    """Its settings are dense Qwen3's; sequence parallelism over two ranks and LoRA are the script's."""
    write_model(tmp_path / "model", 1)
    task.write_datasets(tmp_path / "data", 1, 2, 1.0)
    facts = json.loads(SFT.read_text())
    values = {
        "model": tmp_path / "model",
        "warmup_data": tmp_path / "data" / "warmup.parquet",
        "warmup_batch_size": 64,
        "warmup_batch_of_a_rank": 64,  # the script has two ranks share rows
        "warmup_lr": 1e-3,
        "warmup_steps": 3,
        "output": tmp_path,
    }
    small = [*quickstart("warmup", values), "engine.ep_size=2", "data.val_files=null", "trainer.logger=[console]"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", facts["module"], *facts["arguments"], *small]
    env = {"OMP_NUM_THREADS": "1", "VERL_PLATFORM": "cpu", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-9000:]
    losses = [line for line in done.stdout.splitlines() if "train/loss" in line]
    assert len(losses) == 3, done.stdout[-3000:]


def test_grpo_script_with_two_words_trains(tmp_path):
    """With the reference policy, KL loss, dynamic batches and both offloads of the script."""
    steps, log = _steps(tmp_path, 2, GRPO)
    assert max(differences(steps)) < SAME
    assert all("actor/kl_loss" in step for step in steps)
    assert f"actor_rollout_ref.actor.strategy=fsdp2: {RUNS}" in log


def test_fully_async_script_with_two_words_trains(tmp_path):
    """With the sequence parallelism of the script, for the actor and the reference policy, on two ranks.

    This trainer counts answers and not steps.
    """
    _, log = _steps(tmp_path, 3, FULLY_ASYNC)
    assert f"actor_rollout_ref.actor.fsdp_config.strategy=fsdp: {RUNS}" in log
