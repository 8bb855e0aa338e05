"""Seconds of an update through verl's worker: packed rows beside other batches; printed, the cost of router replay."""

import json
import statistics
import time

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from epfsdp2.engine.integration import building
from tests.support.engine.memory import MODEL
from tests.support.models.tiny import reference_model
from tests.support.ranks import run_ranks
from tests.support.trainer.ppo import PADDED, of_this_rank, ppo_batch, ppo_samples, ppo_worker

pytestmark = pytest.mark.long
WORLD, PER_RANK, PROMPT, RESPONSE, TURNS = 2, 8, 64, 448, 7


def _routes(folder, samples):
    """Return the model's own routes, so that experts get as many tokens as without replay."""
    model, routes = reference_model(folder), []
    for ids, *_ in samples:
        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False, output_router_logits=True).router_logits
        routes.append(torch.stack([each.topk(MODEL["num_experts_per_tok"]).indices for each in logits], dim=1))
    return torch.nested.as_nested_tensor([each.to(torch.int16) for each in routes], layout=torch.jagged)


def _measure(folder, out):
    """Write from rank 0 the seconds of each turn by side; sides take turns, and the first turn does not count."""
    from verl.workers.config import EngineRouterReplayConfig

    samples = ppo_samples(WORLD * PER_RANK, PROMPT, RESPONSE)
    workers = {
        "packed": ppo_worker(folder, WORLD, micro_batch=PER_RANK),
        "padded": ppo_worker(folder, WORLD, micro_batch=PER_RANK, model=PADDED),
        "replay": ppo_worker(folder, WORLD, micro_batch=PER_RANK, router_replay=EngineRouterReplayConfig(mode="R3")),
    }
    with pytest.MonkeyPatch.context() as patch:  # transformers' mask of all pairs of a row
        patch.setattr(building, "PackedSequences", lambda module, longest: None)
        workers["one mask of the row"] = ppo_worker(folder, WORLD, micro_batch=PER_RANK)
    mine = of_this_rank(workers["packed"], samples)
    routes, seconds = _routes(folder, mine), {name: [] for name in workers}
    for _ in range(TURNS + 1):
        for name, worker in workers.items():
            batch = ppo_batch(mine, len(samples), PROMPT, RESPONSE)
            if name == "replay":
                batch["routed_experts"] = routes
            dist.barrier()
            began = time.monotonic()
            worker.train_batch(batch)
            dist.barrier()
            seconds[name].append(time.monotonic() - began)
    if dist.get_rank() == 0:
        out.write_text(json.dumps({name: took[1:] for name, took in seconds.items()}))


def test_update_of_packed_rows_is_faster_than_of_padded_ones_and_of_one_mask_of_the_row(tmp_path):
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**MODEL)).float().save_pretrained(tmp_path / "model")
    run_ranks(_measure, WORLD, tmp_path / "model", tmp_path / "seconds.json", timeout=1000)
    seconds = json.loads((tmp_path / "seconds.json").read_text())
    ratios = {
        name: statistics.median(t / p for t, p in zip(took, seconds["packed"], strict=True))
        for name, took in seconds.items()
    }
    print(ratios)
    assert ratios["padded"] > 1 and ratios["one mask of the row"] > 1, ratios
