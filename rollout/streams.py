"""What a trainer rank hands to the rollout: everything, or what the worker beside it keeps.

Iterated, the weights of a sync are the ``full`` stream, which every backend of verl takes. An adapter that knows where
its worker is asks for that worker's stream instead (``RolloutWeights.for_worker``).
"""

import contextlib
import logging
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from ..engine.mesh import Meshes
from ..engine.shards import persistent_buffers
from . import naming, stream
from .exchange import Exchange
from .placement import ANALYTIC, Heads, Need, Rollout, Stream, Tensor, needs
from .plan import Targets, make_plan
from .slices import placed
from .source import sharded_tensors

__all__ = ["RolloutSync", "RolloutWeights", "SyncSettings", "choose_stream", "for_this_worker", "obstacle"]

logger = logging.getLogger("epfsdp2")

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def choose_stream(wanted: str, family: str, rollout: Rollout, obstacle: str = "") -> tuple[Stream, str]:
    """The stream for a rollout, and why it is not a smaller one (empty if it is what was asked for).

    Args:
        wanted: the user's setting.
        family: ``model_type`` of the text config.
        obstacle: what about the rollout allows no other stream than ``full``; empty if nothing.
    """
    if wanted == "full":
        return "full", ""
    if not obstacle and family not in ANALYTIC:
        obstacle = f"how vLLM cuts a {family} is not known"
    if not obstacle and wanted == "expert_local" and not rollout.expert_parallel:
        obstacle = "vLLM runs without expert parallelism"
    if obstacle:
        return "full", obstacle
    if wanted != "auto":
        return cast(Stream, wanted), ""
    return "sliced", ""


def obstacle(config: Any, is_ours: bool) -> str:
    """What about verl's rollout config allows no other stream than ``full``; empty if nothing.

    Args:
        is_ours: whether vLLM's workers have our extension, which alone knows slices.
    """
    vllm = (config.get("engine_kwargs") or {}).get("vllm") or {}
    disaggregation = config.get("disaggregation")
    if not is_ours:
        return "engine_kwargs.vllm.worker_extension_cls is another one than epfsdp2's"
    if config.get("pipeline_model_parallel_size", 1) > 1:
        return "the rollout is pipeline-parallel"
    if vllm.get("enable_eplb"):
        return "vLLM moves experts to balance their load"
    if disaggregation is not None and disaggregation.get("enabled"):
        return "prefill and decode are on different workers"
    if config.get("quantization"):
        return "vLLM quantises the weights"
    return ""


def for_this_worker(weights: Any, config: Any, worker: int, is_ours: bool) -> Iterable[tuple[str, torch.Tensor]]:
    """What the worker with this index in its replica is sent, of weights that may be anybody's.

    Args:
        config: verl's rollout config.
    """
    if not isinstance(weights, RolloutWeights):
        return weights
    rollout = Rollout(
        config.tensor_model_parallel_size, config.data_parallel_size, config.get("expert_parallel_size", 1) > 1
    )
    kind, reason = choose_stream(weights.wanted, weights.family, rollout, obstacle(config, is_ours))
    if reason and dist.get_rank() == 0:
        logger.warning("epfsdp2: engine.rollout_sync=%s: full stream, since %s", weights.wanted, reason)
    return weights.for_worker(kind, rollout, worker)


@dataclass(frozen=True)
class SyncSettings:
    """Bounds in bytes: of one gather of the full stream, and of what a rank sends, or receives, in one round."""

    wanted: str
    gather_bytes: int
    round_bytes: int


class RolloutSync:
    """An engine's side of all its syncs; plans are made once per placement.

    Args:
        model: sharded.
        layers: FQNs of its layers.
        dtypes: in which parameters are sent (``parallelize.compute_dtypes``).
    """

    def __init__(
        self,
        model: Any,
        meshes: Meshes,
        layers: list[str],
        dtypes: Mapping[str, torch.dtype],
        settings: SyncSettings,
    ):
        self.model, self.meshes, self.layers, self.settings = model, meshes, layers, settings
        stored = {name: p.dtype for name, p in model.named_parameters()}
        self.dtypes = {name: stream.narrower(dtype, dtypes.get(name)) for name, dtype in stored.items()}
        self.dtypes |= {name: buffer.dtype for name, buffer in persistent_buffers(model).items()}
        self._heads = Heads.of(model.config.get_text_config())
        self._exchanges: dict[tuple[Stream, Rollout, int], Exchange] = {}

    def weights(self) -> "RolloutWeights":
        """The weights of one sync."""
        return RolloutWeights(self)

    def full(self) -> Iterator[tuple[str, torch.Tensor]]:
        arriving = self._gathered()
        with contextlib.closing(arriving):
            yield from naming.for_vllm(self.model, ((tensor.name, tensor.assembled()) for tensor in arriving))

    def _gathered(self) -> Generator[stream.Gathered, None, None]:
        return stream.gathered(self.model, self.meshes, self.layers, self.settings.gather_bytes, self.dtypes)

    def _state(self) -> dict[str, torch.Tensor]:
        return {**dict(self.model.named_parameters()), **persistent_buffers(self.model)}

    def exchange(self, kind: Stream, rollout: Rollout, worker: int) -> Exchange:
        """The exchange that feeds ``worker`` of each replica; collective only when it is run."""
        key = (kind, rollout, worker)
        if key not in self._exchanges:
            world = dist.get_world_size()

            def needs_of(tensor: Tensor, index: int) -> list[Need]:
                return needs(tensor, rollout, index % rollout.workers, self._heads, kind)

            plan = make_plan(
                sharded_tensors(self.model, {name: dtype.itemsize for name, dtype in self.dtypes.items()}),
                self.layers,
                self.meshes.topology,
                Targets(world),
                needs_of,
                self.settings.round_bytes,
            )
            device = self.meshes.dense.device_type
            self._exchanges[key] = Exchange(plan, lambda tensor: needs_of(tensor, worker), dist.get_rank(), device)
        return self._exchanges[key]

    def for_worker(self, kind: Stream, rollout: Rollout, worker: int) -> Iterator[tuple[str, torch.Tensor]]:
        if kind == "full":
            yield from self.full()
        elif kind == "expert_local":
            yield from self._expert_local(rollout, worker)
        elif rollout.workers == 1:
            yield from self._placed_gathers(rollout, worker)
        else:
            yield from self._slices(rollout, worker)

    def _expert_local(self, rollout: Rollout, worker: int) -> Iterator[tuple[str, torch.Tensor]]:
        whole = self.exchange("expert_local", rollout, worker).assembled(self._state(), self.dtypes)
        with contextlib.closing(whole):
            for name, need, values in whole:
                yield from self._local_experts(name, need, values)

    def _slices(self, rollout: Rollout, worker: int) -> Iterator[tuple[str, torch.Tensor]]:
        arriving = self.exchange("sliced", rollout, worker).run(self._state(), self.dtypes)
        with contextlib.closing(arriving):
            for arrival in arriving:
                yield from placed(arrival.box, arrival.values, self._needs(arrival.tensor, rollout, worker))

    def _placed_gathers(self, rollout: Rollout, worker: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The slices of a worker that keeps everything: gathers cross a node's border once, where rounds would for
        each of its ranks."""
        arriving = self._gathered()
        with contextlib.closing(arriving):
            for whole in arriving:
                tensor = Tensor(whole.name, tuple(whole.shape), self.dtypes[whole.name].itemsize)
                for box, values in whole.shards:
                    yield from placed(box, values, self._needs(tensor, rollout, worker))

    def _needs(self, tensor: Tensor, rollout: Rollout, worker: int) -> list[Need]:
        return needs(tensor, rollout, worker, self._heads, "sliced")

    def _local_experts(self, name: str, need: Need, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Names of a checkpoint, experts one by one: vLLM would take a part of a stack for its first experts."""
        first = need.box.low[0] if need.box.low else 0
        for own, tensor in naming.as_checkpoint(self.model, [(name, values)]):
            expert = _EXPERT.search(own)
            yield own.replace(expert[0], f".experts.{int(expert[1]) + first}.") if expert else own, tensor


class RolloutWeights:
    """The weights of one sync. Iterating is collective, and so is the iterator of ``for_worker``; use one of them."""

    def __init__(self, sync: RolloutSync):
        self._sync = sync

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._sync.full()

    @property
    def family(self) -> str:
        """``model_type`` of the model."""
        return self._sync.model.config.get_text_config().model_type

    @property
    def wanted(self) -> str:
        """The user's ``engine.rollout_sync``."""
        return self._sync.settings.wanted

    def for_worker(self, kind: Stream, rollout: Rollout, worker: int) -> Iterator[tuple[str, torch.Tensor]]:
        """What the worker with this index in its replica takes."""
        return self._sync.for_worker(kind, rollout, worker)
