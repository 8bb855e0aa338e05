"""Each wrong setting ends in one paragraph that names it, its value, the rule and what works."""

import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import verl.trainer.config
from hydra import compose, initialize_config_module
from hydra.errors import InstantiationException
from omegaconf import OmegaConf
from verl.workers.config.model import HFModelConfig, MtpConfig

from epfsdp2.engine import config as engine_config_module
from epfsdp2.engine.compat import versions
from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.preflight import model_facts
from epfsdp2.engine.preflight import rollout as rollout_checks
from epfsdp2.engine.preflight import run as preflight
from epfsdp2.engine.preflight.cut_experts import check_cut_experts_sync
from epfsdp2.engine.preflight.dense_models import not_applied, without_experts
from epfsdp2.engine.preflight.features import check_attention
from epfsdp2.engine.preflight.model_facts import inspect_model, largest_sent
from epfsdp2.engine.preflight.rollout import check_graphs, check_rollout
from epfsdp2.engine.preflight.run import check_model_settings, check_run, check_training, check_versions
from epfsdp2.engine.settings.values import OPTIMIZERS
from epfsdp2.engine.topology.expert_placement import EtpDim
from epfsdp2.rollout.layout.sync_mode import EXTENSION, SGLANG_LOADER
from tests.parity.families import save
from tests.support.settings import TINY, checkpoint, engine

# Elements of the largest tensor of that model: gate_up_proj [E, 2I, D].
GATE_UP = 8 * 2 * 16 * 32
DISK = namedtuple("DISK", "total used free")
MODEL = "actor_rollout_ref.model"
BACKEND = "actor_rollout_ref.rollout.checkpoint_engine.backend"
SDPA = {"override_config": {"attn_implementation": "sdpa"}}
TENSOR_PARALLEL = "actor_rollout_ref.rollout.tensor_model_parallel_size"
BUCKET = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"


@pytest.fixture
def model(tmp_path):
    return checkpoint(tmp_path)


def paragraph(error: SettingError, setting: str, value: object) -> str:
    text = str(error)
    assert text.startswith(f"{setting}={value}: ")
    assert "What works: " in text and "\n" not in text
    return text


def test_a_right_run_passes_and_is_counted(model, stacks_are_sent):
    facts = check_training(engine(ep_size=4), 8, model, device="cpu")
    assert facts.experts == (8, 8)
    assert facts.stacked == (((8, 32, 16), 0, EtpDim(2)), ((8, 32, 32), 0, EtpDim(1, parts=2)))
    assert largest_sent(facts.model) == ("model.layers.0.mlp.experts.gate_up_proj", GATE_UP)


@pytest.fixture
def flash_attn(monkeypatch):
    """Whether flash-attn is installed, whatever is installed here."""

    def install(there):
        version = versions.installed
        monkeypatch.setattr(
            versions, "installed", lambda name: ("2.8.3" if there else None) if name == "flash-attn" else version(name)
        )

    return install


@pytest.mark.parametrize("ep_size, world, works", [(3, 8, "[1, 2, 4, 8]"), (4, 6, "[1, 2, 3, 6]"), (8, 4, "[1, 2, 4]")])
def test_ep_size_has_to_divide_the_ranks(model, ep_size, world, works):
    with pytest.raises(SettingError) as caught:
        check_training(engine(ep_size=ep_size), world, model, device="cpu")
    text = paragraph(caught.value, "engine.ep_size", ep_size)
    assert "number of ranks" in text and works in text


def test_ep_size_has_to_divide_the_ranks_of_one_copy(model):
    with pytest.raises(SettingError, match=r"engine.ep_size=8: .*engine.fsdp_size=4"):
        check_training(engine(ep_size=8, fsdp_size=4), 16, model, device="cpu")
    with pytest.raises(SettingError, match=r"engine.fsdp_size=3: .*\[1, 2, 4, 8\]"):
        check_training(engine(fsdp_size=3), 8, model, device="cpu")


def test_ep_size_has_to_divide_the_experts(tmp_path):
    model = checkpoint(tmp_path)
    model["override_config"]["num_experts"] = 6
    with pytest.raises(SettingError) as caught:
        check_training(engine(ep_size=4), 12, model, device="cpu")
    text = paragraph(caught.value, "engine.ep_size", 4)
    assert "number of experts" in text and "6 in Qwen3MoeForCausalLM" in text and "[1, 2, 3, 6]" in text


@pytest.fixture
def dense(tmp_path):
    (tmp_path / "dense").mkdir()
    return checkpoint(tmp_path / "dense", "qwen3", num_hidden_layers=1, hidden_size=32, vocab_size=64)


def test_a_dense_model_beside_another_is_sharded_over_all_ranks(dense):
    facts = check_training(engine(ep_size=8, expert_shard_dim=1, expert_plan={"w1": 0}), 4, dense, device="cpu")
    assert facts.is_dense and facts.experts == ()
    said = not_applied(engine(ep_size=8), "its/path", facts.model)
    assert said == "its/path has no experts: engine.ep_size=8 does not apply, FSDP2 over all ranks"
    assert not_applied(engine(), "its/path", facts.model) == ""


def test_patterns_of_routers_are_for_the_models_that_have_some(dense):
    patterns = ["*.mlp.gate", "*.self_attn"]
    facts = check_training(engine(fp32_modules=patterns), 4, dense, device="cpu")
    assert without_experts(engine(fp32_modules=patterns), facts.model).fp32_modules == ["*.self_attn"]
    assert "engine.fp32_modules=['*.mlp.gate'] does not apply" in not_applied(
        engine(fp32_modules=patterns), "its/path", facts.model
    )
    with pytest.raises(SettingError, match=r"engine.fp32_modules=\*.mlp.gate: matches no module of the model"):
        check_run(engine(fp32_modules=patterns), 4, dense, {}, device="cpu")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ep_size", 2),
        ("etp_size", 2),
        ("expert_shard_dim", 1),
        ("experts_backend", "torch"),
        ("reshard_experts_after_forward", False),
        ("dispatch_chunks", 2),
        ("router_aux_loss_coef", 0.001),
        ("router_metrics", True),
        ("overlap_shared_experts", True),
        ("router_replay.mode", "R2"),
    ],
)
def test_a_setting_of_experts_for_a_dense_model_alone_is_refused(dense, name, value):
    settings = engine(replay=value) if name.startswith("router_replay") else engine(**{name: value})
    for critic in ({}, {"critic_enable": True, "critic_path": dense["path"]}, {"critic_path": "no/such"}):
        with pytest.raises(SettingError) as caught:
            check_run(settings, 4, dense, critic, device="cpu")
        text = paragraph(caught.value, f"engine.{name}", value)
        assert f"Qwen3ForCausalLM ({MODEL}.path) is a dense model" in text
        assert ("nor has that of the critic, Qwen3ForCausalLM" in text) == ("critic_enable" in critic)
    check_run(engine(), 4, dense, {}, device="cpu")


def test_an_etp_size_that_does_not_fit_is_refused_with_those_that_do(model):
    check_training(engine(ep_size=2, etp_size=2), 8, model, device="cpu")
    with pytest.raises(SettingError) as caught:
        check_training(engine(ep_size=4, etp_size=4), 8, model, device="cpu")
    assert "engine.etp_size= one of [1, 2]" in paragraph(caught.value, "engine.etp_size", 4)
    with pytest.raises(SettingError) as caught:  # the inner size is 16
        check_training(engine(etp_size=32), 32, model, device="cpu")
    assert "engine.etp_size= one of [1, 2, 4, 8, 16]" in paragraph(caught.value, "engine.etp_size", 32)


def test_what_can_not_be_with_cut_experts_is_refused(model):
    cut = engine(ep_size=2, etp_size=2)
    muon = {"optimizer": "Muon", "optimizer_impl": "torch.optim", "lr": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.99)}
    check_training(cut, 8, model, optim=muon, device="cpu")
    with pytest.raises(SettingError) as caught:
        check_training(engine(ep_size=8, etp_size=2), 64, model, optim=muon, device="cpu")
    paragraph(caught.value, f"{OPTIMIZERS[MODEL]}.optimizer", "Muon")
    with pytest.raises(SettingError) as caught:
        check_cut_experts_sync(cut, {"backend": "delta_sharded"})
    paragraph(caught.value, "actor_rollout_ref.rollout.checkpoint_engine.backend", "delta_sharded")
    check_cut_experts_sync(cut, {"backend": "naive"})
    adapters = {**model, "lora_rank": 8, "target_modules": "all-linear"}
    check_training(cut, 8, adapters, optim=muon, device="cpu")
    with pytest.raises(SettingError) as caught:
        check_training(engine(ep_size=8, etp_size=2), 64, adapters, device="cpu", optim=muon)
    paragraph(caught.value, f"{OPTIMIZERS[MODEL]}.optimizer", "Muon")


def test_a_plan_of_experts_for_a_dense_model_alone_is_refused(dense):
    with pytest.raises(SettingError, match=r"engine.expert_plan=\*.w1: matches no parameter of the model"):
        check_run(engine(expert_plan={"*.w1": 0}), 4, dense, {}, device="cpu")


@pytest.mark.parametrize("which", [{"critic_enable": True}, {"critic_enable": None, "adv_estimator": "gae"}])
def test_settings_of_experts_are_the_critics_where_it_alone_has_some(dense, model, which):
    beside = {**which, "critic_path": model["path"]}
    check_run(engine(ep_size=2, router_z_loss_coef=0.1), 4, dense, beside, device="cpu")
    with pytest.raises(SettingError, match="engine.router_replay.mode=R2: can't be with Qwen3ForCausalLM"):
        check_run(engine(ep_size=2, replay="R2"), 4, dense, beside, device="cpu")
    with pytest.raises(SettingError, match="engine.ep_size=2: concerns experts"):
        check_run(engine(ep_size=2), 4, dense, {**beside, "critic_enable": False}, device="cpu")


def test_whole_experts_in_the_rollout_of_a_dense_model_are_refused(dense):
    rollout = {"name": "vllm", "tensor_model_parallel_size": 2, "expert_parallel_size": 2}
    with pytest.raises(SettingError, match="rollout.expert_parallel_size=2: vLLM spreads experts, and the model has"):
        check_run(engine(), 4, dense, rollout, device="cuda")


@pytest.mark.parametrize(
    "kind, experts",
    [
        ("jetmoe", "JetMoeParallelExperts"),
        ("longcat_flash", "LongcatFlashExperts"),
        ("dbrx", "DbrxExperts"),
    ],
)
def test_experts_outside_the_interface_are_refused_by_their_class(tmp_path, kind, experts):
    settings = {"n_layers": 1} if kind == "dbrx" else {"num_hidden_layers": 2}
    settings |= {"num_layers": 1} if kind == "longcat_flash" else {}
    if kind == "dbrx":
        # transformers 5.9 builds dbrx only from a config that says so itself.
        settings["attn_config"] = {"model_type": "", "rope_theta": 1e4, "kv_n_heads": 1, "clip_qkv": 8}
    model = checkpoint(tmp_path, kind, **settings)
    with pytest.raises(SettingError, match="outside transformers' experts interface") as caught:
        inspect_model(model)
    text = paragraph(caught.value, f"{MODEL}.path", model["path"])
    assert experts in text and "Attention" not in text and "Norm" not in text


@pytest.mark.parametrize("use_remove_padding", [True, False])
def test_eager_attention_takes_packed_inputs_too(model, use_remove_padding):
    model |= {"use_remove_padding": use_remove_padding, "override_config": {"attn_implementation": "eager"}}
    assert check_training(engine(), 2, model, device="cpu") is not None


def test_gpt_oss_has_no_sdpa_and_runs_eager_without_an_accelerator(tmp_path, flash_attn):
    flash_attn(True)
    model = checkpoint(tmp_path, "gpt_oss", num_hidden_layers=1)
    with pytest.raises(SettingError, match="GptOssForCausalLM does not support it.*attn_implementation=eager"):
        check_training(engine(), 2, model, device="cpu")
    with pytest.raises(SettingError, match="attn_implementation=flash_attention_2"):
        check_training(engine(), 2, model, device="cuda")
    flash_attn(False)
    with pytest.raises(SettingError, match="attn_implementation=flex_attention"):
        check_training(engine(), 2, model, device="cuda")
    model["override_config"] = {"attn_implementation": "eager"}
    assert check_training(engine(), 2, model, device="cpu") is not None
    model["override_config"] = {"attn_implementation": "flex_attention"}
    assert check_training(engine(), 2, model, device="cuda") is not None
    assert check_training(engine(ulysses_sequence_parallel_size=2), 2, model, device="cuda") is not None
    with pytest.raises(SettingError, match="flex attention needs an accelerator"):
        check_training(engine(), 2, model, device="cpu")


def test_verls_default_attention_needs_an_accelerator(model, flash_attn):
    flash_attn(True)
    del model["override_config"]
    assert check_training(engine(), 2, model, device="cuda") is not None
    with pytest.raises(SettingError, match="needs an accelerator") as caught:
        check_training(engine(), 2, model, device="cpu", setting="model")
    text = paragraph(caught.value, "model.override_config.attn_implementation", "flash_attention_2")
    assert text.endswith("+model.override_config.attn_implementation=sdpa")


@pytest.mark.parametrize("wanted", [None, "flash_attention_2", "paged|flash_attention_2"])
def test_flash_attention_2_on_a_gpu_needs_flash_attn(model, flash_attn, wanted):
    model["override_config"] = {} if wanted is None else {"attn_implementation": wanted}
    flash_attn(True)
    assert check_training(engine(), 2, model, device="cuda") is not None
    flash_attn(False)
    for facts in (inspect_model(model), None):
        with pytest.raises(SettingError, match="flash-attn, which is not installed") as caught:
            check_attention(model, facts, device="cuda")
        text = paragraph(caught.value, f"{MODEL}.override_config.attn_implementation", wanted or "flash_attention_2")
        assert "pip install 'verl[vllm,fsdp]'" in text
        assert text.endswith(f"+{MODEL}.override_config.attn_implementation=sdpa")
    # Neither transformers' path on an NPU nor flash attention 3 takes it from that distribution.
    check_attention(model, inspect_model(model), device="npu")
    check_attention({"override_config": {"attn_implementation": "flash_attention_3"}}, None, device="cuda")


@pytest.mark.parametrize("setting", [MODEL, "critic.model", "model"])
@pytest.mark.parametrize(
    "name, value, settings",
    [
        ("use_liger", True, {"use_liger": True}),
        ("tiled_mlp.enabled", True, {"tiled_mlp": {"enabled": True, "num_shards": 4}}),
        ("mtp.enable", True, {"mtp": {"enable": True}}),
    ],
)
def test_what_the_engine_does_not_do_is_refused(model, setting, name, value, settings):
    for asked in (settings, SimpleNamespace(**settings), OmegaConf.create(settings)):
        with pytest.raises(SettingError) as caught:
            check_model_settings(asked, setting)
        text = paragraph(caught.value, f"{setting}.{name}", value)
        assert text.endswith("=False")
    with pytest.raises(SettingError, match="is not supported by this engine"):
        check_training(engine(), 2, model | settings, device="cpu", setting=setting)
    with pytest.raises(SettingError, match="is not supported by this engine"):
        check_training(engine(), 2, {"path": "some-org/not-here"} | settings, device="cpu", setting=setting)


def test_a_tower_that_there_is_not_is_not_left_as_it_is(model):
    with pytest.raises(SettingError) as caught:
        check_training(engine(freeze_vision_tower=True), 2, model, device="cpu")
    assert "has no vision tower" in paragraph(caught.value, "engine.freeze_vision_tower", True)


@pytest.mark.parametrize("setting", [MODEL, "critic.model", "model"])
def test_activations_are_offloaded_where_layers_are_computed_again(model, setting):
    for checkpointing, recomputed in (("none", True), ("selective", True), ("auto", False)):
        asked = model | {"enable_activation_offload": True, "enable_gradient_checkpointing": recomputed}
        with pytest.raises(SettingError) as caught:
            check_training(engine(activation_checkpointing=checkpointing), 2, asked, device="cpu", setting=setting)
        assert "activation_checkpointing=full" in paragraph(caught.value, f"{setting}.enable_activation_offload", True)
        asked["enable_activation_offload"] = False
        check_training(engine(activation_checkpointing=checkpointing), 2, asked, device="cpu", setting=setting)
    for checkpointing, recomputed in (("full", False), ("auto", True)):
        asked = model | {"enable_activation_offload": True, "enable_gradient_checkpointing": recomputed}
        check_training(engine(activation_checkpointing=checkpointing), 2, asked, device="cpu", setting=setting)


def test_verls_own_model_settings_ask_for_nothing_else():
    path = Path(verl.trainer.config.__file__).parent / "model" / "hf_model.yaml"
    check_model_settings(OmegaConf.load(path))
    assert {name.partition(".")[0] for name in preflight._UNSUPPORTED} <= {f.name for f in fields(HFModelConfig)}
    nothing = {"lora": {"rank": 0}, "tiled_mlp": {"enabled": False}, "mtp": None, "lora_adapter_path": None}
    check_model_settings(nothing)
    check_model_settings(SimpleNamespace(mtp=MtpConfig()))
    with pytest.raises(SettingError, match=r"model\.mtp\.enable=True"):
        check_model_settings(SimpleNamespace(mtp=MtpConfig(enable=True)), "model")


@pytest.mark.parametrize("key", ["save_contents", "load_contents"])
@pytest.mark.parametrize("setting", [MODEL, "critic.model", "model"])
def test_checkpoint_contents_have_to_be_known(model, key, setting):
    node = {MODEL: "actor_rollout_ref.actor.checkpoint", "critic.model": "critic.checkpoint"}.get(setting, "checkpoint")
    for contents, unknown in ((["model", "hf"], "hf"), (["optim"], "optim"), ("modle", "modle")):
        with pytest.raises(SettingError) as caught:
            check_training(engine(), 2, model, checkpoint={key: contents}, device="cpu", setting=setting)
        assert f"there is no {unknown} in a checkpoint" in paragraph(caught.value, f"{node}.{key}", contents)
    for contents in (None, [], ["model"], OmegaConf.create(["model", "optimizer", "extra", "hf_model"])):
        assert check_training(engine(), 2, model, checkpoint={key: contents}, device="cpu", setting=setting)


def test_a_critic_is_not_saved_in_the_background(model):
    def check(setting):
        check_training(engine(), 2, model, checkpoint={"async_save": True}, device="cpu", setting=setting)

    check(MODEL)
    with pytest.raises(SettingError) as caught:
        check("critic.model")
    paragraph(caught.value, "critic.checkpoint.async_save", True)


REPLAY = "engine.router_replay.mode"
ROUTES = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
RECORDED = {"enable_rollout_routing_replay": True}


def test_what_is_replayed_has_to_be_recorded(model):
    for mode, rollout in (("disabled", {}), ("disabled", RECORDED), ("R2", {}), ("R3", RECORDED)):
        check_run(engine(replay=mode), 2, model, {"name": None} | rollout, device="cpu")
    bypass = {"bypass_mode": True}
    check_run(engine(replay="R3"), 2, model, {"name": None} | RECORDED | bypass, device="cpu")
    for mode, rollout, setting, value in (
        ("R3", {}, ROUTES, False),
        ("R2", RECORDED, ROUTES, True),
        ("R2", bypass, REPLAY, "R2"),
    ):
        with pytest.raises(SettingError) as caught:
            check_run(engine(replay=mode), 2, model, {"name": None} | rollout, device="cpu")
        assert REPLAY in paragraph(caught.value, setting, value)


def test_what_cannot_be_replayed(tmp_path, model):
    def refused(model, setting, value, words):
        with pytest.raises(SettingError) as caught:
            check_run(engine(replay="R2"), 2, model, {"name": None}, device="cpu")
        assert words in paragraph(caught.value, setting, value)

    refused(model | {"use_remove_padding": False}, f"{MODEL}.use_remove_padding", False, "along a packed row")
    (tmp_path / "one").mkdir()
    one = checkpoint(tmp_path / "one", "mixtral", num_hidden_layers=2, num_experts_per_tok=1)
    refused(one, REPLAY, "R2", "a token takes one expert")


def test_top_k_distillation_needs_logits_of_the_batch_s_tokens(model):
    def run(engine, model, loss="forward_kl_topk", enabled=True):
        rollout = {"name": None, "distillation": enabled, "distillation_loss": loss}
        check_run(engine, 2, model, rollout, device="cpu")

    fused, plain, padded = model | {"use_fused_kernels": True}, engine(pad_to_length=False), engine(pad_to_length=True)
    run(plain, model)
    run(padded, fused, enabled=False)
    run(padded, fused, loss="k3")
    for settings, setting in (
        ((plain, fused), f"{MODEL}.use_fused_kernels"),
        ((padded, model), "engine.pad_to_length"),
    ):
        with pytest.raises(SettingError) as caught:
            run(*settings)
        assert "distillation_loss.loss_mode=forward_kl_topk" in paragraph(caught.value, setting, True)


def test_any_rollout_is_sent_full_tensors_and_only_vllm_slices(model, installs, caplog):
    road = {"name": "vllm", "update_weights_bucket_megabytes": 1024}
    for backend in ("naive", "nccl", "epfsdp2_p2p", "delta_sharded", None):
        check_run(engine(), 2, model, road | {"backend": backend}, device="cpu")
    check_run(engine(), 2, model, {"name": None}, device="cpu")
    installs("sglang", "0.5.12")
    check_run(engine(), 2, model, road | {"name": "sglang"}, device="cpu")
    assert "nobody has run" not in caplog.text
    check_run(engine(rollout_sync="full"), 2, model, road | {"name": "trtllm", "backend": "nccl"}, device="cpu")
    assert "nobody has run this engine with actor_rollout_ref.rollout.name=trtllm" in caplog.text
    for name, settings, backend, setting, value in (
        ("sglang", {"rollout_sync": "sliced"}, "naive", "engine.rollout_sync", "sliced"),
        ("trtllm", {}, "epfsdp2_p2p", "actor_rollout_ref.rollout.checkpoint_engine.backend", "epfsdp2_p2p"),
    ):
        with pytest.raises(SettingError) as caught:
            check_run(engine(**settings), 2, model, road | {"name": name, "backend": backend}, device="cpu")
        paragraph(caught.value, setting, value)


@pytest.mark.parametrize(
    "argument, value", [("tp_size", 2), ("dp_size", 2), ("pp_size", 2), ("ep_size", 2)], ids=lambda it: str(it)
)
def test_sizes_among_sglangs_arguments_are_verls_own(model, installs, argument, value):
    installs("sglang", "0.5.12")
    setting = f"actor_rollout_ref.rollout.engine_kwargs.sglang.{argument}"
    check_run(engine(), 2, model, {"name": "sglang", "engine_kwargs": {"sglang": {argument: 1}}}, device="cpu")
    with pytest.raises(SettingError) as caught:
        check_run(engine(), 2, model, {"name": "sglang", "engine_kwargs": {"sglang": {argument: value}}}, device="cpu")
    paragraph(caught.value, setting, value)


def test_slices_that_sglang_can_not_cut_are_refused(model, installs):
    installs("sglang", "0.5.12")
    kwargs = {"sglang": {"custom_weight_loader": [SGLANG_LOADER]}}
    rollout = {"name": "sglang", "backend": "epfsdp2_p2p", "tensor_model_parallel_size": 3, "engine_kwargs": kwargs}
    with pytest.raises(SettingError) as caught:
        check_run(engine(), 2, model, rollout, device="cpu")
    text = paragraph(caught.value, "actor_rollout_ref.rollout.tensor_model_parallel_size", 3)
    assert "SGLang can't cut this model so" in text


def test_routes_of_a_family_that_sglang_records_none_of_are_refused(model, installs, monkeypatch):
    installs("sglang", "0.5.12")
    rollout = {"name": "sglang", "enable_rollout_routing_replay": True}
    replay = engine("R3")
    check_run(replay, 2, model, rollout, device="cpu")
    monkeypatch.setattr(rollout_checks, "RECORDS_NO_ROUTES", ("qwen3_moe",))
    with pytest.raises(SettingError) as caught:
        check_run(replay, 2, model, rollout, device="cpu")
    paragraph(caught.value, "actor_rollout_ref.rollout.enable_rollout_routing_replay", True)


@pytest.mark.parametrize(
    "dim, ep, world, rest",
    # gate_up_proj [8, 32, 32], down_proj [8, 32, 16]
    [
        (0, 2, 4, None),
        (0, 8, 8, None),
        (0, 4, 12, 2),
        (0, 2, 32, 4),
        (1, 2, 64, None),
        (1, 2, 6, 32),
        ("auto", 2, 6, None),
    ],
)
def test_an_explicit_expert_shard_dim_has_to_divide(model, dim, ep, world, rest):
    def check():
        check_training(engine(ep_size=ep, expert_shard_dim=dim), world, model, device="cpu")

    if rest is None:
        return check()
    with pytest.raises(SettingError) as caught:
        check()
    text = paragraph(caught.value, "engine.expert_shard_dim", dim)
    assert f"size {rest} along this dim" in text and f"ep_fsdp={world // ep} " in text


@pytest.mark.parametrize("path", ["/no/such/model", "~/no-such-model", "./no/such", "a/b/c"])
def test_a_path_that_is_not_there(path):
    with pytest.raises(SettingError, match="there is no such folder") as caught:
        inspect_model({"path": path})
    paragraph(caught.value, f"{MODEL}.path", path)


def test_a_folder_without_safetensors(tmp_path, model):
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(SettingError, match="has no .*safetensors") as caught:
        inspect_model(model)
    paragraph(caught.value, f"{MODEL}.path", model["path"])


def test_an_index_with_missing_shards(tmp_path, model):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SettingError, match="model-00002.safetensors, which is not there"):
        inspect_model(model)


@pytest.mark.parametrize("path", ["hdfs://host/model", "no-such-org/no-such-model-123"])
def test_what_is_not_here_yet_is_not_checked_and_said_so(path, caplog):
    with caplog.at_level(logging.WARNING, "epfsdp2"):
        assert check_training(engine(), 2, {"path": path} | SDPA, device="cpu") is None
    assert [record.getMessage() for record in caplog.records] == [
        f"epfsdp2: {MODEL}.path={path} is not on this machine yet, so it is not checked"
    ]
    with pytest.raises(SettingError, match="number of ranks"):
        check_training(engine(ep_size=3), 8, {"path": path}, device="cpu")
    # What does not depend on the model is.
    with pytest.raises(SettingError, match="needs an accelerator"):
        check_training(engine(), 2, {"path": path}, device="cpu")


SEQUENCE = "engine.ulysses_sequence_parallel_size"


def test_ranks_that_share_rows(model, tmp_path):
    """The model has two heads."""
    assert check_training(engine(ulysses_sequence_parallel_size=2), 4, model, device="cpu") is not None

    def refused(size, world, model, words, name=SEQUENCE, value=None):
        with pytest.raises(SettingError) as caught:
            check_training(engine(ulysses_sequence_parallel_size=size), world, model, device="cpu")
        assert words in paragraph(caught.value, name, size if value is None else value)

    works = "What works: engine.ulysses_sequence_parallel_size= one of [1, 2]"
    refused(4, 6, model, "has to divide the number of ranks, 6 (dp * sp == 6)")
    refused(4, 4, model, f"has to divide the number of attention heads of Qwen3MoeForCausalLM, 2. {works}")
    unpacked, name = model | {"use_remove_padding": False}, f"{MODEL}.use_remove_padding"
    refused(2, 4, unpacked, f"it is packed rows that are cut ({SEQUENCE}=2). What works: {name}=True", name, "False")
    refused(2, 4, {"path": "hdfs://host/model"} | SDPA | {"use_remove_padding": False}, "packed rows", name, "False")
    linear = {"num_hidden_layers": 2, "num_experts": 8, "layer_types": ["linear_attention", "full_attention"]}
    next_ = checkpoint(tmp_path / "next", "qwen3_next", **{**TINY, **linear})
    assert check_training(engine(ulysses_sequence_parallel_size=2), 4, next_, device="cpu") is not None
    refused(4, 4, next_, f"has to divide the number of attention heads of Qwen3NextForCausalLM, 2. {works}")


@pytest.mark.parametrize("name", ["deepseek_v4", "glm_moe_dsa"])
def test_ranks_can_not_share_rows_of_which_an_indexer_chooses_keys(tmp_path, name):
    model = {"path": str(save(name, tmp_path)), "override_config": {"attn_implementation": "eager"}}
    words = rf"^{SEQUENCE}=2: can't be with \w+: an indexer of \w+ chooses among the keys .*What works: {SEQUENCE}=1$"
    with pytest.raises(SettingError, match=words):
        check_training(engine(ulysses_sequence_parallel_size=2), 2, model, device="cpu")


def test_a_hub_id_in_the_cache_is_checked(tmp_path, model, monkeypatch):
    monkeypatch.setattr(model_facts, "try_to_load_from_cache", lambda path, name: str(tmp_path / name))
    assert inspect_model({"path": "some-org/some-model"}).experts == (8, 8)


def test_a_config_that_transformers_cannot_build(tmp_path, model):
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "no_such_type"}))
    with pytest.raises(SettingError, match="transformers can't build") as caught:
        inspect_model(model)
    paragraph(caught.value, f"{MODEL}.path", model["path"])
    (tmp_path / "config.json").unlink()
    with pytest.raises(SettingError, match="transformers can't build"):
        inspect_model(model)


@pytest.mark.parametrize("name", ["verl", "ray", "vllm", "sglang"])
def test_a_missing_distribution_is_refused(monkeypatch, name):
    version = versions.installed
    monkeypatch.setattr(versions, "installed", lambda asked: None if asked == name else version(asked))
    with pytest.raises(SettingError, match=f"(?i){name} is not installed.*pip install"):
        check_versions("sglang" if name == "sglang" else "vllm")
    if name in ("vllm", "sglang"):
        check_versions("trtllm")


@pytest.fixture
def installs(monkeypatch):
    """Has a distribution seem to be there in a version."""

    def install(name, version):
        installed = versions.installed
        monkeypatch.setattr(versions, "installed", lambda asked: version if asked == name else installed(asked))

    return install


@pytest.mark.parametrize(
    "name, version", [("verl", "0.10.1"), ("vllm", "0.23.0"), ("vllm", "0.99.0"), ("transformers", "5.6.0")]
)
def test_check_versions_outside_the_range_is_refused_with_it(installs, name, version):
    installs(name, version)
    with pytest.raises(SettingError) as caught:
        check_versions("vllm")
    text = paragraph(caught.value, name, version)
    assert f"outside {versions.accepted()[name]}" in text and text.endswith(f"'{name}{versions.accepted()[name]}'")


@pytest.mark.parametrize("name, version", [("torch", "2.11.0a0+nv26.10"), ("torch", "2.12.1"), ("vllm", "0.25.1")])
def test_check_versions_in_the_range_and_not_run_warns_with_those_that_were(installs, caplog, name, version):
    installs(name, version)
    with caplog.at_level(logging.WARNING, "epfsdp2"):
        check_versions("vllm")
    (record,) = caplog.records
    shown = ", ".join(versions.tested(name))
    assert record.getMessage() == f"epfsdp2: {name} {version} was not tested with; tested: {name} {shown}"


def test_the_installed_versions_are_tested_ones(caplog):
    with caplog.at_level(logging.WARNING, "epfsdp2"):
        check_versions("vllm")
    assert not caplog.records


@pytest.mark.parametrize(
    "stored, computed, megabytes", [("fp32", "fp32", 16), ("fp32", "bf16", 8), ("bf16", "bf16", 8), ("bf16", "fp32", 8)]
)
def test_the_bucket_has_to_hold_the_largest_tensor_whole_as_it_is_sent(
    tmp_path, monkeypatch, stacks_are_sent, stored, computed, megabytes
):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: DISK(0, 0, 1 << 40))
    model = checkpoint(tmp_path)
    # [8, 2 * 256, 1024]: 16 MB in float32; one expert of it is 2 MB.
    model["override_config"] |= {"hidden_size": 1024, "moe_intermediate_size": 256}
    rollout = {"name": "vllm", "n_gpus_per_node": 2, "update_weights_bucket_megabytes": megabytes}
    settings = engine(model_dtype=stored, mixed_precision={"param_dtype": computed})
    check_run(settings, 2, model, rollout, device="cpu", ipc=False)
    with pytest.raises(SettingError) as caught:
        too_small = rollout | {"update_weights_bucket_megabytes": megabytes - 1}
        check_run(settings, 2, model, too_small, device="cpu", ipc=False)
    text = paragraph(caught.value, BUCKET, megabytes - 1)
    assert "gate_up_proj" in text and text.endswith(f"{BUCKET}={megabytes}")
    # Where device memory is shared, what does not fit is sent by itself.
    check_run(settings, 2, model, too_small, device="cpu", ipc=True)


def test_of_modules_in_float32_the_largest_tensor_is_sent_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: DISK(0, 0, 1 << 40))
    model = checkpoint(tmp_path)
    # A head of 6 M elements; gate_up_proj has 8 M.
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 512, "vocab_size": 6144, "tie_word_embeddings": False}
    model["override_config"] |= sizes
    rollout = {"name": "vllm", "n_gpus_per_node": 2, "update_weights_bucket_megabytes": 23}
    settings = engine()
    check_run(settings, 2, model, rollout, device="cpu", ipc=False)
    settings.fp32_modules = ["lm_head"]
    with pytest.raises(SettingError, match=f"{BUCKET}=23: the largest tensor, lm_head.weight, is {24 << 20} bytes"):
        check_run(settings, 2, model, rollout, device="cpu", ipc=False)


def test_the_bucket_has_to_hold_one_expert_where_vllm_takes_them_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: DISK(0, 0, 1 << 40))
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts": 8}
    model = checkpoint(tmp_path, "hunyuan_v1_moe", **sizes, **heads)
    facts = inspect_model(model)
    assert max(math.prod(shape) for shape, *_ in facts.stacked) == 8 * 2 << 20
    name, elements = largest_sent(facts.model)
    assert elements == 1 << 20 and ".experts.0." in name
    rollout = {"name": "vllm", "n_gpus_per_node": 2, "update_weights_bucket_megabytes": 2}
    check_run(engine(), 2, model, rollout, device="cpu", ipc=False)
    with pytest.raises(SettingError, match=f"{BUCKET}=1: the largest tensor, {re.escape(name)}, "):
        check_run(engine(), 2, model, rollout | {"update_weights_bucket_megabytes": 1}, device="cpu", ipc=False)
    # A dense tensor that is larger counts.
    model["override_config"] |= {"vocab_size": 4096}
    assert largest_sent(inspect_model(model).model)[1] == 4096 * 1024


def test_rollouts_in_other_processes_have_buckets_too_but_elsewhere(model, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: DISK(1, 1, 0))
    apart = {"name": "vllm", "backend": "epfsdp2_p2p", "update_weights_bucket_megabytes": 1}
    check_run(engine(), 2, model, apart, device="cpu", ipc=False)
    with pytest.raises(SettingError, match=f"{BUCKET}=0: the largest tensor"):
        check_run(engine(), 2, model, apart | {"update_weights_bucket_megabytes": 0}, device="cpu", ipc=False)


def test_dev_shm_has_to_hold_one_bucket_per_local_rank(model, monkeypatch):
    facts = inspect_model(model)
    rollout = {"n_gpus_per_node": 4, "update_weights_bucket_megabytes": 100}

    def free(megabytes):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: DISK(0, 0, megabytes << 20))

    free(464)
    check_rollout(engine(), 8, rollout, facts)
    free(463)
    with pytest.raises(SettingError) as caught:
        check_rollout(engine(), 8, rollout, facts)
    text = paragraph(caught.value, BUCKET, 100)
    assert "4 ranks" in text and "463 MB are free" in text and f"{BUCKET}=99" in text
    check_rollout(engine(), 3, rollout, facts)
    free(64)
    with pytest.raises(SettingError, match=r"a /dev/shm of 68 MB or more \(docker run --shm-size\)"):
        check_rollout(engine(), 8, rollout, facts)


def rollout(tp=2, **settings):
    """A rollout of verl's that slices can be sent to; keys of ``vllm`` are vLLM's own."""
    vllm = {"worker_extension_cls": EXTENSION, **settings.pop("vllm", {})}
    return {"name": "vllm", "tensor_model_parallel_size": tp, "engine_kwargs": {"vllm": vllm}, **settings}


def test_latent_attention_in_cuda_graphs_needs_a_vllm_that_keeps_its_matrices(tmp_path, model, installs):
    latent = checkpoint(tmp_path / "latent", "deepseek_v3", num_hidden_layers=2, first_k_dense_replace=1)
    facts, plain = (check_training(engine(), 2, model, device="cpu") for model in (latent, model))
    installs("vllm", "0.24.0")
    for graphs in ({}, {"enforce_eager": False}):
        with pytest.raises(SettingError) as caught:
            check_graphs(graphs, facts, "cuda")
    text = paragraph(caught.value, "actor_rollout_ref.rollout.enforce_eager", False)
    assert "vllm 0.24.0 allocates" in text and text.endswith("enforce_eager=True, or vllm>=0.27.1")
    for works in (
        ({"enforce_eager": True}, facts, "cuda"),
        ({}, facts, "cpu"),
        ({}, plain, "cuda"),
        ({}, None, "cuda"),
    ):
        check_graphs(*works)
    installs("vllm", "0.27.1")
    check_graphs({}, facts, "cuda")


@pytest.mark.parametrize("wanted", ["full", "auto", "sliced", "expert_local"])
def test_a_stream_that_the_rollout_takes(model, wanted):
    expert_parallel = rollout(2, data_parallel_size=2, expert_parallel_size=4)
    check_run(engine(rollout_sync=wanted), 8, model, expert_parallel, device="cpu")
    if wanted != "expert_local":
        check_run(engine(rollout_sync=wanted), 8, model, rollout(), device="cpu")


VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"
OBSTACLES = [
    ({"vllm": {"worker_extension_cls": "theirs.Extension"}}, f"{VLLM}.worker_extension_cls=theirs.Extension"),
    ({"engine_kwargs": None}, f"{VLLM}.worker_extension_cls=None"),
    ({"vllm": {"expert_placement_strategy": "round_robin"}}, f"{VLLM}.expert_placement_strategy=round_robin"),
    ({"pipeline_model_parallel_size": 2}, "actor_rollout_ref.rollout.pipeline_model_parallel_size=2"),
    ({"disaggregation": {"enabled": True}}, "actor_rollout_ref.rollout.disaggregation.enabled=True"),
    ({"quantization": "torchao"}, "actor_rollout_ref.rollout.quantization=torchao"),
    ({"vllm": {"quantization": "fp8"}}, f"{VLLM}.quantization=fp8"),
    ({"qat": {"enable": True}}, "actor_rollout_ref.rollout.qat.enable=True"),
    ({"backend": "nccl"}, f"{BACKEND}=nccl"),
]


@pytest.mark.parametrize("wanted", ["sliced", "expert_local"])
@pytest.mark.parametrize("settings, named", OBSTACLES)
def test_a_stream_that_the_rollout_cannot_take_is_refused_by_name_alone(model, wanted, settings, named):
    placed = rollout(2, **{"data_parallel_size": 2, "expert_parallel_size": 4, **settings})
    with pytest.raises(SettingError) as caught:
        check_run(engine(rollout_sync=wanted), 8, model, placed, device="cpu")
    text = paragraph(caught.value, "engine.rollout_sync", wanted)
    assert f"can't be with {named}: " in text and "What works: engine.rollout_sync=auto, or " in text
    for other in ("auto", "full"):
        check_run(engine(rollout_sync=other), 8, model, placed, device="cpu")


@pytest.mark.parametrize("backend", ["nccl", "epfsdp2_p2p"])
def test_a_quantised_rollout_has_to_be_beside_the_trainer(model, backend):
    check_run(engine(rollout_sync="full"), 8, model, rollout(quantization="fp8"), device="cpu")
    with pytest.raises(SettingError) as caught:
        check_run(engine(), 8, model, rollout(quantization="fp8", backend=backend), device="cpu")
    text = paragraph(caught.value, "actor_rollout_ref.rollout.quantization", "fp8")
    assert text.endswith(f"What works: {BACKEND}=naive, or actor_rollout_ref.rollout.quantization=null")


def test_slices_of_a_quantised_rollout_need_whole_blocks(tmp_path, model):
    with pytest.raises(SettingError, match=r"tensor_model_parallel_size=2: .* blocks of 128 x 128 share a scale"):
        check_run(engine(), 8, model, rollout(quantization="fp8"), device="cpu")
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 64, "num_experts": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    fits = checkpoint(tmp_path / "fits", "olmoe", **sizes, **heads)
    check_run(engine(), 8, fits, rollout(2, quantization="fp8"), device="cpu")
    with pytest.raises(SettingError, match="this mode sends whole tensors beside the experts"):
        whole = rollout(2, quantization="fp8", expert_parallel_size=2)
        check_run(engine(rollout_sync="expert_local"), 8, fits, whole, device="cpu")


@pytest.mark.parametrize("key", ["ignored_layers", "ignore"])
def test_layers_that_are_not_to_be_quantised_have_to_be_there(model, key):
    layer = "model.layers.1"
    named = [f"{layer}.mlp.gate", f"{layer}.self_attn.qkv_proj", f"{layer}.self_attn.q_proj", "lm_head", "re:.*gate"]
    given = {"quantization_config": {"quant_method": "fp8", key: named}}
    check_run(engine(), 2, model, rollout(vllm={"hf_overrides": given}), device="cpu")
    for name, near in ((f"{layer}.mlp.gatee", f"{layer}.mlp.gate"), ("model.layers.2.mlp.gate", "layers")):
        named.append(name)
        with pytest.raises(SettingError) as caught:
            check_run(engine(), 2, model, rollout(vllm={"hf_overrides": given}), device="cpu")
        text = paragraph(caught.value, f"{VLLM}.hf_overrides.quantization_config.{key}", name)
        assert "has no such layer" in text and near in text.partition("What works: ")[2]
        named.pop()
    with pytest.raises(SettingError, match="hf_overrides.quantization_config=.* needs full tensors"):
        check_run(engine(rollout_sync="sliced"), 2, model, rollout(vllm={"hf_overrides": given}), device="cpu")


def test_whole_experts_need_expert_parallelism(model):
    with pytest.raises(SettingError) as caught:
        check_run(engine(rollout_sync="expert_local"), 8, model, rollout(2, data_parallel_size=2), device="cpu")
    text = paragraph(caught.value, "engine.rollout_sync", "expert_local")
    assert text.endswith("engine.rollout_sync=auto, or actor_rollout_ref.rollout.expert_parallel_size=4")


def test_slices_need_a_family_and_a_vllm_that_are_known(tmp_path, model, installs, monkeypatch, caplog):
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4}
    other = checkpoint(tmp_path / "other", "minimax", **sizes, **heads) | {"use_remove_padding": False}
    with pytest.raises(SettingError, match="can't be with actor_rollout_ref.model=minimax: how vLLM cuts it"):
        check_run(engine(rollout_sync="sliced"), 2, other, rollout(), device="cpu")
    check_run(engine(), 2, other, rollout(), device="cpu")

    # Of a model that is not here yet, what can be judged is.
    later = {"path": "some-org/not-here", **SDPA}
    check_run(engine(rollout_sync="sliced"), 2, later, rollout(), device="cpu")
    with pytest.raises(SettingError, match="quantization=torchao"):
        check_run(engine(rollout_sync="sliced"), 2, later, rollout(quantization="torchao"), device="cpu")

    installs("vllm", "0.25.1")
    with pytest.raises(SettingError, match="vllm 0.25.1 was not tested with; .*a layout may have changed") as caught:
        check_run(engine(rollout_sync="sliced"), 2, model, rollout(), device="cpu")
    assert paragraph(caught.value, "engine.rollout_sync", "sliced").endswith("engine.rollout_sync=auto")
    check_run(engine(), 2, model, rollout(), device="cpu")


@pytest.mark.parametrize("wanted", ["auto", "full", "sliced"])
@pytest.mark.parametrize(
    "settings, setting, value, words",
    [
        ({"vllm": {"enable_eplb": True}}, f"{VLLM}.enable_eplb", True, "silently wrong"),
        ({"vllm": {"tensor_parallel_size": 4}}, f"{VLLM}.tensor_parallel_size", 4, "feeds the wrong ones"),
        ({"vllm": {"pipeline_parallel_size": 2}}, f"{VLLM}.pipeline_parallel_size", 2, "feeds the wrong ones"),
        ({"vllm": {"data_parallel_size": 2}}, f"{VLLM}.data_parallel_size", 2, "feeds the wrong ones"),
        ({"expert_parallel_size": 3}, "actor_rollout_ref.rollout.expert_parallel_size", 3, "all 2 workers"),
        ({"data_parallel_size": 0}, "actor_rollout_ref.rollout.data_parallel_size", 0, "at least 1"),
        ({"tp": 3}, TENSOR_PARALLEL, 3, "the 8 trainer ranks are not a multiple"),
        ({"tp": 2, "data_parallel_size": 8}, TENSOR_PARALLEL, 2, "takes 16 workers"),
        ({"tp": 4}, TENSOR_PARALLEL, 4, "vLLM can't cut 2 attention heads so. What works: .* one of [1, 2]"),
    ],
)
def test_a_rollout_that_nothing_reaches_is_refused(model, wanted, settings, setting, value, words):
    with pytest.raises(SettingError) as caught:
        check_run(engine(rollout_sync=wanted), 8, model, rollout(**settings), device="cpu")
    assert re.search(words.replace("[", r"\["), paragraph(caught.value, setting, value))


@pytest.mark.parametrize(
    "sizes, tp, words",
    [
        ({"num_attention_heads": 6, "moe_intermediate_size": 48}, 3, "a vocabulary of 64, padded to 64 "),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 6, "4 key-value heads"),
        (
            {"num_attention_heads": 8, "moe_intermediate_size": 4},
            8,
            "intermediate size 4 of an expert",
        ),
        ({"num_attention_heads": 16, "num_experts": 8}, 16, "8 experts"),
    ],
)
def test_what_vllm_cannot_cut(model, sizes, tp, words):
    model["override_config"] |= sizes
    with pytest.raises(SettingError) as caught:
        check_run(engine(), 48, model, rollout(tp), device="cpu")
    assert words in paragraph(caught.value, TENSOR_PARALLEL, tp)
    # With as many ranks as heads and fewer key-value heads, neighbours hold the same one.
    check_run(engine(), 48, model, rollout(2), device="cpu")


def test_experts_are_cut_over_data_parallel_workers_too(model):
    model["override_config"] |= {"moe_intermediate_size": 6}
    with pytest.raises(SettingError) as caught:
        check_run(engine(), 8, model, rollout(1, data_parallel_size=4), device="cpu")
    text = paragraph(caught.value, TENSOR_PARALLEL, 1)
    assert "the intermediate size 6 of an expert, in 4 parts" in text
    assert text.endswith("What works: actor_rollout_ref.rollout.expert_parallel_size=4")
    check_run(engine(), 8, model, rollout(1, data_parallel_size=4, expert_parallel_size=4), device="cpu")


def test_a_dense_part_that_does_not_divide_is_found_by_the_plan(model):
    model["override_config"] |= {"intermediate_size": 33, "mlp_only_layers": [0]}
    with pytest.raises(SettingError, match=r"gate_proj.weight has 33 along dim 0, which tensor parallelism 2"):
        check_run(engine(), 2, model, rollout(), device="cpu")
    check_run(engine(), 2, model, rollout(1), device="cpu")


@pytest.mark.parametrize("wanted, expert_parallel", [("sliced", 1), ("auto", 1), ("expert_local", 2)])
def test_a_round_has_to_hold_one_row(model, wanted, expert_parallel):
    # gate_up_proj [2048, 2048, 2048] in bfloat16: a worker takes half of it, half of that from the other rank, in 2048
    # parts at most: 2 MB each.
    model["override_config"] |= {"num_experts": 2048, "moe_intermediate_size": 1024, "hidden_size": 2048}
    placed = rollout(expert_parallel_size=expert_parallel)
    check_run(engine(rollout_sync=wanted, sync_megabytes=10, expert_shard_dim=1), 2, model, placed, device="cpu")
    with pytest.raises(SettingError) as caught:
        check_run(engine(rollout_sync=wanted, sync_megabytes=9, expert_shard_dim=1), 2, model, placed, device="cpu")
    text = paragraph(caught.value, "engine.sync_megabytes", 9)
    assert f"{2 << 20} bytes on a rank" in text and text.endswith("engine.sync_megabytes=10")
    check_run(engine(rollout_sync="full", sync_megabytes=1), 2, model, placed, device="cpu")


# The same through verl: its own validate_config, which main_ppo calls before it starts Ray.

RUN = [
    "engine=epfsdp2",
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    f"{BUCKET}=4",
    "trainer.n_gpus_per_node=2",
    "trainer.device=cpu",
]


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    """The same on a machine with an accelerator."""
    monkeypatch.setattr(engine_config_module, "get_device_name", lambda: "cpu")
    monkeypatch.setattr(engine_config_module, "is_support_ipc", lambda: False)


def validate(model, *overrides, critic=False):
    from verl.utils.config import validate_config

    path = f"{MODEL}.path={model['path']}"
    attention = f"+{MODEL}.override_config.attn_implementation={model['override_config']['attn_implementation']}"
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [*RUN, path, attention, *overrides])
    validate_config(config, use_reference_policy=False, use_critic=critic)


def test_validate_config_lets_a_right_run_pass(model, installs):
    installs("sglang", "0.5.12")
    validate(model, "engine.ep_size=2")
    validate(model, "engine.ep_size=2", "actor_rollout_ref.rollout.name=sglang")
    adapters = f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules=[q_proj,o_proj]"
    validate(model, "engine.ep_size=2", *adapters)
    with pytest.raises(SettingError, match="lora.merge=False: sglang is sent adapters merged"):
        validate(model, "engine.ep_size=2", "actor_rollout_ref.rollout.name=sglang", *adapters)


@pytest.mark.parametrize(
    "override, rule",
    [
        ("engine.ep_size=3", "engine.ep_size=3: has to divide the number of ranks"),
        (f"{MODEL}.path=/no/such/model", f"{MODEL}.path=/no/such/model: there is no such folder"),
        (f"+{MODEL}.override_config.num_experts=7", "engine.ep_size=2: has to divide the number of experts"),
        (f"{MODEL}.lora_rank=8", f"{MODEL}.lora.merge=False: vLLM's CPU build has no kernels for adapters of experts"),
        (f"{MODEL}.mtp.enable=True", f"{MODEL}.mtp.enable=True: is not supported"),
        (
            "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf]",
            "actor_rollout_ref.actor.checkpoint.save_contents=['model', 'hf']: there is no hf",
        ),
        ("engine.rollout_sync=expert_local", "engine.rollout_sync=expert_local: can't be with"),
        (f"{TENSOR_PARALLEL}=4", f"{TENSOR_PARALLEL}=4: a replica of vLLM takes 4 workers"),
        (
            "+actor_rollout_ref.rollout.engine_kwargs.vllm.enable_eplb=True",
            "actor_rollout_ref.rollout.engine_kwargs.vllm.enable_eplb=True: ",
        ),
        (f"{BUCKET}=0", f"{BUCKET}=0: the largest tensor"),
        (f"{BUCKET}=100000000", f"{BUCKET}=100000000: each of the 2 ranks of a node"),
    ],
)
def test_validate_config_refuses(model, override, rule):
    with pytest.raises(SettingError) as caught:
        validate(model, "engine.ep_size=2", override)
    assert str(caught.value).startswith(rule)


@pytest.mark.parametrize("kind", ["use_dora=True", "modules_to_save=[lm_head]", "rank_pattern={q_proj:4}"])
def test_validate_config_refuses_adapters_alone_that_vllm_does_not_serve(model, kind):
    settings = f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules=[q_proj]", f"+{MODEL}.lora.{kind}"
    with pytest.raises(SettingError) as caught:
        validate(model, "engine.ep_size=2", *settings)
    rule = f"{MODEL}.lora.merge=False: vLLM serves no adapter with {kind.partition('=')[0]}."
    assert str(caught.value) == f"{rule} What works: {MODEL}.lora.merge=True"
    validate(model, "engine.ep_size=2", *settings, f"{MODEL}.lora.merge=True")


@pytest.mark.parametrize(
    "override, words",
    [
        ("engine.ep_size=0", "engine.ep_size=0: has to be a positive whole number. What works: engine.ep_size=1"),
        ("engine.ep_size=-2", "engine.ep_size=-2: has to be a positive whole number. What works: engine.ep_size=1"),
        ("engine.epsize=2", "engine.epsize=2: the engine has no such setting. What works: engine.ep_size"),
        ("+engine.epsize=2", "engine.epsize=2: the engine has no such setting. What works: engine.ep_size"),
    ],
)
def test_validate_config_refuses_values_and_keys_by_themselves(model, override, words):
    with pytest.raises(InstantiationException) as caught:
        validate(model, override)
    assert words in str(caught.value).splitlines()
    assert isinstance(caught.value.__cause__, SettingError)


def test_validate_config_refuses_a_critic_without_a_model(model):
    with pytest.raises(InstantiationException) as caught:
        validate(model, "critic.model.path=/no/such/critic", "critic.ppo_micro_batch_size_per_gpu=1", critic=True)
    (line,) = [line for line in str(caught.value).splitlines() if line.startswith("critic.model.path=/no/such/critic")]
    assert "there is no such folder. What works: " in line


@pytest.mark.parametrize(
    "override, named",
    [
        ("actor_rollout_ref.rollout.disaggregation.enabled=True", "rollout.disaggregation.enabled=True"),
        ("actor_rollout_ref.rollout.quantization=torchao", "rollout.quantization=torchao"),
        ("actor_rollout_ref.rollout.pipeline_model_parallel_size=2", "rollout.pipeline_model_parallel_size=2"),
        (f"{VLLM}.worker_extension_cls=theirs.Extension", f"{VLLM}.worker_extension_cls=theirs.Extension"),
        (f"+{VLLM}.expert_placement_strategy=round_robin", "expert_placement_strategy=round_robin"),
        (f"{BACKEND}=nccl", f"{BACKEND}=nccl"),
    ],
)
def test_validate_config_sees_all_that_decides_on_the_stream(model, override, named):
    whole = ["engine.ep_size=2", "trainer.n_gpus_per_node=4", override]
    validate(model, *whole)
    with pytest.raises(SettingError) as caught:
        validate(model, *whole, "engine.rollout_sync=sliced")
    assert named in paragraph(caught.value, "engine.rollout_sync", "sliced")


@pytest.mark.e2e
@pytest.mark.parametrize(
    "override, words",
    [
        # One that a check of a run refuses, and one that Hydra is given by the engine's config.
        ("engine.ep_size=3", "engine.ep_size=3: has to divide the number of ranks, 2"),
        ("engine.epsize=2", "engine.epsize=2: the engine has no such setting. What works: engine.ep_size"),
        pytest.param(
            "engine.rollout_sync=expert_local",
            "engine.rollout_sync=expert_local: can't be with",
            marks=pytest.mark.long,
        ),
        pytest.param(
            f"{MODEL}.path=/no/such/model",
            f"{MODEL}.path=/no/such/model: there is no such folder",
            marks=pytest.mark.long,
        ),
    ],
)
def test_main_ppo_ends_with_the_paragraph_and_never_starts_ray(tmp_path, model, override, words):
    main_ppo_ends_with(words, tmp_path, model, override)


@pytest.mark.e2e
def test_main_ppo_ends_with_what_is_wrong_with_a_damaged_file_and_never_starts_ray(tmp_path, model):
    with Path(model["path"], "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, os.SEEK_END) - 2)
    main_ppo_ends_with(f"{MODEL}.path={model['path']}: model.safetensors can't be read: ", tmp_path, model)


def main_ppo_ends_with(words, tmp_path, model, *overrides):
    ray = tmp_path / "ray"
    ray.mkdir()
    attention = f"+{MODEL}.override_config.attn_implementation=sdpa"
    command = [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        *RUN,
        f"{MODEL}.path={model['path']}",
        attention,
        *overrides,
    ]
    environment = {**os.environ, "RAY_TMPDIR": str(ray), "VERL_PLATFORM": "cpu"}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith(words)]
    assert "What works: " in line
    assert "Traceback" not in done.stderr
    assert not list(ray.iterdir())
