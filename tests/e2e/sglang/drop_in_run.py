"""The quickstart with one of two engines: ``python -m tests.e2e.sglang.drop_in_run stock|epfsdp2 ...``."""

import sys

from epfsdp2.recipes.quickstart import cli, commands

# verl's fsdp2 engine in float32, by the settings of each role.
_STOCK_ENGINE = [
    setting
    for role, engine in {
        "actor_rollout_ref.actor": "fsdp_config",
        "actor_rollout_ref.ref": "fsdp_config",
        "critic": "fsdp",
    }.items()
    for setting in (
        f"{role}.strategy=fsdp2",
        f"{role}.{engine}.strategy=fsdp2",
        f"{role}.{engine}.model_dtype=fp32",
        f"{role}.{engine}.use_torch_compile=False",
        f"+{role}.{engine}.mixed_precision={{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}}",
    )
]
_STOCK_ENGINE.append("critic.model._target_=tests.e2e.sglang.stock_on_cpu.CriticModel")


def _stock_command(values: dict, extra: list[str]) -> list[str]:
    own = [setting for setting in commands.overrides("grpo", values) if not setting.startswith("engine.")]
    return [sys.executable, "-m", "verl.trainer.main_ppo", *own, *_STOCK_ENGINE, *extra]


if __name__ == "__main__":
    _, side, *options = sys.argv
    if side == "stock":
        cli.grpo_command = _stock_command
    raise SystemExit(cli.main(options))
