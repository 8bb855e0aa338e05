"""The experts layer, forward and backward, beside other implementations of the same layer.

    python -m benchmarks.experts.compare [--repeats 5] [--only NAME] [--peers .venv_peers/bin/python]

Local sides are transformers' own experts implementations and this engine's, on one module. Peers run in processes of
their own environment: torchtitan's routed experts, VeOmni's fused experts and, on a GPU, SonicMoE's layer. Sides take
turns, and each ratio is taken within a turn. On a GPU there is also the geometry of Qwen3-30B-A3B with 16k tokens,
beside the matrix rate and the copy bandwidth of the same run.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from benchmarks.experts.layer import Geometry, kept_bytes, passes, seconds_of
from benchmarks.tables import RESULTS, ROOT, report
from epfsdp2.engine.moe.dispatch import start_dispatch_plans
from epfsdp2.engine.moe.forward import ExpertsRuntime, attach
from epfsdp2.engine.moe.gemm.backends import EXPERTS_IMPLEMENTATION, backend_named, choose_backend, inverse

OURS, BASE = EXPERTS_IMPLEMENTATION, "grouped_mm"
LOCAL = ("eager", "batched_mm", BASE, OURS)
PEERS = ("torchtitan", "veomni", "sonic-moe")
PEERS_COMMAND = ("-m", "benchmarks.experts.peers")
PEERS_PYTHON = ROOT / ".venv_peers" / "bin" / "python"

GRID = (
    Geometry("few large experts", 1024, 8, 2, 1024, 2048),
    Geometry("many small experts", 1024, 64, 8, 512, 128),
    Geometry("few tokens", 64, 64, 2, 512, 256),
    Geometry("Qwen3-30B-A3B, 256 tokens", 256, 128, 8, 2048, 768),
    Geometry("Qwen3-30B-A3B, 256 tokens", 256, 128, 8, 2048, 768, "bfloat16"),
    Geometry("DeepSeek-V3, 16 of 256 experts, 64 tokens", 64, 16, 8, 7168, 2048),
)
ON_A_GPU = (
    Geometry("Qwen3-30B-A3B, 16k tokens", 16384, 128, 8, 2048, 768, "bfloat16", "cuda"),
    Geometry("DeepSeek-V3, 64 of 256 experts, 16k tokens", 16384, 64, 8, 7168, 2048, "bfloat16", "cuda"),
)
READY = "No GPU here: `make bench-experts` on a machine with one also measures rows of 16k tokens."

# Limits over grouped_mm. GPU_SPEEDUP is the least speedup over it on a GPU.
TIME_LIMIT, KEPT_LIMIT, GPU_SPEEDUP, RATE_SHARE, BANDWIDTH_SHARE = 1.0, 0.4, 1.5, 0.5, 0.7
COPIED_LIMIT = 4 << 30  # bytes of weights that batched_mm may copy, an expert's for each (token, expert) pair
WRITTEN_LIMIT = 16 << 30  # bytes of gradients that eager may write, a whole stack's for each expert
TURN_SECONDS = 0.3  # short passes are repeated within a turn
COLUMNS = ["geometry", "T", "E", "K", "D", "I", "dtype", "side", "forward ms", "both ms", "of grouped_mm's"]
COLUMNS += ["kept MiB", "of grouped_mm's", ""]


@dataclass(frozen=True)
class Row:
    """One side at one geometry: medians; ``note`` says why there are none."""

    geometry: Geometry
    side: str
    forward: float = 0.0
    total: float = 0.0
    ratio: float = 0.0
    kept: int = 0
    kept_ratio: float = 0.0
    peak: int = 0  # of CUDA's allocator, above what was there
    note: str = ""

    @property
    def holds(self) -> bool:
        on_gpu = self.geometry.device != "cpu"
        if self.side != OURS or (on_gpu and self.geometry != ON_A_GPU[0]):
            return True
        limit = 1 / GPU_SPEEDUP if on_gpu else TIME_LIMIT
        return not self.note and self.ratio <= limit and self.kept_ratio <= KEPT_LIMIT


class Local:
    """transformers' experts module, which computes as the side that is asked for."""

    def __init__(self, geometry: Geometry):
        sizes = {"hidden_size": geometry.hidden, "moe_intermediate_size": geometry.intermediate}
        self.config = Qwen3MoeConfig(num_experts=geometry.experts, num_experts_per_tok=geometry.top_k, **sizes)
        self.geometry, self.inputs = geometry, geometry.inputs()
        with torch.device(geometry.device):
            self.module = Qwen3MoeExperts(self.config).to(geometry.torch_dtype)
        geometry.fill(self.module.gate_up_proj, self.module.down_proj)
        attach(self.module, ExpertsRuntime(geometry.experts, None, _backend_of(geometry)))
        self.parameters: list[nn.Parameter] = [*self.module.parameters()]

    def passes(self, side: str, times: int) -> dict:
        return passes(self._as(side), self.inputs, self.parameters, times)

    def kept(self, side: str) -> int:
        return kept_bytes(self._as(side), self.inputs, self.parameters)

    def peak(self, side: str) -> int:
        """Most bytes that CUDA's allocator had handed out in a forward and backward, above those before it."""
        self.passes(side, 1)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.passes(side, 1)
        return torch.cuda.max_memory_allocated() - before

    def refuses(self, side: str) -> str:
        """Why a side is left out here."""
        geometry = self.geometry
        expert = 3 * geometry.hidden * geometry.intermediate * geometry.torch_dtype.itemsize
        copied, written = geometry.tokens * geometry.top_k * expert, geometry.experts**2 * expert
        if side == "batched_mm" and copied > COPIED_LIMIT:
            return f"would copy {copied / 2**30:.0f} GiB of weights"
        if side == "eager" and written > WRITTEN_LIMIT:
            return f"would write {written / 2**30:.0f} GiB of gradients"
        return ""

    def _as(self, side: str) -> nn.Module:
        self.config._experts_implementation = side
        return self.module


class Peer:
    """A side that runs in the peers' environment."""

    def __init__(self, name: str, geometry: Geometry, python: Path):
        self.name = name
        command = [str(python), *PEERS_COMMAND, name]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )
        self.first = self._ask(asdict(geometry))
        self.error = self.first.get("error", "")

    def passes(self, times: int) -> dict:
        return self._ask({"times": times})

    def end(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()

    def _ask(self, fields: dict) -> dict:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(fields) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        return json.loads(answer) if answer else {"error": f"ended with status {self.process.wait()}"}


@contextlib.contextmanager
def peers_of(geometry: Geometry, python: Path) -> Iterator[tuple[dict[str, Peer], dict[str, str]]]:
    """Peers that run here, and why the others don't."""
    if not python.exists():
        yield {}, dict.fromkeys(PEERS, "not installed: make peers")
        return
    started = [Peer(name, geometry, python) for name in PEERS]
    try:
        yield {p.name: p for p in started if not p.error}, {p.name: p.error for p in started if p.error}
    finally:
        for peer in started:
            peer.end()


def measure(geometry: Geometry, repeats: int, python: Path) -> list[Row]:
    """All sides at one geometry, in turns.

    Raises:
        AssertionError: a side computes something else than ``grouped_mm``.
    """
    local = Local(geometry)
    with peers_of(geometry, python) as (peers, notes):
        for side in LOCAL:
            if reason := local.refuses(side):
                notes[side] = reason
        runs = {side: local for side in LOCAL if side not in notes}
        once = {side: runs[side].passes(side, 1) for side in runs} | {name: p.passes(1) for name, p in peers.items()}
        for side, figures in once.items():
            loose = side in peers or geometry.dtype == "bfloat16"
            error = abs(figures["norm"] / once[BASE]["norm"] - 1)
            assert error < (2e-2 if loose else 1e-4), f"{side} at {geometry}: the norm is off by {error:.1e}"
        times = {side: max(1, round(TURN_SECONDS / figures["total"])) for side, figures in once.items()}
        turns: dict[str, list[dict]] = {side: [] for side in once}
        for turn in range(repeats):
            order = [*turns][turn % len(turns) :] + [*turns][: turn % len(turns)]  # each is the first at times
            for side in order:
                took = peers[side].passes(times[side]) if side in peers else local.passes(side, times[side])
                turns[side].append(took)
        kept = {s: local.kept(s) for s in runs} | {name: p.first["kept"] for name, p in peers.items()}
        peaks = {s: local.peak(s) for s in runs} if geometry.device != "cpu" else {}
    rows = []
    for side in (*LOCAL, *PEERS):
        if side in notes:
            rows.append(Row(geometry, side, note=notes[side]))
            continue
        rows.append(
            Row(
                geometry,
                side,
                statistics.median(t["forward"] for t in turns[side]),
                statistics.median(t["total"] for t in turns[side]),
                statistics.median(t["total"] / b["total"] for t, b in zip(turns[side], turns[BASE], strict=True)),
                kept[side],
                kept[side] / kept[BASE],
                peaks.get(side, 0),
            )
        )
    return rows


def _backend_of(geometry: Geometry) -> str:
    return choose_backend("auto", geometry.device.partition(":")[0], geometry.torch_dtype).name


def rates(geometry: Geometry) -> dict[str, float]:
    """Return TFLOP/s of one large product, GB/s of a copy; and GB/s of permuting rows and summing them.

    The least that these two could move is ``T + T * K`` rows each.
    """
    device, dtype = geometry.device, geometry.torch_dtype
    size = 8192 if device != "cpu" else 512
    square = torch.randn(size, size, device=device, dtype=dtype)
    matrix = 2 * size**3 / seconds_of(lambda: square @ square, device)
    backend = backend_named(_backend_of(geometry))
    hidden, index, weights = (tensor.detach() for tensor in geometry.inputs())
    slots = geometry.tokens * geometry.top_k
    moved = (geometry.tokens + slots) * geometry.hidden * dtype.itemsize
    into, out_of = (torch.empty(moved // 2, dtype=torch.uint8, device=device) for _ in range(2))
    (route,) = start_dispatch_plans(index, geometry.experts, None).wait()
    tokens_S, slots_TK = route.slot_order // geometry.top_k, inverse(route.slot_order).view_as(index)
    rows = backend.take(hidden, tokens_S)
    return {
        "matrix_tflops": matrix / 1e12,
        "copy_gbs": 2 * into.numel() / seconds_of(lambda: into.copy_(out_of), device) / 1e9,
        "permute_gbs": moved / seconds_of(lambda: backend.take(hidden, tokens_S), device) / 1e9,
        "sum_gbs": moved / seconds_of(lambda: backend.gather_sum(rows, slots_TK, weights, dtype), device) / 1e9,
    }


def shares(row: Row, measured: dict[str, float]) -> dict[str, float]:
    """Return the share of the matrix rate of a layer, and of the copy bandwidth of permuting rows and summing them."""
    return {
        "matrix rate": row.geometry.flops / row.total / 1e12 / measured["matrix_tflops"],
        "permute": measured["permute_gbs"] / measured["copy_gbs"],
        "sum": measured["sum_gbs"] / measured["copy_gbs"],
    }


def fast_enough(found: dict[str, float]) -> bool:
    """Whether shares are within the bounds."""
    return found["matrix rate"] >= RATE_SHARE and min(found["permute"], found["sum"]) >= BANDWIDTH_SHARE


def cells(row: Row) -> list[str]:
    g = row.geometry
    sizes = [g.name, *map(str, (g.tokens, g.experts, g.top_k, g.hidden, g.intermediate)), g.dtype, row.side]
    if row.note:
        return [*sizes, *[""] * 5, row.note]
    milliseconds = [f"{1e3 * seconds:.1f}" for seconds in (row.forward, row.total)]
    peak = f"peak {row.peak / 2**20:.0f} MiB" if row.peak else ""
    note = peak + ("" if row.holds else " above the bound")
    return [
        *sizes,
        *milliseconds,
        f"{row.ratio:.2f} x",
        f"{row.kept / 2**20:.1f}",
        f"{row.kept_ratio:.2f} x",
        note.strip(),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="turns that count")
    parser.add_argument("--only", default="", help="geometries whose name holds this; writes no result file")
    parser.add_argument("--peers", type=Path, default=PEERS_PYTHON, help="Python of the peers' environment")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # threads that wait for the next side spin, and would slow it down
    grid = GRID + (ON_A_GPU if torch.cuda.is_available() else ())
    chosen = [geometry for geometry in grid if asked.only in geometry.name]
    rows = [row for geometry in chosen for row in measure(geometry, asked.repeats, asked.peers)]
    on_gpu: dict[str, Any] = {}
    for row in rows:
        if row.side == OURS and row.geometry.device != "cpu":
            measured = rates(row.geometry)
            on_gpu[row.geometry.name] = measured | {"shares": shares(row, measured)}
    text = [
        f"Forward and backward of a layer on one core. Sides take turns: medians of {asked.repeats}.",
        "Ratios are within a turn. Kept: bytes that a forward keeps for its backward, besides parameters and inputs.",
        "torchtitan computes in bfloat16 whatever the dtype of its parameters. The full layers have fewer tokens, and",
        "DeepSeek-V3's fewer experts, to fit the machine.",
        "",
        f"Bounds: `{OURS}` takes at most {TIME_LIMIT} of the time of `{BASE}` and keeps at most {KEPT_LIMIT} of its",
        f"bytes; on an H200 {GPU_SPEEDUP} x its speed, {RATE_SHARE:.0%} of the matrix rate measured in the same run,",
        f"and {BANDWIDTH_SHARE:.0%} of the copy bandwidth for permuting rows and for summing them.",
        "",
        json.dumps(on_gpu) if on_gpu else READY,
    ]
    lines, folder = [*map(cells, rows)], None if asked.only else RESULTS
    report("experts", "The experts layer", "make bench-experts", ("torch",), text, COLUMNS, lines, folder=folder)
    found = on_gpu.get(ON_A_GPU[0].name)
    reached = found is None or fast_enough(found["shares"])
    return 0 if reached and all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
