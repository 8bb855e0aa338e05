"""A trainer and a rollout of another torch world, process by process, and the parameters that workers should get."""

import asyncio
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.workers.config import RolloutConfig

from epfsdp2.engine.model.layers import layer_names
from epfsdp2.rollout.layout.slice_names import is_slice
from epfsdp2.rollout.layout.specs import Heads, Rollout
from epfsdp2.rollout.plan.transfer_plan import ROUND_BUFFERS
from epfsdp2.rollout.remote import checkpoint_engine
from epfsdp2.rollout.sync import RolloutSync, SyncSettings
from epfsdp2.rollout.vllm.server import EXTENSION
from tests.support.engine.sharded import sharded_model
from tests.support.models.tiny import reference_model
from tests.support.rollout.sent_slices import collected
from tests.support.rollout.units import worker_parameters

__all__ = ["Member", "check_equal", "taken"]


class Member:
    """One process: the first ``trainers`` ranks of a test are a trainer's, the others a rollout's.

    Args:
        seconds: longest wait for another member.
        limit: bytes of a round.

    Attributes:
        whole: the weights that the trainer starts with.
        crossed: bytes that each all-to-all carried from this trainer rank to the rollout.
    """

    trainers, tp = 2, 2
    mesh: tuple[int, int] = (2, -1)  # ``ep`` and ``fsdp_size``
    building: Mapping[str, Any] = {}  # further arguments of ``sharded_model``

    def __init__(self, folder: Path, seconds: float = 60.0, limit: int = 50_000):
        self.folder, self.seconds, self.limit = folder, seconds, limit
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.is_trainer = self.rank < self.trainers
        self.index = self.rank if self.is_trainer else self.rank - self.trainers
        self.facts, self.syncs = dist.FileStore(str(folder / "facts"), self.world), 0
        self.crossed: list[int] = []
        dist.barrier()  # because a rank that is still connecting fails if another one has left
        dist.destroy_process_group()
        dist.init_process_group(
            "cpu:gloo",
            init_method=f"file://{folder / ('trainer' if self.is_trainer else 'rollout')}",
            rank=self.index,
            world_size=self.trainers if self.is_trainer else self.world - self.trainers,
            timeout=timedelta(seconds=60),
        )
        checkpoint_engine._address = lambda: "127.0.0.1"
        self.new_engine()
        self.whole = dict(reference_model(folder / "model").named_parameters())
        if self.is_trainer:
            self.model, self.meshes = sharded_model(folder / "model", self.trainers, *self.mesh, **self.building)

    def new_engine(self) -> None:
        role = {"is_master": self.index == 0} if self.is_trainer else {}
        self.engine = CheckpointEngineRegistry.new(
            "epfsdp2_p2p", bucket_size=self.limit, timeout_seconds=self.seconds, **role
        )

    def connect(self) -> None:
        """Connect as verl's manager does before each sync."""
        self.syncs += 1
        self.facts.set(f"{self.syncs}/{self.rank}", pickle.dumps(self.engine.prepare()))
        metadata = [pickle.loads(self.facts.get(f"{self.syncs}/{rank}")) for rank in range(self.world)]
        both = self.engine.build_topology(self.trainers, self.world - self.trainers, metadata)
        kwargs = both[0 if self.is_trainer else 1]
        self.engine.init_process_group(**{name: values[self.index] for name, values in kwargs.items()})

    def finalize(self) -> None:
        """Finalize as verl's manager does after a sync in which all members succeeded."""
        self.meet()
        self.engine.finalize()

    def meet(self) -> None:
        """Wait for all members, because trainer rank 0's store has the cause of a failure."""
        self.facts.set(f"{self.syncs}/{self.rank} done", "")
        self.facts.wait([f"{self.syncs}/{rank} done" for rank in range(self.world)])

    def exporter(self, wanted: str = "auto", dtype: torch.dtype | None = None, verify: int = 0) -> RolloutSync:
        dtypes = {} if dtype is None else dict.fromkeys((name for name, _ in self.model.named_parameters()), dtype)
        settings = SyncSettings(wanted, ROUND_BUFFERS * self.limit, verify)
        return RolloutSync(self.model, self.meshes, layer_names(self.model), dtypes, settings)

    def send(self, weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, float]:
        return asyncio.run(self.engine.send_weights(weights))

    def receive(self, **settings: Any) -> Iterator[tuple[str, torch.Tensor]]:
        received = self.engine.receive_weights()
        return received.for_rollout(self.config(**settings), self.index % self.tp).tensors()

    def config(self, extension: str = EXTENSION, vllm: Mapping[str, Any] | None = None, **settings: Any) -> Any:
        engine_kwargs = {"vllm": {"worker_extension_cls": extension, **(vllm or {})}}
        return RolloutConfig(name="vllm", tensor_model_parallel_size=self.tp, engine_kwargs=engine_kwargs, **settings)

    def sync(self, weights: Callable[[], Iterable[tuple[str, torch.Tensor]]] | None = None, **settings: Any) -> Any:
        """Run a sync of ``weights()``; return the trainer's metrics, or a rollout rank's tensors."""
        self.connect()
        with self.counting():
            if self.is_trainer:
                got: Any = self.send(weights() if weights is not None else self.exporter().weights())
            else:
                got = taken(self.receive(**settings))
        self.finalize()
        return got

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count in ``crossed``, and check that no round exceeds its limit."""
        self.crossed, stock = [], dist.all_to_all_single

        def counting(received, sent, receive_splits, send_splits, group, **kwargs):
            assert max(received.numel(), sent.numel()) <= self.limit
            self.crossed.append(sum(send_splits[self.trainers :]))
            return stock(received, sent, receive_splits, send_splits, group=group, **kwargs)

        dist.all_to_all_single = counting
        try:
            yield
        finally:
            dist.all_to_all_single = stock

    def parameters(
        self,
        worker: int,
        factor: float = 1,
        rollout: Rollout | None = None,
        quantise: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Compute a worker's parameters from whole weights times ``factor``; in bfloat16 with ``quantise``."""
        heads = Heads.of(reference_model(self.folder / "model").config)
        whole = {name: (t * factor).detach() for name, t in self.whole.items()}
        if quantise is not None:
            whole = {name: t.bfloat16() for name, t in whole.items()}
        return worker_parameters(whole, rollout or Rollout(self.tp), worker, heads, quantise)


def taken(received: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collect full tensors, and a worker's parameters joined from their parts."""
    found: dict[str, torch.Tensor] = {}
    units: list[tuple[str, torch.Tensor]] = []
    for name, values in received:
        if is_slice(name):
            units.append((name, values.clone()))
        else:
            assert name not in found
            found[name] = values
    return {**found, **collected(iter(units))}


def check_equal(got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Check names, dtypes and bits."""
    assert got.keys() == wanted.keys()
    for name, values in wanted.items():
        found = got[name]
        assert (found.dtype, found.shape) == (values.dtype, values.shape), name
        assert torch.equal(found.contiguous().view(torch.uint8), values.contiguous().view(torch.uint8)), name
