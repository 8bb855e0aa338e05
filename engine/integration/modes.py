"""What verl enters to train and to evaluate, and what FSDP2 is owed when it leaves."""

from typing import Any

from torch.distributed.fsdp import FSDPModule
from verl.workers.engine.fsdp.transformer_impl import EngineEvalModeCtx, EngineTrainModeCtx

from ..fsdp.reshard import reshard_all

__all__ = ["EvalMode", "TrainMode"]


class _Mode:
    """What both modes owe FSDP2 when they end."""

    engine: Any

    def _leave(self, exc_type) -> None:
        module = self.engine.module
        if exc_type is not None and isinstance(module, FSDPModule) and hasattr(module, "reset_iter_state"):
            # torch 2.13: after an error inside forward or backward FSDP's state is undefined until this is called.
            # Before the first forward there is none, which it fails at; what ended the mode is the error to see.
            try:
                module.reset_iter_state()
            except AttributeError as error:
                if error.name != "all_gather_state":
                    raise


class TrainMode(_Mode, EngineTrainModeCtx):
    def __exit__(self, exc_type, exc_value, traceback):
        self._leave(exc_type)
        super().__exit__(exc_type, exc_value, traceback)


class EvalMode(_Mode, EngineEvalModeCtx):
    def __exit__(self, exc_type, exc_value, traceback):
        self._leave(exc_type)
        # After a forward without a backward the root stays gathered, and without reshard_after_forward every layer.
        # verl reshards the root alone, and only where fsdp_size > 1 (fsdp/transformer_impl.py:1114; default -1).
        reshard_all(self.engine.module)
        super().__exit__(exc_type, exc_value, traceback)
