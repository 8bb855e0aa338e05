"""Memory to load and to export a checkpoint, and how long a save in the background keeps a step waiting.

    python -m benchmarks.weights.checkpoint [--repeats 5]

Four ranks on a CPU load a Qwen3-MoE of about 0.2 GB; torch's profiler records every allocation and release, and the
peak is compared with a rank's shard and one layer. So is the export's, which runs in one process and has no shard.
Files are mapped, not read; their pages are the system's and not counted.
Then two ranks save model and AdamW's moments, in turns waiting for it and in the background; the time that a step loses
to the latter is compared with a bare copy of the same tensors. One process copies 512 MiB, as the first of such saves
does and as the next one.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.machine import machine
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.tables import write_table
from epfsdp2.engine.checkpoint import state as checkpoint
from epfsdp2.engine.checkpoint.background import Background, copied_to_host
from epfsdp2.engine.checkpoint.load import load_weights, match_weights
from epfsdp2.engine.checkpoint.safetensors_reader import open_checkpoint
from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.model.meta import build_on_meta, materialize
from epfsdp2.engine.optim.multi_optimizer import build_multi_optimizer
from epfsdp2.engine.parallelize import parallelize
from epfsdp2.engine.topology.dtensor import local_tensor
from epfsdp2.engine.topology.mesh import Topology, build_meshes
from epfsdp2.recipes.convert.export import export
from tests.support.engine.memory import MODEL, peak_of
from tests.support.engine.sharded import sharded_model
from tests.support.ranks import run_ranks

WORLD = 4
# Replica, ep, shard dim of the experts.
MESHES = ((-1, 1, "auto"), (-1, 2, "auto"), (-1, 2, 0), (-1, 4, "auto"), (2, 2, "auto"))
COLUMNS = ["", "measured MiB", "shard MiB", "layer MiB", "of shard + layer"]
SAVES = ["", "seconds", "of a bare copy, of the first"]


def loads(folder: Path, out: Path, fsdp_size: int, ep: int, dim: int | str) -> None:
    """Load on this rank; rank 0 writes the largest peak and shard of all ranks."""
    meshes = build_meshes("cpu", Topology.arrange(WORLD, ep, fsdp_size))
    config = AutoConfig.from_pretrained(folder, attn_implementation="sdpa")
    files = open_checkpoint(folder)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, record_function("load"):
        model = build_on_meta(AutoModelForCausalLM, config, torch.float32)
        parallelize(model, meshes, ShardingOptions(param_dtype=torch.float32, expert_shard_dim=dim))
        materialize(model, "cpu")
        load_weights(model, match_weights(model, files, meshes), meshes)
    shard = sum(local_tensor(p).nbytes for p in model.parameters())
    figures = torch.tensor([peak_of(profiler, "load", _sizes(folder))[0], shard])
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(figures.tolist()))


def saves(folder: Path, out: Path, repeats: int) -> None:
    """Rank 0 writes seconds: of a save, of what a save in the background keeps a step waiting, of a bare copy."""
    model, _ = sharded_model(folder, dist.get_world_size(), 2)
    optimizer = build_multi_optimizer(model, lambda params: torch.optim.AdamW(params, lr=1e-4))
    optimizer.init_state()
    describe = AutoConfig.from_pretrained(folder).save_pretrained
    background = Background()
    took: dict[str, list[float]] = {"waiting": [], "background": [], "copy": []}
    contents = {"model", "optimizer", "extra"}
    target = out.with_name("saved")
    for _ in range(repeats + 1):
        dist.barrier()
        began = time.monotonic()
        checkpoint.Snapshot.of(model, optimizer, None, contents, 1).write(target, describe)
        took["waiting"].append(time.monotonic() - began)
        dist.barrier()
        began = time.monotonic()
        snapshot = checkpoint.Snapshot.of(model, optimizer, None, contents, 1).on_host()
        background.start("a save", partial(snapshot.write, target, describe, "cpu", background.group))
        took["background"].append(time.monotonic() - began)
        background.wait()
        tensors = [local_tensor(tensor) for tensor in snapshot.tensors.values()]
        dist.barrier()
        began = time.monotonic()
        copies = [tensor.clone() for tensor in tensors]
        took["copy"].append(time.monotonic() - began)
        del copies, snapshot
    if dist.get_rank() == 0:
        out.write_text(json.dumps({name: statistics.median(seconds[1:]) for name, seconds in took.items()}))


def copies(repeats: int) -> dict[str, float]:
    """Seconds of one rank's copy of 512 MiB in the host's memory, as a save in the background makes it: the first, and
    the next."""
    tensors = {f"{i}": torch.ones(1 << 23) for i in range(16)}
    took: dict[str, list[float]] = {"first": [], "next": []}
    for _ in range(repeats):
        kept: dict[str, torch.Tensor] = {}
        for kind in took:
            began = time.monotonic()
            kept = copied_to_host(tensors, kept)
            took[kind].append(time.monotonic() - began)
    return {name: statistics.median(seconds) for name, seconds in took.items()}


def saves_once(folder: Path, out: Path) -> None:
    model, _ = sharded_model(folder, dist.get_world_size(), 2)
    checkpoint.save_checkpoint(out, model, None, None, {"model"}, 1, AutoConfig.from_pretrained(folder).save_pretrained)


def export_peak(folder: Path, scratch: Path) -> int:
    """Most bytes that the export had allocated at once."""
    run_ranks(saves_once, WORLD, folder, scratch / "saved")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, record_function("export"):
        export(scratch / "saved", scratch / "exported")
    return peak_of(profiler, "export", _sizes(scratch / "saved" / checkpoint.SHARDS))[0]


def _sizes(folder: Path) -> set[int]:
    return {path.stat().st_size for path in folder.glob("*.safetensors")}


def run(repeats: int) -> tuple[list[dict], dict[str, float]]:
    """Rows of memory, and seconds of saves."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        folder, out = scratch / "model", scratch / "figures.json"
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**MODEL)).float()
        layer = sum(p.nbytes for p in model.model.layers[0].parameters())
        model.save_pretrained(folder)
        del model
        for fsdp_size, ep, dim in MESHES:
            run_ranks(loads, WORLD, folder, out, fsdp_size, ep, dim)
            peak, shard = json.loads(out.read_text())
            replicas = 1 if fsdp_size == -1 else WORLD // fsdp_size
            what = f"load, {replicas} x {WORLD // replicas // ep} x {ep}, shard dim {dim}"
            rows.append({"what": what, "peak": peak, "shard": shard, "layer": layer})
        rows.append({"what": "export", "peak": export_peak(folder, scratch), "shard": 0, "layer": layer})
        run_ranks(saves, 2, folder, out, repeats, timeout=600)
        seconds = json.loads(out.read_text()) | copies(repeats)
    return rows, seconds


def cells(row: dict) -> list[str]:
    mib = [f"{row[key] / 2**20:.1f}" for key in ("peak", "shard", "layer")]
    return [row["what"], *mib, f"{row['peak'] / (row['shard'] + row['layer']):.2f}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="saves of each kind that count")
    rows, seconds = run(parser.parse_args().repeats)
    timed = [
        ["save, waited for", f"{seconds['waiting']:.2f}", ""],
        ["save in the background: the step waits", f"{seconds['background']:.2f}", ""],
        ["bare copy of the same tensors", f"{seconds['copy']:.2f}", ""],
        ["copy of 512 MiB for the first save in the background", f"{seconds['first']:.2f}", ""],
        ["for the next one, to the same memory", f"{seconds['next']:.2f}", ""],
    ]
    of = {"waiting": "copy", "background": "copy", "copy": "copy", "first": "first", "next": "first"}
    for line, (name, base) in zip(timed, of.items(), strict=True):
        line[2] = f"{seconds[name] / seconds[base]:.2f} x"
    console = Console(width=140)
    for columns, lines in ((COLUMNS, [*map(cells, rows)]), (SAVES, timed)):
        shown = Table(*columns)
        for cell in lines:
            shown.add_row(*cell)
        console.print(shown)
    where = machine()
    text = [
        "Four ranks on CPU, float32. Peak: most bytes allocated at once, on the rank with the most. A save is of model",
        "and AdamW's moments on two ranks, medians of five:",
        "",
        *(f"* {name}: {took} s, {ratio}" for name, took, ratio in timed),
    ]
    result = {"machine": where, "model": MODEL, "rows": rows, "seconds": seconds}
    on = f"{where['cpu']}; torch {where['versions']['torch']}"
    heading = "Loading, exporting and saving a checkpoint"
    write_table("checkpoint", result, heading, "make bench-checkpoint", on, text, COLUMNS, [*map(cells, rows)])
    return 0 if all(row["peak"] <= row["shard"] + row["layer"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
