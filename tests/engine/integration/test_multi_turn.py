"""Responses of several turns: a tool's answer is in the forward, not in the loss, and has routes to replay."""

import torch

from epfsdp2.engine.moe.find import find_experts
from epfsdp2.engine.moe.router.replay import RouterReplay
from tests.support.models.tiny import reference_model, relative_error, save_qwen3_moe
from tests.support.ranks import run_ranks
from tests.support.trainer.ppo import (
    of_this_rank,
    plain_ppo_loss,
    ppo_batch,
    ppo_samples,
    ppo_worker,
    watched_gradients,
)

RELATIVE = 1e-5
LAYERS, EXPERTS = 3, 8
CASES = [
    {"ep": 2, "activation_checkpointing": "full", "dispatch_chunks": 2},
    {"ep": 2, "ulysses_sequence_parallel_size": 2, "pad_to_length": True, "pad_to_length_bucket": 32},
]


def _turns(samples):
    """Return for each response which tokens the policy wrote.

    There are four kinds in turn: no tool; its answer between two turns; its answer at the end, where the response was
    cut off. The fourth has two answers, and its last turn has one token.
    """
    masks = []
    for i, (_, _, old, _) in enumerate(samples):
        mask = torch.ones(len(old), dtype=torch.bool)
        mask[[slice(0, 0), slice(1, len(old) - 1), slice(1, None), slice(1, len(old) - 1, 2)][i % 4]] = False
        masks.append(mask)
    return masks


def _routes(samples, masks):
    """Return routes of a rollout whose router chose otherwise; rows of the last token and unseen ones are zeros."""
    generator, routes = torch.Generator().manual_seed(5), []
    for (ids, prompt, *_), mask in zip(samples, masks, strict=True):
        scores = torch.rand(len(ids), LAYERS, EXPERTS, generator=generator)
        own = scores.topk(2).indices.to(torch.int16)
        own[prompt + int(mask.nonzero().max()) :] = 0
        routes.append(own)
    return routes


def _on_ranks(folder, cases):
    from verl.workers.config import EngineRouterReplayConfig

    samples = ppo_samples()
    masks = _turns(samples)
    routes = _routes(samples, masks)
    plain, logits = reference_model(folder), []
    replay = RouterReplay(plain, find_experts(plain), LAYERS)
    for (ids, *_), own in zip(samples, routes, strict=True):
        replay.replay(own)
        logits.append(plain(input_ids=ids[None], use_cache=False).logits[0])
    plain_ppo_loss(samples, logits, masks).backward()
    for settings in cases:
        worker = ppo_worker(folder, router_replay=EngineRouterReplayConfig(mode="R3"), **settings)
        seen = watched_gradients(worker, steps=False)
        batch = ppo_batch(of_this_rank(worker, samples), masks=of_this_rank(worker, masks))
        batch["routed_experts"] = torch.nested.as_nested_tensor(of_this_rank(worker, routes), layout=torch.jagged)
        worker.train_batch(batch)
        for name, param in plain.named_parameters():
            assert relative_error(seen[name], param.grad) < RELATIVE, (settings, name)


def test_update_of_turns_with_a_tool_equals_the_plain_model(tmp_path):
    run_ranks(_on_ranks, 2, save_qwen3_moe(tmp_path), CASES)
