"""A weight sync into vLLM workers in FP8: verl's stock path beside slices that trainer ranks quantise.

    python -m benchmarks.weights.weight_sync --rollout vllm-fp8 [--repeats 5]

Two trainer ranks hold a Qwen3-MoE in float32. Stock: verl's fsdp2 engine, whose whole tensors each worker quantises by
verl's loader. Full: whole tensors of this engine with ``ep_size=2`` for that loader. Sliced: FP8 slices with scales.
Blocks are 128 x 128. It needs a processor with AMX, because vLLM's CPU build has FP8 kernels for no other. The
loader of verl does not support that build. Workers keep the routers that vLLM frees (``kept_weights.py``), and time
alone is compared.
"""

import json
import statistics
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.tables import RESULTS, report
from benchmarks.weights.into_vllm import seconds_of_syncs, send_together
from epfsdp2.rollout.layout.specs import Rollout
from tests.support.models.quantised import BLOCK, save_quantised

__all__ = ["main"]

SIDES = ("stock", "full", "sliced")
LEAST, MOST_BYTES = 1.5, 0.55  # times as fast as stock; of the bytes in bfloat16, with scales
COLUMNS = ["rollout", "side", "GB", "of bfloat16", "end to end s", "against stock"]
_EXTENSION = "benchmarks.weights.kept_weights.KeepsRouters"
# verl chooses a Triton kernel wherever Triton can be imported, also for tensors on a CPU.
_ENVIRONMENT = {"VERL_VLLM_FP8_QUANT_ENABLED": "1", "VERL_DISABLE_TRITON_FP8": "1"}


def _model() -> dict:
    from benchmarks.weights.weight_sync import MODEL

    return MODEL | {"moe_intermediate_size": 4 * BLOCK}  # two blocks at TP 2


def _ranks(tp: int, handles: list[str], folder: Path, turns: list[str], out: Path) -> None:
    """Send the weights of each turn; write when each began, and what was handed over."""
    from benchmarks.weights.weight_sync import BUCKET_MEGABYTES, ours, stock_weights, verls

    model, sync = verls(folder, torch.float32), ours(folder, torch.float32)
    began, sent = [], {}
    for side in turns:
        if side == "stock":
            source = stock_weights(model)
        else:
            rollout = Rollout(tp, block=BLOCK)
            source = sync.weights().for_worker(side, rollout, is_quantised=True).tensors()
        at, stats = send_together(source, handles, BUCKET_MEGABYTES)
        began.append(at)
        sent[side] = stats.nbytes
    if dist.get_rank() == 0:
        whole = 2 * sum(p.numel() for p in sync.model.parameters()) / tp
        out.write_text(json.dumps({"began": began, "sent": sent, "bfloat16": whole}))


def _run(tp: int, repeats: int) -> list[dict]:
    """Medians of each side at one rollout TP."""
    turns = [side for _ in range(repeats + 1) for side in SIDES]  # the first of each warms up
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name) / "model", Path(name) / "figures.json"
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**_model())).float().save_pretrained(folder, max_shard_size="10GB")
        quantised = save_quantised(folder, Path(name) / "quantised")
        syncs = [{"is_quantised": side == "sliced"} for side in turns]
        figures, took = seconds_of_syncs(
            quantised, tp, syncs, _ranks, folder, turns, out=out, extension=_EXTENSION, environment=_ENVIRONMENT
        )
    rows: list[dict] = []
    for side in SIDES:
        seconds = statistics.median([took[i] for i, turn in enumerate(turns) if turn == side][1:])
        row = {"tp": tp, "side": side, "gigabytes": figures["sent"][side] / 1e9, "seconds": seconds}
        row["of_bfloat16"] = figures["sent"][side] / figures["bfloat16"]
        row["times_stock"] = (rows[0]["seconds"] if rows else seconds) / seconds
        rows.append(row)
    return rows


def _cells(row: dict) -> list[str]:
    return [
        f"TP {row['tp']}",
        row["side"],
        f"{row['gigabytes']:.2f}",
        f"{row['of_bfloat16']:.2f} x",
        f"{row['seconds']:.2f}",
        f"{row['times_stock']:.1f} x",
    ]


def holds(row: dict) -> bool:
    """Whether slices are as fast and as few bytes as they are held to."""
    return row["side"] != "sliced" or (row["times_stock"] >= LEAST and row["of_bfloat16"] <= MOST_BYTES)


def _text(repeats: int) -> list[str]:
    return [
        "Two trainer ranks with float32 masters send a Qwen3-MoE to vLLM workers that hold weights in FP8, with scales",
        f"of blocks of {BLOCK} x {BLOCK}; sides take turns, medians of {repeats}. Stock: verl's fsdp2",
        "engine, whose whole tensors every worker quantises by verl's loader. Full: whole tensors of this engine, in",
        "bfloat16, for the same loader. Sliced: trainer ranks quantise what they own. GB: handed to one worker; then",
        "against its share of the model in bfloat16. The embedding and the head stay in bfloat16 on all sides. verl's",
        "loader is not written for vLLM's CPU build, so time alone is compared.",
        "",
        f"Bounds of `sliced`: {LEAST} x stock, and {MOST_BYTES} x the bytes in bfloat16, scales counted.",
    ]


def main(repeats: int, sizes: list[int]) -> int:
    """Measure, print and write the figures.

    Args:
        sizes: vLLM's tensor-parallel sizes.
    """
    if not torch.cpu._is_amx_tile_supported():
        raise SystemExit("vLLM's CPU build has FP8 kernels for processors with AMX alone")
    rows = []
    for tp in sizes:
        rows += _run(tp, repeats)
        print("\n".join(" | ".join(_cells(row)) for row in rows[-len(SIDES) :]), flush=True)
    command, folder = "make bench-sync ARGS='--rollout vllm-fp8'", RESULTS if len(sizes) == 2 else None
    lines, text = [*map(_cells, rows)], _text(repeats)
    report(
        "weight_sync_fp8", "A weight sync into vLLM in FP8", command, ("torch",), text, COLUMNS, lines, folder=folder
    )
    return 0 if all(map(holds, rows)) else 1
