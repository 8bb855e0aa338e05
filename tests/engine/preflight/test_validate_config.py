"""The same checks through verl: its own validate_config, which main_ppo calls before it starts Ray."""

import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import verl.trainer.ppo.v1.trainer_base
import verl.trainer.ppo.v1.utils
from hydra import compose, initialize_config_module
from hydra.errors import InstantiationException
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass, validate_config

from epfsdp2.engine.config import roles
from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.preflight.rollout import LACKING_IN_V1
from tests.support.trainer.preflight import BACKEND, BUCKET, MODEL, TENSOR_PARALLEL, VLLM, refused
from tests.support.trainer.settings import saved_checkpoint

ROLLOUT = "actor_rollout_ref.rollout"
RUN = [
    "engine=epfsdp2",
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1",
    f"{BUCKET}=4",
    "trainer.n_gpus_per_node=2",
    "trainer.device=cpu",
    f"+{MODEL}.override_config.attn_implementation=sdpa",
]


def composed(*overrides):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [*RUN, *overrides])


@pytest.fixture(scope="module")
def stock():
    config = composed()
    OmegaConf.set_struct(config, False)
    return config


@pytest.fixture
def validate(stock, model, monkeypatch):
    """Return a function that validates a run with overrides; they are merged, because Hydra takes a second."""
    # The same on a machine with an accelerator.
    monkeypatch.setattr(roles, "get_device_name", lambda: "cpu")
    monkeypatch.setattr(roles, "is_support_ipc", lambda: False)

    def validate(*overrides, critic=False):
        given = OmegaConf.from_dotlist(["engine.ep_size=2", f"{MODEL}.path={model['path']}", *overrides])
        config = OmegaConf.merge(copy.deepcopy(stock), given)
        validate_config(config, use_reference_policy=False, use_critic=critic)
        return config

    return validate


def test_validate_config_of_a_valid_run_passes(validate, installs):
    installs("sglang", "0.5.12")
    validate()
    validate(f"{ROLLOUT}.name=sglang")
    adapters = f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules=[q_proj,o_proj]"
    validate(*adapters)
    with pytest.raises(SettingError, match="lora.merge=False: sglang is sent adapters merged"):
        validate(f"{ROLLOUT}.name=sglang", *adapters)


def test_validate_config_of_a_run_that_cannot_resume_is_refused(validate, tmp_path):
    root = tmp_path / "runs"
    saved_checkpoint(root, 3, ["hf_model"])
    settings = (
        f"trainer.default_local_dir={root}",
        "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",  # which load_contents follows
    )
    with refused("actor_rollout_ref.actor.checkpoint.load_contents", ["hf_model"]):
        validate(*settings)
    validate(*settings, "trainer.resume_mode=disable")


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("engine.ep_size=3", "engine.ep_size=3: has to divide the number of ranks"),
        (f"{MODEL}.path=/no/such/model", f"{MODEL}.path=/no/such/model: there is no such folder"),
        (f"{MODEL}.override_config.num_experts=7", "engine.ep_size=2: has to divide the number of experts"),
        (f"{MODEL}.lora_rank=8", f"{MODEL}.lora.merge=False: vLLM's CPU build has no kernels for adapters of experts"),
        (
            f"{MODEL}.mtp.enable=True",
            f"{MODEL}.mtp.enable=True: the layers that draft of Qwen3MoeForCausalLM are not known",
        ),
        (
            "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf]",
            "actor_rollout_ref.actor.checkpoint.save_contents=['model', 'hf']: there is no hf",
        ),
        (
            "actor_rollout_ref.actor.use_fused_kernels=True",
            "actor_rollout_ref.actor.use_fused_kernels=True: verl's engines read the model's setting alone.",
        ),
        *(
            (f"algorithm.adv_estimator={name}", f"algorithm.adv_estimator={name}: verl's v1 trainer has no ")
            for name in LACKING_IN_V1
        ),
        (f"{TENSOR_PARALLEL}=4", f"{TENSOR_PARALLEL}=4: a replica of vLLM takes 4 workers"),
        (f"{VLLM}.enable_eplb=True", f"{VLLM}.enable_eplb=True: "),
        (f"{BUCKET}=0", f"{BUCKET}=0: the largest tensor"),
        (f"{BUCKET}=100000000", f"{BUCKET}=100000000: each of the 2 ranks of a node"),
    ],
)
def test_validate_config_of_every_wrong_override_refuses_it_by_its_rule(validate, override, rule):
    with pytest.raises(SettingError) as caught:
        validate(override)
    assert str(caught.value).startswith(rule)


def test_validate_config_of_algorithms_that_verls_v1_trainer_lacks_takes_its_older_trainer(validate):
    for name in LACKING_IN_V1:
        validate(f"algorithm.adv_estimator={name}", "trainer.use_v1=False")
    drawn = ["algorithm.adv_estimator=gae", "algorithm.use_pf_ppo=True", "critic.enable=False"]
    validate(*drawn, "trainer.use_v1=False")
    with refused("algorithm.use_pf_ppo", True, works="trainer.use_v1=False"):
        validate(*drawn)


def test_verls_v1_trainer_lacks_what_these_algorithms_need():
    """Once it has one of them, ``check_algorithm`` can let that pass."""
    v1 = (
        Path(verl.trainer.ppo.v1.trainer_base.__file__).read_text()
        + Path(verl.trainer.ppo.v1.utils.__file__).read_text()
    )
    for needed in ("reward_baselines", "sum_pi_squared", "gdpo_reward_keys", "pf_ppo"):
        assert needed not in v1, needed
    (fields,) = re.findall(r"def _compute_advantage.*?fields = (\[.*?\])", v1, flags=re.S)
    assert "prompts" not in fields and "attention_mask" not in fields


def test_validate_config_says_that_a_backend_of_verls_sends_merged_weights(validate, caplog):
    settings = f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules=[q_proj]", "trainer.n_gpus_per_node=4"
    for backend, merge, says in (("nccl", False, True), ("nccl", True, False), ("naive", False, False)):
        caplog.clear()
        validate(*settings, f"{BACKEND}={backend}", f"{MODEL}.lora.merge={merge}")
        assert (f"{BACKEND}={backend} sends all weights in every sync" in caplog.text) == says, (backend, merge)


@pytest.mark.parametrize(
    "kind", ["use_dora=True", "modules_to_save=[lm_head]", "rank_pattern={q_proj: 4}", "alpha_pattern={q_proj: 4}"]
)
def test_validate_config_refuses_adapters_alone_that_vllm_does_not_serve(validate, kind):
    settings = f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules=[q_proj]", f"{MODEL}.lora.{kind}"
    rule = f"vLLM serves no adapter with {kind.partition('=')[0]}."
    with refused(f"{MODEL}.lora.merge", False, works=f"{rule} What works: {MODEL}.lora.merge=True"):
        validate(*settings)
    validate(*settings, f"{MODEL}.lora.merge=True")
    # A backend of verl's sends merged weights, whatever the adapters are.
    validate("trainer.n_gpus_per_node=4", *settings, f"{BACKEND}=nccl")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("engine.ep_size=0", "engine.ep_size=0: has to be a positive whole number. What works: engine.ep_size=1"),
        ("+engine.epsize=2", "engine.epsize=2: the engine has no such setting. What works: engine.ep_size"),
        (
            "engine.old_log_probs_from_update=True",
            "engine.old_log_probs_from_update=True: the pass for old log-probs packs sequences otherwise than the "
            "update. What works: engine.batch_invariant=True, or engine.old_log_probs_from_update=False",
        ),
    ],
)
def test_validate_config_refuses_values_and_keys_by_themselves(override, words):
    with pytest.raises(InstantiationException) as caught:
        validate_config(composed(override), use_reference_policy=False, use_critic=False)
    assert words in str(caught.value).splitlines()
    assert isinstance(caught.value.__cause__, SettingError)


def test_validate_config_refuses_a_critic_without_a_model(validate):
    with pytest.raises(InstantiationException) as caught:
        validate("critic.model.path=/no/such/critic", "critic.ppo_micro_batch_size_per_gpu=1", critic=True)
    (line,) = [line for line in str(caught.value).splitlines() if line.startswith("critic.model.path=/no/such/critic")]
    assert "there is no such folder. What works: " in line


@pytest.mark.parametrize(
    "named",
    [
        f"{ROLLOUT}.disaggregation.enabled=True",
        f"{ROLLOUT}.quantization=torchao",
        f"{ROLLOUT}.pipeline_model_parallel_size=2",
        f"{VLLM}.worker_extension_cls=theirs.Extension",
        f"{VLLM}.expert_placement_strategy=round_robin",
        f"{BACKEND}=nccl",
    ],
)
def test_validate_config_sees_all_that_decides_on_the_stream(validate, named):
    whole = ["trainer.n_gpus_per_node=4", named]
    validate(*whole)
    with refused("engine.rollout_sync", "sliced", named):
        validate(*whole, "engine.rollout_sync=sliced")


ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
FROM_UPDATE = ["engine.batch_invariant=True", "engine.old_log_probs_from_update=True"]


def _one_update(config):
    return omega_conf_to_dataclass(config.actor_rollout_ref.actor).engine._one_update


def test_validate_config_of_one_update_per_batch_lets_the_actor_take_old_log_probs_from_it(validate):
    found = _one_update(validate(*FROM_UPDATE, f"{ROLLOUT}.n=4", f"{ACTOR}.loss_agg_mode=token-sum"))
    assert found == {"sequences": 32, "averaged": {"loss_agg_mode": "token-sum", "loss_scale_factor": None}}
    assert _one_update(validate()) is None
    engine = roles.EPFSDP2EngineConfig(batch_invariant=True, old_log_probs_from_update=True)
    for forward_only in (True, False):
        sizes = {"rollout": {"train_batch_size": 8}, "ppo_mini_batch_size": 8, "ppo_micro_batch_size_per_gpu": 1}
        role = roles.EPFSDP2ActorConfig(engine=engine, rollout_n=1, forward_only=forward_only, **sizes)
        assert (role.engine._one_update is None) == forward_only


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.train_batch_size=16", "data.train_batch_size=16, not 8"),
        (f"{ACTOR}.ppo_epochs=2", ""),
        (f"{ACTOR}.calculate_sum_pi_squared=True", ""),
        ("algorithm.use_kl_in_reward=True", ""),
        (f"{CORRECTION}.bypass_mode=True", ""),
        (f"{CORRECTION}.rollout_is=token", ""),
        (f"{CORRECTION}.rollout_rs=token_k1", ""),
        ("distillation.enabled=True", ""),
        ("engine.router_replay.mode=R2", ""),
        ("engine.indexer_replay=True", ""),
        ("rollout.nnodes=1", ""),
        ("trainer.critic_warmup=3", ""),
    ],
)
def test_validate_config_logs_the_setting_for_which_old_log_probs_are_computed(stock, model, caplog, override, said):
    given = [*FROM_UPDATE, "engine.ep_size=2", f"{MODEL}.path={model['path']}", override]
    config = OmegaConf.merge(copy.deepcopy(stock), OmegaConf.from_dotlist(given))
    roles._log_once.cache_clear()
    assert _one_update(config) is None
    lines = [record.getMessage() for record in caplog.records if "old log-probs" in record.getMessage()]
    assert len(lines) == 1 and lines[0].endswith(f"computed before updates because of {said or override}")


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("override", "words"),
    [
        # The engine's config refuses one, and the checks of a run a damaged file.
        pytest.param("engine.epsize=2", "engine.epsize=2: the engine has no such setting.", marks=pytest.mark.long),
        (None, f"{MODEL}.path={{}}: model.safetensors can't be read: "),
    ],
)
def test_main_ppo_ends_with_the_paragraph_and_never_starts_ray(tmp_path, model, override, words):
    if override is None:
        with Path(model["path"], "model.safetensors").open("r+b") as file:
            file.truncate(file.seek(0, os.SEEK_END) - 2)
    ray = tmp_path / "ray"
    ray.mkdir()
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *RUN, f"{MODEL}.path={model['path']}"]
    command += [override] if override else []
    environment = {**os.environ, "RAY_TMPDIR": str(ray), "VERL_PLATFORM": "cpu"}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith(words.format(model["path"]))]
    assert "What works: " in line
    assert "Traceback" not in done.stderr
    assert not list(ray.iterdir())
