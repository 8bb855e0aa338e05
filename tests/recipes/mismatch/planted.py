"""Rollouts of random tokens whose log-probs a model computed in a planted setup."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from epfsdp2.engine.moe.find import find_experts
from epfsdp2.engine.moe.router.replay import RouterReplay
from epfsdp2.recipes.mismatch.model import Setup, TrainerModel
from epfsdp2.recipes.mismatch.rollouts import Response
from tests.support.models.tiny import VOCAB, reference_model

__all__ = ["plant", "random_responses", "shuffled_routes"]


def random_responses(folder: Path, count: int = 12) -> list[Response]:
    """Return responses without log-probs, with the routes of the plain model in float32 if it has experts."""
    model, draw = reference_model(folder), torch.Generator().manual_seed(5)
    experts, found = find_experts(model), []
    replay = RouterReplay(model, experts, model.config.num_hidden_layers) if experts else None
    for i in range(count):
        ids = torch.randint(3, VOCAB, (1, 20 + 3 * i), generator=draw)
        if replay is not None:
            replay.record()
            with torch.no_grad():
                model(input_ids=ids, use_cache=False)
        routes = replay.recorded() if replay is not None else None
        sampled = torch.ones(ids.shape[1] - 6, dtype=torch.bool)
        sampled[2:4] = i % 2 == 0  # of a tool
        found.append(Response(ids[0, :6], ids[0, 6:], sampled, torch.zeros(len(sampled)), routes))
    return found


def shuffled_routes(responses: list[Response], share: float = 0.2, experts: int = 8) -> list[Response]:
    """Send a share of the tokens to other experts than the router's."""
    draw, changed = torch.Generator().manual_seed(6), []
    for r in responses:
        routes = r.routes.clone()
        for token in torch.nonzero(torch.rand(len(routes), generator=draw) < share)[:, 0]:
            for layer in range(routes.shape[1]):
                routes[token, layer] = torch.randperm(experts, generator=draw)[: routes.shape[2]].to(routes.dtype)
        changed.append(replace(r, routes=routes))
    return changed


def plant(
    folder: Path,
    setup: Setup,
    responses: list[Response],
    out: Path,
    previous: Path | None = None,
    trainer: Setup | None = None,
) -> Path:
    """Write responses as JSON Lines, with the log-probs that a setup computes.

    Args:
        trainer: adds noise, of 0.2 of the mean difference to this setup.
    """
    model = TrainerModel(folder, previous, "cpu", 256)
    (log_probs,) = model.log_probs([setup], responses)
    if trainer is not None:
        (plain,) = model.log_probs([trainer], responses)
        difference = (torch.cat(log_probs) - torch.cat(plain)).abs().mean().item()
        draw = torch.Generator().manual_seed(7)
        log_probs = [own + 0.2 * (difference or 0.01) * torch.randn(own.shape, generator=draw) for own in log_probs]
    rows = [
        {
            "prompts": r.prompt.tolist(),
            "responses": r.response.tolist(),
            "response_mask": r.is_sampled.int().tolist(),
            "rollout_log_probs": own.tolist(),
            **({} if r.routes is None else {"routed_experts": r.routes.tolist()}),
        }
        for r, own in zip(responses, log_probs, strict=True)
    ]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return out
