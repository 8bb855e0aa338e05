"""Log-probs and an update of this engine beside verl's stock fsdp2 engine, over ranks and ``ep``.

    python -m benchmarks.update.step [--repeats 5] [--worlds 1 2 4]

Both engines run in verl's own worker in the same processes, on the same checkpoint, batch and loss. They compute in
float32 with activation checkpointing, verl's default. Sides take turns, each ratio is taken within a turn. The model is
a Qwen3-MoE with 95 % of its weights in experts, of which a token uses one in sixteen, as in Qwen3-30B-A3B. Bytes on the
wire are counted in one more update, and have to equal the plan's (``engine/planner/traffic.py``).

The last rows have few large experts and twice as many ranks, as Mixtral 8x7B on 16 GPUs.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.tables import RESULTS, report
from epfsdp2.engine.config.settings import sharding_options
from epfsdp2.engine.model.meta import build_on_meta
from epfsdp2.engine.planner.memory import Batch
from epfsdp2.engine.planner.model_sizes import ModelSizes
from epfsdp2.engine.planner.traffic import Collective, collectives
from epfsdp2.engine.topology.mesh import divisors
from tests.support.engine.wire import Counted, counted_collectives
from tests.support.ranks import run_ranks
from tests.support.trainer.ppo import Sample, of_this_rank, ppo_batch, ppo_worker
from tests.support.trainer.verl_worker import training_worker

STOCK = "verl fsdp2"
Mesh = tuple[int, int]  # ep and etp
WORLDS, TOKENS, PER_RANK = (1, 2, 4), (256, 1024), 4
LARGE_VOCABULARY = 65536  # measured on two ranks with the most tokens
FEW_RANKS, FEW_TOKENS = 8, 64  # with few large experts
# Least speedups of an update over verl's. The first is with ep over all ranks and the fewest tokens.
FULL_EP_SPEEDUP, LEAST_SPEEDUP = 2.0, 0.95
ETP_SPEEDUP = 1.1  # over the same ep without etp
COLUMNS = ["ranks", "experts", "vocabulary", "tokens of a rank", "side", "log-probs s", "update s", "tokens/s"]
COLUMNS += ["of verl's", "of ep's", "wire MB", "plan MB"]
MODEL = {
    "vocab_size": 3072,
    "hidden_size": 256,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
FEW = MODEL | {"num_experts": 4, "moe_intermediate_size": 4096, "num_hidden_layers": 2}


@dataclass(frozen=True)
class Row:
    """Medians of one side; ``wire`` and ``plan`` are bytes of all ranks in an update."""

    world: int
    tokens: int  # of a rank
    side: str
    ep: int  # 0 for verl's
    log_probs: float
    update: float
    speedup: float  # over verl's, of the update
    wire: float
    plan: float
    vocabulary: int = MODEL["vocab_size"]
    experts: int = MODEL["num_experts"]
    etp: int = 1
    over_ep: float = 0.0  # of the update's speed, over the same ``ep`` without ``etp``; 0 without

    @property
    def tokens_per_second(self) -> float:
        return self.world * self.tokens / self.update

    @property
    def holds(self) -> bool:
        if self.etp > 1 and self.over_ep < ETP_SPEEDUP:
            return False
        gathers_most = self.ep * self.etp == self.world > 1 and self.tokens <= TOKENS[0]
        least = FULL_EP_SPEEDUP if gathers_most else LEAST_SPEEDUP
        return self.ep == 0 or self.speedup >= least


def samples_of(world: int, tokens: int, vocabulary: int) -> list[Sample]:
    """Return ``PER_RANK`` samples of different lengths for each rank, which together have ``tokens`` tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = [tokens // PER_RANK + change for change in _spread(tokens // (2 * PER_RANK))]
    lengths[-1] += tokens - sum(lengths)
    samples = []
    for length in lengths * world:
        before = length // 4
        ids = torch.randint(0, vocabulary, (length,), generator=generator)
        old = -8.0 - torch.rand(length - before, generator=generator)
        samples.append((ids, before, old, torch.randn(length - before, generator=generator)))
    return samples


def _spread(most: int) -> list[int]:
    return [most * (2 * i - PER_RANK + 1) // (PER_RANK - 1) for i in range(PER_RANK)]


def stock_worker(folder: Path, loss: Any) -> Any:
    """Return verl's worker with its own fsdp2 engine, in float32."""
    from verl.workers.config import FSDPEngineConfig

    engine = FSDPEngineConfig(
        strategy="fsdp2",
        mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"},
        use_torch_compile=False,
        use_dynamic_bsz=False,
        max_token_len_per_gpu=None,
        infer_max_token_len_per_gpu=None,
        micro_batch_size_per_gpu=PER_RANK,
        infer_micro_batch_size_per_gpu=PER_RANK,
    )
    with patch.dict(os.environ, VERL_ENGINE_DEVICE="cuda"):  # verl registers its engine for accelerators alone
        return training_worker(folder, "language_model", engine, loss)


def side_of(ep: int, etp: int) -> str:
    return f"ep {ep}" + (f" etp {etp}" if etp > 1 else "")


def measure(folder: Path, out: Path, meshes: Sequence[Mesh], tokens: Sequence[int], repeats: int) -> None:
    """Write from rank 0, for each number of tokens, seconds of each turn and bytes of all ranks by side."""
    world, config, figures = dist.get_world_size(), AutoConfig.from_pretrained(folder), []
    workers = {side_of(ep, etp): ppo_worker(folder, ep, micro_batch=PER_RANK, etp_size=etp) for ep, etp in meshes}
    ours = dict(workers)
    workers[STOCK] = stock_worker(folder, next(iter(workers.values())).loss_fn)
    for count in tokens:
        samples = samples_of(world, count, config.vocab_size)
        sides: dict[str, list[tuple[float, float]]] = {name: [] for name in workers}
        for turn in range(repeats + 1):
            names = [*workers][turn % len(workers) :] + [*workers][: turn % len(workers)]  # each is the first at times
            for name in names:
                sides[name].append(_step(workers[name], samples))
        wire = {name: _wire(worker, samples) for name, worker in workers.items()}
        planned = {name: _planned(folder, worker, count) for name, worker in ours.items()}
        for name, plan in planned.items():
            found = {kind: (counted.calls, counted.nbytes) for kind, counted in wire[name].items()}
            wanted = {c.name: (c.calls, world * c.nbytes) for c in plan}
            assert found == wanted, f"{world} ranks, {name}, {count} tokens: {found} is not {wanted}"
        received = {name: sum(c.wire for c in counted.values()) for name, counted in wire.items()}
        plans = {name: world * sum(c.wire for c in plan) for name, plan in planned.items()}
        turns = {name: found[1:] for name, found in sides.items()}
        figures.append({"seconds": turns, "wire": received, "plan": plans})
    if dist.get_rank() == 0:
        out.write_text(json.dumps(figures))


def _batch(worker: Any, samples: Sequence[Sample]) -> Any:
    longest = max(len(ids) - before for ids, before, *_ in samples)
    return ppo_batch(of_this_rank(worker, samples), len(samples), max(before for _, before, *_ in samples), longest)


def _step(worker: Any, samples: Sequence[Sample]) -> tuple[float, float]:
    """Return seconds of log-probs and of an update, until all ranks have ended."""
    from verl.utils import tensordict_utils as tu

    infer, train = _batch(worker, samples), _batch(worker, samples)
    tu.assign_non_tensor(infer, compute_loss=False)
    dist.barrier()
    began = time.monotonic()
    worker.infer_batch(infer)
    dist.barrier()
    half = time.monotonic()
    worker.train_batch(train)
    dist.barrier()
    return half - began, time.monotonic() - half


def _wire(worker: Any, samples: Sequence[Sample]) -> dict[str, Counted]:
    """Return the bytes that all ranks pass to collectives in an update, by kind.

    Routing is uneven between ranks, so that their sum is compared.
    """
    meshes = getattr(worker.engine, "meshes", None)  # verl's engine has other ones
    with counted_collectives(meshes and meshes.etp_group) as counted:
        worker.train_batch(_batch(worker, samples))
    everyone: list[dict[str, Counted]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, counted)
    return {
        kind: Counted(own.calls, sum(c[kind].nbytes for c in everyone), sum(c[kind].wire for c in everyone))
        for kind, own in counted.items()
    }


def _planned(folder: Path, worker: Any, tokens: int) -> list[Collective]:
    """Return the planned collectives of an update on one rank."""
    options = sharding_options(worker.engine.engine_config, worker.engine.model_config)
    config = AutoConfig.from_pretrained(folder)
    sizes = ModelSizes.built_by(partial(build_on_meta, AutoModelForCausalLM, config), options)
    return collectives(sizes, worker.engine.meshes.topology, options, Batch(tokens))


def run(
    model: dict[str, Any], world: int, eps: Sequence[int], tokens: Sequence[int], repeats: int, etp: int = 1
) -> list[Row]:
    """Measure both engines on a random model of these sizes; this engine with each ``ep``, without and with ``etp``."""
    meshes = [(ep, size) for ep in eps for size in sorted({1, etp}) if ep * size <= world]
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name) / "model", Path(name) / "figures.json"
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**model)).float().save_pretrained(folder)
        run_ranks(measure, world, folder, out, meshes, tokens, repeats, timeout=1800)
        figures = json.loads(out.read_text())
    rows = [row for count, found in zip(tokens, figures, strict=True) for row in rows_of(world, count, found)]
    return [replace(row, vocabulary=model["vocab_size"], experts=model["num_experts"]) for row in rows]


def rows_of(world: int, tokens: int, figures: dict[str, Any]) -> list[Row]:
    """Return medians and ratios within a turn, verl's row first."""
    seconds = figures["seconds"]
    rows = []
    for side in (STOCK, *(name for name in seconds if name != STOCK)):
        log_probs, update = (statistics.median(turn[part] for turn in seconds[side]) for part in (0, 1))
        speedup = statistics.median(v[1] / o[1] for v, o in zip(seconds[STOCK], seconds[side], strict=True))
        ep, etp = (0, 1) if side == STOCK else (int(size) for size in f"{side} etp 1".split()[1:4:2])
        wire, plan = figures["wire"][side], figures["plan"].get(side, 0)
        row = Row(world, tokens, side, ep, log_probs, update, speedup, wire, plan, etp=etp)
        if etp > 1:
            whole = seconds[side_of(ep, 1)]
            over = statistics.median(w[1] / o[1] for w, o in zip(whole, seconds[side], strict=True))
            row = replace(row, over_ep=over)
        rows.append(row)
    return rows


def share_of_experts(model: dict[str, Any]) -> float:
    """Return the share of a model's weights that are in experts."""
    with torch.device("meta"):
        parameters = dict(Qwen3MoeForCausalLM(Qwen3MoeConfig(**model)).named_parameters())
    experts = sum(p.numel() for name, p in parameters.items() if ".experts." in name)
    return experts / sum(p.numel() for p in parameters.values())


def cells(row: Row) -> list[str]:
    return [
        str(row.world),
        str(row.experts),
        str(row.vocabulary),
        str(row.tokens),
        row.side,
        f"{row.log_probs:.2f}",
        f"{row.update:.2f}",
        f"{row.tokens_per_second:.0f}",
        f"{row.speedup:.2f} x" + ("" if row.holds else " (below the bound)"),
        f"{row.over_ep:.2f} x" if row.etp > 1 else "",
        f"{row.wire / 1e6:.3f}",
        "" if row.ep == 0 else f"{row.plan / 1e6:.3f}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="turns that count")
    parser.add_argument("--worlds", type=int, nargs="*", default=WORLDS, help="ranks; fewer write no result file")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="of a rank in an update")
    parser.add_argument(
        "--large", action=argparse.BooleanOptionalAction, default=True, help=f"a vocabulary of {LARGE_VOCABULARY:,} too"
    )
    parser.add_argument(
        "--few", action=argparse.BooleanOptionalAction, default=True, help="few large experts, with etp, too"
    )
    asked = parser.parse_args()
    rows: list[Row] = []
    for world in asked.worlds:
        rows += run(MODEL, world, divisors(world), asked.tokens, asked.repeats)
        if world == 2 and asked.large:
            large = MODEL | {"vocab_size": LARGE_VOCABULARY}
            rows += run(large, world, [world], asked.tokens[-1:], asked.repeats)
    if asked.few:
        rows += run(FEW, FEW_RANKS, [FEW["num_experts"]], [FEW_TOKENS], asked.repeats, etp=2)
    text = [
        f"A Qwen3-MoE with {share_of_experts(MODEL):.1%} of its weights in experts, float32, activation checkpointing.",
        f"Sides take turns in the same processes: medians of {asked.repeats}, ratios within a turn, one thread a rank.",
        "Tokens/s: of an update, of all ranks. Wire: bytes that all ranks together receive in an update, counted.",
        "Plan: bytes by `engine/planner/traffic.py`, asserted to be the same by bytes and by calls.",
        f"The last rows have {FEW['num_experts']} experts with an inner size of {FEW['moe_intermediate_size']} on",
        f"{FEW_RANKS} ranks: with `ep` alone two ranks gather each expert, with `etp` they share it.",
        "Of ep's: tokens/s over those of the same `ep` without `etp`.",
        "",
        f"Bounds: `ep` over all ranks with {TOKENS[0]} tokens at least {FULL_EP_SPEEDUP} x, every other row at least",
        f"{LEAST_SPEEDUP} x verl's; `etp` at least {ETP_SPEEDUP} x `ep` alone.",
        "The time that EP saves does not grow with tokens, which both sides compute alike.",
    ]
    is_whole = (*asked.worlds,) == WORLDS and (*asked.tokens,) == TOKENS and asked.large and asked.few
    heading, folder = "The engine's step beside verl's fsdp2 engine", RESULTS if is_whole else None
    packages = ("torch", "verl", "transformers")
    report("step", heading, "make bench-step", packages, text, COLUMNS, [*map(cells, rows)], folder=folder)
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
