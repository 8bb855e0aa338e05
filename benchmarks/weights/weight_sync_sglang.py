"""A weight sync into SGLang: verl's stock path beside slices, same model, same servers, same run.

    python -m benchmarks.weights.weight_sync --rollout sglang [--repeats 5]

Two trainer ranks hold a Qwen3-MoE in float32. Stock: verl's fsdp2 engine and verl's own adapter. Sliced: this engine
with ``ep_size=2`` and its adapter. Each side is timed until SGLang has loaded everything and has flushed its cache.
SGLang's servers are real, on the CPU, in bfloat16: a replica for each rank, or one for both. One model is that of
``weight_sync.py``, the other has the names of Qwen3-30B-A3B and tiny widths.
"""

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed as dist

from benchmarks.measure import figures_of, in_turns, median_ratio, random_checkpoint, seconds_on_ranks
from benchmarks.tables import judged, report
from epfsdp2.engine.cleanup import held_by, remove_unused
from epfsdp2.recipes.quickstart.commands import sglang_environment

__all__ = ["NAMES", "main"]

WORLD, SIDES = 2, ("stock", "sliced")
BUCKET_MEGABYTES = 2048  # verl's default
NAMES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
LEAST = {"names of Qwen3-30B-A3B": 20.0, "0.48 GB": 2.0}  # times as fast as stock, by model


@contextlib.contextmanager
def _servers(folder: Path, tp: int):
    """A replica for each rank, or one for all: their ports."""
    ports, processes = [], []
    for first in range(0, WORLD, tp):
        ports.append(_free_port())
        words = [f"model-path={folder}", f"port={ports[-1]}", f"tp-size={tp}", "dtype=bfloat16", "device=cpu"]
        words += ["attention-backend=torch_native", "max-total-tokens=1024", "log-level=error"]
        words += ["custom-weight-loader=epfsdp2.rollout.sglang.loader.load", "skip-tokenizer-init"]
        words += ["disable-overlap-schedule", "disable-cuda-graph", "disable-radix-cache"]
        words += ["skip-server-warmup", "sleep-on-idle"]
        command = [sys.executable, "-m", "sglang.launch_server", *(f"--{word}" for word in words)]
        cores = "|".join("01"[first : first + tp])
        environment = os.environ | {"OMP_NUM_THREADS": "1", "SGLANG_CPU_OMP_THREADS_BIND": cores}
        environment["TMPDIR"] = str(folder.parent)  # where SGLang leaves its sockets
        processes.append(subprocess.Popen(command, env=environment, start_new_session=True))
    try:
        for port, process in zip(ports, processes, strict=True):
            _wait_until_it_answers(port, process)
        yield ports
    finally:
        for process in processes:
            if process.poll() is None:
                _end(process)


def _free_port() -> int:
    """A port below those that the system hands out: SGLang takes the one that is 10,000 above as well."""
    while True:
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", random.randrange(20_000, 22_000)))
            return one.getsockname()[1]


def _wait_until_it_answers(port: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return
        time.sleep(0.5)
    raise RuntimeError(f"SGLang's server does not answer; its exit status: {process.poll()}")


def _end(process: subprocess.Popen) -> None:
    import psutil

    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    segments = held_by(one.pid for one in family)  # message queues, which killed workers leave
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
    psutil.wait_procs(family, timeout=30)
    remove_unused(segments)


def _adapter(folder: Path, tp: int, port: int):
    """This rank's adapter, as verl builds it, on a server that nobody started through Ray."""
    from torch.distributed.device_mesh import init_device_mesh
    from verl.workers.config import CheckpointEngineConfig, RolloutConfig
    from verl.workers.rollout.sglang_rollout.http_server_engine import AsyncHttpServerAdapter

    from epfsdp2.rollout.sglang import adapter
    from epfsdp2.rollout.sglang.server import SGLANG_LOADER

    one = object.__new__(adapter.Adapter)
    one.config = RolloutConfig(
        name="sglang",
        tensor_model_parallel_size=tp,
        checkpoint_engine=CheckpointEngineConfig(update_weights_bucket_megabytes=BUCKET_MEGABYTES),
        engine_kwargs={"sglang": {"custom_weight_loader": [SGLANG_LOADER], "device": "cpu"}},
    )
    one.model_config = SimpleNamespace(hf_config=SimpleNamespace(model_type="qwen3_moe"))
    one.device_mesh = init_device_mesh("cpu", (WORLD // tp, tp), mesh_dim_names=("dp", "infer_tp"))
    one.rollout_rank, one._pd_role, one._engine = dist.get_rank() % tp, None, None
    if one.rollout_rank == 0:
        one._engine = AsyncHttpServerAdapter(
            model_path=str(folder), host="127.0.0.1", port=port, launch_server=False, timeout=600.0
        )
    one._init_server_adapter = mock.AsyncMock()  # the server is there
    return one


def _ranks(folder: Path, tp: int, ports: list[int], repeats: int) -> dict[str, Any]:
    """Update the servers in turns; returns seconds of each, and the number of tensors and the bytes of a worker."""
    import torch

    from benchmarks.weights.weight_sync import ours, stock_weights, verls

    model, sync = verls(folder, torch.float32), ours(folder, torch.float32)
    adapter = _adapter(folder, tp, ports[dist.get_rank() // tp])
    sources = {"stock": partial(stock_weights, model), "sliced": sync.weights}

    def update(side: str) -> float:
        return seconds_on_ranks(lambda: asyncio.run(adapter.update_weights(sources[side]())))

    took = in_turns({side: partial(update, side) for side in SIDES}, repeats)
    stock = list(stock_weights(model))
    sliced = list(sync.weights().for_rollout(adapter.config, adapter.rollout_rank).tensors())
    sent = {"stock": sum(t.nbytes for _, t in stock), "sliced": sum(t.nbytes for _, t in sliced)}
    return {"took": took, "sent": sent, "tensors": len(stock)}


def _run(name: str, sizes: dict, tp: int, repeats: int) -> list[dict[str, str]]:
    with random_checkpoint("qwen3_moe", sizes) as folder, _servers(folder, tp) as ports:
        figures = figures_of(_ranks, WORLD, folder, tp, ports, repeats)
    rows = []
    for side in SIDES:
        took = figures["took"][side]
        faster = median_ratio(figures["took"]["stock"], took)
        rows.append(
            {
                "model": name,
                "tensors": str(figures["tensors"]),
                "rollout": f"TP {tp}",
                "side": side,
                "GB": f"{figures['sent'][side] / 1e9:.2f}",
                "end to end s": f"{median(took):.2f}",
                "against stock": f"{faster:.1f} x",
                **judged(faster >= LEAST[name] if side == "sliced" else None),
            }
        )
    return rows


def main(repeats: int, sizes: list[int], folder: Path | None) -> int:
    """Measure at tensor-parallel sizes of SGLang, and report to a folder (None to print only)."""
    from benchmarks.weights.weight_sync import MODEL

    if "SGLANG_USE_CPU_ENGINE" not in os.environ:  # which is read, with the library's path, when a process starts
        environment = os.environ | sglang_environment() | {"VERL_PLATFORM": "cpu"}
        command = [sys.executable, "-m", "benchmarks.weights.weight_sync", *sys.argv[1:]]
        os.execvpe(sys.executable, command, environment)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no server is left
    models = dict(zip(LEAST, (NAMES, MODEL), strict=True))
    rows = [row for name, model in models.items() for tp in sizes for row in _run(name, model, tp, repeats)]
    text = [
        "Two trainer ranks with float32 masters update real SGLang servers in bfloat16, until everything is loaded",
        f"and the cache is flushed; sides take turns, medians of {repeats}. Stock: verl's fsdp2 engine and",
        "verl's own adapter. Sliced: this engine and its adapter. GB: sent to one worker.",
        "",
        f"Bounds of `sliced`: {', '.join(f'{least:.0f} x with the {name} model' for name, least in LEAST.items())}.",
    ]
    command = "make bench-sync STACK=sglang ARGS='--rollout sglang'"
    heading, packages = "A weight sync into SGLang", ("torch", "sglang")
    return report("weight_sync_sglang", heading, command, packages, text, rows, folder=folder)
