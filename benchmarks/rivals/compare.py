"""Updates of this engine's core beside transformers' own expert parallelism, in turns on the same cores.

    python -m benchmarks.rivals.compare [--repeats 5] [--only TEXT]

transformers has the same mesh since 5.23: FSDP over all ranks, experts over ``ep``, tokens by all-to-all. Both sides
run in the same processes, with the same checkpoint, sequences, loss, AdamW and activation checkpointing, in float32
(``sides.py``). A batch has four sequences a rank. Their lengths differ, with a policy's loss and entropy, or are
equal, with the plain loss of next tokens, where a padded batch loses nothing.
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import figures_of, options, random_checkpoint
from benchmarks.rivals.measured import cells, gradient_error, measured
from benchmarks.rivals.sides import OURS, THEIRS, Batch, Ours, Side, Theirs
from benchmarks.tables import RESULTS, report
from benchmarks.update.step import LARGE_VOCABULARY, MODEL, PER_RANK, samples_of

POLICY, TEXT = "policy", "next tokens"
# Least speedups over the rival: with ep over all ranks, and elsewhere.
FULL_EP_SPEEDUP, LEAST_SPEEDUP = 1.15, 1.0
LARGEST_ERROR = 1e-5
QWEN, DEEPSEEK = "Qwen3-MoE", "DeepSeek-V3"
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    QWEN: ("qwen3_moe", MODEL),
    DEEPSEEK: (
        "deepseek_v3",
        {
            **{key: size for key, size in MODEL.items() if key not in ("num_experts", "head_dim")},
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
    ),
}


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


def _measure(folder: Path, case: Case, repeats: int) -> list[dict]:
    """Return for each batch seconds of each turn, memory, bytes on the wire and gradients' error, by side."""
    rank, world = dist.get_rank(), case.world
    sides: dict[str, Side] = {THEIRS: Theirs(folder, world, case.ep), OURS: Ours(folder, world, case.ep)}
    small = batch_of(rank, world, *min(case.batches), case.vocabulary)
    errors = {name: gradient_error(side, folder, small) for name, side in sides.items()}
    found = []
    for tokens, loss in case.batches:
        batch = batch_of(rank, world, tokens, loss, case.vocabulary)
        updates = {name: partial(side.update, batch) for name, side in sides.items()}
        found.append(measured(updates, repeats) | {"error": errors})
    return found


def run(case: Case, repeats: int, model_type: str, sizes: dict[str, Any]) -> list[dict[str, str]]:
    """Measure both sides on a random model of these sizes; returns the rival's row before ours for each batch."""
    with random_checkpoint(model_type, sizes | {"vocab_size": case.vocabulary}) as folder:
        figures = figures_of(_measure, case.world, folder, case, repeats)
    least = FULL_EP_SPEEDUP if case.ep == case.world else LEAST_SPEEDUP
    shape = {"model": case.model, "vocabulary": str(case.vocabulary), "ranks": str(case.world), "ep": str(case.ep)}
    return [
        {**shape, "tokens of a rank": str(tokens), "loss": loss, **cells(found, side, THEIRS, least, LARGEST_ERROR)}
        for (tokens, loss), found in zip(case.batches, figures, strict=True)
        for side in (THEIRS, OURS)
    ]


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--only", default="", help="cases whose name holds this; writes no result file")
    asked = parser.parse_args()
    chosen = [case for case in CASES if asked.only in str(case)]
    rows = [row for case in chosen for row in run(case, asked.repeats, *SIZES[case.model])]
    text = [
        "Updates with AdamW in float32 with activation checkpointing, one thread a rank. Sides take turns in the same",
        f"processes: medians of {asked.repeats}, ratios within a turn.",
        f"A policy's loss has entropies and {PER_RANK} sequences a rank of different lengths; `{TEXT}` is a",
        "plain loss on sequences of one length. Peak: bytes that an update allocates besides weights and optimizer, on",
        "the rank with the most. Wire: bytes that all ranks together receive. Gradient error: the largest relative",
        "error of a parameter against the plain model in one process. This engine does not recompute its last layer.",
        "",
        f"Bounds: {FULL_EP_SPEEDUP} x with `ep` over all ranks, nowhere below {LEAST_SPEEDUP} x.",
    ]
    heading, folder = "An update beside other libraries' expert parallelism", RESULTS if chosen == CASES else None
    packages = ("torch", "transformers")
    return report("rivals", heading, "make bench-rivals", packages, text, rows, folder=folder)


if __name__ == "__main__":
    sys.exit(main())
