"""The quickstart with the arguments of one of verl's scripts: ``python -m verl_script FACTS.json ...``.

``benchmarks/scripts/verl_scripts.py --record`` writes ``FACTS.json``: the trainer that the script starts, and its
arguments, ``engine=epfsdp2 engine.ep_size=8`` at their end. The quickstart's settings of a small machine follow them.
The algorithm stays the script's.
"""

import json
import sys
from pathlib import Path

from epfsdp2.recipes.quickstart import cli, commands

_, _FACTS, *_OPTIONS = sys.argv
_OF_THE_SCRIPT = (
    "algorithm.",
    "actor_rollout_ref.actor.use_kl_loss=",
    "actor_rollout_ref.model.enable_gradient_checkpointing=",
)
# The sizes in a script are for a machine with eight GPUs.
_TWO_RANKS = {"ulysses_sequence_parallel_size": "2", "fsdp_size": "-1", "expert_parallel_size": "1"}
_SMALL = ["++ray_kwargs.ray_init.runtime_env.py_executable=null"]
# One worker generates, in a process of its own. verl has no config of the name that one script gives.
_FULLY_ASYNC = [
    "--config-name=fully_async_ppo_trainer.yaml",
    "rollout.nnodes=1",
    "rollout.n_gpus_per_node=1",
    "rollout.n=8",
    "rollout.total_rollout_steps=32",
    "async_training.trigger_parameter_sync_step=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=epfsdp2_p2p",
    "algorithm.rollout_correction.bypass_mode=False",
    "data.train_batch_size=0",
    "ray_kwargs.ray_init.num_gpus=3",
    "ray_kwargs.ray_init.num_cpus=64",
]


def _command(values: dict, extra: list[str]) -> list[str]:
    facts = json.loads(Path(_FACTS).read_text())
    small = [line for line in commands.overrides("grpo", values) if not line.startswith(_OF_THE_SCRIPT)]
    # The script may have added the key already.
    small = [f"++{line.lstrip('+')}" if line.startswith("+") else line for line in small]
    critic = [f"critic.model.path={values['model']}", "++critic.model.override_config.attn_implementation=sdpa"]
    small += _SMALL + critic + (_FULLY_ASYNC if "fully_async" in facts["module"] else [])
    if any(word.startswith("engine.ep_size=") for word in facts["arguments"]):
        small.append("engine.ep_size=2")
    words = [*map(_on_two_ranks, facts["arguments"]), *small, *extra]
    # Hydra's own options come first, each once, because one between overrides would end their list.
    options = {word.partition("=")[0]: word for word in words if word.startswith("--")}
    overrides = [word for word in words if not word.startswith("--")]
    return [sys.executable, "-m", facts["module"], *options.values(), *overrides]


def _on_two_ranks(word: str) -> str:
    key, _, value = word.partition("=")
    size = _TWO_RANKS.get(key.rpartition(".")[2])
    return f"{key}={size}" if size and value != "1" else word


if __name__ == "__main__":
    cli.grpo_command = _command
    raise SystemExit(cli.main(_OPTIONS))
