"""Run a GPU recipe: join its overrides, print the command, and exec it.

    python -m epfsdp2.recipes.gpu.run qwen3_30b_a3b_8gpu grpo [more overrides]
    python -m epfsdp2.recipes.gpu.run --print gpt_oss_120b_32gpu ppo

The command is ``python -m verl.trainer.main_ppo engine=epfsdp2 engine.ep_size=N ...``; start it on the head node of a
Ray cluster, or on the one node. A later override wins, so the command line can change everything in a recipe.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

__all__ = ["ALGORITHMS", "CLUSTERS", "command", "main", "overrides"]

ALGORITHMS = ("grpo", "ppo")
_HERE = Path(__file__).parent
# A recipe is one of these, common.yaml and one algorithm.
CLUSTERS = tuple(sorted(p.stem for p in _HERE.glob("*.yaml") if p.stem not in (*ALGORITHMS, "common")))


def overrides(cluster: str, algorithm: str) -> list[str]:
    """Return the overrides of a recipe of ``CLUSTERS`` and ``ALGORITHMS``, in the order in which Hydra reads them."""
    names = (cluster, "common", algorithm)
    return [override for name in names for override in yaml.safe_load((_HERE / f"{name}.yaml").read_text())]


def command(cluster: str, algorithm: str, more: Sequence[str] = ()) -> list[str]:
    """Return the arguments of the Python interpreter."""
    return ["-m", "verl.trainer.main_ppo", *overrides(cluster, algorithm), *more]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the command, then replace this process by it."""
    parser = argparse.ArgumentParser(prog="epfsdp2.recipes.gpu.run", description=__doc__.splitlines()[0])
    parser.add_argument("--print", action="store_true", dest="only_print", help="print the command and stop")
    parser.add_argument("cluster", choices=CLUSTERS)
    parser.add_argument("algorithm", choices=ALGORITHMS)
    parser.add_argument("overrides", nargs="*", help="more of verl's overrides; a later one wins")
    args = parser.parse_args(argv)
    words = command(args.cluster, args.algorithm, args.overrides)
    print(shlex.join(["python", *words]), flush=True)
    if not args.only_print:
        os.execv(sys.executable, [sys.executable, *words])


if __name__ == "__main__":
    main()
