"""Settings, families and versions with which ``engine.rollout_bitwise`` is refused."""

import pytest
from transformers import AutoConfig

from epfsdp2.engine.compat import versions
from epfsdp2.engine.config import EPFSDP2ActorConfig, EPFSDP2CriticConfig, EPFSDP2EngineConfig
from epfsdp2.engine.preflight.run import check_run
from tests.support.trainer.preflight import MODEL, refused, rollout
from tests.support.trainer.settings import TINY, checkpoint, engine

pytestmark = pytest.mark.skipif(
    not versions.vllm_in("==0.27.1"), reason="rollout_bitwise was shown with vLLM 0.27.1 alone"
)

ROLLOUT = "actor_rollout_ref.rollout"
SETTING = "engine.rollout_bitwise"
TOLD = {"additional_config": {"epfsdp2_bitwise": True}}


def _check(model, placed=None, device="cpu", **settings):
    placed = {"enforce_eager": True, "dtype": "bfloat16", "tp": 1, "vllm": TOLD, **(placed or {})}
    asked = engine(**{"batch_invariant": True, "rollout_bitwise": True, **settings})
    check_run(asked, 4, model, rollout(**placed), device=device)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_shown_families_and_dtypes_are_accepted(tmp_path, family, dtype):
    placed = {"dtype": {"bf16": "bfloat16", "fp32": "float32"}[dtype]}
    sizes = {} if family == "qwen3_moe" else {"hidden_size": 32, "num_hidden_layers": 2}
    _check(checkpoint(tmp_path, family, **sizes), placed, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "value", "settings", "placed", "model"),
    [
        ("engine.batch_invariant", False, {"batch_invariant": False}, {}, {}),
        ("engine.chunked_logits", False, {"chunked_logits": False}, {}, {}),
        ("engine.fp32_modules", ["model.norm"], {"fp32_modules": ["model.norm"]}, {}, {}),
        (f"{ROLLOUT}.name", "sglang", {}, {"name": "sglang"}, {}),
        (f"{ROLLOUT}.tensor_model_parallel_size", 4, {}, {"tp": 4}, {}),
        (f"{ROLLOUT}.expert_parallel_size", 2, {}, {"tp": 2, "expert_parallel_size": 2}, {}),
        (f"{ROLLOUT}.data_parallel_size", 2, {}, {"data_parallel_size": 2}, {}),
        (f"{ROLLOUT}.enforce_eager", False, {}, {"enforce_eager": False}, {}),
        (f"{ROLLOUT}.dtype", "float32", {}, {"dtype": "float32"}, {}),
        (f"{ROLLOUT}.quantization", "fp8", {}, {"quantization": "fp8"}, {}),
        (f"{MODEL}.lora_rank", 4, {}, {}, {"lora_rank": 4, "target_modules": ["q_proj"]}),
        (f"{ROLLOUT}.engine_kwargs.vllm.additional_config.epfsdp2_bitwise", None, {}, {"vllm": {}}, {}),
    ],
)
def test_setting_with_which_an_operator_differs_is_refused(tmp_path, monkeypatch, name, value, settings, placed, model):
    real = versions.installed
    monkeypatch.setattr(versions, "installed", lambda asked: "0.5.12" if asked == "sglang" else real(asked))
    with refused(name, value, SETTING):
        _check(checkpoint(tmp_path) | model, placed, **settings)


@pytest.mark.parametrize(
    ("family", "differs"),
    [
        ("llama", "model.layers.0.input_layernorm (LlamaRMSNorm) differs first"),
        ("qwen2", "model.layers.0.input_layernorm (Qwen2RMSNorm) differs first"),
    ],
)
def test_other_family_is_refused_with_the_first_operator_that_differs(tmp_path, family, differs):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    with refused(SETTING, True, differs):
        _check(checkpoint(tmp_path, family, **sizes))


def test_rotary_embedding_with_scaling_is_refused(tmp_path):
    model = checkpoint(tmp_path)
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    AutoConfig.for_model("qwen3_moe", **TINY, rope_parameters=rope).save_pretrained(tmp_path)
    with refused(SETTING, True, "a rotary embedding with scaling differs first"):
        _check(model)


def test_wide_model_between_two_workers_is_refused_in_float32_alone(tmp_path):
    model = checkpoint(tmp_path, "qwen3", hidden_size=1024, num_hidden_layers=1)
    _check(model, {"tp": 2})
    with refused(f"{ROLLOUT}.tensor_model_parallel_size", 2, "lm_head, cut between workers in float32, differs first"):
        _check(model, {"tp": 2, "dtype": "float32"}, dtype="fp32")


def test_actor_and_reference_know_vllms_workers_and_a_critic_computes_as_always():
    asked, placed = EPFSDP2EngineConfig(batch_invariant=True, rollout_bitwise=True), rollout(tp=2)
    sizes = {"rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
    for forward_only in (False, True):
        role = EPFSDP2ActorConfig(engine=asked, rollout=placed, forward_only=forward_only, **sizes)
        assert role.engine.rollout_bitwise and role.engine._rollout_tp == 2
    critic = EPFSDP2CriticConfig(engine=asked, ppo_micro_batch_size_per_gpu=1)
    assert not critic.engine.rollout_bitwise


def test_accelerator_is_refused(tmp_path):
    with refused(SETTING, True, "it was shown on a CPU alone"):
        _check(checkpoint(tmp_path), device="cuda", full_determinism=True, experts_backend="triton")


@pytest.mark.parametrize("name", ["vllm", "transformers", "torch"])
def test_version_that_was_not_shown_is_refused(tmp_path, monkeypatch, name):
    real, model = versions.installed, checkpoint(tmp_path)
    shown = {"vllm": "0.29.0", "transformers": "5.12.1", "torch": "2.13.9"}[name]
    monkeypatch.setattr(versions, "installed", lambda asked: shown if asked == name else real(asked))
    with refused(SETTING, True, f"it was shown with {name} ", f"and {shown} is installed"):
        _check(model)
