"""The quickstart with another trainer of verl in the place of ``main_ppo``: ``python -m other_trainer MODULE ...``."""

import sys

from epfsdp2.recipes.quickstart import cli

_, _MODULE, *_OPTIONS = sys.argv
_stock = cli.grpo_command


def _command(values: dict, extra: list[str]) -> list[str]:
    return [_MODULE if word == "verl.trainer.main_ppo" else word for word in _stock(values, extra)]


if __name__ == "__main__":
    cli.grpo_command = _command
    raise SystemExit(cli.main(_OPTIONS))
