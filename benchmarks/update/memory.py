"""Peak memory of a training step on each rank, allocation by allocation, beside the prediction.

    python -m benchmarks.update.memory [--fast]

``tests/support/engine/memory.py`` measures.
"""

import argparse
import sys

from rich.console import Console
from rich.progress import track

from benchmarks.tables import RESULTS, judged, report
from tests.support.engine.memory import Row, run

ROWS = [
    Row(1),
    Row(2),
    Row(4),
    Row(2, shard_dim=1),
    Row(1, fsdp_size=2),
    Row(2, fsdp_size=2),
    Row(2, depth=0),
    Row(2, depth=2),
    Row(2, reshard=False),
    Row(2, checkpointing="none"),
    Row(4, checkpointing="none", tokens=1024),
    Row(4, checkpointing="full", tokens=1024),
    Row(2, checkpointing="selective", tokens=1024),
    Row(4, checkpointing="none", tokens=512, sp=2),
    Row(4, checkpointing="none", tokens=512, sp=4),
    Row(2, checkpointing="full", tokens=512, critic=True),
    Row(2, checkpointing="full", tokens=512, lora_rank=16),
    Row(4, checkpointing="full", tokens=512, chunks=2),
    Row(1, checkpointing="full", tokens=512, by_index=True),
    Row(4, checkpointing="full", tokens=512, by_index=True),
    Row(4, checkpointing="none", tokens=512, chunks=2, by_index=True),
    Row(1, checkpointing="full", tokens=512, dense=True),
    Row(1, fsdp_size=2, checkpointing="none", tokens=512, dense=True),
]


def cells(row: Row) -> dict[str, str]:
    features = {
        f"sp {row.sp}": row.sp > 1,
        "critic": row.critic,
        f"LoRA {row.lora_rank}": row.lora_rank > 0,
        f"{row.chunks} chunks": row.chunks > 1,
        "dense": row.dense,
        "by index": row.by_index,
    }
    return {
        "mesh": str(row.mesh),
        "shard dim": str(row.shard_dim),
        "depth": str(row.depth),
        "reshard": str(row.reshard),
        "checkpointing": row.checkpointing,
        "tokens": str(row.tokens),
        "besides": " ".join(name for name, is_there in features.items() if is_there),
        "measured": f"{row.measured / 2**20:.1f}",
        "predicted": f"{row.predicted / 2**20:.1f}",
        "ratio": f"{row.ratio:.3f}",
        "largest": f"{row.largest / row.stack:.2f}",
        **judged(row.holds),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="three rows; writes no result file")
    is_fast = parser.parse_args().fast
    rows = [run(row) for row in track(ROWS[1:4] if is_fast else ROWS, "measuring", console=Console(stderr=True))]
    text = [
        "Four ranks on CPU, float32, AdamW, the lesser of the second and third step. MiB on the rank with the largest",
        "peak; tokens are of a rank. Predicted: `engine/planner/memory.py`, sizes and how unevenly the random",
        "routers spread the rows. Largest: the largest single allocation over the stack `[E, 2I, D]` of a layer's",
        "`gate_up_proj`; with `ep` = 1 FSDP gathers whole stacks. By index: operators that allocate as the Triton",
        "kernels do on a GPU (`tests/support/moe/indexed_backend.py`).",
    ]
    folder = None if is_fast else RESULTS
    return report("memory", "Peak memory of a step", "make memory", ("torch",), text, [*map(cells, rows)], (), folder)


if __name__ == "__main__":
    sys.exit(main())
