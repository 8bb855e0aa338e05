"""Which stream a worker gets, and what is in the one of whole experts."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from verl.workers.config import RolloutConfig

from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.model import hf_names
from epfsdp2.engine.model.layers import layer_names
from epfsdp2.engine.topology.dtensor import local_tensor
from epfsdp2.rollout import sync as streams
from epfsdp2.rollout.layout.stream_choice import EXTENSION, choose_stream, rollout_of
from epfsdp2.rollout.layout.vllm_layout import Rollout
from epfsdp2.rollout.sync import RolloutSync, SyncSettings
from epfsdp2.rollout.transport.cast import CastOnCopy
from epfsdp2.rollout.transport.report import Handover
from epfsdp2.rollout.transport.watched_sockets import WeightSyncError
from tests.support.engine import sharded_model
from tests.support.models import reference_model, save_qwen3_moe
from tests.support.names import send_stacks
from tests.support.ranks import run_ranks

WORLD = 4
MEMORY, ROOMY = 30_000, 1 << 22


OURS = {"engine_kwargs": {"vllm": {"worker_extension_cls": EXTENSION}}}
TP2 = {"tensor_model_parallel_size": 2, **OURS}
EP2 = {"data_parallel_size": 2, "expert_parallel_size": 2, **OURS}


@pytest.mark.parametrize(
    ("wanted", "family", "config", "stream", "reason"),
    [
        ("auto", "qwen3_moe", OURS, "sliced", ""),
        ("auto", "qwen3_moe", TP2, "sliced", ""),
        ("auto", "qwen3_moe", EP2, "sliced", ""),
        ("auto", "no_such", TP2, "full", "actor_rollout_ref.model=no_such: how vLLM cuts it is not known"),
        ("auto", "no_such", {}, "full", ""),
        ("auto", "qwen3_moe", {"tensor_model_parallel_size": 2}, "full", "worker_extension_cls=None: only this"),
        ("auto", "qwen3_moe", {**TP2, "quantization": "fp8"}, "full", "rollout.quantization=fp8: vLLM quantises"),
        ("sliced", "qwen3_moe", OURS, "sliced", ""),
        ("expert_local", "qwen3_moe", EP2, "expert_local", ""),
        ("full", "no_such", {**TP2, "quantization": "fp8"}, "full", ""),
    ],
)
def test_the_stream_and_why(wanted, family, config, stream, reason):
    kind, why = choose_stream(wanted, config, family)
    assert kind == stream and reason in why and bool(reason) == bool(why)


def test_the_dataclass_of_verl_is_read_as_the_mapping_is():
    verls = RolloutConfig(name="vllm", tensor_model_parallel_size=2, engine_kwargs={"vllm": {}})
    assert rollout_of(verls) == Rollout(2)
    with pytest.raises(SettingError, match="worker_extension_cls=None"):
        choose_stream("sliced", verls, "qwen3_moe")
    verls = RolloutConfig(name="vllm", tensor_model_parallel_size=2, disaggregation={"enabled": True}, **OURS)
    with pytest.raises(SettingError, match="disaggregation.enabled=True"):
        choose_stream("sliced", verls, "qwen3_moe")


def _whole_experts(folder):
    send_stacks()
    rank = dist.get_rank()
    model, meshes = sharded_model(folder, WORLD, 2)
    sync = RolloutSync(model, meshes, layer_names(model), {}, SyncSettings("auto", MEMORY))
    wanted = dict(hf_names.as_checkpoint(model, reference_model(folder).named_parameters()))
    got = dict(sync.weights().for_worker("expert_local", Rollout(2, 2, expert_parallel=True), rank))
    mine = {name for name in wanted if ".experts." not in name or f".experts.{2 * rank}." in name}
    mine |= {name for name in wanted if f".experts.{2 * rank + 1}." in name}
    assert got.keys() == mine
    assert all(torch.equal(got[name], wanted[name]) for name in mine)
    roomy = RolloutSync(model, meshes, layer_names(model), {}, SyncSettings("auto", ROOMY))
    full = dict(roomy.weights())
    assert full.keys() == dict(reference_model(folder).named_parameters()).keys()


def test_a_worker_with_whole_experts_gets_its_own_under_their_names(tmp_path):
    run_ranks(_whole_experts, WORLD, save_qwen3_moe(tmp_path))


def _cast_slices(folder):
    rank = dist.get_rank()
    model, meshes = sharded_model(folder, WORLD, 2)
    layers, low = layer_names(model), torch.bfloat16
    dtypes = dict.fromkeys((name for name, p in model.named_parameters() if "norm" not in name), low)

    def slices(dtypes):
        sync = RolloutSync(model, meshes, layers, dtypes, SyncSettings("auto", ROOMY))
        arriving = sync.weights().for_worker("sliced", Rollout(2), rank % 2)
        # As the transport does: a tensor is the sender's until the next is asked for.
        kinds, found = {}, {}
        for name, tensor in arriving:
            kinds.setdefault(type(tensor), []).append(name)
            found[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        return kinds, found

    (plain, wide), (kinds, narrow) = slices({}), slices(dtypes)
    assert plain.keys() == {torch.Tensor} and kinds.keys() == {torch.Tensor, CastOnCopy}, (
        "its own are cast, what came was"
    )
    # Of these a rank sends columns and keeps columns: they are cast together.
    assert any("w2_weight" in name for name in narrow) and not any("w2_weight" in name for name in kinds[CastOnCopy])
    assert wide.keys() == narrow.keys()
    for name, values in narrow.items():
        assert values.dtype == (torch.float32 if "norm" in name else low)
        assert torch.equal(values, wide[name].to(values.dtype)), name


def test_slices_of_wider_masters_are_their_casts(tmp_path):
    run_ranks(_cast_slices, WORLD, save_qwen3_moe(tmp_path))


def _for_a_quantised_rollout(folder):
    model, meshes = sharded_model(folder, WORLD, 2)
    wanted = dict(hf_names.as_checkpoint(model, reference_model(folder).named_parameters()))
    assert max(tensor.dim() for tensor in wanted.values()) == 2  # which verl's quantisation asserts
    for memory in (ROOMY, MEMORY):
        sync = RolloutSync(model, meshes, layer_names(model), {}, SyncSettings("auto", memory, verified=-1))
        assert sync.weights().for_rollout(TP2, dist.get_rank() % 2).is_verified
        for settings in ({"quantization": "fp8"}, {"qat": {"enable": True}}):
            stream = sync.weights().for_rollout({**TP2, **settings}, dist.get_rank() % 2)
            assert (stream.kind, stream.is_verified) == ("full", False)
            got = {name: tensor.clone() for name, tensor in stream.tensors()}
            assert got.keys() == wanted.keys() and all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_a_quantised_rollout_is_sent_a_checkpoints_tensors_and_no_checksums(tmp_path):
    run_ranks(_for_a_quantised_rollout, WORLD, save_qwen3_moe(tmp_path))


def _said_once(folder):
    model, meshes = sharded_model(folder, 2, 2)
    sync = RolloutSync(model, meshes, layer_names(model), {}, SyncSettings("auto", ROOMY))
    lines = []
    streams.logger.addFilter(lambda record: lines.append(record.getMessage()))
    config = {**TP2, "quantization": "fp8"}
    for _ in range(3):
        assert len(dict(sync.weights().for_rollout(config, dist.get_rank()).tensors())) > 0
    said = "epfsdp2: engine.rollout_sync=auto: full stream, since actor_rollout_ref.rollout.quantization=fp8: "
    assert [line.startswith(said) for line in lines] == [True] * (dist.get_rank() == 0)


def test_auto_says_once_and_on_one_rank_why_it_is_full(tmp_path):
    run_ranks(_said_once, 2, save_qwen3_moe(tmp_path))


HANDOVER = Handover(tensors=3, nbytes=2_000_000_000, gather_seconds=1.0, wire_seconds=0.25, load_seconds=2.0)


def _counted(folder):
    rank = dist.get_rank()
    model, meshes = sharded_model(folder, WORLD, 2)
    memory = 600_000
    sync = RolloutSync(model, meshes, layer_names(model), {}, SyncSettings("auto", memory, verified=2))
    whole = sum(p.numel() * 4 for p in reference_model(folder).parameters())
    own = sum(local_tensor(p).numel() * 4 for p in model.parameters())
    reports = []
    for config in (OURS, TP2, TP2):
        stream = sync.weights().for_rollout(config, rank % 2)
        assert stream.is_verified == (len(reports) < 2)
        handed = sum(tensor.nbytes for _, tensor in stream.tensors())
        assert handed == whole if config is OURS else handed < 0.6 * whole
        reports.append(stream.report(HANDOVER))
        assert sync.last_report is reports[-1]
    gathered, sliced, again = reports
    assert gathered.least == whole - own
    # Shards are padded to 16 bytes, and to the largest rank's.
    assert gathered.least <= gathered.traffic.received == gathered.traffic.sent <= 1.2 * gathered.least
    largest = max(p.numel() * 4 for p in model.parameters())
    assert 2 * largest < gathered.traffic.peak <= memory
    plan = sync.exchange("sliced", Rollout(2), rank % 2).plan
    assert sliced.traffic.received == sliced.least == plan.received[rank]
    assert sliced.traffic.sent == plan.sent[rank]
    assert memory / 5 < sliced.traffic.peak <= memory
    assert (again.traffic, again.number) == (sliced.traffic, 3)
    assert str(sliced).startswith(
        "weight sync 2, sliced: 3 tensors, 2.000 GB in 3.25 s (gather 1.00, wire 0.25, load 2.00)"
    )
    assert sliced.metrics()["sync_received_gb"] == sliced.least / 1e9
    full = replace(sliced, stream="full", handover=replace(HANDOVER, is_stock=True)).metrics()
    assert [m[n] for m in (sliced.metrics(), full) for n in ("sync_full_stream", "sync_stock_sender")] == [0, 0, 1, 1]


def test_bytes_and_buffers_are_counted(tmp_path):
    run_ranks(_counted, WORLD, save_qwen3_moe(tmp_path))


def _one_plan(folder):
    rank = dist.get_rank()
    model, meshes = sharded_model(folder, 2, 2)
    layers = layer_names(model)

    def stream(limit):
        sync = RolloutSync(model, meshes, layers, {}, SyncSettings("sliced", limit))
        return sync.weights().for_rollout(TP2, rank)

    stream(MEMORY).agree(None)
    with pytest.raises(
        WeightSyncError, match="do not agree.*\n  plan: digest: [0-9a-f]+ on rank 0; [0-9a-f]+ on rank 1"
    ):
        stream(MEMORY + 5 * rank).agree(None)
    with pytest.raises(WeightSyncError, match="rank 1: WeightSyncError: the worker has another layout"):
        stream(MEMORY).agree(WeightSyncError("the worker has another layout") if rank == 1 else None)
    # More than a round may hold, on one rank alone.
    with pytest.raises(WeightSyncError, match="rank 0: ValueError: one row of"):
        stream(MEMORY if rank else 10).agree(None)


def test_ranks_compare_their_plans_before_anything_is_sent(tmp_path):
    run_ranks(_one_plan, 2, save_qwen3_moe(tmp_path))
