"""Whole GRPO runs on one GPU: verl's main_ppo, vLLM colocated with the trainer, weights in slices by CUDA IPC.

    python -m benchmarks.gpu.gpu_run [A|B ...] [--steps 6] [--size tiny|wide] [--cpu] [--results FOLDER]
        [--override KEY=VALUE]

Run A is a Qwen3-MoE with two layers of Qwen3-30B-A3B's width and random weights, in bfloat16 over float32 masters, with
vLLM asleep during updates. B adds CUDA graphs in vLLM, and parameters and optimizer on the host between phases. The
reward is the share of an answer's characters that are 7, which random weights can raise in a few steps. The table of
all runs is written to ``benchmarks/results/gpu_run.md``, or to a file of that name in ``--results``. ``--cpu`` tries
the script without a GPU, and writes nothing.
"""

import argparse
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.console import Console

from benchmarks.tables import RESULTS, report
from epfsdp2.recipes.launch.failure import cause
from epfsdp2.recipes.launch.processes import ProcessTree
from epfsdp2.recipes.quickstart import sampler, task
from epfsdp2.recipes.quickstart.commands import grpo_command
from epfsdp2.recipes.quickstart.metrics import read_records
from epfsdp2.recipes.quickstart.model import build_model, build_tokenizer

__all__ = ["SIZES", "command_of", "compute_score", "main"]

_WIDE = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "initializer_range": 0.02,
}
SIZES = {"tiny": {"head_dim": 128}, "wide": _WIDE | {"head_dim": 128}}  # FlashAttention 3 has kernels for 128
LENGTHS = {"tiny": 16, "wide": 256}  # of an answer, at most
ROLLOUT = "actor_rollout_ref.rollout"
_VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
RUNS = {
    "A": [],
    "B": [
        f"{ROLLOUT}.enforce_eager=False",
        f'++{_VLLM}.compilation_config=\'{{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY"}}\'',
        f"{ROLLOUT}.cudagraph_capture_sizes=[1,8,32,64,128,256]",
        "engine.param_offload=True",
        "engine.optimizer_offload=True",
    ],
}
# Columns of the table, and verl's names of the figures.
COLUMNS = {
    "reward": "critic/score/mean",
    "train/rollout difference": "training/rollout_probs_diff_mean",
    "largest": "training/rollout_probs_diff_max",
    "generate s": "timing_s/gen",
    "log-prob s": "timing_s/old_log_prob",
    "update s": "timing_s/update_actor",
    "sync s": "timing_s/update_weights",
    "step s": "timing_s/step",
    "trainer's peak GB": "actor/perf/max_memory_allocated_gb",
    "tokens/s": "perf/throughput",
}


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """Return the share of sevens among an answer's characters; verl calls it."""
    return solution_str.count("7") / max(len(solution_str), 1)


def write_inputs(folder: Path, size: str, is_cpu: bool) -> None:
    """Write the model and the questions."""
    tokenizer, longest = build_tokenizer(), 2 * LENGTHS[size] + 64
    tokenizer.model_max_length = longest
    dtype = torch.float32 if is_cpu else torch.bfloat16
    sizes = SIZES[size] | {"max_position_embeddings": longest, "dtype": str(dtype).removeprefix("torch.")}
    build_model(tokenizer, 0, **sizes).to(dtype).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    pd.DataFrame(task.grpo_rows(0)).to_parquet(folder / "data.parquet")


def command_of(name: str, folder: Path, steps: int, size: str, is_cpu: bool, extra: list[str]) -> list[str]:
    """Return the command of a run: the quickstart's, with what differs on a GPU."""
    length = LENGTHS[size]
    values = {
        "seed": 1,
        "steps": steps,
        "batch_size": 4 if is_cpu else 32,
        "group_size": 4 if is_cpu else 8,
        "lr": 2e-5,
        "output": folder / name,
        "model": folder / "model",
        "grpo_data": folder / "data.parquet",
        "reward_file": Path(__file__).resolve(),
        "sampler_file": Path(sampler.__file__),
        "ray_dir": folder / "ray",
    }
    own = [
        "engine.ep_size=1",
        "trainer.n_gpus_per_node=1",
        "++ray_kwargs.ray_init.num_gpus=1",
        f"data.max_response_length={length}",
        f"{ROLLOUT}.max_model_len={length + 64}",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384",
        f"{ROLLOUT}.log_prob_use_dynamic_bsz=True",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu=16384",
    ]
    on_gpu = [
        "engine.mixed_precision={param_dtype:bf16,reduce_dtype:fp32,buffer_dtype:fp32}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
        f"{ROLLOUT}.dtype=bfloat16",
        f"{ROLLOUT}.max_num_seqs=256",
        f"{ROLLOUT}.max_num_batched_tokens=8192",
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=1024",
        f"{ROLLOUT}.gpu_memory_utilization=0.35",
        f"{ROLLOUT}.free_cache_engine=True",
        f"++{ROLLOUT}.enable_sleep_mode=True",
        f"~{_VLLM}.kv_cache_memory_bytes",
        "trainer.device=cuda",
        *RUNS[name],
    ]
    return grpo_command(values, [*own, *([] if is_cpu else on_gpu), *extra])


def _rows(name: str, records: list[dict]) -> list[dict[str, str]]:
    """Return a row for each step of a run."""
    return [
        {"run": name, "step": str(record["step"])}
        | {column: f"{record['data'].get(key, float('nan')):.3g}" for column, key in COLUMNS.items()}
        for record in records
        if COLUMNS["reward"] in record["data"]
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", default=list(RUNS), help=f"of {', '.join(RUNS)}; all by default")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--size", choices=SIZES, default="wide")
    parser.add_argument("--cpu", action="store_true", help="without a GPU, to try the script")
    parser.add_argument("--results", type=Path, default=RESULTS, help="write the table there")
    parser.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="one more for main_ppo")
    options = parser.parse_args(arguments)
    console, rows, failed = Console(highlight=False, soft_wrap=True), [], False
    with ProcessTree() as tree, tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder), options.size, options.cpu)
        for name in options.runs:
            command = command_of(name, Path(folder), options.steps, options.size, options.cpu, options.override)
            console.print(shlex.join(command), markup=False, style="dim")
            metrics, log = Path(folder) / f"{name}.jsonl", Path(folder) / f"{name}.log"
            status = tree.run(command, tree.environment() | {"VERL_FILE_LOGGER_PATH": str(metrics)}, log, lambda: None)
            found = _rows(name, read_records(metrics))
            if status or len(found) < options.steps:
                failed = True
                console.print(f"{name} ended with status {status} after {len(found)} steps:", *cause(log), markup=False)
            for line in log.read_text(errors="replace").splitlines():
                if "[epfsdp2]" in line or "engine.experts_backend" in line:
                    console.print(line[-300:], markup=False)
            for row in found:
                console.print(" | ".join(row.values()), markup=False)
            rows += found
    if not options.cpu:
        text = [
            f"{torch.cuda.get_device_name()}. GRPO by verl's main_ppo, trainer and vLLM on one GPU, a Qwen3-MoE of",
            "two layers of Qwen3-30B-A3B's width. A: sleep level 2, slices by CUDA IPC. B: CUDA graphs, and parameters",
            "and optimizer on the host between phases. Difference: of the probabilities of sampled tokens.",
        ]
        packages = ("torch", "vllm", "verl")
        report("gpu_run", "GRPO on a GPU", "make gpu-run", packages, text, rows, folder=options.results)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
