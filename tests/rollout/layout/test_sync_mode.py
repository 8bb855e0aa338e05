"""The sync mode of a rollout, and the tensors of each mode."""

import copy
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from verl.workers.config import RolloutConfig

from epfsdp2.engine.compat import versions
from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.model import hf_names
from epfsdp2.engine.model.layers import layer_names
from epfsdp2.engine.topology.dtensor import local_tensor
from epfsdp2.rollout import sync as rollout_sync
from epfsdp2.rollout.layout.specs import Rollout
from epfsdp2.rollout.servers import choose_mode, server_of, untested
from epfsdp2.rollout.sglang.server import SGLANG_LOADER
from epfsdp2.rollout.sync import RolloutSync, SyncSettings
from epfsdp2.rollout.transport.report import TransferStats
from epfsdp2.rollout.transport.watched_sockets import WeightSyncError
from epfsdp2.rollout.vllm.server import EXTENSION, VLLM, check_parallelism
from tests.parity import families
from tests.support.engine.sharded import sharded_model
from tests.support.models.quantised import COMPRESSED
from tests.support.models.tiny import reference_model, save_qwen3_moe
from tests.support.ranks import each_case, run_ranks
from tests.support.rollout.sent_slices import collected, weights_for

WORLD = 4
MEMORY, ROOMY = 1 << 18, 1 << 22

OURS = {"engine_kwargs": {"vllm": {"worker_extension_cls": EXTENSION}}}
TP2 = {"tensor_model_parallel_size": 2, **OURS}
EP2 = {"data_parallel_size": 2, "expert_parallel_size": 2, **OURS}
FP8 = {**TP2, "quantization": "fp8"}
ONLINE = {**TP2, "engine_kwargs": {"vllm": {"worker_extension_cls": EXTENSION, "quantization": "fp8_per_tensor"}}}
KIND = "quantization_config"


def rollout_of(config):
    return server_of(config).rollout_of(config)


def _compressed(kind="int8", group=None, **settings):
    """A rollout with weights of compressed-tensors, and other settings of its config or of its group."""
    asked = copy.deepcopy(COMPRESSED[kind]) | settings
    for key, values in (group or {}).items():
        asked["config_groups"]["group_0"][key] = {**(asked["config_groups"]["group_0"][key] or {}), **values}
    return {**TP2, "engine_kwargs": {"vllm": {"worker_extension_cls": EXTENSION, "hf_overrides": {KIND: asked}}}}


SGLANG = {
    "name": "sglang",
    "tensor_model_parallel_size": 2,
    "engine_kwargs": {"sglang": {"custom_weight_loader": [SGLANG_LOADER]}},
}


def _sglang(**arguments):
    """A rollout by SGLang with more arguments."""
    return {**SGLANG, "engine_kwargs": {"sglang": {**SGLANG["engine_kwargs"]["sglang"], **arguments}}}


@pytest.mark.parametrize(
    ("requested", "family", "config", "mode", "reason"),
    [
        ("auto", "qwen3_moe", OURS, "sliced", ""),
        ("auto", "qwen3_moe", EP2, "sliced", ""),
        ("auto", "no_such", TP2, "full", "actor_rollout_ref.model=no_such: how vLLM cuts it is not known"),
        ("auto", "no_such", {}, "full", ""),
        ("auto", "qwen3_moe", {"tensor_model_parallel_size": 2}, "full", "worker_extension_cls=None: only this"),
        ("auto", "qwen3_moe", FP8, "sliced", ""),
        ("auto", "phimoe", FP8, "full", "rollout.quantization=fp8: which weights of a phimoe vLLM"),
        ("auto", "qwen3_moe", {**FP8, "quantization": "torchao"}, "full", "quantization=torchao: vLLM quantises"),
        ("auto", "qwen3_moe", ONLINE, "full", "quantization=fp8_per_tensor: each worker quantises its fused"),
        ("auto", "qwen3_moe", _compressed("int8"), "sliced", ""),
        ("auto", "qwen3_moe", _compressed("fp8"), "sliced", ""),
        ("auto", "phimoe", _compressed("fp8"), "full", "which weights of a phimoe vLLM"),
        ("auto", "qwen3_moe", _compressed(quant_method="gptq"), "full", "vLLM quantises the weights"),
        ("auto", "qwen3_moe", _compressed(group={"weights": {"strategy": "tensor"}}), "full", "fused weights with one"),
        ("auto", "qwen3_moe", _compressed(group={"weights": {"strategy": "group"}}), "full", "one scale for each row"),
        ("auto", "qwen3_moe", _compressed(group={"weights": {"num_bits": 4}}), "full", "quantise to 8 bits"),
        ("auto", "qwen3_moe", _compressed(group={"weights": {"symmetric": False}}), "full", "around zero"),
        ("auto", "qwen3_moe", _compressed(group={"input_activations": {"dynamic": False}}), "full", "a calibration"),
        ("auto", "qwen3_moe", _compressed(kv_cache_scheme={"num_bits": 8}), "full", "scales of the cache"),
        ("auto", "qwen3_moe", _compressed(config_groups={}), "full", "one group, of targets [Linear]"),
        ("sliced", "qwen3_moe", OURS, "sliced", ""),
        ("full", "no_such", {**TP2, "quantization": "fp8"}, "full", ""),
        ("auto", "qwen3_moe", SGLANG, "sliced", ""),
        ("auto", "gpt_oss", SGLANG, "full", "actor_rollout_ref.model=gpt_oss: how SGLang cuts it was not compared"),
        ("auto", "dots1", {**SGLANG, "tensor_model_parallel_size": 1}, "full", "how SGLang cuts it was not compared"),
        ("auto", "qwen3_moe", {**SGLANG, "expert_parallel_size": 2}, "sliced", ""),
        ("auto", "qwen3_moe", {**SGLANG, "expert_parallel_size": 3}, "full", "expert_parallel_size=3: slices know"),
        ("auto", "qwen3_moe", {**SGLANG, "data_parallel_size": 2}, "full", "data_parallel_size=2: it cuts the model"),
        ("auto", "qwen3_moe", {**SGLANG, "engine_kwargs": {}}, "full", "custom_weight_loader=[]: only this"),
        ("auto", "qwen3_moe", {**SGLANG, "quantization": "fp8"}, "full", "quantization=fp8: SGLang quantises"),
        ("auto", "glm4_moe", SGLANG, "full", "disable_shared_experts_fusion=None: SGLang may store the shared"),
        ("auto", "glm4_moe", _sglang(disable_shared_experts_fusion=True), "sliced", ""),
        ("auto", "deepseek_v3", _sglang(device="cpu"), "sliced", ""),
        ("auto", "qwen3_moe", _sglang(quantization="fp8"), "full", "sglang.quantization=fp8: SGLang quantises"),
        ("auto", "qwen3_moe", _sglang(load_format="flash_rl"), "full", "load_format=flash_rl: a loader of this kind"),
        ("auto", "qwen3_moe", _sglang(load_format="dummy", ep_num_redundant_experts=0), "sliced", ""),
        ("auto", "qwen3_moe", _sglang(enable_eplb=True), "full", "sglang.enable_eplb=True: SGLang stores experts"),
        ("auto", "qwen3_moe", _sglang(moe_runner_backend="flashinfer_cutlass"), "full", "this kernel stores experts"),
        ("auto", "qwen3_moe", _sglang(custom_weight_loader=["my.loader"]), "full", "only this package's loader"),
        ("auto", "qwen3_moe", _sglang(custom_weight_loader=["my.loader", SGLANG_LOADER]), "sliced", ""),
        ("auto", "qwen3_moe", {**SGLANG, "name": "trtllm"}, "full", "rollout.name=trtllm: it accepts full tensors"),
    ],
)
def test_choose_mode_returns_mode_and_reason(requested, family, config, mode, reason):
    found, why = choose_mode(requested, config, family)
    assert found == mode and reason in why and bool(reason) == bool(why)


def test_rollout_of_compressed_tensors_has_a_scale_for_each_row():
    assert [rollout_of(_compressed(kind)).channels for kind in ("int8", "fp8")] == ["int8", "fp8"]
    assert rollout_of(_compressed()).is_quantised and not rollout_of(TP2).is_quantised
    assert rollout_of(_compressed(group={"weights": {"strategy": "tensor"}})).channels == ""


def test_rollout_parallelism_of_dbrx_is_checked_by_its_sizes_and_spreads_no_experts():
    config = families.FAMILIES["dbrx"].build().config
    check_parallelism(TP2, 4, config)
    with pytest.raises(SettingError, match="expert_parallel_size=2: vLLM's loader of a dbrx spreads no experts"):
        check_parallelism({**TP2, "expert_parallel_size": 2}, 4, config)
    config.ffn_config.ffn_hidden_size = 18
    with pytest.raises(SettingError, match="the intermediate size 18 of an expert, in 4 parts"):
        check_parallelism({**TP2, "tensor_model_parallel_size": 4}, 4, config)


def test_rollout_parallelism_of_deepseek_v4_is_checked_by_its_groups_of_outputs():
    config = families.FAMILIES["deepseek_v4"].build().config
    check_parallelism(TP2, 4, config)
    with pytest.raises(SettingError, match="can't cut 2 groups of attention outputs"):
        check_parallelism({**TP2, "tensor_model_parallel_size": 4}, 4, config)


@pytest.mark.parametrize("requested", ["auto", "sliced"])
@pytest.mark.parametrize(("name", "config"), [("vllm", OURS), ("sglang", SGLANG)])
def test_choose_mode_for_an_untested_release_is_sliced(name, config, requested, monkeypatch):
    installed = versions.installed
    monkeypatch.setattr(versions, "installed", lambda asked: "9.9" if asked == name else installed(asked))
    assert choose_mode(requested, config, "qwen3_moe") == ("sliced", "")
    assert untested({"name": name}) == f"{name} 9.9 was not tested with (tested: {', '.join(versions.tested(name))})"
    assert untested({"name": "trtllm"}) == ""


def test_choose_mode_of_a_drafter_without_a_known_layout_is_full(monkeypatch):
    known = {"deepseek_v3", "deepseek_v4"}
    monkeypatch.setattr(type(VLLM), "known_families", staticmethod(lambda: known))
    for family in known:
        assert choose_mode("auto", TP2, family) == ("sliced", "")
    assert choose_mode("auto", TP2, "deepseek_v3", drafts=True) == ("sliced", "")
    mode, reason = choose_mode("auto", TP2, "deepseek_v4", drafts=True)
    assert mode == "full" and "how vLLM cuts the drafter of a deepseek_v4 is not known" in reason
    with pytest.raises(SettingError, match="mtp.enable_rollout=False"):
        choose_mode("sliced", TP2, "deepseek_v4", drafts=True)


def test_choose_mode_reads_verls_dataclass_like_a_mapping():
    verls = RolloutConfig(name="vllm", tensor_model_parallel_size=2, engine_kwargs={"vllm": {}})
    assert rollout_of(verls) == Rollout(2, server="vllm")
    with pytest.raises(SettingError, match="worker_extension_cls=None"):
        choose_mode("sliced", verls, "qwen3_moe")
    verls = RolloutConfig(name="vllm", tensor_model_parallel_size=2, disaggregation={"enabled": True}, **OURS)
    with pytest.raises(SettingError, match="disaggregation.enabled=True"):
        choose_mode("sliced", verls, "qwen3_moe")


def _sliced_sends_float32_parameters_as_their_casts(folder, model, meshes):
    rank = dist.get_rank()
    layers, low = layer_names(model), torch.bfloat16
    dtypes = dict.fromkeys((name for name, p in model.named_parameters() if "norm" not in name), low)

    def sent(dtypes):
        sync = RolloutSync(model, meshes, layers, dtypes, SyncSettings("auto", ROOMY))
        weights = weights_for(sync, Rollout(2), rank)
        return collected(weights.tensors()), weights.traffic

    (wide, wide_traffic), (narrow, traffic) = sent({}), sent(dtypes)
    assert traffic.sent < 0.55 * wide_traffic.sent and traffic.received < 0.55 * wide_traffic.received
    assert wide.keys() == narrow.keys()
    for name, values in narrow.items():
        assert values.dtype == (torch.float32 if "norm" in name else low)
        assert torch.equal(values, wide[name].to(values.dtype)), name


def _quantised_rollout_in_full_gets_checkpoint_tensors_without_checksums(folder, model, meshes):
    wanted = dict(hf_names.as_checkpoint(model, reference_model(folder).named_parameters()))
    assert max(tensor.dim() for tensor in wanted.values()) == 2  # which verl's quantization asserts
    for memory in (ROOMY, MEMORY):
        sync = RolloutSync(model, meshes, layer_names(model), {}, SyncSettings("auto", memory, verify_syncs=-1))
        assert sync.weights().for_rollout(TP2, dist.get_rank()).has_checksums
        full = RolloutSync(model, meshes, layer_names(model), {}, SyncSettings("full", memory, verify_syncs=-1))
        for own, settings in (
            (full, {"quantization": "fp8"}),
            (sync, {"quantization": "torchao"}),
            (sync, {"qat": {"enable": True}}),
        ):
            weights = own.weights().for_rollout({**TP2, **settings}, dist.get_rank())
            assert (weights.mode, weights.has_checksums) == ("full", False)
            got = {name: tensor.clone() for name, tensor in weights.tensors()}
            assert got.keys() == wanted.keys() and all(torch.equal(got[name], wanted[name]) for name in wanted)


def _auto_that_falls_back_warns_once_on_rank_0(folder, model, meshes):
    sync = RolloutSync(model, meshes, layer_names(model), {}, SyncSettings("auto", ROOMY))
    lines = []
    rollout_sync.logger.addFilter(lambda record: lines.append(record.getMessage()))
    for _ in range(3):
        sync.weights().for_rollout({**TP2, "quantization": "torchao"}, dist.get_rank())
    warning = "epfsdp2: engine.rollout_sync=auto falls back to full: actor_rollout_ref.rollout.quantization=torchao: "
    assert [line.startswith(warning) for line in lines] == [True] * (dist.get_rank() == 0)


TRANSFER = TransferStats(tensors=3, nbytes=2_000_000_000, gather_seconds=1.0, wire_seconds=0.25, load_seconds=2.0)


def _counted(folder):
    rank = dist.get_rank()
    model, meshes = sharded_model(folder, WORLD, 2)
    memory = 600_000
    sync = RolloutSync(model, meshes, layer_names(model), {}, SyncSettings("auto", memory, verify_syncs=2))
    whole = sum(p.numel() * 4 for p in reference_model(folder).parameters())
    own = sum(local_tensor(p).numel() * 4 for p in model.parameters())
    reports = []
    for config in (OURS, TP2, TP2):
        weights = sync.weights().for_rollout(config, 0 if config is OURS else rank % 2)
        assert weights.has_checksums == (len(reports) < 2)
        sent = sum(tensor.nbytes for _, tensor in weights.tensors())
        assert sent == whole if config is OURS else sent < 0.6 * whole
        reports.append(weights.report(TRANSFER))
        assert sync.last_report is reports[-1]
    gathered, sliced, again = reports
    assert gathered.min_received_bytes == whole - own
    # Shards are padded to 16 bytes, and to the largest rank's.
    least, traffic = gathered.min_received_bytes, gathered.traffic
    assert least <= traffic.received == traffic.sent <= 1.2 * least
    assert memory / 3 < gathered.traffic.peak <= memory
    exchange = weights.sync.exchange(rollout_of(TP2))
    plan, (own, kind) = exchange.plan, (rank, rank % 2)
    assert sliced.min_received_bytes == plan.needed[kind] - plan.sent[own, kind]
    # Short tensors (norms, routers' weights) are sent whole to every worker.
    short = sum(round_.whole_offsets[1] for _, round_ in plan.rounds)
    assert sliced.min_received_bytes < sliced.traffic.received <= sliced.min_received_bytes + (WORLD - 1) * short
    assert sliced.traffic.received < 1.1 * sliced.min_received_bytes
    others = [other for other in range(WORLD) if other != rank]
    assert sliced.traffic.sent <= sum(plan.sent[own, other % 2] for other in others) + len(others) * short
    assert memory / 5 < sliced.traffic.peak <= memory
    assert (again.traffic, again.number) == (sliced.traffic, 3)
    assert str(sliced).startswith(
        "weight sync 2, sliced: 3 tensors, 2.000 GB in 3.25 s (gather 1.00, wire 0.25, load 2.00)"
    )
    assert sliced.metrics()["sync_received_gb"] == sliced.traffic.received / 1e9
    assert sliced.metrics()["sync_least_gb"] == sliced.min_received_bytes / 1e9
    full = replace(sliced, mode="full").metrics()
    assert [found["sync_full_stream"] for found in (sliced.metrics(), full)] == [0, 1]


def test_report_counts_bytes_and_buffers(tmp_path):
    run_ranks(_counted, WORLD, save_qwen3_moe(tmp_path))


def _differing_plans_are_refused_on_every_rank(folder, model, meshes):
    rank = dist.get_rank()
    layers = layer_names(model)

    def export(limit):
        sync = RolloutSync(model, meshes, layers, {}, SyncSettings("sliced", limit))
        return sync.weights().for_rollout(TP2, rank)

    export(MEMORY).check_plans(None)
    with pytest.raises(
        WeightSyncError, match="do not agree.*\n  plan: digest: [0-9a-f]+ on rank 0; [0-9a-f]+ on rank 1"
    ):
        export(MEMORY + 5 * rank).check_plans(None)
    with pytest.raises(WeightSyncError, match="rank 1: WeightSyncError: the worker has another layout"):
        export(MEMORY).check_plans(WeightSyncError("the worker has another layout") if rank == 1 else None)
    # More than a round may hold, on one rank alone.
    with pytest.raises(WeightSyncError, match="rank 0: RoundTooSmallError: one row of"):
        export(MEMORY if rank else 10).check_plans(None)


def _untested_release_gets_slices_if_its_layout_is_the_planned_one(folder, model, meshes):
    rank = dist.get_rank()
    other = WeightSyncError("worker 1 of a replica: they differ,\n first a") if rank else None
    lines = []
    read = mock.patch.object(rollout_sync.logger, "filters", [lambda record: lines.append(record.getMessage())])
    new = mock.patch.object(versions, "untested", lambda name: f"{name} 9.9 was not tested with")

    def syncs(requested, failure, config=TP2):
        """The weights of two syncs of an untested release, whose workers compare their layout in the first."""
        sync = RolloutSync(model, meshes, layer_names(model), {}, SyncSettings(requested, ROOMY))
        found = []
        for failed in (failure, None):
            found.append(sync.weights().for_rollout(config, rank))
            if found[-1].mode == "sliced" and not sync.is_compared:
                assert found[-1].has_checksums  # although none are asked for
                found[-1].check_plans(failed)
            assert sum(1 for _ in found[-1].tensors()) > 1
        assert [weights._number for weights in found] == [1, 2]
        return [(weights.mode, weights.has_checksums) for weights in found]

    with new, read:
        for requested in ("auto", "sliced"):
            assert syncs(requested, None) == [("sliced", True), ("sliced", False)] and not lines
        assert syncs("auto", other) == [("full", False), ("full", False)]
        reason = "vllm 9.9 was not tested with: Some ranks failed: rank 1: WeightSyncError: worker 1 of a replica: they"
        wanted = f"epfsdp2: engine.rollout_sync=auto falls back to full: {reason} differ, first a"
        assert lines == [wanted] * (rank == 0)
        with pytest.raises(WeightSyncError, match="they differ"):
            syncs("sliced", other)
        # Its full tensors would have no scales.
        with pytest.raises(SettingError, match="full tensors have no scales: .*they differ"):
            syncs("auto", other, _compressed("int8"))


def _two_ranks(folder):
    checks = (
        _sliced_sends_float32_parameters_as_their_casts,
        _quantised_rollout_in_full_gets_checkpoint_tensors_without_checksums,
        _auto_that_falls_back_warns_once_on_rank_0,
        _differing_plans_are_refused_on_every_rank,
        _untested_release_gets_slices_if_its_layout_is_the_planned_one,
    )
    model, meshes = sharded_model(folder, 2, 2)
    each_case([(check.__name__, check) for check in checks], lambda name, check: check(folder, model, meshes))


def test_modes_on_two_ranks_send_casts_or_checkpoints_warn_of_full_and_refuse_differing_plans(tmp_path):
    # Columns are long enough to be sent in pieces, in both dtypes.
    run_ranks(_two_ranks, 2, save_qwen3_moe(tmp_path, moe_intermediate_size=128))
