"""Values for the names in the quickstart's commands."""

from pathlib import Path

from epfsdp2.recipes.quickstart import cli

__all__ = ["command_values"]


def command_values(folder: Path) -> dict:
    names = ("output", "model", "warmup_data", "grpo_data", "reward_file", "sampler_file", "ray_dir")
    return vars(cli.parse([])) | {name: folder / name for name in names}
