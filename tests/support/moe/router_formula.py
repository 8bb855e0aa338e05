"""The routers' losses by their formula, token by token, from what a plain model's routers saw."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from epfsdp2.engine.moe.find import ExpertsInfo

__all__ = ["router_losses", "routers", "watched_routers"]

# Softmax, groups of experts, experts by token id, two maxima, a router inside of the block, one outside the interface.
_KINDS = ("qwen3_moe", "deepseek_v3", "deepseek_v4", "phimoe", "gpt_oss", "dbrx")


def routers(names: Iterable[str]) -> list[Any]:
    """Return families as parameters of a test, in which `make test` runs a family of each kind of router."""
    return [name if name in _KINDS else pytest.param(name, marks=pytest.mark.long) for name in names]


def router_losses(logits: torch.Tensor, ids: torch.Tensor, sigmoid: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the load-balancing loss and the z-loss of one layer.

    Args:
        logits: ``[tokens, E]``.
        ids: ``[tokens, K]``.
    """
    tokens, experts = logits.shape
    scores = logits.sigmoid() if sigmoid else logits.exp()
    probs = scores / scores.sum(-1, keepdim=True)
    aux = sum(experts * (ids == expert).sum() / tokens * probs[:, expert].sum() / tokens for expert in range(experts))
    return aux, torch.stack([row.exp().sum().log() ** 2 for row in logits]).mean()


@contextlib.contextmanager
def watched_routers(
    model: nn.Module, experts: Sequence[ExpertsInfo], sigmoid: bool
) -> Iterator[Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
    """Watch routers with a ``gate.weight``; yields a function that returns both losses, averaged over the layers, of
    all tokens of the forwards inside."""
    logits: dict[str, list[torch.Tensor]] = {info.fqn: [] for info in experts}
    ids: dict[str, list[torch.Tensor]] = {info.fqn: [] for info in experts}

    def arrive(info: Any, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        gate = model.get_submodule(info.fqn.rpartition(".")[0]).gate
        logits[info.fqn].append(args[0] @ gate.weight.T)
        ids[info.fqn].append(args[1])

    def losses() -> tuple[torch.Tensor, torch.Tensor]:
        pairs = [router_losses(torch.cat(logits[fqn]), torch.cat(ids[fqn]), sigmoid) for fqn in logits]
        return torch.stack([aux for aux, _ in pairs]).mean(), torch.stack([z for _, z in pairs]).mean()

    hooks = [info.module.register_forward_pre_hook(partial(arrive, info)) for info in experts]
    try:
        yield losses
    finally:
        for hook in hooks:
            hook.remove()
