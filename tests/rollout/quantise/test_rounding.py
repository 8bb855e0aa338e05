"""Runs that may compute with their rollout's weights, and the setting that refuses the others."""

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from epfsdp2.engine.config import EPFSDP2ActorConfig
from epfsdp2.engine.config.settings import check_settings
from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.preflight.rollout import check_rounding
from epfsdp2.engine.preflight.run import check_run, check_training
from epfsdp2.rollout.vllm.server import EXTENSION
from tests.support.models.quantised import COMPRESSED
from tests.support.trainer.settings import checkpoint, engine

SETTING = "engine.rollout_quantization_aware"
FP8 = {"quantization": "fp8"}


def _model(folder, **sizes):
    plain = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 64, "num_experts": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "moe_intermediate_size": 256}
    return checkpoint(folder, "qwen2_moe", **{**plain, **heads, "shared_expert_intermediate_size": 256, **sizes})


def _rollout(**settings):
    extension = {"worker_extension_cls": EXTENSION}
    sizes = {"n_gpus_per_node": 4, "update_weights_bucket_megabytes": 64}
    return {"name": "vllm", "engine_kwargs": {"vllm": extension}, **sizes, **FP8, **settings}


@pytest.mark.parametrize(("which", "size"), [(True, {"etp_size": 2}), ("experts", {"ep_size": 4})], ids=str)
def test_a_rollout_that_is_sent_quantised_slices_is_taken(tmp_path, which, size):
    check_run(engine(rollout_quantization_aware=which, **size), 4, _model(tmp_path), _rollout(), device="cpu")


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_a_rollout_with_scales_of_rows_is_taken_where_rows_are_whole(tmp_path, kind):
    held = {"worker_extension_cls": EXTENSION, "hf_overrides": {"quantization_config": COMPRESSED[kind]}}
    rollout = _rollout(quantization=None, engine_kwargs={"vllm": held})
    check_run(_rounds_rows(kind, ep_size=2), 4, _model(tmp_path), rollout, device="cpu")
    with pytest.raises(SettingError, match=f"^{SETTING}=True: .*engine.etp_size=2 cuts those of experts"):
        check_run(_rounds_rows(kind, etp_size=2), 4, _model(tmp_path), rollout, device="cpu")


def _rounds_rows(kind, **settings):
    asked = engine(rollout_quantization_aware=True, **settings)
    asked._rollout_channels = kind  # as the actor's config says it
    return asked


def test_actor_and_reference_policy_round_as_the_rollout_does():
    tensors = "num_bits:8,type:int,symmetric:true"
    group = f"targets:[Linear],weights:{{{tensors},strategy:channel}},input_activations:{{{tensors},dynamic:true}}"
    quantised = f"quantization_config:{{quant_method:compressed-tensors,config_groups:{{group_0:{{{group}}}}}}}"
    overrides = f"+actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides={{{quantised}}}"
    for given, held in (([overrides], "int8"), ([], "")):
        with initialize_config_module("verl.trainer.config", version_base=None):
            roles = compose("ppo_trainer", ["engine=epfsdp2", *given]).actor_rollout_ref
        for role in (roles.actor, roles.ref):
            rollout = OmegaConf.to_container(role.rollout, resolve=True)
            sizes = {"rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1, "ppo_mini_batch_size": 8}
            assert EPFSDP2ActorConfig(rollout=rollout, **sizes).engine._rollout_channels == held


@pytest.mark.parametrize(
    ("settings", "rollout", "says"),
    [
        ({}, {"quantization": None}, r"for a vLLM in FP8 or INT8, and .*rollout.quantization=None"),
        ({}, {"quantization": "torchao"}, r"for a vLLM in FP8 or INT8, and .*rollout.quantization=torchao"),
        ({"rollout_sync": "full"}, {}, "engine.rollout_sync=full has vLLM's workers quantise whole tensors"),
        ({}, {"engine_kwargs": {}}, "worker_extension_cls=None: only this package's extension can load slices"),
        ({"etp_size": 4}, {}, "engine.etp_size=4 cuts the 256 of an expert inside of one"),
    ],
)
def test_a_rollout_that_is_sent_other_weights_is_refused(tmp_path, settings, rollout, says):
    with pytest.raises(SettingError, match=f"^{SETTING}=True: .*{says}") as caught:
        asked = engine(rollout_quantization_aware=True, **settings)
        check_run(asked, 4, _model(tmp_path), _rollout(**rollout), device="cpu")
    assert f"{SETTING}=False" in str(caught.value).partition("What works: ")[2]


def test_other_trainers_and_models_are_refused(tmp_path):
    model = _model(tmp_path / "moe")
    dense = checkpoint(tmp_path / "dense", "qwen2", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    lora = {**model, "lora_rank": 8, "target_modules": "all-linear"}
    for asked, given, setting, says in (
        (True, model, "model", "this trainer has none"),
        (True, lora, "actor_rollout_ref.model", "with their adapters merged"),
        ("experts", dense, "actor_rollout_ref.model", "has no experts"),
    ):
        with pytest.raises(SettingError, match=f"^{SETTING}={asked}: .*{says}"):
            check_training(engine(rollout_quantization_aware=asked), 4, given, device="cpu", setting=setting)
    with pytest.raises(SettingError, match="for a vLLM in FP8 or INT8, and actor_rollout_ref.rollout.name=sglang"):
        check_rounding(engine(rollout_quantization_aware=True), _rollout(name="sglang"), None)
    with pytest.raises(SettingError, match=f"^{SETTING}=all: is true"):
        check_settings(engine(rollout_quantization_aware="all"))
