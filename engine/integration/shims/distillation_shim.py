"""Shim: verl 0.9.1 computes top-k distillation losses for strategies that it names, and raises for any other.

``compute_topk_loss`` reads logits that an engine has whole, so FSDP's are right here too
(``trainer/distillation/losses.py``, 137). There is no way to register a strategy, so the function gets a wrapper that
calls it under FSDP's name. ``test_distillation_shim.py`` fails when upstream no longer needs it.
"""

import sys
from functools import wraps
from types import SimpleNamespace
from typing import Any

from ...config.values import STRATEGY

__all__ = ["install"]

_MODULE = "verl.trainer.distillation.losses"


def install() -> None:
    """Wrap verl's function, once per process, where this process has loaded it: a loss of it has."""
    module: Any = sys.modules.get(_MODULE)
    if module is None or hasattr(module.compute_topk_loss, "__wrapped__"):
        return
    stock = module.compute_topk_loss

    @wraps(stock)
    def compute_topk_loss(config: Any, *args: Any, **kwargs: Any) -> Any:
        # Of the actor's config it reads the strategy alone.
        return stock(SimpleNamespace(strategy="fsdp2") if config.strategy == STRATEGY else config, *args, **kwargs)

    module.compute_topk_loss = compute_topk_loss
