"""One learning-rate schedule over the optimizers of a ``MultiOptimizer``."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .multi_optimizer import MultiOptimizer

__all__ = ["MultiLRScheduler"]


class MultiLRScheduler(LRScheduler):
    """Steps the schedulers of the inner optimizers as one scheduler.

    Like torch's ``ChainedScheduler`` it has no schedule of its own: all values are those of the inner schedulers, in
    the order of ``optimizer.param_groups``.

    Args:
        build: makes the scheduler of an inner optimizer, the same schedule for all.
    """

    def __init__(self, optimizer: MultiOptimizer, build: Callable[[Optimizer], LRScheduler]):
        self.optimizer = optimizer
        self.schedulers = {name: build(inner) for name, inner in optimizer.optimizers.items()}

    @property
    def last_epoch(self) -> int:  # type: ignore[override]
        """Number of steps so far, equal in all schedulers."""
        return next(iter(self.schedulers.values())).last_epoch

    def get_last_lr(self) -> list[Any]:
        """Return the learning rate of each of the optimizer's ``param_groups``."""
        return [lr for scheduler in self.schedulers.values() for lr in scheduler.get_last_lr()]

    def step(self) -> None:  # type: ignore[override]
        for scheduler in self.schedulers.values():
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each scheduler under its optimizer's name."""
        return {name: scheduler.state_dict() for name, scheduler in self.schedulers.items()}

    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise ``ValueError`` unless a state belongs to this run's optimizers."""
        if state_dict.keys() != self.schedulers.keys():
            raise ValueError(
                f"The saved schedule belongs to the optimizers {sorted(state_dict)}, but this run has "
                f"{sorted(self.schedulers)}. Leave extra out of checkpoint.load_contents to start a new schedule."
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that ``check_state_dict`` accepts, and set the optimizer's learning rates from it.

        torch's schedulers leave the rates to the optimizer's state. A run that does not load this state would take its
        first step with the initial rate.
        """
        for name, scheduler in self.schedulers.items():
            scheduler.load_state_dict(state_dict[name])
            for group, lr in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = lr
