"""Shim: verl 0.9.1 keeps a table of strategies in ``DetachActorWorker``, and refuses one that is not in it.

The worker of ``separate_async`` and of the fully-async trainers saves the weights to the host and restores them, so
that old log-probs come from one policy over several updates (``experimental/separation/engine_workers.py``,
``_get_strategy_handlers``). There is no way to register a strategy, so its method gets a wrapper that knows this one.
``test_separation_shim.py`` fails when upstream no longer needs it.
"""

import sys
from functools import wraps
from typing import Any

import torch
from torch import nn

from ...checkpoint.background import copied_to_host
from ...config.values import STRATEGY
from ...topology.dtensor import local_tensor

__all__ = ["install", "restore", "save"]

_MODULE = "verl.experimental.separation.engine_workers"


def install() -> None:
    """Wrap the worker's method, once per process, where this process is such a worker's."""
    module = sys.modules.get(_MODULE)
    if module is None or hasattr(module.DetachActorWorker._get_strategy_handlers, "__wrapped__"):
        return
    stock = module.DetachActorWorker._get_strategy_handlers

    @wraps(stock)
    def handlers(worker: Any) -> tuple[Any, Any]:
        engine = getattr(getattr(worker, "actor", None), "engine", None)
        if getattr(getattr(engine, "engine_config", None), "strategy", None) == STRATEGY:
            # verl's scripts set actor.strategy=fsdp2 whatever the engine is, and the worker reads it when it restores.
            worker.config.actor.strategy = STRATEGY
        return (save, restore) if worker.config.actor.strategy == STRATEGY else stock(worker)

    module.DetachActorWorker._get_strategy_handlers = handlers


def save(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copy this rank's shards to the host."""
    return copied_to_host(_shards(model))


def restore(model: nn.Module, saved: dict[str, torch.Tensor]) -> None:
    """Put the shards back that ``save`` copied."""
    with torch.no_grad():
        for name, shard in _shards(model).items():
            shard.copy_(saved[name])


def _shards(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: local_tensor(param).detach() for name, param in model.named_parameters()}
