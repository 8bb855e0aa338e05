"""Shims for verl 0.9.1 where a strategy can't be registered; ``test_shims.py`` fails once verl no longer needs them."""

import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ..checkpoint.background import copied_to_host
from ..compat.wrap_function import wrap
from ..config.values import STRATEGY
from ..topology.dtensor import local_tensor

__all__ = ["TrainersMetric", "install", "restore", "save"]


class TrainersMetric(str):
    """The name of a metric that replaces one of the trainer's, for example ``training/rollout_probs_diff_max``.

    The trainer begins the names of an update's metrics with ``actor/``, unless they do (``rename_dict``).
    """

    __slots__ = ()

    def startswith(self, prefix: Any, *bounds: Any) -> bool:
        return prefix == "actor/" or super().startswith(prefix, *bounds)


def install() -> None:
    """Wrap verl's functions in the modules that this process has loaded; once per process."""
    if losses := sys.modules.get("verl.trainer.distillation.losses"):
        wrap(losses, "compute_topk_loss", _topk_loss)
    if workers := sys.modules.get("verl.experimental.separation.engine_workers"):
        wrap(workers.DetachActorWorker, "_get_strategy_handlers", _strategy_handlers)
    if tracking := sys.modules.get("verl.utils.tracking"):
        wrap(tracking.Tracking, "log", _mean_of_ranks)


def _topk_loss(stock: Any) -> Any:
    """Compute top-k distillation losses as for FSDP.

    ``compute_topk_loss`` raises for a strategy that it does not name, and reads whole logits, which this engine has
    (``trainer/distillation/losses.py``, line 137).
    """

    def compute_topk_loss(config: Any, *args: Any, **kwargs: Any) -> Any:
        # It reads only the strategy of the actor's config.
        return stock(SimpleNamespace(strategy="fsdp2") if config.strategy == STRATEGY else config, *args, **kwargs)

    return compute_topk_loss


def _strategy_handlers(stock: Any) -> Any:
    """Save and restore the weights of this engine in the worker of ``separate_async`` and the fully-async trainers.

    They compute old log-probs with one policy over several updates (``experimental/separation/engine_workers.py``).
    """

    def handlers(worker: Any) -> tuple[Any, Any]:
        engine = getattr(getattr(worker, "actor", None), "engine", None)
        if getattr(getattr(engine, "engine_config", None), "strategy", None) == STRATEGY:
            # verl's scripts set actor.strategy=fsdp2 whatever the engine is, and the worker reads it to restore.
            worker.config.actor.strategy = STRATEGY
        return (save, restore) if worker.config.actor.strategy == STRATEGY else stock(worker)

    return handlers


def _mean_of_ranks(stock: Any) -> Any:
    """Log the mean of an update's metrics, as the trainers of PPO do.

    ``sft_trainer`` logs the lists of ranks that ``TrainingWorker`` has gathered, and TensorBoard refuses those.
    """

    def log(tracking: Any, data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        lists = {name: value for name, value in data.items() if isinstance(value, list)}
        means = {f"train/{name}": torch.tensor(value).mean().item() for name, value in lists.items()}
        stock(tracking, {n: value for n, value in data.items() if n not in lists} | means, *args, **kwargs)

    return log


def save(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copy this rank's shards to the host."""
    return copied_to_host(_shards(model))


def restore(model: nn.Module, saved: dict[str, torch.Tensor]) -> None:
    """Copy the shards back that ``save`` returned."""
    with torch.no_grad():
        for name, shard in _shards(model).items():
            shard.copy_(saved[name])


def _shards(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: local_tensor(param).detach() for name, param in model.named_parameters()}
