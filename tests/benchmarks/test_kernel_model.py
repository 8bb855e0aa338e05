"""Every Triton kernel compiles for GPUs that need not be there and is within its budgets; what is predicted of them."""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.kernels.kernel_model import (
    GEMMS,
    GPUS,
    Compiled,
    Launch,
    Routing,
    hbm_bytes,
    mm_order,
    over_budget,
    routed,
    seconds,
    spills_in_loop,
    work_of,
)

MMA = {80: "mma.sync", 90: "wgmma", 100: "tcgen05"}


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernel_model_of_every_kernel_and_gpu_compiles_within_its_budgets():
    """In a process of its own: Triton decides once, at import, whether kernels are interpreted."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.kernels", "--few"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment, timeout=900)
    assert done.stdout, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["problems"] == [] and done.returncode == 0
    rows = found["rows"]
    for arch, dtype in itertools.product(GPUS, ("bfloat16", "float16", "float32")):
        kernels = {row["kernel"] for row in rows if (row["arch"], row["dtype"]) == (arch, dtype)}
        # In float32, and before sm_90, the gate's backward is a pass of its own alone.
        has_both = arch >= 90 and dtype != "float32"
        gemms = {name for name in GEMMS if has_both or name != "grouped_mm_gate_backward"}
        assert ("grouped_mm_gate_backward" in kernels) == has_both
        assert kernels >= {*gemms, "take", "gather_sum", "tile_table"}, (arch, dtype, kernels)
    kernels = {row["kernel"] for row in rows}
    assert kernels >= {"sum_rows", "row_dot", "gate", "gate_backward"}
    # Where the grid's order is right, an operand comes from HBM hardly more often than once.
    assert all(row["gb"] <= 1.1 * row["gb_once"] for row in rows)
    # Every GEMM reads rows through an index, and nothing copies them, where they are not sent,
    assert {row["kernel"] for row in rows if row["indexed"]} >= set(GEMMS)
    # The persistent kernels, through an index and not, and none where there is no TMA, in float32 or with a bias.
    persistent = {(row["arch"], row["kernel"], row["indexed"]) for row in rows if row["is_persistent"]}
    assert persistent >= {(arch, "grouped_mm_gate", "a") for arch in (90, 100)}
    assert persistent >= {(arch, "grouped_mm", "") for arch in (90, 100)}
    assert not any(row["arch"] == 80 or row["dtype"] == "float32" for row in rows if row["is_persistent"])
    # Under expert parallelism outputs and gradients of rows are stored in the order in which they are sent.
    assert {row["is_persistent"] for row in rows if row["is_scattered"]} == {False, True}
    # but for an outer product with many columns.
    forward = [row for row in rows if row["pass"] == "forward"]
    assert "take" not in {row["kernel"] for row in forward}
    # The sizes of the other models are no other code, but for the table of 256 experts' tiles.
    assert found["others"] == ["tile_table"]
    # Every model, dtype and tile was compiled too, of these kernels and within the budgets.
    whole = json.loads((root / "benchmarks/results/kernels.json").read_text())
    assert whole["sources"] == found["sources"], "`make kernels` has to run again: its table is of other kernels"
    assert whole["problems"] == []
    shares = {(one["model"], one["arch"], one["dtype"], one["pass"]): one["share"] for one in found["layers"]}
    for direction, wanted in (("forward", 0.55), ("backward", 0.5)):
        assert shares["Qwen3-30B-A3B", 90, "bfloat16", direction] >= wanted


def launch(kernel="grouped_mm", arch=90, dtype="bfloat16", **made):
    counts = dict.fromkeys([*MMA.values(), "cp.async", "TMA"], 0) | {MMA[arch]: 4, "cp.async": 24}
    facts = {"warps": 8, "stages": 3, "registers": 116, "stack": 0, "spills_in_loop": False, "shared": 98304}
    compiled = Compiled(kernel, arch, instructions=counts, **facts | made)
    values = {"BM": 128, "BN": 128, "BK": 64, "K": 2048, "N": 1536}
    return Launch(compiled, 12 * 1152, dtype, values, {}, is_first_choice=True)


def test_kernel_model_of_a_kernel_over_a_budget_names_what_is_over():
    assert over_budget(launch()) == over_budget(launch(stack=64)) == []
    for made, problem in (
        ({"stack": 72}, "72 bytes of stack"),
        ({"stack": 8, "spills_in_loop": True}, "8 bytes of stack, used in its loop"),
        ({"registers": 136}, "1 CTAs per SM by 136 registers"),
        ({"shared": 120_000}, "1 CTAs per SM by 116 registers and 120000 bytes"),
    ):
        (said,) = over_budget(launch(**made))
        assert problem in said and "grouped_mm (128, 128, 64) with 3 stages, sm_90, bfloat16" in said
    right = launch().compiled.instructions
    for missing, problem in (("wgmma", "no wgmma"), ("cp.async", "0 asynchronous loads, not 24")):
        made = replace(launch().compiled, instructions=right | {missing: 0})
        (said,) = over_budget(replace(launch(), compiled=made))
        assert problem in said
    half = replace(launch().compiled, instructions=right | {"cp.async": 12})  # those of one operand
    assert "12 asynchronous loads, not 24" in over_budget(replace(launch(), compiled=half))[0]
    larger = launch(registers=200)
    assert over_budget(larger) and not over_budget(replace(larger, is_first_choice=False))


def persistent(arch=90, **made):
    values = {"SPECIALIZED": arch == 100, "HAS_INDEX": True, "GATHERS": arch == 100, "BM": 128, "BN": 256, "BK": 64}
    instructions = dict.fromkeys([*MMA.values(), "cp.async", "TMA", "specialized warps"], 0) | {MMA[arch]: 4}
    instructions |= {"TMA": 17, "specialized warps": 10} if arch == 100 else {"TMA": 4, "cp.async": 16}
    one = launch(arch=arch, stages=4, registers=168, shared=213_000)
    compiled = replace(one.compiled, instructions=instructions | made)
    return replace(one, compiled=compiled, values=values | {"K": 2048, "N": 1536}, is_first_choice=False)


def test_kernel_model_of_a_persistent_kernel_with_other_loops_or_warps_names_it():
    assert over_budget(persistent()) == over_budget(persistent(100)) == []
    for arch, made, problem in (
        (90, {"TMA": 1}, "1 loads by TMA, not 4: its loops are not one"),
        (90, {"cp.async": 12}, "12 asynchronous loads, not 16"),
        (100, {"TMA": 1}, "1 loads by TMA, not 2"),
        (100, {"specialized warps": 0}, "no specialized warps"),
    ):
        (said,) = over_budget(persistent(arch, **made))
        assert problem in said


def test_kernel_model_of_a_persistent_kernel_fills_its_pipeline_once_and_hides_its_stores():
    times = {}
    for arch in (90, 100):
        one, gpu = persistent(arch), GPUS[arch]
        work = work_of(one, Routing((1024,) * 128, tuple(range(16384)) * 8), gpu)
        once = replace(one, values={name: value for name, value in one.values.items() if name != "SPECIALIZED"})
        once = replace(once, programs=1024 * 6)
        times[arch] = seconds(one, work, gpu), seconds(once, work, gpu), work.epilogue_bytes / gpu.hbm
        assert times[arch][0] < times[arch][1]
    specialised, alone, stored = times[100]
    assert alone - specialised > stored


@pytest.mark.parametrize("product", ["HMMA.16816.F32.BF16", "HGMMA.64x128x16.F32.BF16", "UTCHMMA", "FFMA"])
def test_kernel_model_of_a_spill_between_two_products_counts_it_in_the_loop(product):
    loop = [f"{product} R4, R8 ;", "MOV R1, R2 ;", f"{product} R4, R8 ;"]
    assert not spills_in_loop(["STL [R1], R0 ;", *loop, "LDL R0, [R1] ;"])
    assert spills_in_loop([*loop, "LDL R0, [R1] ;", *loop])
    assert spills_in_loop(["STL [R1], R0 ;"])  # a kernel without products is one loop over rows


def test_kernel_model_bytes_from_hbm_of_each_program_order_show_which_reads_rows_again():
    """Qwen3-30B-A3B's up projection on an H100: neighbours that share nothing read 7 GB where 0.5 + 0.8 would do."""
    tiles, blocks, a, b = 1152, 12, 128 * 2048 * 2, 128 * 2048 * 2
    rows_first = [(tile, block) for block in range(blocks) for tile in range(tiles)]
    read = {}
    for name, order in (("columns", mm_order(tiles, blocks)), ("rows", rows_first)):
        panels = (((("a", tile), a), (("b", tile // 9, block), b)) for tile, block in order)
        read[name] = hbm_bytes(panels, 2 * 132, GPUS[90].l2)
    once = tiles * a + 128 * blocks * b
    assert read["columns"] == once and read["rows"] > 4 * once


@pytest.mark.parametrize("kernel", ["grouped_mm", "grouped_outer"])
def test_kernel_model_of_indexed_rows_reads_them_from_hbm_again_unless_cached(kernel):
    routing, wide, inner, size = routed(4096, 2, 8), 2048, 1536, 2
    rows, tokens = len(routing.tokens), 4096
    assert sum(routing.counts) == rows == 2 * tokens
    assert list(routing.tokens[: routing.counts[0]]) == sorted(routing.tokens[: routing.counts[0]])  # as dispatch does
    values = {"BM": 128, "BN": 128, "BK": 64}
    values |= {"M": inner, "N": wide} if kernel == "grouped_outer" else {"K": wide, "N": inner}
    flag = "B_INDEXED" if kernel == "grouped_outer" else "HAS_INDEX"
    others = 8 * wide * inner * size + rows * inner * size  # the weights or their gradients, and the other rows
    read = {}
    for l2, indexed in itertools.product((0.0, 1e12), (False, True)):
        one = replace(launch(kernel=kernel), values=values | {flag: indexed})
        read[l2, indexed] = work_of(one, routing, replace(GPUS[90], l2=l2)).hbm_bytes - others - 8 * rows * indexed
    once = len(set(routing.tokens))
    assert read[1e12, False] == pytest.approx(rows * wide * size)
    assert read[1e12, True] == pytest.approx(once * wide * size)
    assert 0.8 * read[0.0, False] < read[0.0, True] <= read[0.0, False]  # programs of a wave share some tokens


def test_kernel_model_of_a_lone_cta_or_a_partial_tile_costs_time():
    counts, gpu = (1024,) * 128, GPUS[90]
    times = []
    for registers, rows in ((116, counts), (200, counts), (116, (1025,) * 128)):
        one = launch(registers=registers)
        work = work_of(one, Routing(rows, ()), gpu)
        times.append(seconds(one, work, gpu))
        assert work.flops == 2 * sum(rows) * 2048 * 1536 and work.flops <= work.padded
        assert 0.4 < work.flops / gpu.flops / times[-1] < 0.8
    assert times[0] < min(times[1:])
