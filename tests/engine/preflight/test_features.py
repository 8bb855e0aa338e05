"""Attention, recomputation, checkpoints, replay and distillation that a model or a run does not allow."""

import contextlib
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import verl.trainer.config
from omegaconf import OmegaConf
from verl.workers.config.model import HFModelConfig, MtpConfig

from epfsdp2.engine.compat import versions
from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.preflight import run as preflight
from epfsdp2.engine.preflight.features import check_attention, check_casts
from epfsdp2.engine.preflight.model_facts import inspect_model
from epfsdp2.engine.preflight.run import check_model_settings, check_run, check_training
from epfsdp2.engine.topology.mesh import Topology
from epfsdp2.rollout.sglang import server as sglang_server
from tests.support.trainer.preflight import MODEL, paragraph
from tests.support.trainer.settings import checkpoint, engine


@pytest.fixture
def flash_attn(monkeypatch):
    """Whether flash-attn is installed, whatever is installed here."""

    def install(there):
        version = versions.installed
        monkeypatch.setattr(
            versions, "installed", lambda name: ("2.8.3" if there else None) if name == "flash-attn" else version(name)
        )

    return install


@pytest.mark.parametrize(
    ("world", "settings", "why"),
    [
        (2, {}, None),
        (1, {"ep_size": 1}, None),
        (4, {"fsdp_size": 2}, None),
        (4, {}, "experts are gathered over 2 ranks"),
        (2, {"model_dtype": "bf16"}, "experts are computed with in model_dtype"),
        (2, {"offload_policy": True}, "offload_policy and"),
        (2, {"rollout_quantization_aware": "experts"}, "rollout_quantization_aware leave"),
        (4, {"keep_casts": False}, None),
    ],
)
def test_kept_casts_are_refused_where_there_are_none(world, settings, why):
    role = engine(**{"ep_size": 2, "keep_casts": True, **settings})
    topology = Topology.arrange(world, role.ep_size, role.fsdp_size)
    with pytest.raises(SettingError, match=f"engine.keep_casts=True: .*{why}") if why else contextlib.nullcontext():
        check_casts(role, topology)


def test_kept_casts_of_a_run_are_checked_on_the_driver(model):
    assert check_training(engine(ep_size=2, keep_casts=True), 2, model, device="cpu") is not None
    with pytest.raises(SettingError, match=r"engine.keep_casts=True: keeps casts .* over 2 ranks.*keep_casts=False"):
        check_training(engine(keep_casts=True), 2, model, device="cpu")


@pytest.mark.parametrize("use_remove_padding", [True, False])
def test_attention_eager_with_packed_inputs_passes(model, use_remove_padding):
    model |= {"use_remove_padding": use_remove_padding, "override_config": {"attn_implementation": "eager"}}
    assert check_training(engine(), 2, model, device="cpu") is not None


def test_attention_of_gpt_oss_without_an_accelerator_refuses_sdpa_and_takes_eager(tmp_path, flash_attn):
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


def test_attention_by_verls_default_without_an_accelerator_is_refused(model, flash_attn):
    flash_attn(True)
    del model["override_config"]
    assert check_training(engine(), 2, model, device="cuda") is not None
    with pytest.raises(SettingError, match="needs an accelerator") as caught:
        check_training(engine(), 2, model, device="cpu", setting="model")
    text = paragraph(caught.value, "model.override_config.attn_implementation", "flash_attention_2")
    assert text.endswith("+model.override_config.attn_implementation=sdpa")


@pytest.mark.parametrize("wanted", [None, "flash_attention_2", "paged|flash_attention_2"])
def test_attention_flash_attention_2_without_flash_attn_is_refused(model, flash_attn, wanted):
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
def test_check_training_of_unsupported_settings_refuses_each(model, setting, name, value, settings):
    for asked in (settings, SimpleNamespace(**settings), OmegaConf.create(settings)):
        with pytest.raises(SettingError) as caught:
            check_model_settings(asked, setting)
        text = paragraph(caught.value, f"{setting}.{name}", value)
        assert text.endswith("=False")
    with pytest.raises(SettingError, match="is not supported by this engine"):
        check_training(engine(), 2, model | settings, device="cpu", setting=setting)
    with pytest.raises(SettingError, match="is not supported by this engine"):
        check_training(engine(), 2, {"path": "some-org/not-here"} | settings, device="cpu", setting=setting)


def test_freeze_vision_tower_of_a_model_without_one_is_refused(model):
    with pytest.raises(SettingError) as caught:
        check_training(engine(freeze_vision_tower=True), 2, model, device="cpu")
    assert "has no vision tower" in paragraph(caught.value, "engine.freeze_vision_tower", True)


@pytest.mark.parametrize("setting", [MODEL, "critic.model", "model"])
def test_activation_offload_without_checkpointing_is_refused(model, setting):
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


def test_model_settings_by_verls_defaults_pass():
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
def test_checkpoint_contents_that_are_unknown_are_refused(model, key, setting):
    node = {MODEL: "actor_rollout_ref.actor.checkpoint", "critic.model": "critic.checkpoint"}.get(setting, "checkpoint")
    for contents, unknown in ((["model", "hf"], "hf"), (["optim"], "optim"), ("modle", "modle")):
        with pytest.raises(SettingError) as caught:
            check_training(engine(), 2, model, checkpoint={key: contents}, device="cpu", setting=setting)
        assert f"there is no {unknown} in a checkpoint" in paragraph(caught.value, f"{node}.{key}", contents)
    with pytest.raises(SettingError) as caught:
        check_training(engine(), 2, model, checkpoint={key: "model"}, device="cpu", setting=setting)
    assert f"{node}.{key}=[model]" in paragraph(caught.value, f"{node}.{key}", "model")
    for contents in (None, [], ["model"], OmegaConf.create(["model", "optimizer", "extra", "hf_model"])):
        assert check_training(engine(), 2, model, checkpoint={key: contents}, device="cpu", setting=setting)


def test_background_save_of_a_critic_is_refused(model):
    def check(setting):
        check_training(engine(), 2, model, checkpoint={"async_save": True}, device="cpu", setting=setting)

    check(MODEL)
    with pytest.raises(SettingError) as caught:
        check("critic.model")
    paragraph(caught.value, "critic.checkpoint.async_save", True)


REPLAY = "engine.router_replay.mode"
ROUTES = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
RECORDED = {"enable_rollout_routing_replay": True}


def test_router_replay_without_recorded_routes_is_refused(model):
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


def test_router_replay_of_unsuitable_models_is_refused(tmp_path, model):
    def refused(model, setting, value, words):
        with pytest.raises(SettingError) as caught:
            check_run(engine(replay="R2"), 2, model, {"name": None}, device="cpu")
        assert words in paragraph(caught.value, setting, value)

    refused(model | {"use_remove_padding": False}, f"{MODEL}.use_remove_padding", False, "along a packed row")
    (tmp_path / "one").mkdir()
    one = checkpoint(tmp_path / "one", "mixtral", num_hidden_layers=2, num_experts_per_tok=1)
    refused(one, REPLAY, "R2", "a token takes one expert")


def test_top_k_distillation_without_logits_of_the_batchs_tokens_is_refused(model):
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


def test_router_replay_of_routes_that_sglang_or_verl_cannot_say_is_refused(model, installs, monkeypatch):
    installs("sglang", "0.5.12")
    rollout = {"name": "sglang", "enable_rollout_routing_replay": True, "skip_tokenizer_init": False}
    replay = engine("R3")
    check_run(replay, 2, model, rollout, device="cpu")
    with pytest.raises(SettingError) as caught:
        check_run(replay, 2, model, {**rollout, "skip_tokenizer_init": True}, device="cpu")
    paragraph(caught.value, "actor_rollout_ref.rollout.skip_tokenizer_init", True)
    monkeypatch.setattr(sglang_server, "RECORDS_NO_ROUTES", ("qwen3_moe",))
    with pytest.raises(SettingError) as caught:
        check_run(replay, 2, model, rollout, device="cpu")
    paragraph(caught.value, "actor_rollout_ref.rollout.enable_rollout_routing_replay", True)
