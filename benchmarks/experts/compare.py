"""The experts layer, forward and backward, beside other implementations of the same layer.

    python -m benchmarks.experts.compare [--repeats 5] [--only NAME] [--peers .venv_peers/bin/python]

Local sides are transformers' own experts implementations and this engine's, on one module. Peers run in processes of
their own environment: torchtitan's routed experts and, on a GPU, SonicMoE's layer. Sides take turns, and each ratio is
taken within a turn. On a GPU there are also layers with 16k tokens.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from benchmarks.experts.layer import Geometry, kept_bytes, passes
from benchmarks.measure import in_turns, median_ratio, options
from benchmarks.tables import RESULTS, ROOT, judged, report
from epfsdp2.engine.moe.forward import ExpertsRuntime, attach
from epfsdp2.engine.moe.gemm.backends import EXPERTS_IMPLEMENTATION, choose_backend

OURS, BASE = EXPERTS_IMPLEMENTATION, "grouped_mm"
LOCAL = ("eager", "batched_mm", BASE, OURS)
PEERS = ("torchtitan", "sonic-moe")
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

# Limits over grouped_mm. GPU_SPEEDUP is the least speedup over it on a GPU.
TIME_LIMIT, KEPT_LIMIT, GPU_SPEEDUP = 1.0, 0.4, 1.5
COPIED_LIMIT = 4 << 30  # bytes of weights that batched_mm may copy, an expert's for each (token, expert) pair
WRITTEN_LIMIT = 16 << 30  # bytes of gradients that eager may write, a whole stack's for each expert
TURN_SECONDS = 0.3  # short passes are repeated within a turn


class Local:
    """transformers' experts module, which computes as the side that is asked for."""

    def __init__(self, geometry: Geometry):
        sizes = {"hidden_size": geometry.hidden, "moe_intermediate_size": geometry.intermediate}
        self.config = Qwen3MoeConfig(num_experts=geometry.experts, num_experts_per_tok=geometry.top_k, **sizes)
        self.geometry, self.inputs = geometry, geometry.inputs()
        with torch.device(geometry.device):
            self.module = Qwen3MoeExperts(self.config).to(geometry.torch_dtype)
        geometry.fill(self.module.gate_up_proj, self.module.down_proj)
        backend = choose_backend("auto", geometry.device.partition(":")[0], geometry.torch_dtype).name
        attach(self.module, ExpertsRuntime(geometry.experts, None, backend))
        self.parameters: list[nn.Parameter] = [*self.module.parameters()]

    def passes(self, side: str, times: int) -> dict:
        return passes(self._as(side), self.inputs, self.parameters, times)

    def kept(self, side: str) -> int:
        return kept_bytes(self._as(side), self.inputs, self.parameters)

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
    with contextlib.ExitStack() as stack:
        for peer in started:
            stack.enter_context(peer.process)
        yield {p.name: p for p in started if not p.error}, {p.name: p.error for p in started if p.error}


def measure(geometry: Geometry, repeats: int, python: Path) -> dict[str, Any]:
    """Measure all sides at one geometry, in turns.

    Returns:
        ``turns``: seconds of each turn by side. ``kept``: bytes for the backward. ``notes``: the reason of each side
        that is left out.

    Raises:
        AssertionError: a side computes something else than ``grouped_mm``.
    """
    local = Local(geometry)
    with peers_of(geometry, python) as (peers, notes):
        notes |= {side: reason for side in LOCAL if (reason := local.refuses(side))}
        runs = {side: partial(local.passes, side) for side in LOCAL if side not in notes}
        sides = runs | {name: peer.passes for name, peer in peers.items()}
        once = {side: run(1) for side, run in sides.items()}
        for side, figures in once.items():
            loose = side in peers or geometry.dtype == "bfloat16"
            error = abs(figures["norm"] / once[BASE]["norm"] - 1)
            assert error < (2e-2 if loose else 1e-4), f"{side} at {geometry}: the norm is off by {error:.1e}"
        times = {side: max(1, round(TURN_SECONDS / figures["total"])) for side, figures in once.items()}
        turns = in_turns({side: partial(run, times[side]) for side, run in sides.items()}, repeats)
        kept = {s: local.kept(s) for s in runs} | {name: p.first["kept"] for name, p in peers.items()}
    return {"turns": turns, "kept": kept, "notes": notes}


def rows_of(geometry: Geometry, found: dict[str, Any]) -> list[dict[str, str]]:
    """Return a row for each side."""
    sizes, rows = {key: str(size) for key, size in asdict(geometry).items()}, []
    totals = {side: [turn["total"] for turn in turns] for side, turns in found["turns"].items()}
    for side in (*LOCAL, *PEERS):
        row, holds = sizes | {"side": side, "forward ms": "", "both ms": "", "of grouped_mm's": ""}, None
        row |= {"kept MiB": "", "of its kept": "", "note": found["notes"].get(side, "")}
        if side in totals:
            forward, total = median(turn["forward"] for turn in found["turns"][side]), median(totals[side])
            ratio, kept = median_ratio(totals[side], totals[BASE]), found["kept"][side] / found["kept"][BASE]
            row |= {"forward ms": f"{1e3 * forward:.1f}", "both ms": f"{1e3 * total:.1f}"}
            row |= {"of grouped_mm's": f"{ratio:.2f} x", "kept MiB": f"{found['kept'][side] / 2**20:.1f}"}
            row |= {"of its kept": f"{kept:.2f} x"}
            if side == OURS and geometry != ON_A_GPU[1]:
                limit = TIME_LIMIT if geometry.device == "cpu" else 1 / GPU_SPEEDUP
                holds = ratio <= limit and kept <= KEPT_LIMIT
        rows.append(row | judged(holds))
    return rows


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--only", default="", help="geometries whose name holds this; writes no result file")
    parser.add_argument("--peers", type=Path, default=PEERS_PYTHON, help="Python of the peers' environment")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # threads that wait for the next side spin, and would slow it down
    grid = [each for each in GRID + (ON_A_GPU if torch.cuda.is_available() else ()) if asked.only in each.name]
    rows = [row for each in grid for row in rows_of(each, measure(each, asked.repeats, asked.peers))]
    text = [
        f"Forward and backward of a layer on one core. Sides take turns: medians of {asked.repeats}.",
        "Ratios are within a turn. Kept: bytes that a forward keeps for its backward, besides parameters and inputs.",
        "torchtitan computes in bfloat16 whatever the dtype of its parameters. The full layers have fewer tokens, and",
        "DeepSeek-V3's fewer experts, to fit the machine.",
        "",
        f"Bounds: `{OURS}` takes at most {TIME_LIMIT} of the time of `{BASE}` and keeps at most {KEPT_LIMIT} of its",
        f"bytes; on a GPU, with the sizes of {ON_A_GPU[0].name}, {GPU_SPEEDUP} x its speed.",
    ]
    folder = None if asked.only else RESULTS
    return report("experts", "The experts layer", "make bench-experts", ("torch",), text, rows, folder=folder)


if __name__ == "__main__":
    sys.exit(main())
