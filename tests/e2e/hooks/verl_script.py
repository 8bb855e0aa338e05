"""The quickstart with the arguments of one of verl's scripts: ``python -m verl_script FACTS.json ...``.

``FACTS.json`` is what ``benchmarks/verl_scripts.py --record`` wrote: the trainer that the script starts, and all it is
given, ``engine=epfsdp2 engine.ep_size=8`` at the end. Behind it come the quickstart's settings of a small machine. The
algorithm stays the script's.
"""

import json
import sys
from pathlib import Path

from epfsdp2.recipes.quickstart import cli, commands

_, _FACTS, *_OPTIONS = sys.argv
_OF_THE_SCRIPT = ("algorithm.", "actor_rollout_ref.actor.use_kl_loss=")
_SMALL = ["engine.ep_size=2", "ray_kwargs.ray_init.runtime_env.py_executable=null"]


def _command(values: dict, extra: list[str]) -> list[str]:
    facts = json.loads(Path(_FACTS).read_text())
    small = [line for line in commands.overrides("grpo", values) if not line.startswith(_OF_THE_SCRIPT)]
    return [sys.executable, "-m", facts["module"], *facts["arguments"], *small, *_SMALL, *extra]


if __name__ == "__main__":
    cli.grpo_command = _command
    raise SystemExit(cli.main(_OPTIONS))
