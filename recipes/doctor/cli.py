"""Check a cluster for this engine, with a time limit on every check.

    torchrun --nproc-per-node 8 -m epfsdp2.recipes.doctor --out machine.json

or on every node of a Ray cluster: ``python -m epfsdp2.recipes.doctor --ray``.
"""

import argparse
import json
import os
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.distributed.rendezvous import rendezvous
from transformers.utils.logging import disable_progress_bar

from ...engine.errors import SettingError
from .check import Check, Ranks, Row
from .host import judge_disk, judge_memory, judge_versions, measure_disk, measure_memory, measure_versions
from .links import judge_links, measure_links
from .meshes import judge_gradients, judge_sync, measure_gradients, measure_sync
from .on_ray import run_on_ray
from .rates import judge_experts, judge_rates, measure_experts, measure_rates
from .receiver import judge_receiver, measure_receiver
from .watch import Watch

__all__ = ["CHECKS", "main", "parse", "report"]

CHECKS = {
    "versions": Check(30.0, measure_versions, judge_versions),
    "memory": Check(60.0, measure_memory, judge_memory),
    "disk": Check(60.0, measure_disk, judge_disk),
    "links": Check(60.0, measure_links, judge_links),
    "gradients": Check(120.0, measure_gradients, judge_gradients),
    "sync": Check(60.0, measure_sync, judge_sync),
    "rates": Check(60.0, measure_rates, judge_rates),
    "experts": Check(120.0, measure_experts, judge_experts),
    "receiver": Check(90.0, measure_receiver, judge_receiver),
}
"""By name, in the order of execution. On GPUs, gradients and experts compile kernels first."""
_WIDTH = 118
_START_SECONDS = 60.0  # for all ranks to start and to connect
_LEAVE_SECONDS = 20.0
_COLLECTIVE_SECONDS = 600.0  # time-out of the group; longer than any check, so the watch acts first


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node 8 -m epfsdp2.recipes.doctor",
        description="Whether collectives, kernels, memory and disks of a cluster work, and what they reach.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=list(CHECKS), metavar="CHECK", help=f"of {', '.join(CHECKS)}")
    disk = "folder on the disk for checkpoints; the check writes and reads a file there"
    add("--folder", type=Path, default=Path("."), help=disk)
    add("--limit", type=float, default=1.0, help="factor on all time limits")
    add("--out", type=Path, metavar="FILE", help="write the figures for recipes.plan --machine FILE")
    add("--ray", action="store_true", help="start a rank on each GPU of this machine's Ray cluster")
    add("--ranks", type=int, default=0, help="with --ray: this many ranks, on CPUs")
    options = parser.parse_args(arguments)
    if options.limit <= 0:
        parser.error(f"--limit is {options.limit}; it has to be positive")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this rank, or with ``--ray`` all; return 0 if nothing is wrong, 1 if something is, 2 for a wrong setting."""
    options = parse(arguments)
    if options.ray:
        return _run_on_ray(options)
    alone = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": get_free_port()}
    for name, value in alone.items():
        os.environ.setdefault(name, str(value))  # a single rank, if started without a launcher
    warnings.filterwarnings("ignore", category=FutureWarning)
    disable_progress_bar()
    rows: list[Row] = []
    store, rank, world = next(rendezvous("env://", timeout=timedelta(seconds=options.limit * _START_SECONDS)))

    def say(hanging: str) -> None:
        report(rows, world, options.out)
        print(hanging, flush=True)

    with Watch(store, rank, world, say) as watch:
        ranks = _start(options, watch, store, rank, world)
        for name in options.only or CHECKS:
            rows += _run(name, CHECKS[name], options.limit, ranks, watch)
        if rank == 0:  # now, because torchrun kills this rank as soon as another one fails
            report(rows, world, options.out)
        watch.begin("end", options.limit * _START_SECONDS)
        is_wrong = watch.meet(None, lambda _: any(row.verdict == "wrong" for row in rows))
        dist.destroy_process_group()
        watch.end()
    store.set(f"left/{rank}", "")
    if rank == 0:  # it may host the store, which the others still read
        store.wait([f"left/{rank}" for rank in range(world)], timedelta(seconds=_LEAVE_SECONDS))
    return int(is_wrong)


def _run_on_ray(options: argparse.Namespace) -> int:
    names = options.only or list(CHECKS)
    words = ["--folder", str(options.folder.resolve()), "--limit", str(options.limit), "--only", *names]
    seconds = options.limit * (sum(CHECKS[name].seconds for name in names) + 2 * _START_SECONDS)
    try:
        return run_on_ray(words, options.ranks, seconds, options.out)
    except SettingError as error:
        Console(highlight=False, soft_wrap=True).print(str(error), style="red", markup=False)
        return 2


def _start(options: argparse.Namespace, watch: Watch, store: dist.Store, rank: int, world: int) -> Ranks:
    """Choose device and backend, and initialize the process group; collective."""
    watch.begin("start", options.limit * _START_SECONDS)
    place, per_node = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", world))
    device, gpu = "cpu", f"none on rank {rank}"
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        index = place % torch.cuda.device_count()
        torch.cuda.set_device(index)
        device, gpu = "cuda", str(torch.cuda.get_device_properties(index).uuid)
    shares_gpu = watch.meet(gpu, lambda gpus: len(set(gpus)) < len(gpus))
    backend = "cpu:gloo" if device == "cpu" else "gloo" if shares_gpu else "cpu:gloo,cuda:nccl"
    limit = timedelta(seconds=options.limit * _COLLECTIVE_SECONDS)
    group = dist.PrefixStore("group", store)
    dist.init_process_group(backend, store=group, rank=rank, world_size=world, timeout=limit)
    dist.all_reduce(torch.ones(1, device=device))
    watch.end()
    return Ranks(rank, world, per_node, device, shares_gpu, options.folder, watch.note)


def _run(name: str, check: Check, limit: float, ranks: Ranks, watch: Watch) -> list[Row]:
    """Run a check and return its rows on rank 0; collective. An exception becomes a row, and the checks continue."""
    watch.begin(name, limit * check.seconds)
    done: dict[str, Any] = {}
    try:
        done["measured"] = check.measure(ranks)
    except Exception as error:
        done["error"] = f"{type(error).__name__}: {error}"
    rows: list[Row] = []

    def judge(everyones: list[Any]) -> None:
        if errors := [(rank, each["error"]) for rank, each in enumerate(everyones) if "error" in each]:
            rank, error = errors[0]
            also = f" (and {len(errors) - 1} other ranks)" if len(errors) > 1 else ""
            rows.append(Row(name, f"rank {rank}{also}: {error}"[:300], "no error", "wrong"))
        else:
            rows.extend(check.judge([each["measured"] for each in everyones], ranks))

    watch.meet(done, judge)
    watch.end()
    return rows


def report(rows: Sequence[Row], world: int, out: Path | None) -> None:
    """Print the table and the settings; write the cluster's figures to ``out``."""
    console = Console(highlight=False, width=_WIDTH)
    table = Table("what", "measured", "wanted", "", box=None, pad_edge=False)
    styles = {"right": "green", "low": "yellow", "wrong": "red"}
    for row in rows:
        verdict = row.verdict.upper() if row.verdict != "right" else "right"
        table.add_row(row.what, row.value, row.wanted, verdict, style=styles.get(row.verdict))
    console.print(f"epfsdp2 doctor, {world} ranks, torch {torch.__version__}", markup=False)
    console.print(table)
    if settings := [setting for row in rows for setting in row.settings]:
        console.print("\n".join(["settings for a run here:", *settings]), markup=False)
    if out is not None:
        cluster = {name: value for row in rows for name, value in row.cluster.items()}
        out.write_text(json.dumps(cluster, indent=1) + "\n")
        console.print(f"python -m epfsdp2.recipes.plan --model ... --machine {out}", soft_wrap=True, markup=False)
