"""Updates of this engine's core beside transformers' own expert parallelism, in turns on the same cores.

    python -m benchmarks.rivals.compare [--repeats 5] [--only TEXT]

transformers has the same mesh since 5.23: FSDP over all ranks, experts over ``ep``, tokens by all-to-all. Both sides
run in the same processes, with the same checkpoint, sequences, loss, AdamW and activation checkpointing, in float32
(``sides.py``). A batch has four sequences a rank. Their lengths differ, with a policy's loss and entropy, or are
equal, with the plain loss of next tokens, where a padded batch loses nothing.
"""

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.rivals.measured import gradient_error, in_turns, memory_bytes, wire_bytes
from benchmarks.rivals.sides import OURS, THEIRS, Batch, Ours, Side, Theirs
from benchmarks.tables import RESULTS, report
from benchmarks.update.step import LARGE_VOCABULARY, MODEL, samples_of
from tests.support.ranks import run_ranks

PER_RANK = 4
POLICY, TEXT = "policy", "next tokens"
# Least speedups over the rival: with ep over all ranks, and elsewhere.
FULL_EP_SPEEDUP, LEAST_SPEEDUP = 1.15, 1.0
LARGEST_ERROR = 1e-5
QWEN, DEEPSEEK = "Qwen3-MoE", "DeepSeek-V3"
SIZES: dict[str, dict[str, Any]] = {
    QWEN: {"model_type": "qwen3_moe", **MODEL},
    DEEPSEEK: {
        "model_type": "deepseek_v3",
        **{key: size for key, size in MODEL.items() if key not in ("num_experts", "head_dim", "num_key_value_heads")},
        "num_key_value_heads": 4,
        "n_routed_experts": 32,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "intermediate_size": 1024,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
    },
}
COLUMNS = ["model", "vocabulary", "ranks", "ep", "tokens of a rank", "loss", "side", "update s", "tokens/s"]
COLUMNS += ["of the rival's", "peak MB", "wire MB", "gradient error"]


@dataclass(frozen=True)
class Case:
    """A model, its mesh and the batches that it is trained on, by one group of processes.

    Args:
        batches: tokens of a rank, and the loss.
    """

    model: str
    vocabulary: int
    world: int
    ep: int
    batches: tuple[tuple[int, str], ...]

    def __str__(self) -> str:
        return f"{self.model} {self.vocabulary} {self.world} ranks ep {self.ep}"


SMALL = MODEL["vocab_size"]
ANSWERS = tuple((tokens, POLICY) for tokens in (256, 1024, 4096))
CASES = [
    *(Case(QWEN, SMALL, world, world, (*ANSWERS, (1024, TEXT))) for world in (2, 4)),
    Case(QWEN, SMALL, 4, 2, ((1024, POLICY),)),
    Case(QWEN, LARGE_VOCABULARY, 2, 2, ((1024, POLICY),)),
    Case(QWEN, LARGE_VOCABULARY, 4, 4, ((256, POLICY),)),
    Case(DEEPSEEK, SMALL, 2, 2, ANSWERS),
    Case(DEEPSEEK, SMALL, 4, 4, ANSWERS[:2]),
]


@dataclass(frozen=True)
class Row:
    """Medians of one side; bytes are counted by ``measured.py``."""

    model: str
    vocabulary: int
    world: int
    ep: int
    tokens: int  # of a rank
    loss: str
    side: str
    update: float
    speedup: float  # over the rival's
    memory: int
    wire: float
    error: float

    @property
    def tokens_per_second(self) -> float:
        return self.world * self.tokens / self.update

    @property
    def holds(self) -> bool:
        least = FULL_EP_SPEEDUP if self.ep == self.world else LEAST_SPEEDUP
        return self.side != OURS or (self.speedup >= least and self.error <= LARGEST_ERROR)


def batch_of(rank: int, world: int, tokens: int, loss: str, vocabulary: int) -> Batch:
    """Return a rank's sequences: those of ``step.py``, or of one length."""
    if loss == TEXT:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(0, vocabulary, (world * PER_RANK, tokens // PER_RANK), generator=generator)
        return Batch([*rows[rank * PER_RANK :][:PER_RANK]], None, tokens)
    samples = samples_of(world, tokens, vocabulary)[rank * PER_RANK :][:PER_RANK]
    generator = torch.Generator().manual_seed(rank)
    ids = [ids for ids, *_ in samples]
    return Batch(ids, [torch.randn(len(each) - 1, generator=generator) for each in ids], tokens)


def measure(folder: Path, out: Path, case: Case, repeats: int) -> None:
    """Write from rank 0 the figures of each number of tokens and loss."""
    rank, world = dist.get_rank(), case.world
    sides: dict[str, Side] = {THEIRS: Theirs(folder, world, case.ep), OURS: Ours(folder, world, case.ep)}
    small = batch_of(rank, world, *min(case.batches), case.vocabulary)
    errors = {name: gradient_error(side, folder, small) for name, side in sides.items()}
    found = []
    for tokens, loss in case.batches:
        batch = batch_of(rank, world, tokens, loss, case.vocabulary)
        updates = {name: partial(side.update, batch) for name, side in sides.items()}
        seconds = in_turns(updates, repeats)
        found.append(
            {
                "tokens": tokens,
                "loss": loss,
                "seconds": seconds,
                "memory": {name: memory_bytes(update) for name, update in updates.items()},
                "wire": {name: wire_bytes(update) for name, update in updates.items()},
                "error": errors,
            }
        )
    if rank == 0:
        out.write_text(json.dumps(found))


def run(case: Case, repeats: int, sizes: dict[str, Any]) -> list[Row]:
    """Measure both sides on a random model of these sizes."""
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name) / "model", Path(name) / "figures.json"
        own = {key: size for key, size in sizes.items() if key != "model_type"} | {"vocab_size": case.vocabulary}
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(sizes["model_type"], **own))
        model.float().save_pretrained(folder)
        run_ranks(measure, case.world, folder, out, case, repeats, timeout=1800)
        figures = json.loads(out.read_text())
    return [row for found in figures for row in rows_of(case, found)]


def rows_of(case: Case, found: dict[str, Any]) -> list[Row]:
    """Return medians and ratios within a turn, the rival's row first."""
    mesh = case.model, case.vocabulary, case.world, case.ep
    rows = []
    for side in (THEIRS, OURS):
        seconds = found["seconds"][side]
        speedup = statistics.median(t / o for t, o in zip(found["seconds"][THEIRS], seconds, strict=True))
        bytes_ = found["memory"][side], found["wire"][side]
        batch = found["tokens"], found["loss"]
        rows.append(Row(*mesh, *batch, side, statistics.median(seconds), speedup, *bytes_, found["error"][side]))
    return rows


def cells(row: Row) -> list[str]:
    return [
        row.model,
        str(row.vocabulary),
        str(row.world),
        str(row.ep),
        str(row.tokens),
        row.loss,
        row.side,
        f"{row.update:.2f}",
        f"{row.tokens_per_second:.0f}",
        f"{row.speedup:.2f} x" + ("" if row.holds else " (below the bound)"),
        f"{row.memory / 1e6:.0f}",
        f"{row.wire / 1e6:.1f}",
        f"{row.error:.1e}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="turns that count")
    parser.add_argument("--only", default="", help="cases whose name holds this; writes no result file")
    asked = parser.parse_args()
    chosen = [case for case in CASES if asked.only in str(case)]
    rows = [row for case in chosen for row in run(case, asked.repeats, SIZES[case.model])]
    text = [
        "Updates with AdamW in float32 with activation checkpointing, one thread a rank. Sides take turns in the same",
        f"processes: medians of {asked.repeats}, ratios within a turn. Tokens/s are of all ranks, without padding.",
        f"A policy's loss has entropies and {PER_RANK} sequences a rank of different lengths; `{TEXT}` is a",
        "plain loss on sequences of one length. Peak: bytes that an update allocates besides weights and optimizer, on",
        "the rank with the most. Wire: bytes that all ranks together receive. Gradient error: the largest relative",
        "error of a parameter against the plain model in one process. This engine does not recompute its last layer.",
        "",
        f"Bounds: {FULL_EP_SPEEDUP} x with `ep` over all ranks, nowhere below {LEAST_SPEEDUP} x.",
    ]
    heading, folder = "An update beside other libraries' expert parallelism", RESULTS if chosen == CASES else None
    lines, packages = [*map(cells, rows)], ("torch", "transformers")
    report("rivals", heading, "make bench-rivals", packages, text, COLUMNS, lines, folder=folder)
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
