"""The quickstart with verl's own fsdp2 engine, in float32, and SGLang: ``python -m stock_engine ROLES ...``.

``ROLES`` are those of the run, joined by commas: ``actor``, ``ref``, ``critic``.
"""

import os
import sys

from epfsdp2.recipes.quickstart import cli

_, _ROLES, *_OPTIONS = sys.argv
_ENGINES = {
    "actor": "actor_rollout_ref.actor.fsdp_config",
    "ref": "actor_rollout_ref.ref.fsdp_config",
    "critic": "critic.fsdp",
}
_STRATEGIES = {
    "actor": ["actor_rollout_ref.actor.strategy=fsdp2"],
    "critic": ["critic.strategy=fsdp2", "critic.model.external_lib=stock_on_cpu"],
}
_stock = cli.grpo_command


def _command(values: dict, extra: list[str]) -> list[str]:
    words = [word for word in _stock(values, extra) if not word.startswith(("engine=", "engine."))]
    words.append("actor_rollout_ref.model.external_lib=stock_on_cpu")
    for role in _ROLES.split(","):
        engine = _ENGINES[role]
        words += _STRATEGIES.get(role, [])
        words.append(f"{engine}.use_torch_compile=False")
        words.append(f"+{engine}.mixed_precision={{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}}")
    return words


if __name__ == "__main__":
    os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # verl registers its engines for accelerators alone
    cli.grpo_command = _command
    raise SystemExit(cli.main(_OPTIONS))
