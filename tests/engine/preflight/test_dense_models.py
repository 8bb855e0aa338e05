"""Settings of experts for models that have none."""

import pytest

from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.preflight.dense_models import not_applied, without_experts
from epfsdp2.engine.preflight.run import check_run, check_training
from tests.support.trainer.preflight import MODEL, paragraph
from tests.support.trainer.settings import checkpoint, engine


@pytest.fixture
def dense(tmp_path):
    (tmp_path / "dense").mkdir()
    return checkpoint(tmp_path / "dense", "qwen3", num_hidden_layers=1, hidden_size=32, vocab_size=64)


def test_check_training_of_a_dense_model_beside_experts_applies_no_ep_size(dense):
    facts = check_training(engine(ep_size=8, expert_shard_dim=1, expert_plan={"w1": 0}), 4, dense, device="cpu")
    assert facts.is_dense and facts.experts == ()
    said = not_applied(engine(ep_size=8), "its/path", facts.model)
    assert said == "its/path has no experts: engine.ep_size=8 does not apply, FSDP2 over all ranks"
    assert not_applied(engine(), "its/path", facts.model) == ""


def test_fp32_modules_of_routers_apply_to_models_with_routers_alone(dense):
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
def test_setting_of_experts_for_a_dense_model_alone_is_refused(dense, name, value):
    settings = engine(replay=value) if name.startswith("router_replay") else engine(**{name: value})
    for critic in ({}, {"critic_enable": True, "critic_path": dense["path"]}, {"critic_path": "no/such"}):
        with pytest.raises(SettingError) as caught:
            check_run(settings, 4, dense, critic, device="cpu")
        text = paragraph(caught.value, f"engine.{name}", value)
        assert f"Qwen3ForCausalLM ({MODEL}.path) is a dense model" in text
        assert ("nor has that of the critic, Qwen3ForCausalLM" in text) == ("critic_enable" in critic)
    check_run(engine(), 4, dense, {}, device="cpu")


def test_expert_plan_of_a_dense_model_alone_is_refused(dense):
    with pytest.raises(SettingError, match=r"engine.expert_plan=\*.w1: matches no parameter of the model"):
        check_run(engine(expert_plan={"*.w1": 0}), 4, dense, {}, device="cpu")


@pytest.mark.parametrize("which", [{"critic_enable": True}, {"critic_enable": None, "adv_estimator": "gae"}])
def test_settings_of_experts_where_the_critic_alone_has_some_are_checked_for_it(dense, model, which):
    beside = {**which, "critic_path": model["path"]}
    check_run(engine(ep_size=2, router_z_loss_coef=0.1), 4, dense, beside, device="cpu")
    with pytest.raises(SettingError, match="engine.router_replay.mode=R2: can't be with Qwen3ForCausalLM"):
        check_run(engine(ep_size=2, replay="R2"), 4, dense, beside, device="cpu")
    with pytest.raises(SettingError, match="engine.ep_size=2: concerns experts"):
        check_run(engine(ep_size=2), 4, dense, {**beside, "critic_enable": False}, device="cpu")


def test_rollout_expert_parallel_size_of_a_dense_model_is_refused(dense):
    rollout = {"name": "vllm", "tensor_model_parallel_size": 2, "expert_parallel_size": 2}
    with pytest.raises(SettingError, match="rollout.expert_parallel_size=2: vLLM spreads experts, and the model has"):
        check_run(engine(), 4, dense, rollout, device="cuda")
