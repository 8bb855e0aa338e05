"""The trainer's knowledge of a rollout engine; ``rollout/<server>/server.py`` has one object for each."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn

from ...engine.errors import SettingError
from ...engine.model import hf_names
from .rollout_config import ROLLOUT, size_of
from .rules import Family
from .specs import Rollout, SyncMode

__all__ = ["Server", "disaggregated"]


class Server:
    """A rollout engine of verl's that loads full tensors under the names of checkpoints.

    A folder with a known layout has a subclass. Checks raise ``SettingError`` with the first setting that the server
    would refuse, or that makes rollouts wrong, and a value that works. verl, the server's distribution and its folder
    here have the same ``name``.
    """

    install_hint = ""
    quantised: Mapping[str, re.Pattern[str]] = {}  # by family, names of weights that a quantised rollout quantises
    stacked_adapters: Collection[str] = frozenset()  # families whose experts have adapters in peft's stacks
    lacking: tuple[str, ...] = ()  # adapter settings (``engine/lora/settings.py``) without support
    no_expert_adapters: tuple[str, ...] = ()  # devices without kernels for adapters of experts
    serves_adapters = False  # whether adapters load without the weights
    has_known_drafters = False  # whether the layout of multi-token prediction layers is known
    unknown_drafters: Collection[str] = frozenset()  # families whose drafter's layout is not known
    writes_times_of_frames = False  # whether it writes those of videos into prompts that have them
    shares_memory = False  # whether tensors pass through a bucket in /dev/shm if devices share no memory
    is_as_fast_in_full = False  # whether a worker that keeps the whole model loads full tensors as fast as slices

    def __init__(self, name: str, title: str = ""):
        self.name, self.title = name, title or name

    def install(self, timeout_seconds: float) -> None:
        """Register this package's adapter of the server with verl; see ``servers.install``."""
        from verl.workers.rollout import base

        adapter = import_module(f"...{self.name}.adapter", __name__)
        adapter.Updates.timeout_seconds = timeout_seconds
        base._ROLLOUT_REGISTRY[(self.name, "async")] = f"{adapter.__name__}.Adapter"

    def families(self) -> Mapping[str, Family]:
        """Return the layout differences of the installed release, by family (``model_type``)."""
        return {}

    def known_families(self) -> Collection[str]:
        """Return the families whose layout in the installed release is known."""
        return self.families().keys()

    def named(
        self, model: Any, tensors: Iterable[tuple[str, torch.Tensor]], waiting: dict[str, torch.Tensor] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors under the names of this family's loader; see ``hf_names.as_singles``."""
        return hf_names.as_singles(model, tensors, waiting)

    def rollout_of(self, config: Any) -> Rollout:
        """Read one replica's parallel sizes and quantisation from verl's rollout config."""
        tp, dp = size_of(config, "tensor_model_parallel_size"), size_of(config, "data_parallel_size")
        return Rollout(tp, dp, size_of(config, "expert_parallel_size") > 1, server=self.name)

    def quantisation_settings(self, config: Any) -> list[tuple[str, object]]:
        """Return the settings, with values, that make the server quantise received weights."""
        qat = config.get("qat")
        settings = {"quantization": config.get("quantization"), "qat.enable": qat is not None and qat.get("enable")}
        return [(f"{ROLLOUT}.{setting}", value) for setting, value in settings.items() if value]

    def obstacle(self, config: Any, family: str | None) -> SettingError | None:
        """Return the error of the first setting that rules out ``sliced``; ``family`` is None if not known yet."""

    def unknown_family(self, family: str | None, what: str) -> SettingError | None:
        """Return the error of a family without a known layout; ``what`` ends its rule, e.g. "is not known"."""
        known = self.known_families()
        reason = f"how {self.title} cuts it {what} (known: {', '.join(sorted(known))})."
        return (
            None if family is None or family in known else SettingError("actor_rollout_ref.model", family, reason, "")
        )

    def check_settings(self, config: Any, model: nn.Module | None, requested: str, ranks: int, device: str) -> None:
        """Check settings and sizes for ``engine.rollout_sync=requested``.

        Args:
            model: None skips the checks of its sizes.
            ranks: number of trainer ranks beside workers; 0 if the workers are other processes.
        """

    def check_mode(self, config: Any, mode: SyncMode, reason: str, backend: str) -> None:
        """Check the chosen mode, with the ``reason`` of a fall-back, against a checkpoint-engine backend."""

    def longest_start(self, config: Any) -> Any:
        """Return the sequence length that decides the server's rotary frequencies at start; None if none does."""

    def check_rotations(self, kind: str, parameters: Mapping[str, Any], most: int, config: Any) -> int:
        """Check length-dependent rotary frequencies against the trainer's; return the sequence length they hold for.

        ``kind`` is ``dynamic`` or ``longrope``, ``most`` the model's ``max_position_embeddings``.
        """
        return most


def disaggregated(config: Any) -> SettingError | None:
    """Return the error of a replica with prefill and decode workers; None for other replicas."""
    if not (config.get("disaggregation") or {}).get("enabled"):
        return None
    reason = "prefill and decode workers shard the model differently."
    return SettingError(f"{ROLLOUT}.disaggregation.enabled", True, reason, "False")
