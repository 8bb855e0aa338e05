"""The frozen weights that a rollout has below its adapters, by their checksums."""

from typing import Any

from ..engine.errors import listed
from ..engine.lora.frozen_base import base_checksums, difference

__all__ = ["BaseChangedError", "SentBase"]


class BaseChangedError(RuntimeError):
    """The weights that a rollout was sent once, below its adapters, are others in the trainer now."""


class SentBase:
    """The frozen weights as the rollout has them, by their checksums.

    Args:
        model: sharded, with adapters.
    """

    def __init__(self, model: Any):
        self._model = model
        self._sent: dict[str, list[Any]] | None = None
        self._may_differ = False

    def record(self) -> None:
        """Remember the weights that are about to be sent; collective."""
        self._sent, self._may_differ = base_checksums(self._model), False

    def loaded(self) -> None:
        """Note that a checkpoint was loaded, which may have had other weights."""
        self._may_differ = True

    def check(self, wanted: bool) -> None:
        """Compare the weights with those that were sent, where that is wanted or a checkpoint was loaded; collective.

        Raises:
            BaseChangedError: they differ.
        """
        if self._sent is None:  # vLLM has read them from the model's checkpoint
            self.record()
        if not wanted and not self._may_differ:
            return
        changed = difference(self._sent or {}, base_checksums(self._model))
        if changed:
            raise BaseChangedError(
                f"the frozen weights have changed after they were sent to the rollout: {listed(changed)}. It is sent "
                "adapters alone; actor_rollout_ref.model.lora.merge=True sends the weights in every sync."
            )
        self._may_differ = False
