"""Log-probs and an update of this engine beside verl's stock fsdp2 engine, over ranks and ``ep``.

    python -m benchmarks.update.step [--repeats 5] [--worlds 1 2 4]

Both engines run in verl's own worker in the same processes, on the same checkpoint, batch and loss. They compute in
float32 with activation checkpointing, verl's default. The model is a Qwen3-MoE with 95 % of its weights in experts, of
which a token uses one in sixteen, as in Qwen3-30B-A3B. Bytes on the wire are counted in one more update, and have to
equal the plan's (``engine/planner/traffic.py``).

Some rows have few large experts and twice as many ranks, as Mixtral 8x7B on 16 GPUs. The last compare packed rows with
padded ones, with one mask for the whole row, with replayed routes, and with ``engine.batch_invariant``.
"""

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks.measure import figures_of, in_turns, median_ratio, options, random_checkpoint, seconds_on_ranks
from benchmarks.tables import RESULTS, judged, report
from epfsdp2.engine.config.settings import sharding_options
from epfsdp2.engine.integration import building
from epfsdp2.engine.model.meta import build_on_meta
from epfsdp2.engine.planner.memory import Batch
from epfsdp2.engine.planner.model_sizes import ModelSizes
from epfsdp2.engine.planner.traffic import Collective, collectives
from epfsdp2.engine.topology.mesh import divisors
from tests.support.engine.wire import Counted, counted_collectives
from tests.support.models.tiny import reference_model
from tests.support.trainer.ppo import PADDED, Sample, of_this_rank, ppo_batch, ppo_worker
from tests.support.trainer.verl_worker import training_worker

STOCK = "verl fsdp2"
WORLDS, TOKENS, PER_RANK = (1, 2, 4), (256, 1024), 4
LARGE_VOCABULARY = 65536  # measured on two ranks with the most tokens
FEW_RANKS, FEW_TOKENS = 8, 64  # with few large experts
# Least speedups of an update over verl's. The first is with ep over all ranks and the fewest tokens.
FULL_EP_SPEEDUP, LEAST_SPEEDUP = 2.0, 0.95
ETP_SPEEDUP = 1.1  # over the same ep without etp
BATCHES = ("packed", "padded", "one mask", "replay", "batch_invariant")
MOST_INVARIANT = 1.1  # x the seconds of packed rows
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


def samples_of(world: int, tokens: int, vocabulary: int) -> list[Sample]:
    """Return ``PER_RANK`` samples of different lengths for each rank, which together have ``tokens`` tokens."""
    generator, most = torch.Generator().manual_seed(0), tokens // (2 * PER_RANK)
    lengths = [tokens // PER_RANK + most * (2 * i - PER_RANK + 1) // (PER_RANK - 1) for i in range(PER_RANK)]
    lengths[-1] += tokens - sum(lengths)
    samples = []
    for length in lengths * world:
        before = length // 4
        ids = torch.randint(0, vocabulary, (length,), generator=generator)
        old = -8.0 - torch.rand(length - before, generator=generator)
        samples.append((ids, before, old, torch.randn(length - before, generator=generator)))
    return samples


def _stock_worker(folder: Path, loss: Any) -> Any:
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
    with mock.patch.dict(os.environ, VERL_ENGINE_DEVICE="cuda"):  # verl registers its engine for accelerators alone
        return training_worker(folder, "language_model", engine, loss)


def _side(ep: int, etp: int) -> str:
    return f"ep {ep}" + (f" etp {etp}" if etp > 1 else "")


def _measure(folder: Path, meshes: Sequence[tuple[int, int]], tokens: Sequence[int], repeats: int) -> list[dict]:
    """Return for each number of tokens the seconds of each turn, and the bytes of all ranks, by side."""
    world, config, figures = dist.get_world_size(), AutoConfig.from_pretrained(folder), []
    ours = {_side(ep, etp): ppo_worker(folder, ep, micro_batch=PER_RANK, etp_size=etp) for ep, etp in meshes}
    workers = ours | {STOCK: _stock_worker(folder, next(iter(ours.values())).loss_fn)}
    for count in tokens:
        samples = samples_of(world, count, config.vocab_size)
        turns = in_turns({name: partial(_step, worker, samples) for name, worker in workers.items()}, repeats)
        wire = {name: _wire(worker, samples) for name, worker in workers.items()}
        planned = {name: _planned(folder, worker, count) for name, worker in ours.items()}
        for name, plan in planned.items():
            found = {kind: (counted.calls, counted.nbytes) for kind, counted in wire[name].items()}
            wanted = {c.name: (c.calls, world * c.nbytes) for c in plan}
            assert found == wanted, f"{world} ranks, {name}, {count} tokens: {found} is not {wanted}"
        received = {name: sum(c.wire for c in counted.values()) for name, counted in wire.items()}
        plans = {name: world * sum(c.wire for c in plan) for name, plan in planned.items()}
        figures.append({"seconds": turns, "wire": received, "plan": plans})
    return figures


def _batch(worker: Any, samples: Sequence[Sample]) -> Any:
    longest = max(len(ids) - before for ids, before, *_ in samples)
    return ppo_batch(of_this_rank(worker, samples), len(samples), max(before for _, before, *_ in samples), longest)


def _step(worker: Any, samples: Sequence[Sample]) -> tuple[float, float]:
    """Return seconds of log-probs and of an update."""
    from verl.utils import tensordict_utils as tu

    infer, train = _batch(worker, samples), _batch(worker, samples)
    tu.assign_non_tensor(infer, compute_loss=False)
    return seconds_on_ranks(partial(worker.infer_batch, infer)), seconds_on_ranks(partial(worker.train_batch, train))


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
    sharding = sharding_options(worker.engine.engine_config, worker.engine.model_config)
    config = AutoConfig.from_pretrained(folder)
    sizes = ModelSizes.built_by(partial(build_on_meta, AutoModelForCausalLM, config), sharding)
    return collectives(sizes, worker.engine.meshes.topology, sharding, Batch(tokens))


def run(
    model: dict[str, Any], world: int, eps: Sequence[int], tokens: Sequence[int], repeats: int, etp: int = 1
) -> list[dict[str, str]]:
    """Return a row for each side: verl's engine, and this engine with each ``ep``, without and with ``etp``."""
    meshes = [(ep, size) for ep in eps for size in sorted({1, etp}) if ep * size <= world]
    with random_checkpoint("qwen3_moe", model) as folder:
        figures = figures_of(_measure, world, folder, meshes, tokens, repeats)
    return [
        _row(model, world, count, ep, size, found)
        for count, found in zip(tokens, figures, strict=True)
        for ep, size in [(0, 1), *meshes]
    ]


def _row(model: dict[str, Any], world: int, tokens: int, ep: int, etp: int, found: dict) -> dict[str, str]:
    """Return the row of this engine with ``ep``, or of verl's if that is 0."""
    side = _side(ep, etp) if ep else STOCK
    log_probs, updates = zip(*found["seconds"][side], strict=True)
    stock = [update for _, update in found["seconds"][STOCK]]
    speedup, over_ep = median_ratio(stock, updates), 0.0
    least = FULL_EP_SPEEDUP if ep * etp == world > 1 and tokens <= TOKENS[0] else LEAST_SPEEDUP
    if etp > 1:
        over_ep = median_ratio([update for _, update in found["seconds"][_side(ep, 1)]], updates)
    return {
        "ranks": str(world),
        "experts": str(model["num_experts"]),
        "vocabulary": str(model["vocab_size"]),
        "tokens of a rank": str(tokens),
        "side": side,
        "log-probs s": f"{median(log_probs):.2f}",
        "update s": f"{median(updates):.2f}",
        "tokens/s": f"{world * tokens / median(updates):.0f}",
        "of verl's": f"{speedup:.2f} x",
        "of ep's": f"{over_ep:.2f} x" if etp > 1 else "",
        "wire MB": f"{found['wire'][side] / 1e6:.3f}",
        "plan MB": f"{found['plan'][side] / 1e6:.3f}" if ep else "",
        **judged((speedup >= least and (etp == 1 or over_ep >= ETP_SPEEDUP)) if ep else None),
    }


def _measure_batches(folder: Path, repeats: int) -> dict[str, list[float]]:
    """Return seconds of updates of the same samples as different batches."""
    from verl.workers.config import EngineRouterReplayConfig

    world, config = dist.get_world_size(), AutoConfig.from_pretrained(folder)
    build = partial(ppo_worker, folder, world, micro_batch=PER_RANK)
    workers = {"packed": build(), "padded": build(model=PADDED)}
    with mock.patch.object(building, "PackedSequences", lambda module, longest: None):  # transformers' own mask
        workers["one mask"] = build()
    workers["batch_invariant"] = build(batch_invariant=True)
    workers["replay"] = build(router_replay=EngineRouterReplayConfig(mode="R3"))
    samples = samples_of(world, TOKENS[-1], config.vocab_size)
    model, routes = reference_model(folder), []
    for ids, *_ in of_this_rank(workers["packed"], samples):  # the model's own routes: experts get as many tokens
        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False, output_router_logits=True).router_logits
        chosen = [each.topk(config.num_experts_per_tok).indices for each in logits]
        routes.append(torch.stack(chosen, dim=1).to(torch.int16))
    recorded = torch.nested.as_nested_tensor(routes, layout=torch.jagged)

    def update(name: str) -> float:
        batch = _batch(workers[name], samples)
        if name == "replay":
            batch["routed_experts"] = recorded
        return seconds_on_ranks(partial(workers[name].train_batch, batch))

    return in_turns({name: partial(update, name) for name in workers}, repeats)


def batch_rows(model: dict[str, Any], repeats: int) -> dict[str, float]:
    """Return for each kind of batch its update's seconds over those of packed rows."""
    with random_checkpoint("qwen3_moe", model) as folder:
        seconds = figures_of(_measure_batches, 2, folder, repeats)
    return {name: median_ratio(seconds[name], seconds["packed"]) for name in BATCHES}


def share_of_experts(model: dict[str, Any]) -> float:
    """Return the share of a model's weights that are in experts."""
    plain = build_on_meta(AutoModelForCausalLM, Qwen3MoeConfig(**model), torch.float32)
    sizes = {name: p.numel() for name, p in plain.named_parameters()}
    return sum(size for name, size in sizes.items() if ".experts." in name) / sum(sizes.values())


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--worlds", type=int, nargs="*", default=WORLDS, help="ranks; fewer write no result file")
    asked = parser.parse_args()
    is_whole = (*asked.worlds,) == WORLDS
    rows = []
    for world in asked.worlds:
        rows += run(MODEL, world, divisors(world), TOKENS, asked.repeats)
    below, is_dear = [], False
    if is_whole:
        rows += run(MODEL | {"vocab_size": LARGE_VOCABULARY}, 2, [2], TOKENS[-1:], asked.repeats)
        rows += run(FEW, FEW_RANKS, [FEW["num_experts"]], [FEW_TOKENS], asked.repeats, etp=2)
        ratios = batch_rows(MODEL, asked.repeats)
        is_dear = ratios["batch_invariant"] > MOST_INVARIANT
        below = ["", "Seconds of an update over those of packed rows, two ranks, `ep` 2:", ""]
        below += [f"* {name}: {ratio:.2f} x" for name, ratio in ratios.items()]
        below += ["", f"`batch_invariant` may take {MOST_INVARIANT} x."]
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
    heading, folder = "The engine's step beside verl's fsdp2 engine", RESULTS if is_whole else None
    packages = ("torch", "verl", "transformers")
    return report("step", heading, "make bench-step", packages, text, rows, below, folder) or int(is_dear)


if __name__ == "__main__":
    sys.exit(main())
