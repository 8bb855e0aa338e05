"""Attention, recomputation, sequence parallelism, replay and distillation that a model or a run does not allow."""

import contextlib
import functools
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import verl.trainer.config
from omegaconf import OmegaConf
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention

from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.preflight.features import check_attention, check_casts
from epfsdp2.engine.preflight.model import inspect_model
from epfsdp2.engine.preflight.run import check_model_settings, check_run, check_training
from epfsdp2.engine.topology.mesh import Topology
from epfsdp2.rollout.sglang import server as sglang_server
from tests.parity.families import save
from tests.support.trainer.preflight import MODEL, SDPA, refused
from tests.support.trainer.settings import TINY, checkpoint, engine

SEQUENCE = "engine.ulysses_sequence_parallel_size"
REPLAY = "engine.router_replay.mode"
ROUTES = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
RECORDED = {"enable_rollout_routing_replay": True}
ROLES = pytest.mark.parametrize("setting", [MODEL, "critic.model", "model"])


def check(model, world=2, device="cpu", setting=MODEL, **settings):
    return check_training(engine(**settings), world, model, device=device, setting=setting)


@pytest.mark.parametrize(
    ("world", "settings", "why"),
    [
        (2, {}, None),
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
    with refused("engine.keep_casts", True, why) if why else contextlib.nullcontext():
        check_casts(role, Topology.arrange(world, role.ep_size, role.fsdp_size))


def test_kept_casts_and_frozen_towers_of_a_run_are_checked_on_the_driver(model):
    check(model, ep_size=2, keep_casts=True)
    with refused("engine.keep_casts", True, " over 2 ranks", works="engine.keep_casts=False"):
        check(model, keep_casts=True)
    with refused("engine.freeze_vision_tower", True, "has no vision tower"):
        check(model, freeze_vision_tower=True)


@pytest.mark.parametrize("use_remove_padding", [True, False])
def test_attention_eager_with_packed_inputs_passes(model, use_remove_padding):
    model |= {"use_remove_padding": use_remove_padding, "override_config": {"attn_implementation": "eager"}}
    assert check(model) is not None


def test_attention_of_gpt_oss_without_an_accelerator_refuses_sdpa_and_takes_eager(tmp_path, installs):
    installs("flash-attn", "2.8.3")
    model = checkpoint(tmp_path, "gpt_oss", num_hidden_layers=1)
    for flash, device, works in (
        ("2.8.3", "cpu", "eager"),
        ("2.8.3", "cuda", "flash_attention_2"),
        (None, "cuda", "flex_attention"),
    ):
        installs("flash-attn", flash)
        with pytest.raises(SettingError, match=f"GptOssForCausalLM does not support it.*attn_implementation={works}"):
            check(model, device=device)
    model["override_config"] = {"attn_implementation": "eager"}
    assert check(model) is not None
    model["override_config"] = {"attn_implementation": "flex_attention"}
    assert check(model, device="cuda", ulysses_sequence_parallel_size=2) is not None
    with pytest.raises(SettingError, match="flex attention needs an accelerator"):
        check(model)


def test_attention_by_verls_default_without_an_accelerator_is_refused(model, installs):
    installs("flash-attn", "2.8.3")
    del model["override_config"]
    assert check(model, device="cuda") is not None
    name = "model.override_config.attn_implementation"
    with refused(name, "flash_attention_2", "needs an accelerator", works=f"+{name}=sdpa"):
        check(model, setting="model")


@pytest.mark.parametrize("wanted", [None, "paged|flash_attention_2"])
def test_attention_flash_attention_2_without_flash_attn_is_refused(model, installs, wanted):
    model["override_config"] = {} if wanted is None else {"attn_implementation": wanted}
    installs("flash-attn", "2.8.3")
    assert check(model, device="cuda") is not None
    installs("flash-attn", None)
    name, facts = f"{MODEL}.override_config.attn_implementation", inspect_model(model)
    for known in (facts, None):
        words = "flash-attn, which is not installed", "pip install 'verl[vllm,fsdp]'"
        with refused(name, wanted or "flash_attention_2", *words, works=f"+{name}=sdpa"):
            check_attention(model, known, device="cuda")
    # Neither transformers' path on an NPU nor flash attention 3 takes it from that distribution.
    check_attention(model, facts, device="npu")
    check_attention({"override_config": {"attn_implementation": "flash_attention_3"}}, None, device="cuda")


@ROLES
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("use_liger", {"use_liger": True}),
        ("tiled_mlp.enabled", {"tiled_mlp": {"enabled": True, "num_shards": 4}}),
    ],
)
def test_model_settings_that_are_unsupported_are_refused(setting, name, settings):
    words = "is not supported by this engine"
    for asked in (settings, SimpleNamespace(**settings), OmegaConf.create(settings)):
        with refused(f"{setting}.{name}", True, words, works="=False"):
            check_model_settings(asked, setting)
    with refused(f"{setting}.{name}", True, words):
        check({"path": "some-org/not-here"} | settings, setting=setting)


def test_model_settings_by_verls_defaults_pass():
    path = Path(verl.trainer.config.__file__).parent / "model" / "hf_model.yaml"
    check_model_settings(OmegaConf.load(path))
    check_model_settings({"lora": {"rank": 0}, "tiled_mlp": {"enabled": False}})


def test_fused_kernels_that_verl_has_not_are_refused(model):
    for backend in ("torch", "liger"):
        check(model | {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": backend}})
    with refused(f"{MODEL}.fused_kernel_options.impl_backend", "cutlass", "verl has no such kernels"):
        check(model | {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "cutlass"}})


@ROLES
def test_activation_offload_without_checkpointing_is_refused(model, setting):
    def run(checkpointing, recomputed, offload=True):
        asked = {"enable_activation_offload": offload, "enable_gradient_checkpointing": recomputed}
        check(model | asked, setting=setting, activation_checkpointing=checkpointing)

    for checkpointing, recomputed in (("none", True), ("selective", True), ("auto", False)):
        with refused(f"{setting}.enable_activation_offload", True, "activation_checkpointing=full"):
            run(checkpointing, recomputed)
        run(checkpointing, recomputed, offload=False)
    run("full", False)
    run("auto", True)


def test_sequence_parallel_size_that_does_not_fit_is_refused_with_those_that_do(model, tmp_path):
    """The model has two heads."""
    works = f"What works: {SEQUENCE}= one of [1, 2]"
    with refused(SEQUENCE, 4, "has to divide the number of ranks, 6 (dp * sp == 6)"):
        check(model, 6, ulysses_sequence_parallel_size=4)
    unpacked, name = {"use_remove_padding": False}, f"{MODEL}.use_remove_padding"
    rows = f"it is packed rows that are cut ({SEQUENCE}=2). What works: {name}=True"
    for known in (model, {"path": "hdfs://host/model"} | SDPA):
        with refused(name, False, rows):
            check(known | unpacked, 4, ulysses_sequence_parallel_size=2)
    linear = {"num_hidden_layers": 2, "num_experts": 8, "layer_types": ["linear_attention", "full_attention"]}
    next_ = checkpoint(tmp_path / "next", "qwen3_next", **{**TINY, **linear})
    for known, kind in ((model, "Qwen3MoeForCausalLM"), (next_, "Qwen3NextForCausalLM")):
        assert check(known, 4, ulysses_sequence_parallel_size=2) is not None
        with refused(SEQUENCE, 4, f"has to divide the number of attention heads of {kind}, 2. {works}"):
            check(known, 4, ulysses_sequence_parallel_size=4)


def test_sequence_parallel_size_of_a_model_with_distances_in_a_row_is_refused(tmp_path, monkeypatch):
    """As Inkling2 of transformers 5.24 has them; an indexer alone is no reason."""
    model = {"path": str(save("glm_moe_dsa", tmp_path)), "override_config": {"attn_implementation": "eager"}}
    assert check(model, ulysses_sequence_parallel_size=2) is not None
    forward = GlmMoeDsaAttention.forward
    own = inspect.signature(forward)
    distances = inspect.Parameter("relative_distance", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    other = functools.wraps(forward)(lambda *args, **kwargs: forward(*args, **kwargs))
    other.__signature__ = own.replace(parameters=[distances, *own.parameters.values()])
    monkeypatch.setattr(GlmMoeDsaAttention, "forward", other)
    words = rf"^{SEQUENCE}=2: can't be with \w+: GlmMoeDsaAttention of \w+ gets distances .*What works: {SEQUENCE}=1$"
    with pytest.raises(SettingError, match=words):
        check(model, ulysses_sequence_parallel_size=2)


def test_router_replay_without_recorded_routes_is_refused(model):
    def run(mode, **rollout):
        check_run(engine(replay=mode), 2, model, {"name": None} | rollout, device="cpu")

    for mode, rollout in (("disabled", RECORDED), ("R2", {}), ("R3", RECORDED)):
        run(mode, **rollout)
    run("R3", bypass_mode=True, **RECORDED)
    with refused(ROUTES, False, REPLAY):
        run("R3")
    with refused(ROUTES, True, REPLAY):
        run("R2", **RECORDED)
    with refused(REPLAY, "R2"):
        run("R2", bypass_mode=True)


@pytest.mark.parametrize(
    ("family", "rollout", "why"),
    [
        ("glm_moe_dsa", {}, None),
        ("glm_moe_dsa", {"bypass_mode": True}, "in bypass mode nobody computes them"),
        ("glm_moe_dsa", {"use_v1": False}, "v1 trainers alone"),
        ("glm_moe_dsa", {"separate_nodes": 1}, "v1 trainers alone"),
        ("qwen3_moe", {}, "Qwen3MoeForCausalLM has no indexer that"),
    ],
)
def test_indexer_replay_without_indexers_or_recorded_keys_is_refused(tmp_path, family, rollout, why):
    model = {"path": str(save(family, tmp_path)), "override_config": {"attn_implementation": "eager"}}
    with refused("engine.indexer_replay", True, why) if why else contextlib.nullcontext():
        check_run(engine(indexer_replay=True), 2, model, {"name": None} | rollout, device="cpu")


def test_router_replay_of_unsuitable_models_or_rollouts_is_refused(tmp_path, model, installs, monkeypatch):
    (tmp_path / "one").mkdir()
    one = checkpoint(tmp_path / "one", "mixtral", num_hidden_layers=2, num_experts_per_tok=1)
    with refused(f"{MODEL}.use_remove_padding", False, "along a packed row"):
        check_run(engine("R2"), 2, model | {"use_remove_padding": False}, {"name": None}, device="cpu")
    with refused(REPLAY, "R2", "a token takes one expert"):
        check_run(engine("R2"), 2, one, {"name": None}, device="cpu")

    installs("sglang", "0.5.12")
    rollout = {"name": "sglang", "skip_tokenizer_init": False, **RECORDED}
    check_run(engine("R3"), 2, model, rollout, device="cpu")
    with refused("actor_rollout_ref.rollout.skip_tokenizer_init", True):
        check_run(engine("R3"), 2, model, {**rollout, "skip_tokenizer_init": True}, device="cpu")
    monkeypatch.setattr(sglang_server, "RECORDS_NO_ROUTES", ("qwen3_moe",))
    with refused(ROUTES, True):
        check_run(engine("R3"), 2, model, rollout, device="cpu")


def test_top_k_distillation_without_logits_of_the_batchs_tokens_is_refused(model):
    def run(fused, padded, loss="forward_kl_topk", enabled=True):
        rollout = {"name": None, "distillation": enabled, "distillation_loss": loss}
        check_run(engine(pad_to_length=padded), 2, model | {"use_fused_kernels": fused}, rollout, device="cpu")

    run(False, False)
    run(True, True, enabled=False)
    run(True, True, loss="k3")
    loss = "distillation_loss.loss_mode=forward_kl_topk"
    with refused(f"{MODEL}.use_fused_kernels", True, loss):
        run(True, False)
    with refused("engine.pad_to_length", True, loss):
        run(False, True)
