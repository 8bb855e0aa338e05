"""verl's own TrainingWorker around this engine, on this rank."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["optimizer_config", "training_worker"]


def optimizer_config(optimizer: str = "AdamW", clip_grad: float = 1e9, **override: Any) -> Any:
    """AdamW without clipping; ``override`` is what torch's takes besides the learning rate."""
    from verl.workers.config import FSDPOptimizerConfig

    return FSDPOptimizerConfig(
        optimizer=optimizer,
        lr=1e-3,
        clip_grad=clip_grad,
        total_training_steps=10,
        override_optimizer_config=override,
    )


def training_worker(
    folder: Path,
    model_type: str,
    engine: Any,
    loss: Any,
    saved: tuple[str, ...] = ("model", "optimizer", "extra"),
    in_background: bool = False,
    optimizer: Mapping[str, Any] | None = None,
    **model: Any,
) -> Any:
    """A worker with its model built and its loss set.

    Args:
        model_type: ``language_model`` or ``value_model``.
        engine: ``EPFSDP2EngineConfig``.
        loss: what verl's ``set_loss_fn`` takes.
        saved: contents of its checkpoints.
        in_background: whether it goes on while these are written.
        optimizer: arguments of ``optimizer_config``.
        model: verl's settings of the model.
    """
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig
    from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig

    model = {"override_config": {"attn_implementation": "sdpa"}, "load_tokenizer": False, **model}
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type=model_type,
            model_config=HFModelConfig(path=str(folder), **model),
            engine_config=engine,
            optimizer_config=optimizer_config(**(optimizer or {})),
            checkpoint_config=CheckpointConfig(
                save_contents=list(saved), load_contents=list(saved), async_save=in_background
            ),
        )
    )
    worker.reset()
    worker.set_loss_fn(loss)
    return worker
