"""How the cost of an update grows with tokens, experts and ranks, beside verl's stock fsdp2 engine.

    python -m benchmarks.update.growth [--repeats 5] [--only tokens|experts|ranks]

As ``step.py``, on a smaller model, ``ep`` over all ranks. Tokens and experts grow 1 to 16 times on two ranks, experts
with as many active per token. Ranks grow from 1 to 8 with the tokens of all of them the same, so that the work is;
they share the machine's cores. A figure of merit is the exponent ``p`` of the least-squares fit ``seconds ~ x ** p``:
1 is a cost in proportion, 0 none.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
from rich.console import Console
from rich.progress import track
from rich.table import Table

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.machine import machine
from benchmarks.tables import RESULTS, write_table
from benchmarks.update.step import MODEL, STOCK, Row, run

FACTORS = (1, 2, 4, 8, 16)
RANKS = (1, 2, 4, 8)
WORLD, TOKENS, EXPERTS = 2, 128, 8  # of a rank, of a layer; where they do not grow
GROWTHS = ("tokens", "experts", "ranks")
COLUMNS = ["grows", "x", "ranks", "tokens of a rank", "experts", "side", "update s", "tokens/s", "of verl's", "wire MB"]
SMALLER = {**MODEL, "vocab_size": 512, "num_hidden_layers": 2, "num_experts": EXPERTS}


def grow(what: str, repeats: int) -> list[tuple[int, Row]]:
    """Rows by how many times as much there is."""
    if what == "tokens":
        rows = run(SMALLER, WORLD, [WORLD], [TOKENS * factor for factor in FACTORS], repeats)
        return [(row.tokens // TOKENS, row) for row in rows]
    if what == "experts":
        return [
            (factor, row)
            for factor in track(FACTORS, "experts", console=Console(stderr=True))
            for row in run({**SMALLER, "num_experts": EXPERTS * factor}, WORLD, [WORLD], [TOKENS], repeats)
        ]
    return [
        (ranks, row)
        for ranks in track(RANKS, "ranks", console=Console(stderr=True))
        for row in run(SMALLER, ranks, [ranks], [max(RANKS) * TOKENS // ranks], repeats)
    ]


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """``p`` of the least-squares fit of ``log y = p * log x + c``."""
    x, y = ([math.log(point[i]) for point in points] for i in (0, 1))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


def exponents(found: dict[str, list[tuple[int, Row]]]) -> dict[str, dict[str, float]]:
    """Of the seconds of an update, by what grows, of both engines."""
    return {
        what: {
            side: exponent([(factor, row.update) for factor, row in points if (row.ep == 0) == (side == STOCK)])
            for side in ("epfsdp2", STOCK)
        }
        for what, points in found.items()
    }


def cells(what: str, factor: int, row: Row) -> list[str]:
    experts = EXPERTS * (factor if what == "experts" else 1)
    return [
        what,
        str(factor),
        str(row.world),
        str(row.tokens),
        str(experts),
        row.side,
        f"{row.update:.3f}",
        f"{row.tokens_per_second:.0f}",
        f"{row.speedup:.2f} x",
        f"{row.wire / 1e6:.1f}",
    ]


def plot(found: dict[str, list[tuple[int, Row]]], path: Path) -> None:
    figure, axes = plt.subplots(1, len(found), figsize=(4 * len(found), 3.5), squeeze=False)
    for axis, (what, points) in zip(axes[0], found.items(), strict=True):
        for side, is_stock in (("epfsdp2, ep over all ranks", False), (STOCK, True)):
            line = [(factor, row.update) for factor, row in points if (row.ep == 0) == is_stock]
            axis.plot(*zip(*line, strict=True), marker="o", label=side)
        axis.set(xscale="log", yscale="log", xlabel=f"{what}, times as many", ylabel="seconds of an update")
        axis.set_xticks([factor for factor, row in points if row.ep == 0], minor=False)
        axis.get_xaxis().set_major_formatter(matplotlib.ticker.ScalarFormatter())
        axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write(found: dict[str, list[tuple[int, Row]]], repeats: int) -> None:
    where, fitted = machine(), exponents(found)
    text = [
        "A small Qwen3-MoE in float32, with activation checkpointing, `ep` over all ranks; sides take turns in the",
        f"same processes, medians of {repeats}, ratios within a turn. Tokens and experts grow on two ranks, experts",
        "with as many active per token. Ranks grow with the tokens of all of them the same, and share the machine's",
        "cores.",
        "",
        *(
            f"* seconds of an update ~ {what} ** p: p = {by['epfsdp2']:.2f}; verl's fsdp2 engine: {by[STOCK]:.2f}"
            for what, by in fitted.items()
        ),
        "",
        "![seconds of an update](growth.png)",
    ]
    result: dict[str, Any] = {"machine": where, "model": SMALLER, "repeats": repeats, "exponents": fitted}
    result["rows"] = [{"grows": what, "factor": f, **asdict(row)} for what, rows in found.items() for f, row in rows]
    versions = ", ".join(f"{name} {where['versions'][name]}" for name in ("torch", "verl", "transformers"))
    on = f"{where['cpu']}, {where['cores']} cores; {versions}"
    lines = [cells(what, factor, row) for what, points in found.items() for factor, row in points]
    write_table("growth", result, "How the cost of an update grows", "make bench-growth", on, text, COLUMNS, lines)
    plot(found, RESULTS / "growth.png")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="turns that count")
    parser.add_argument("--only", choices=GROWTHS, help="one of them; writes no result file")
    asked = parser.parse_args()
    found = {what: grow(what, asked.repeats) for what in ([asked.only] if asked.only else GROWTHS)}
    shown = Table(*COLUMNS)
    for what, points in found.items():
        for factor, row in points:
            shown.add_row(*cells(what, factor, row))
    Console(width=160).print(shown)
    for what, by in exponents(found).items():
        print(f"seconds of an update ~ {what} ** p: " + ", ".join(f"{side} {p:.2f}" for side, p in by.items()))
    if asked.only is None:
        write(found, asked.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
