"""What the trainer has to know of a rollout engine: one object for each, of ``rollout/<server>/server.py``."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn

from ...engine.compat import versions
from ...engine.model import hf_names
from .rollout_config import ROLLOUT, size_of
from .rules import Family
from .specs import Rollout, SyncMode

__all__ = ["Obstacle", "Server", "disaggregated"]


@dataclass(frozen=True)
class Obstacle:
    """A setting and its value that leave ``full`` as the only mode, with the reason and a value that would not."""

    setting: str
    value: object
    reason: str
    works: str


class Server:
    """A rollout engine that takes full tensors under the names of checkpoints, as every one of verl's does.

    A folder that knows more of its engine derives from this. Checks raise ``SettingError`` with the first setting that
    the server would refuse, or by which rollouts would be wrong, and a value that works.

    Args:
        name: verl's name of it, of its distribution, and of its folder here.
        title: how it is spelled.
    """

    install_hint = ""
    quantised: Mapping[str, re.Pattern[str]] = {}  # by family, the weights that it holds in FP8 or INT8 if asked to
    stacked_adapters: Collection[str] = frozenset()  # families whose experts it adapts by peft's stacks
    lacking: tuple[str, ...] = ()  # settings of adapters (``engine/lora/settings.py``) that it can't serve
    no_expert_adapters: tuple[str, ...] = ()  # devices for which it has no kernels for adapters of experts
    serves_adapters = False  # whether it takes adapters without the weights
    shares_memory = False  # whether tensors go through a bucket in /dev/shm where devices share no memory
    is_as_fast_in_full = False  # whether a worker that keeps the whole model loads full tensors as fast as slices

    def __init__(self, name: str, title: str = ""):
        self.name, self.title = name, title or name

    def install(self, timeout_seconds: float) -> None:
        """Make verl build this package's adapter of the server in this process; see ``servers.install``."""
        from verl.workers.rollout import base

        adapter = import_module(f"...{self.name}.adapter", __name__)
        adapter.Updates.timeout_seconds = timeout_seconds
        base._ROLLOUT_REGISTRY[(self.name, "async")] = f"{adapter.__name__}.Adapter"

    def families(self) -> Mapping[str, Family]:
        """Return how the installed release differs from the common rules, by family (``model_type``)."""
        return {}

    def known_families(self) -> Collection[str]:
        """Return the families whose layout in the installed release is known."""
        return self.families().keys()

    def unknown_layout(self) -> str:
        """Return why the layout of the installed release is unknown; empty if it is known, or none is installed."""
        return versions.untested(self.name)

    def named(
        self, model: Any, tensors: Iterable[tuple[str, torch.Tensor]], waiting: dict[str, torch.Tensor] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors under the names that the loader of this family takes; see ``hf_names.as_singles``."""
        return hf_names.as_singles(model, tensors, waiting)

    def rollout_of(self, config: Any) -> Rollout:
        """Read how one replica is sharded, and what its workers hold weights in, from verl's rollout config."""
        tp, dp = size_of(config, "tensor_model_parallel_size"), size_of(config, "data_parallel_size")
        return Rollout(tp, dp, size_of(config, "expert_parallel_size") > 1, server=self.name)

    def quantisation_settings(self, config: Any) -> list[tuple[str, object]]:
        """Return the settings, with their values, that make the server quantise the weights that it receives."""
        qat = config.get("qat")
        asked = {"quantization": config.get("quantization"), "qat.enable": qat is not None and qat.get("enable")}
        return [(f"{ROLLOUT}.{setting}", value) for setting, value in asked.items() if value]

    def obstacle(self, config: Any, family: str | None) -> Obstacle | None:
        """Return the first setting that leaves ``full`` as the only mode; ``family`` is None if not known yet."""

    def unknown_family(self, family: str | None, what: str) -> Obstacle | None:
        """Return the obstacle of a family whose layout is not known, ``what`` of which was not done."""
        known = self.known_families()
        reason = f"how {self.title} cuts it {what} (known: {', '.join(sorted(known))})."
        return None if family is None or family in known else Obstacle("actor_rollout_ref.model", family, reason, "")

    def check_settings(self, config: Any, model: nn.Module | None, requested: str, ranks: int, device: str) -> None:
        """Check settings and sizes for ``engine.rollout_sync=requested``; a model that is None skips what needs it.

        Args:
            ranks: number of trainer ranks, each of which feeds one worker; 0 where the workers are other processes.
        """

    def check_mode(self, config: Any, mode: SyncMode, reason: str, backend: str) -> None:
        """Check what this mode, which was chosen for the ``reason``, can't serve by this checkpoint-engine backend."""

    def longest_start(self, config: Any) -> Any:
        """Return the tokens of a sequence by which the server chooses rotations when it starts; None if it does not."""

    def check_rotations(self, kind: str, parameters: Mapping[str, Any], most: int, config: Any) -> int:
        """Check that the server rotates by frequencies of a sequence's length as the trainer does; return that length.

        ``kind`` is ``dynamic`` or ``longrope``, and ``most`` the model's ``max_position_embeddings``.
        """
        return most


def disaggregated(config: Any) -> Obstacle | None:
    """Return the obstacle of a replica whose workers are of two kinds; None for any other."""
    if not (config.get("disaggregation") or {}).get("enabled"):
        return None
    reason = "prefill and decode workers shard the model differently."
    return Obstacle(f"{ROLLOUT}.disaggregation.enabled", True, reason, "False")
