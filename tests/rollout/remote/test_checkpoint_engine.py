"""The checkpoint engine between a trainer's ranks and rollout ranks of another torch world."""

import asyncio
import os
import pickle
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.workers.config import RolloutConfig

from epfsdp2.engine.lora.adapters import A, B, Lora, lora_of
from epfsdp2.engine.lora.rollout_names import RolloutNames
from epfsdp2.engine.model import hf_names
from epfsdp2.engine.model.layers import layer_names
from epfsdp2.engine.preflight.rollout import tensors_before_sharding
from epfsdp2.engine.topology.dtensor import is_adapter
from epfsdp2.engine.topology.mesh import Topology
from epfsdp2.rollout.layout.slice_names import is_slice, parse_slice, slice_name
from epfsdp2.rollout.layout.specs import Heads, Rollout
from epfsdp2.rollout.remote import checkpoint_engine
from epfsdp2.rollout.servers import target_slices
from epfsdp2.rollout.sync import RolloutSync, SyncSettings
from epfsdp2.rollout.transport.watched_sockets import WeightSyncError
from epfsdp2.rollout.vllm.names import ADAPTED_AS_STACKS
from epfsdp2.rollout.vllm.server import EXTENSION
from tests.support.engine.lora import lora_settings, stirred
from tests.support.engine.sharded import sharded_model
from tests.support.models.tiny import reference_model, save_qwen3_moe
from tests.support.ranks import run_ranks

TRAINERS, TP = 2, 2
LIMIT = 6000
SECONDS = 15.0


class Member:
    """One process: the first ``TRAINERS`` ranks of a test are a trainer's, the others a rollout's."""

    building = {}  # further arguments of ``sharded_model``

    def __init__(self, folder, seconds=60.0):
        self.seconds = seconds
        self.folder, self.rank, self.world = folder, dist.get_rank(), dist.get_world_size()
        self.is_trainer = self.rank < TRAINERS
        self.index = self.rank if self.is_trainer else self.rank - TRAINERS
        self.facts, self.syncs = dist.FileStore(str(folder / "facts"), self.world), 0
        dist.barrier()  # a rank that is still connecting fails when another one has left
        dist.destroy_process_group()
        dist.init_process_group(
            "cpu:gloo",
            init_method=f"file://{folder / ('trainer' if self.is_trainer else 'rollout')}",
            rank=self.index,
            world_size=TRAINERS if self.is_trainer else self.world - TRAINERS,
            timeout=timedelta(seconds=60),
        )
        checkpoint_engine._address = lambda: "127.0.0.1"
        self.new_engine()
        self.whole = dict(reference_model(folder / "model").named_parameters())
        if self.is_trainer:
            self.model, self.meshes = sharded_model(folder / "model", TRAINERS, 2, **self.building)

    def new_engine(self):
        role = {"is_master": self.index == 0} if self.is_trainer else {}
        self.engine = CheckpointEngineRegistry.new(
            "epfsdp2_p2p", bucket_size=LIMIT, timeout_seconds=self.seconds, **role
        )

    def connect(self):
        """Do what verl's manager does before each sync."""
        self.syncs += 1
        self.facts.set(f"{self.syncs}/{self.rank}", pickle.dumps(self.engine.prepare()))
        metadata = [pickle.loads(self.facts.get(f"{self.syncs}/{rank}")) for rank in range(self.world)]
        both = self.engine.build_topology(TRAINERS, self.world - TRAINERS, metadata)
        kwargs = both[0 if self.is_trainer else 1]
        self.engine.init_process_group(**{name: values[self.index] for name, values in kwargs.items()})

    def finalize(self):
        """Do what verl's manager does after a sync in which all members succeeded."""
        self.facts.set(f"{self.syncs}/{self.rank} done", "")
        self.facts.wait([f"{self.syncs}/{rank} done" for rank in range(self.world)])
        self.engine.finalize()

    def weights(self, wanted="auto"):
        settings = SyncSettings(wanted, 5 * LIMIT)
        return RolloutSync(self.model, self.meshes, layer_names(self.model), {}, settings).weights()

    def send(self, weights):
        return asyncio.run(self.engine.send_weights(weights))

    def receive(self, is_ours=True):
        return self.engine.receive_weights().for_rollout(self.config(is_ours), self.index % TP).tensors()

    def config(self, is_ours=True, **settings):
        engine_kwargs = {"vllm": {"worker_extension_cls": EXTENSION if is_ours else "another"}}
        return RolloutConfig(name="vllm", tensor_model_parallel_size=TP, engine_kwargs=engine_kwargs, **settings)

    def sync(self, wanted="auto", is_ours=True, weights=None):
        """Run a sync; return what a rollout rank received and the bytes sent from here to the rollout."""
        self.connect()
        with _crossing() as crossed:
            got = self.send(weights or self.weights(wanted)) if self.is_trainer else _taken(self.receive(is_ours))
        self.finalize()
        return got, sum(crossed)

    def slices(self, factor=1):
        """Compute the slices that a rollout rank keeps."""
        return _taken(
            (slice_name(need.parameter, need.at), self.whole[tensor.name][need.block.slices] * factor)
            for tensor, need in self.needs(self.index % TP)
        )

    def needs(self, worker):
        """Yield what a worker keeps: each tensor and a slice of it."""
        model = reference_model(self.folder / "model")
        for tensor in tensors_before_sharding(model, Topology.arrange(TRAINERS, 2)):
            for need in target_slices(tensor, Rollout(TP), worker, Heads.of(model.config)):
                yield tensor, need


def _taken(received):
    """Collect full tensors, and slices assembled into their parameters."""
    whole, slices = {}, {}
    for name, values in received:
        if is_slice(name):
            parameter, corner, _ = parse_slice(name)
            slices.setdefault(parameter, []).append((corner, values.clone()))
        else:
            whole[name] = values
    for parameter, parts in slices.items():
        ends = zip(*([c + n for c, n in zip(corner, v.shape, strict=True)] for corner, v in parts), strict=True)
        whole[parameter] = torch.full([max(end) for end in ends], torch.nan)
        for corner, values in parts:
            whole[parameter][tuple(slice(c, c + n) for c, n in zip(corner, values.shape, strict=True))] = values
    return whole


@contextmanager
def _crossing():
    """Counts the bytes that all-to-alls carry from a trainer's rank to the rollout."""
    crossed, stock = [], dist.all_to_all_single

    def counting(received, sent, receive_splits, send_splits, group, **kwargs):
        assert max(received.numel(), sent.numel()) <= LIMIT
        if group.rank() < TRAINERS:
            crossed.append(sum(send_splits[TRAINERS:]))
        return stock(received, sent, receive_splits, send_splits, group=group, **kwargs)

    dist.all_to_all_single = counting
    try:
        yield crossed
    finally:
        dist.all_to_all_single = stock


def _equal(got, wanted):
    assert got.keys() == wanted.keys()
    for name, values in wanted.items():
        assert torch.equal(got[name], values), name


def _syncs(folder):
    member = Member(folder)
    kept_bytes = 2 * sum(n.block.numel * t.itemsize for worker in range(TP) for t, n in member.needs(worker))

    crossed = torch.zeros(1, dtype=torch.int64)
    for factor in (1, 2, 4):
        got, crossed[0] = member.sync()
        if member.is_trainer:
            dist.all_reduce(crossed)
            assert crossed.item() == kept_bytes, "each of the two replicas takes what its workers keep"
            if member.rank == 0:
                assert kept_bytes / 2 <= got["weight_sync/sent_megabytes"] * 2**20 < kept_bytes * 0.6
            else:
                assert got == {}
            with torch.no_grad():
                for param in member.model.parameters():
                    param.mul_(2)
        else:
            _equal(got, member.slices(factor))
    # One worker that does not support slices, or a trainer that is set to full: all receive full tensors, expert by
    # expert where a stack does not fit the memory.
    full = dict(hf_names.as_checkpoint(reference_model(folder / "model"), member.whole.items()))
    full = {name: tensor * 8 for name, tensor in full.items()}
    for case in ({"is_ours": member.rank != TRAINERS}, {"wanted": "full"}):
        got, _ = member.sync(**case)
        if not member.is_trainer:
            _equal(got, full)

    # Weights of an engine that is not ours.
    got, _ = member.sync(weights=iter([("a", torch.arange(5000.0)), ("b", torch.ones(3, dtype=torch.bfloat16))]))
    if not member.is_trainer:
        _equal(got, {"a": torch.arange(5000.0), "b": torch.ones(3, dtype=torch.bfloat16)})

    # A consumer that stops early blocks no rank, and the group is kept.
    group = member.engine._group.process_group
    for wanted in ("auto", "full"):
        member.connect()
        if member.is_trainer:
            member.send(member.weights(wanted))
        else:
            received = member.receive()
            for _ in zip(range(3), received, strict=False):
                pass
            received.close()
        member.finalize()
    assert member.engine._group.process_group is group

    # A rollout rank was restarted: all members make a new group.
    if member.rank == TRAINERS:
        member.new_engine()
    got, _ = member.sync()
    assert member.engine._group.process_group is not group
    if not member.is_trainer:
        _equal(got, member.slices(8))


def test_checkpoint_engine_sends_rollout_ranks_what_they_keep_every_sync(tmp_path):
    save_qwen3_moe(tmp_path / "model")
    run_ranks(_syncs, TRAINERS + 2 * TP, tmp_path, timeout=400)


class _WithAdapters(Member):
    building = {
        "before": lambda model: Lora(model, lora_settings()),
        "initialize": lambda name, tensor, fits: is_adapter(name),
        "finish": lambda model: lora_of(model).initialize(model, 0),
    }

    def stages(self, weights, **settings):
        """Run a sync; return what a rollout rank loads, stage by stage, with the arguments of vLLM's worker."""
        self.connect()
        if self.is_trainer:
            found = self.send(weights)
        else:
            received = self.engine.receive_weights().stages(self.config(**settings), self.index % TP)
            found = [(arguments, _taken(stage.tensors())) for stage, arguments in received]
        self.finalize()
        return found


def _adapters_of(folder, seed):
    """Adapters that vLLM's loader takes, of the plain model."""
    model = reference_model(folder / "model")
    lora, read = Lora(model, lora_settings()), stirred(model, seed)
    names = RolloutNames(model, lora, ADAPTED_AS_STACKS)
    return {own: t for name in lora.targets for own, t in names.tensors(name, read(name + A), read(name + B))}


def _apart(folder):
    member, config = _WithAdapters(folder), {"r": 4}
    sync = None
    if member.is_trainer:
        settings = SyncSettings("auto", 5 * LIMIT, verify_syncs=-1)
        sync = RolloutSync(member.model, member.meshes, layer_names(member.model), {}, settings)
    # A rollout rank that was restarted has no weights, unless vLLM reads them from the checkpoint.
    for seed, (restarts, load_format, has_base) in enumerate(
        [(False, "dummy", False), (False, "dummy", True), (True, "dummy", False), (True, "auto", True)]
    ):
        if restarts and member.rank == TRAINERS:
            member.new_engine()
        weights = None
        if member.is_trainer:
            lora_of(member.model).initialize(member.model, 0, stirred(member.model, seed))
            weights = sync.weights(peft_config=config)
        stages = member.stages(weights, load_format=load_format)
        if member.is_trainer:
            continue
        apart = [{"peft_config": config, "base_sync_done": done} for done in (False, True)]
        assert [arguments for arguments, _ in stages] == (apart[1:] if has_base else apart), seed
        _equal(stages[-1][1], _adapters_of(folder, seed))
        if not has_base:
            _equal(stages[0][1], member.slices())

    # The weights below the adapters change: the sync ends with a reason.
    member.connect()
    if member.is_trainer:
        with torch.no_grad():
            member.model.get_parameter("model.norm.weight").mul_(2)
        with pytest.raises(WeightSyncError, match="have changed after they were sent.*model.norm.weight differs"):
            member.send(sync.weights(peft_config=config))
    else:
        with pytest.raises(WeightSyncError, match="BaseChangedError: .*model.norm.weight differs"):
            received = member.engine.receive_weights()
            for stage, _ in received.stages(member.config(load_format="auto"), member.index % TP):
                dict(stage.tensors())


def test_checkpoint_engine_sends_the_base_once_and_adapters_in_every_sync(tmp_path):
    save_qwen3_moe(tmp_path / "model")
    run_ranks(_apart, TRAINERS + TP, tmp_path, timeout=400)


def _raising():
    yield "a", torch.ones(4000)
    raise ValueError("a fault that the test injected")


def _faults(folder):
    member = Member(folder, SECONDS)
    got, _ = member.sync()

    # A trainer's rank raises in the middle: the others raise its cause and no time-out, and the next sync works.
    member.connect()
    with pytest.raises(WeightSyncError, match="a fault that the test injected"):
        if member.is_trainer:
            member.send(_raising() if member.rank == 0 else iter([]))
            # The other rank only takes part among the trainer's ranks, whose error is the trainer's own.
            raise WeightSyncError("a fault that the test injected")
        dict(member.receive())
    got, _ = member.sync()
    if not member.is_trainer:
        _equal(got, member.slices())

    # A rank that never joins: waits time out.
    member.connect()
    started = time.monotonic()
    if member.is_trainer:
        with pytest.raises(WeightSyncError, match="rollout rank 0 did not publish its 'request' within 15 s"):
            member.send(member.weights())
        assert time.monotonic() - started < SECONDS + 5
    elif member.rank == TRAINERS + 1:
        with pytest.raises(WeightSyncError, match="rollout rank 0 did not publish its 'request'"):
            dict(member.receive())
    else:
        time.sleep(SECONDS + 2)
    got, _ = member.sync()

    # A rank hangs in the set-up of a new group: the others raise in time, and the next sync makes another group.
    if member.rank == TRAINERS:
        member.new_engine()
    member.engine.timeout_seconds = 3.0
    first = (lambda *args, **kwargs: threading.Event().wait()) if member.rank == TRAINERS else dist.all_to_all_single
    did_not_end = pytest.raises(WeightSyncError, match="set-up, which did not end within 3 s")
    with mock.patch.object(dist, "all_to_all_single", first), did_not_end:
        member.connect()
    member.engine.timeout_seconds = SECONDS
    got, _ = member.sync()
    if not member.is_trainer:
        _equal(got, member.slices())

    # A rollout rank is killed in the middle of a sync.
    member.connect()
    started = time.monotonic()
    if member.is_trainer:
        with pytest.raises(WeightSyncError, match="rank"):
            member.send(member.weights())
    else:
        received = iter(member.receive())
        next(received)
        if member.rank == TRAINERS:
            dist.destroy_process_group()
            os._exit(0)
        with pytest.raises(WeightSyncError, match="is gone|Connection"):
            dict(received)
        dist.destroy_process_group()
        os._exit(0)
    assert time.monotonic() - started < SECONDS


def test_checkpoint_engine_failure_ends_both_sides_with_its_cause(tmp_path):
    save_qwen3_moe(tmp_path / "model")
    run_ranks(_faults, TRAINERS + TP, tmp_path, timeout=300)
