"""Rollouts whose rotary embedding differs from the trainer's, because frequencies depend on the length, are refused."""

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from epfsdp2.engine.config import EPFSDP2ActorConfig
from epfsdp2.engine.preflight.run import check_run
from tests.support.models.rope import longrope
from tests.support.trainer.preflight import MODEL, VLLM, refused, rollout
from tests.support.trainer.settings import checkpoint, engine

LENGTH = "actor_rollout_ref.rollout.max_model_len"
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
SGLANG = {"name": "sglang", "update_weights_bucket_megabytes": 64}


def _model(folder, rope, most=128):
    return checkpoint(folder, rope_parameters=rope, max_position_embeddings=most)


def test_actor_and_reference_policy_get_the_length_that_vllm_is_started_for():
    with initialize_config_module("verl.trainer.config", version_base=None):
        composed = compose("ppo_trainer", ["engine=epfsdp2", "actor_rollout_ref.rollout.name=vllm"])
    OmegaConf.set_struct(composed, False)
    for given, wanted in (
        ([], 0),
        ([f"{LENGTH}=4096"], 4096),
        ([f"{LENGTH}=4096", f"{VLLM}.max_model_len=512"], 512),
        (["actor_rollout_ref.rollout.name=sglang"], None),
    ):
        roles = OmegaConf.merge(composed, OmegaConf.from_dotlist(given)).actor_rollout_ref
        for role in (roles.actor, roles.ref):
            settings = OmegaConf.to_container(role.rollout, resolve=True)
            actor = EPFSDP2ActorConfig(rollout=settings, rollout_n=1, ppo_micro_batch_size_per_gpu=1)
            assert actor.engine._max_model_len == wanted
    alone = EPFSDP2ActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    assert alone.engine._max_model_len is None, "of no rollout"


@pytest.mark.parametrize("rope", [longrope(16, 32), DYNAMIC], ids=["longrope", "dynamic"])
def test_vllm_with_a_length_that_its_table_of_positions_has_is_taken(tmp_path, rope):
    model = _model(tmp_path, rope)
    for length in ({}, {"max_model_len": 32}, {"vllm": {"max_model_len": 64}}):
        check_run(engine(), 2, model, rollout(**length), device="cpu")
    for length in (-1, "64k", 256):
        with refused(f"{VLLM}.max_model_len", length, works=f"{LENGTH}=128, or less"):
            check_run(engine(), 2, model, rollout(vllm={"max_model_len": length}), device="cpu")
    plain = _model(tmp_path / "plain", {"rope_type": "default", "rope_theta": 1e4})
    check_run(engine(), 2, plain, rollout(vllm={"max_model_len": 256}), device="cpu")


def test_sglang_whose_frequencies_depend_on_other_sequences_or_grow_is_refused(tmp_path, installs):
    installs("sglang", "0.5.12")
    model = _model(tmp_path / "long", longrope(16, 32))
    for length in ({"max_model_len": 32}, {"max_prompt_length": 8, "max_response_length": 24}):
        check_run(engine(), 2, model, {**SGLANG, **length}, device="cpu")
    for length in ({}, {"max_prompt_length": 8, "max_response_length": 25}):
        works = f"{LENGTH}=32, or actor_rollout_ref.rollout.name=vllm"
        with refused(LENGTH, 128, "over 32 tokens", works=works):
            check_run(engine(), 2, model, {**SGLANG, **length}, device="cpu")
    with refused("actor_rollout_ref.rollout.name", "sglang"):
        check_run(engine(), 2, _model(tmp_path / "grown", DYNAMIC), SGLANG, device="cpu")
    check_run(engine(), 2, _model(tmp_path / "same", {**DYNAMIC, "factor": 1.0}), SGLANG, device="cpu")


@pytest.mark.parametrize(("key", "value"), [("factor", 8.0), ("attention_factor", 1.5), ("long_mscale", 1.4)])
def test_longrope_that_a_rollout_scales_otherwise_is_refused(tmp_path, key, value):
    """vLLM reads the mscales, and neither a factor nor an attention_factor; transformers does the opposite."""
    with refused(MODEL, "Qwen3MoeForCausalLM", "factor=4"):
        check_run(engine(), 2, _model(tmp_path / "other", longrope(16, 32, **{key: value})), rollout(), device="cpu")
    same = _model(tmp_path / "same", longrope(16, 32, factor=4.0))
    check_run(engine(), 2, same, rollout(), device="cpu")
