"""What it costs a trainer rank to quantise the weights of a sync to FP8, against the cast to bfloat16 that it replaces.

    python -m benchmarks.weights.quantising [--repeats 9]

The weights of one layer of a Qwen3-30B-A3B, experts of one rank of eight, in float32. Casting and quantising take
turns: largest values of all blocks, then values in FP8, as ``engine/quantise/shards.py`` calls them. It writes
``benchmarks/results/quantising.json`` and ``quantising.md``.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
import triton

from benchmarks.kernels import passes
from benchmarks.kernels.kernel_model import GPUS
from benchmarks.machine import machine
from benchmarks.tables import rows_of, write_table
from epfsdp2.engine.quantise.blocks import FP8, block_maxima, quantise, scales_of
from epfsdp2.rollout.layout.rollout_config import BLOCK

SHAPES = {
    "experts, gate_up_proj": (16, 1536, 2048),
    "experts, down_proj": (16, 2048, 768),
    "q_proj": (4096, 2048),
    "o_proj": (2048, 4096),
}
MOST = 1.3  # times the cast
COLUMNS = [
    "weight",
    "shape",
    "MB in bfloat16",
    "in FP8",
    "cast, ms",
    "largest values",
    "FP8 values",
    "against the cast",
]

COMPILED = ["kernel", "GPU", "weights", "registers", "CTAs/SM", "bytes of an element"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="turns that count")
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    rows = [measure(name, shape, repeats) for name, shape in SHAPES.items()]
    for row in rows:
        print(row, flush=True)
    where, compiled = machine(), passes.fp8()
    write_table(
        "quantising",
        {"machine": where, "repeats": repeats, "rows": rows, "compiled": compiled},
        "Quantising the weights of a sync",
        "python -m benchmarks.weights.quantising",
        f"{where['cpu']}, {where['cores']} cores, one thread; torch {where['versions']['torch']}",
        [
            "Weights of a layer of Qwen3-30B-A3B, experts of one rank of eight, stored in float32: cast to bfloat16, "
            f"or quantised to FP8 by blocks of {BLOCK} x {BLOCK}, scales counted as bytes. Sides take turns, medians "
            f"of {repeats}. The bound, {MOST} x the cast, does not hold on a CPU, where torch's conversion of float32 "
            "to FP8 alone takes twice as long as that to bfloat16.",
        ],
        COLUMNS,
        [cells(row) for row in rows],
        [
            "",
            "On a GPU with FP8 instructions the kernels of `engine/quantise/triton_blocks.py` do it "
            f"([measured](gpu.md)). **Compiled** by Triton {triton.__version__} for experts of the first row; a cast "
            "of float32 moves 6 bytes:",
            "",
            *rows_of(COMPILED, [_compiled_cells(row) for row in compiled]),
        ],
    )
    return 0 if all(row["times_cast"] <= MOST for row in rows) else 1


def measure(name: str, shape: tuple[int, ...], repeats: int) -> dict:
    weight = torch.randn(shape)
    cast, values = torch.empty(shape, dtype=torch.bfloat16), torch.empty(shape, dtype=FP8)
    corner = (0, 0)
    scales = scales_of(block_maxima(weight, corner, BLOCK))
    sides = {
        "cast": lambda: cast.copy_(weight),
        "maxima": lambda: block_maxima(weight, corner, BLOCK),
        "values": lambda: quantise(weight, scales, corner, BLOCK, values),
    }
    turns = [{side: _seconds(run) for side, run in sides.items()} for _ in range(repeats + 1)][1:]
    return {
        "weight": name,
        "shape": list(shape),
        "bfloat16_bytes": cast.nbytes,
        "fp8_bytes": values.nbytes + scales.nbytes,
        **{f"{side}_seconds": median(turn[side] for turn in turns) for side in sides},
        "times_cast": median((turn["maxima"] + turn["values"]) / turn["cast"] for turn in turns),
    }


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _compiled_cells(row: dict) -> list[str]:
    numbers = (str(row[name]) for name in ("registers", "ctas", "bytes_of_an_element"))
    return [row["kernel"], GPUS[row["arch"]].name, row["dtype"], *numbers]


def cells(row: dict) -> list[str]:
    return [
        row["weight"],
        " x ".join(map(str, row["shape"])),
        f"{row['bfloat16_bytes'] / 1e6:.1f}",
        f"{row['fp8_bytes'] / 1e6:.1f} ({row['fp8_bytes'] / row['bfloat16_bytes']:.3f} x)",
        *(f"{row[f'{side}_seconds'] * 1e3:.1f}" for side in ("cast", "maxima", "values")),
        f"{row['times_cast']:.1f} x",
    ]


if __name__ == "__main__":
    raise SystemExit(main())
