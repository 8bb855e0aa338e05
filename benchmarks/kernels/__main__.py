"""Compile every Triton kernel that a GPU user meets, for GPUs that need not be there; refuse what is over a budget.

    make kernels                            all models, dtypes, GPUs and tiles; writes results/kernels.md and .json
    python -m benchmarks.kernels --few      what `make test-long` compiles

The tables say what compiled (registers, stack, shared memory, CTAs per SM) and what arithmetic predicts of it
(``kernel_model.py``: bytes from HBM, share of the peak). Nothing is measured: no kernel runs.
"""

import argparse
import hashlib
import itertools
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from rich.console import Console
from rich.progress import track

from benchmarks.kernels.kernel_compile import not_compiled, on_gpu
from benchmarks.kernels.kernel_model import GPUS, Launch, Routing, over_budget, routed, seconds, work_of
from benchmarks.machine import machine
from benchmarks.tables import write_table
from epfsdp2.engine.moe.collectives.rows import AllToAll
from epfsdp2.engine.moe.dispatch import DispatchPlan
from epfsdp2.engine.moe.fused import on_rows, on_tokens
from epfsdp2.engine.moe.gemm import triton_gemms, triton_persistent, triton_rows, triton_tiles
from epfsdp2.engine.moe.gemm.gate import Gate
from epfsdp2.engine.moe.gemm.linear import Linear
from epfsdp2.engine.moe.gemm.triton_backend import TritonBackend

__all__ = ["FEW", "MODELS", "Model", "compile_model", "layers", "rows_of"]

TOKENS = 16384
DTYPES = ("bfloat16", "float16", "float32")
_SILU, _CLAMPED = Gate(1.0, 0.0, math.inf, False), Gate(1.702, 1.0, 7.0, True)


@dataclass(frozen=True)
class Model:
    """The experts of a model on one rank, with a low-rank adapter where ``lora`` is its rank."""

    name: str
    experts: int
    top_k: int
    hidden: int
    inner: int
    gate: Gate = _SILU
    is_transposed: bool = False
    has_bias: bool = False
    lora: int = 0


MODELS = (
    Model("Qwen3-30B-A3B", 128, 8, 2048, 768),
    Model("Qwen3-235B-A22B", 128, 8, 4096, 1536),
    Model("DeepSeek-V3", 256, 8, 7168, 2048),
    Model("gpt-oss-120b", 128, 4, 2880, 2880, _CLAMPED, is_transposed=True, has_bias=True),
    Model("GLM-4.5", 160, 8, 5120, 1536),
    Model("GLM-4.5-Air", 128, 8, 4096, 1408),
    *(Model(f"Qwen3-30B-A3B, LoRA rank {rank}", 128, 8, 2048, 768, lora=rank) for rank in (8, 32, 64)),
)
FEW = (MODELS[0], MODELS[3])
_SOURCES = (triton_gemms, triton_persistent, triton_rows, triton_tiles)


class _Module:
    """Stands in for an experts module, of which the backends ask the activation."""

    has_gate = True

    def __init__(self, gate: Gate):
        self.alpha, self.limit, self._apply_gate = gate.alpha, gate.limit, gate


def compile_model(
    model: Model, arch: int, dtype: str, every_tile: bool = True, received: bool = False
) -> dict[str, list[Launch]]:
    """Compile what the model's experts launch, by pass: one rank, all weights trained.

    ``forward`` and ``backward`` are of tokens on the rank of their experts. ``received`` is what copies tokens that are
    sent, and if asked for both passes of rows that were received (``fused.on_rows``), grouped by expert and not.
    """
    launches: list[Launch] = []
    kwargs = {"dtype": getattr(torch, dtype), "device": "meta"}
    e, h, i, r = model.experts, model.hidden, model.inner, model.lora

    def linear(out, into):
        shape = (e, into, out) if model.is_transposed else (e, out, into)
        parts = [torch.empty(shape, **kwargs, requires_grad=not r)]
        parts.append(torch.empty(e, out, **kwargs, requires_grad=True) if model.has_bias else None)
        shapes = ((e, r, into), (e, out, r)) if r else ()
        low = [torch.empty(shape, **kwargs, requires_grad=True) for shape in shapes] or [None, None]
        return Linear(*parts, *low, scaling=2.0, is_transposed=model.is_transposed)

    slots = torch.empty(TOKENS * model.top_k, dtype=torch.int64, device="meta")
    counts = torch.empty(e, dtype=torch.int64, device="meta")
    weights = torch.empty(TOKENS, model.top_k, dtype=torch.float32, device="meta", requires_grad=True)
    tokens = torch.empty(TOKENS, h, **kwargs, requires_grad=True)
    rows = torch.empty(len(slots), h, **kwargs, requires_grad=True)
    module, operators = _Module(model.gate), TritonBackend()
    linears = linear(2 * i, h), linear(h, i)
    plan = DispatchPlan(counts, slots, None, AllToAll([], [], None))
    ends = []
    with on_gpu(arch, launches, every_tile):
        out = on_tokens(module, operators, *linears, tokens, weights, plan, kwargs["dtype"], [])
        ends.append(len(launches))
        out.sum().backward()
        ends.append(len(launches))
        operators.take(tokens.detach(), slots)  # as tokens are sent
        if received:
            on_rows(module, operators, *linears, rows, counts, weights.view(-1)).sum().backward()
            on_rows(module, operators, *linears, rows, counts, weights.view(-1), slots).sum().backward()
    return {"forward": launches[: ends[0]], "backward": launches[ends[0] : ends[1]], "received": launches[ends[1] :]}


COLUMNS = ("kernel", "model", "GPU", "dtype", "tile", "registers", "stack", "shared KiB", "CTAs/SM", "loads, products")
COLUMNS += ("GB from HBM (each operand once)", "of peak, at most")


def rows_of(
    model: Model, arch: int, dtype: str, every_tile: bool = True, received: bool = False
) -> tuple[list[dict], list[str]]:
    """Compile a model; return a row of each launch and what is over a budget."""
    routing, rows, problems = routed(TOKENS, model.top_k, model.experts), [], []
    for direction, launches in compile_model(model, arch, dtype, every_tile, received).items():
        number = 0
        for launch in launches:
            number += launch.is_first_choice
            rows.append({"pass": direction, "launch": number, **_row(model, dtype, launch, routing)})
            problems += over_budget(launch)
    return rows, problems


def _row(model: Model, dtype: str, launch: Launch, routing: Routing) -> dict:
    """Make the row of a launch; ``share`` is of the GPU's matrix rate, or of its HBM's for a pass over rows."""
    gpu, made = GPUS[launch.compiled.arch], launch.compiled
    work = work_of(launch, routing, gpu)
    least = seconds(launch, work, gpu)
    peak = gpu.fp32 if launch.dtype == "float32" else gpu.flops
    share = work.flops / peak / least if work.flops else work.least_bytes / gpu.hbm / least
    return {
        "model": model.name,
        "dtype": dtype,
        "tile": launch.tile,
        "indexed": launch.indexed,
        "is_persistent": launch.is_persistent,
        "is_scattered": launch.is_scattered,
        **{key: value for key, value in asdict(made).items() if key != "instructions"},
        "instructions": {name: count for name, count in made.instructions.items() if count},
        "ctas": made.ctas,
        "is_first_choice": launch.is_first_choice,
        "gflop": round(work.flops / 1e9, 1),
        "gb": round(work.hbm_bytes / 1e9, 4),
        "gb_once": round(work.least_bytes / 1e9, 4),
        "ms": round(1e3 * least, 4),
        "share": round(share, 4),
    }


def cells(row: dict) -> list[str]:
    tile = "" if row["tile"] is None else "x".join(map(str, row["tile"])) + f", {row['stages']} stages"
    kernel = row["kernel"] + (f", {row['indexed']}[index]" if row["indexed"] else "")
    return [
        kernel + ", out[order]" * row["is_scattered"] + ", persistent" * row["is_persistent"],
        row["model"],
        GPUS[row["arch"]].name,
        row["dtype"],
        tile,
        str(row["registers"]),
        str(row["stack"]),
        f"{row['shared'] / 1024:.0f}",
        str(row["ctas"]),
        ", ".join(row["instructions"]),
        f"{row['gb']:.2f} ({row['gb_once']:.2f})",
        f"{row['share']:.0%}" if row["gflop"] else f"{row['share']:.0%} of HBM",
    ]


def layers(rows: list[dict]) -> list[dict]:
    """Add up the kernels of each pass, each with the tile that is predicted to be the fastest."""
    fastest: dict[tuple, dict] = {}
    for row in rows:
        if row["pass"] != "received":
            key = tuple(row[name] for name in ("model", "arch", "dtype", "pass", "launch"))
            fastest[key] = min(row, fastest.get(key, row), key=lambda row: row["ms"])
    sums: dict[tuple, dict] = {}
    for (model, arch, dtype, direction, _), row in fastest.items():
        empty = {"model": model, "arch": arch, "dtype": dtype, "pass": direction, "ms": 0.0, "gflop": 0.0}
        total = sums.setdefault((model, arch, dtype, direction), empty)
        total["ms"] += row["ms"]
        total["gflop"] += row["gflop"]
    for total in sums.values():
        peak = GPUS[total["arch"]].fp32 if total["dtype"] == "float32" else GPUS[total["arch"]].flops
        total["share"] = total["gflop"] * 1e12 / peak / total["ms"]
    return list(sums.values())


def write(rows: list[dict], sums: list[dict], problems: list[str]) -> None:
    held = "every budget holds" if not problems else f"{len(problems)} launches are over a budget"
    text = [
        f"Triton {triton.__version__} and its ptxas compiled {len({_code(row) for row in rows})} kernels of "
        f"{len(rows)} launches; {held} (`benchmarks/kernels/kernel_model.py`, `over_budget`).",
        "",
        "**Compiled**, ahead of time and without a GPU: registers, stack, shared memory, CTAs per SM, instructions.",
        "**Predicted**, by arithmetic (`benchmarks/kernels/kernel_model.py`; [the model](../../docs/benchmarks.md)):",
        f"bytes from HBM, shares and times, at {TOKENS:,} tokens on one rank with all experts.",
        "**Measured** on a GPU: [gpu.md](gpu.md).",
        "",
        "The experts layer, predicted, at most:",
        "",
        "| model | GPU | forward | of peak | backward | of peak |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    halves = [one for one in sums if one["dtype"] == "bfloat16"]
    for first, second in zip(halves[::2], halves[1::2], strict=True):
        passes = [f"{one['ms']:.2f} ms | {one['share']:.0%}" for one in (first, second)]
        text.append(f"| {first['model']} | {GPUS[first['arch']].name} | {' | '.join(passes)} |")
    text += ["", "The kernels of two models in bfloat16; `kernels.json` has float16 and float32 too:"]
    few = {model.name for model in FEW}
    distinct = {tuple(cells(row)): row for row in rows if row["model"] in few}
    shown = {tuple(cells(row)): None for row in rows if row["model"] in few and row["dtype"] == "bfloat16"}
    result = {"machine": machine(), "triton": triton.__version__, "sources": sources_digest()}
    result |= {"problems": problems, "layers": sums, "rows": list(distinct.values())}
    write_table("kernels", result, "The Triton kernels, compiled", "make kernels", "No GPU", text, COLUMNS, list(shown))


def sources_digest() -> str:
    """Return a digest of the files of the kernels and their tiles, by which a table is known to be of them."""
    texts = [Path(str(module.__file__)).read_bytes() for module in _SOURCES]
    return hashlib.blake2b(b"".join(texts), digest_size=8).hexdigest()


def _code(row: dict) -> tuple:
    names = (
        "kernel",
        "is_persistent",
        "is_scattered",
        "indexed",
        "arch",
        "dtype",
        "tile",
        "stages",
        "registers",
        "shared",
    )
    return tuple(str(row[name]) for name in names)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", action="store_true", help="what `make test-long` compiles, as JSON on stdout")
    asked = parser.parse_args()
    cases = list(_few() if asked.few else _every())
    rows, problems = [], []
    for case in track(cases, "compiling", console=Console(stderr=True)):
        found, over = rows_of(*case)
        rows += found
        problems += [f"{case[0].name}: {problem}" for problem in over]
    sums = layers(rows)
    if asked.few:
        printed = {"rows": rows, "layers": sums, "problems": problems}
        print(json.dumps(printed | {"others": _code_of_others(), "sources": sources_digest()}))
    else:
        print(*problems, sep="\n")
        write(rows, sums, problems)
    return 1 if problems else 0


def _every() -> Iterator[tuple[Model, int, str, bool, bool]]:
    for model, arch, dtype in itertools.product(MODELS, GPUS, DTYPES):
        yield model, arch, dtype, True, model in FEW


def _few() -> Iterator[tuple[Model, int, str, bool, bool]]:
    """Iterate over cases with all that makes code differ: the sizes of the other models compile to the same."""
    for arch in GPUS:
        yield from ((MODELS[0], arch, dtype, False, dtype == "bfloat16") for dtype in DTYPES)
        yield FEW[1], arch, "bfloat16", False, False
    yield from ((model, 90, "bfloat16", False, False) for model in MODELS if model.lora)


def _code_of_others() -> list[str]:
    """Name the kernels of the models whose sizes were left out that are other code than what was compiled."""
    found: list[str] = []
    others = [model for model in MODELS if model not in FEW and not model.lora]
    with not_compiled(found):
        for model, arch, dtype in itertools.product(others, GPUS, DTYPES):
            compile_model(model, arch, dtype, every_tile=False)
    return sorted(set(found))


if __name__ == "__main__":
    sys.exit(main())
