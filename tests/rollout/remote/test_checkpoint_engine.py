"""The checkpoint engine between a trainer's ranks and rollout ranks of another torch world."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from epfsdp2.engine.lora.adapters import A, B, Lora, lora_of
from epfsdp2.engine.lora.rollout_names import RolloutNames
from epfsdp2.engine.model import hf_names
from epfsdp2.engine.topology.dtensor import is_adapter
from epfsdp2.rollout.transport.watched_sockets import WeightSyncError
from epfsdp2.rollout.vllm.names import ADAPTED_AS_STACKS
from epfsdp2.rollout.vllm.server import EXTENSION
from tests.support.engine.lora import lora_settings, stirred
from tests.support.models.tiny import reference_model, save_qwen3_moe
from tests.support.ranks import run_ranks
from tests.support.rollout.remote.member import Member, check_equal, taken

TRAINERS, TP = Member.trainers, Member.tp
SECONDS = 15.0
OTHER = "theirs.Extension"  # loads no slices


def _check_sync(member, factor=1):
    """Run a sync in which every worker gets its parameters, of the first weights times ``factor``."""
    got = member.sync()
    if not member.is_trainer:
        check_equal(got, member.parameters(member.index % TP, factor))


def _syncs(folder):
    member = Member(folder)
    kept_bytes = 2 * sum(t.nbytes for worker in range(TP) for t in member.parameters(worker).values())

    crossed = torch.zeros(1, dtype=torch.int64)
    for factor in (1, 2, 4):
        got, crossed[0] = member.sync(), sum(member.crossed)
        if member.is_trainer:
            dist.all_reduce(crossed)
            # Two replicas get their workers' slices; tensors of a few hundred bytes are sent whole to all.
            assert kept_bytes <= crossed.item() < 1.2 * kept_bytes
            if member.rank == 0:
                assert kept_bytes / 2 <= got["weight_sync/sent_megabytes"] * 2**20 < kept_bytes * 0.6
            else:
                assert got == {}
            with torch.no_grad():
                for param in member.model.parameters():
                    param.mul_(2)
        else:
            check_equal(got, member.parameters(member.index % TP, factor))
    # Workers without slices, or a trainer with mode full: all receive full tensors, and single experts of stacks that
    # exceed the memory.
    full = dict(hf_names.as_checkpoint(reference_model(folder / "model"), member.whole.items()))
    full = {name: tensor * 8 for name, tensor in full.items()}
    for wanted, extension in (("auto", OTHER), ("full", EXTENSION)):
        got = member.sync(lambda wanted=wanted: member.exporter(wanted).weights(), extension=extension)
        if not member.is_trainer:
            check_equal(got, full)

    # A consumer that stops early blocks no rank, and the group is kept.
    group = member.engine._endpoint.group.process_group
    for wanted in ("auto", "full"):
        member.connect()
        if member.is_trainer:
            member.send(member.exporter(wanted).weights())
        else:
            received = member.receive()
            for _ in zip(range(3), received, strict=False):
                pass
            received.close()
        member.finalize()
    assert member.engine._endpoint.group.process_group is group

    # One worker has another config: all members raise, and make a new group.
    member.connect()
    with pytest.raises(WeightSyncError, match="the rollout's ranks differ in config or release: full for .*sliced for"):
        if member.is_trainer:
            member.send(member.exporter().weights())
        taken(member.receive(extension=OTHER if member.rank == TRAINERS else EXTENSION))

    # A rollout rank was restarted: all members make a new group.
    if member.rank == TRAINERS:
        member.new_engine()
    _check_sync(member, 8)
    assert member.engine._endpoint.group.process_group is not group


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
        """Run a sync; return a rollout rank's stages, each with the arguments of vLLM's worker."""
        self.connect()
        if self.is_trainer:
            found = self.send(weights)
        else:
            received = self.engine.receive_weights().stages(self.config(**settings), self.index % TP)
            found = [(arguments, taken(stage.tensors())) for stage, arguments in received]
        self.finalize()
        return found


def _adapters_of(folder, seed):
    """Adapters of the plain model under names of vLLM's loader."""
    model = reference_model(folder / "model")
    lora, read = Lora(model, lora_settings()), stirred(model, seed)
    names = RolloutNames(model, lora, ADAPTED_AS_STACKS)
    return {own: t for name in lora.targets for own, t in names.tensors(name, read(name + A), read(name + B))}


def _apart(folder):
    member, config = _WithAdapters(folder), {"r": 4}
    sync = None
    if member.is_trainer:
        sync = member.exporter(verify=-1)
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
        check_equal(stages[-1][1], _adapters_of(folder, seed))
        if not has_base:
            check_equal(stages[0][1], member.parameters(member.index % TP))

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
    member.meet()


def test_checkpoint_engine_sends_the_base_once_and_adapters_in_every_sync(tmp_path):
    save_qwen3_moe(tmp_path / "model")
    run_ranks(_apart, TRAINERS + TP, tmp_path, timeout=400)


def _raising():
    yield "a", torch.ones(40_000)
    raise ValueError("a fault that the test injected")


def _faults(folder):
    member = Member(folder, SECONDS)
    member.sync()

    # A trainer's rank raises in the middle: the others raise its cause and no time-out, and the next sync works.
    member.connect()
    with pytest.raises(WeightSyncError, match="a fault that the test injected"):
        if member.is_trainer:
            member.send(_raising() if member.rank == 0 else iter([]))
            # The other trainer rank joins only collectives of the trainer, whose error the trainer raises itself.
            raise WeightSyncError("a fault that the test injected")
        dict(member.receive())
    _check_sync(member)

    # One raises in its second round, beside a rank that waits for it there: the others raise its cause soon.
    def failing(name):
        if member.rank == 1 and member.crossed:
            member.facts.set("raised", str(time.monotonic()))
            raise ValueError("a fault in a round")
        return local(name)

    member.connect()
    with pytest.raises(WeightSyncError, match="trainer rank 1: .*ValueError: a fault in a round"), member.counting():
        if member.is_trainer:
            exporter = member.exporter()
            local = exporter.values()
            exporter.values = lambda *args: failing
            member.send(exporter.weights())
        taken(member.receive())
    assert time.monotonic() - float(member.facts.get("raised")) < SECONDS / 4
    _check_sync(member)

    # A rank that never joins: waits time out.
    member.connect()
    member.engine._endpoint.group.timeout_seconds = 2.0
    started = time.monotonic()
    if member.is_trainer:
        with pytest.raises(WeightSyncError, match="rollout rank 0 did not publish its 'request' within 2 s"):
            member.send(member.exporter().weights())
        assert time.monotonic() - started < SECONDS / 2
    elif member.rank == TRAINERS + 1:
        with pytest.raises(WeightSyncError, match="rollout rank 0 did not publish its 'request'"):
            dict(member.receive())
    else:
        time.sleep(4)
    _check_sync(member)

    # A rollout rank is killed in the middle of a sync.
    member.connect()
    started = time.monotonic()
    if member.is_trainer:
        with pytest.raises(WeightSyncError, match="rank"):
            member.send(member.exporter().weights())
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
