"""What a feature costs a step: tokens per second and peak memory against the same run without it.

    python -m benchmarks.update.features [--repeats 21]

Two ranks on a CPU update an actor through verl's own worker, with and without each feature, in turns; a step is old
log-probs and one update. Peak memory: most bytes allocated at once in a step, on the rank with the most, tracked
allocation by allocation. The model is a Qwen3-MoE of about 0.2 GB in float32, experts over both ranks. On a machine
without an accelerator what is offloaded moves nowhere, so the rows of offloading show its overhead alone.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.machine import machine
from benchmarks.tables import write_table
from tests.support.engine.memory import MODEL, peak_of
from tests.support.models.tiny import reference_model
from tests.support.ranks import run_ranks
from tests.support.trainer.ppo import of_this_rank, ppo_batch, ppo_samples, ppo_worker

WORLD, PER_RANK, PROMPT, RESPONSE = 2, 4, 64, 448
R3_LIMIT = 0.03  # of a step
FEATURES = {
    "none": {},
    "router replay R3": {"router_replay": "R3"},
    "sequence parallelism over both ranks": {"ulysses_sequence_parallel_size": 2, "micro_batch": 2 * PER_RANK},
    "param_offload, optimizer_offload": {"param_offload": True, "optimizer_offload": True},
    "offload_policy (FSDP2's own)": {"offload_policy": True},
    "enable_activation_offload": {"model": {"enable_activation_offload": True}},
    "load-balancing loss, z-loss": {"router_aux_loss_coef": 1e-3, "router_z_loss_coef": 1e-4},
}
COLUMNS = ["feature", "tokens/s", "time of a step without", "peak MiB", "peak without MiB"]


def measure(folder: Path, out: Path, repeats: int) -> None:
    """Rank 0 writes, per feature, seconds of each step and peak bytes; and the tokens of a step of all ranks."""
    samples = ppo_samples(WORLD * PER_RANK, PROMPT, RESPONSE)
    workers = {name: _worker(folder, **settings) for name, settings in FEATURES.items()}
    mine = {name: of_this_rank(worker, samples) for name, worker in workers.items()}
    routes = _routes(folder, mine["none"])
    seconds: dict[str, list[float]] = {name: [] for name in FEATURES}
    for turn in range(repeats + 1):
        names = [*workers][turn % len(workers) :] + [*workers][: turn % len(workers)]  # each is the first at times
        for name in names:
            worker = workers[name]
            dist.barrier()
            began = time.monotonic()
            _step(worker, mine[name], routes)
            dist.barrier()
            seconds[name].append(time.monotonic() - began)
    peaks = {}
    for name, worker in workers.items():
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, record_function("step"):
            _step(worker, mine[name], routes)
        peak = torch.tensor(peak_of(profiler, "step")[0])
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        peaks[name] = peak.item()
    if dist.get_rank() == 0:
        tokens = sum(len(ids) for ids, *_ in samples)
        out.write_text(
            json.dumps({"seconds": {n: s[1:] for n, s in seconds.items()}, "peaks": peaks, "tokens": tokens})
        )


def _worker(folder: Path, router_replay: str = "disabled", **settings):
    from verl.workers.config import EngineRouterReplayConfig

    settings = {"micro_batch": PER_RANK, **settings}
    return ppo_worker(folder, WORLD, router_replay=EngineRouterReplayConfig(mode=router_replay), **settings)


def _routes(folder: Path, samples) -> list[torch.Tensor]:
    """The model's own, so that experts get as many tokens as without replay: others would be another load."""
    model, top_k = reference_model(folder), MODEL["num_experts_per_tok"]
    routes = []
    for ids, *_ in samples:
        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False, output_router_logits=True).router_logits
        routes.append(torch.stack([each.topk(top_k).indices for each in logits], dim=1).to(torch.int16))
    return routes


def _step(worker, samples, routes) -> None:
    from verl.utils import tensordict_utils as tu

    infer, train = (ppo_batch(samples, WORLD * PER_RANK, PROMPT, RESPONSE) for _ in range(2))
    if worker.engine.engine_config.router_replay.mode == "R3":
        infer["routed_experts"] = torch.nested.as_nested_tensor(routes, layout=torch.jagged)
        train["routed_experts"] = torch.nested.as_nested_tensor(routes, layout=torch.jagged)
    tu.assign_non_tensor(infer, compute_loss=False)
    worker.infer_batch(infer)
    worker.train_batch(train)


def rows_of(figures: dict) -> list[dict]:
    """Medians, and ratios that are taken within each turn."""
    seconds, without = figures["seconds"], figures["seconds"]["none"]
    return [
        {
            "feature": name,
            "tokens_per_second": figures["tokens"] / statistics.median(took),
            "ratio": statistics.median(a / b for a, b in zip(took, without, strict=True)),
            "peak": figures["peaks"][name],
            "peak_without": figures["peaks"]["none"],
        }
        for name, took in seconds.items()
    ]


def cells(row: dict) -> list[str]:
    mib = [f"{row[key] / 2**20:.0f}" for key in ("peak", "peak_without")]
    return [row["feature"], f"{row['tokens_per_second']:.0f}", f"{row['ratio']:.3f} x", *mib]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=21, help="steps of each kind that count; one takes a second")
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name) / "model", Path(name) / "figures.json"
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**MODEL)).float().save_pretrained(folder)
        run_ranks(measure, WORLD, folder, out, repeats, timeout=1200)
        rows = rows_of(json.loads(out.read_text()))
    shown = Table(*COLUMNS)
    for row in rows:
        shown.add_row(*cells(row))
    Console(width=140).print(shown)
    where = machine()
    text = [f"Two ranks on CPU, float32; medians of {repeats} steps, in turns. A step is old log-probs and one update."]
    on = f"{where['cpu']}; torch {where['versions']['torch']}"
    result = {"machine": where, "model": MODEL, "rows": rows}
    lines = [*map(cells, rows)]
    write_table("features", result, "What a feature costs a step", "make bench-features", on, text, COLUMNS, lines)
    (replay,) = (row for row in rows if row["feature"] == "router replay R3")
    return 0 if replay["ratio"] <= 1 + R3_LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
