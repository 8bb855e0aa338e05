"""The GRPO runs for a machine with a GPU: their commands compose, and the script runs on a CPU."""

import os

import pytest
import verl.trainer.config
from hydra import compose, initialize_config_dir

from benchmarks.gpu.gpu_run import RUNS, command_of, compute_score, main


@pytest.mark.parametrize("name", RUNS)
def test_command_of_a_gpu_run_composes_to_what_the_run_is(tmp_path, name):
    command = command_of(name, tmp_path, 6, "wide", False, [])
    words = command[command.index("verl.trainer.main_ppo") + 1 :]
    with initialize_config_dir(os.path.dirname(verl.trainer.config.__file__), version_base=None):
        config = compose("ppo_trainer", words)
    rollout, engine = config.actor_rollout_ref.rollout, config.engine
    assert config.trainer.device == "cuda" and config.trainer.n_gpus_per_node == 1 and engine.ep_size == 1
    assert rollout.free_cache_engine and rollout.enable_sleep_mode and rollout.dtype == "bfloat16"
    assert "kv_cache_memory_bytes" not in rollout.engine_kwargs.vllm
    assert (engine.param_offload, engine.optimizer_offload, rollout.enforce_eager) == (
        (name == "B",) * 2 + (name == "A",)
    )
    assert ("compilation_config" in rollout.engine_kwargs.vllm) == (name == "B")


def test_reward_of_a_gpu_run_is_the_share_of_sevens():
    assert [compute_score("", text, "") for text in ("7a77", "", "abc")] == [0.75, 0.0, 0.0]


@pytest.mark.e2e
@pytest.mark.long
def test_gpu_run_without_a_gpu_makes_its_steps(capsys):
    assert main(["A", "--cpu", "--size", "tiny", "--steps", "2"]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("A | ")]
    assert [row[1] for row in rows] == ["1", "2"] and all(float(row[3]) < 1e-5 for row in rows)
