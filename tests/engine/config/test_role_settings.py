"""A setting of one role overrides the shared one, and no key of verl's FSDP roles is silently dropped."""

import logging
import os
from dataclasses import fields, replace

import pytest
import verl.trainer.config
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config.actor import ActorConfig, FSDPActorConfig
from verl.workers.config.critic import CriticConfig, FSDPCriticConfig
from verl.workers.config.engine import EngineConfig, FSDPEngineConfig

from epfsdp2.engine.config import (
    EPFSDP2ActorConfig,
    EPFSDP2CriticConfig,
    EPFSDP2EngineConfig,
    actor_config,
    engine_config,
    roles,
)
from epfsdp2.engine.config.roles import DriverError
from epfsdp2.engine.config.settings import SETTINGS
from epfsdp2.engine.config.verl_keys import VERL_KEYS
from tests.support.trainer.settings import checkpoint

VERL_CONFIG = os.path.dirname(verl.trainer.config.__file__)
ACTOR, REF, CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"
SIZES = [f"{ACTOR}.ppo_micro_batch_size_per_gpu=2", "critic.ppo_micro_batch_size_per_gpu=2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("model"), architectures=["Qwen3MoeForCausalLM"])["path"]


def composed(*overrides, engine="engine=epfsdp2"):
    with initialize_config_dir(VERL_CONFIG, version_base=None):
        return compose("ppo_trainer", [*SIZES, *overrides, engine])


def role(name, *overrides):
    return of_role(composed(*overrides), name)


def of_role(config, name):
    """As verl builds it from a composed config; the reference policy as verl's worker does, which renames its keys."""
    node = OmegaConf.select(config, name)
    if name == REF:
        OmegaConf.set_struct(node, False)
        for key in ("micro_batch_size", "micro_batch_size_per_gpu", "max_token_len_per_gpu"):
            node[f"ppo_{key}"] = node.pop(f"log_prob_{key}")
        node.use_dynamic_bsz = node.pop("log_prob_use_dynamic_bsz")
        node.ppo_micro_batch_size_per_gpu = 1
    return omega_conf_to_dataclass(node)


def actor(*overrides):
    """The actor's config as its target makes it of these settings, without Hydra, which takes a second."""
    given = OmegaConf.to_container(OmegaConf.from_dotlist([word.lstrip("+") for word in overrides]))
    roles = given.get("actor_rollout_ref", {})
    batch = {"rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1, "ppo_mini_batch_size": 8}
    reference = {"shared_engine": given.get("engine"), **roles.get("ref", {})}
    return actor_config(**batch, shared_engine=given.get("engine"), reference=reference, **roles.get("actor", {}))


# Every key of verl's configs is in one of the lists.


def yaml_keys(*path):
    return set(OmegaConf.load(os.path.join(VERL_CONFIG, *path))) - {"_target_", "defaults"}


def field_names(*kinds):
    return {f.name for kind in kinds for f in fields(kind)} - {"_target_"}


def named(node, use):
    return {name for name, key in VERL_KEYS[node].items() if key.use == use}


def test_role_settings_hold_every_key_of_verls_fsdp_engine_in_one_list():
    keys = field_names(FSDPEngineConfig, EngineConfig) | yaml_keys("engine", "fsdp.yaml")
    assert keys == set(VERL_KEYS["engine"])
    assert named("engine", "taken") <= SETTINGS
    assert {f.name for f in fields(EngineConfig)} >= named("engine", "verl's")


def test_role_settings_hold_every_key_of_verls_roles_in_one_list():
    keys = field_names(ActorConfig, FSDPActorConfig, CriticConfig, FSDPCriticConfig)
    for group in ("actor", "ref", "critic"):
        keys |= yaml_keys(group, f"{group}.yaml") | yaml_keys(group, f"dp_{group}.yaml")
    # verl's worker renames log_prob_* before it builds the reference policy; the nodes of verl's engines are merged.
    keys = {key for key in keys if not key.startswith("log_prob_")} - {"fsdp", "fsdp_config"}
    ours = field_names(EPFSDP2ActorConfig, EPFSDP2CriticConfig)
    assert keys - ours == set(VERL_KEYS["role"]) - ours
    assert named("role", "taken") <= SETTINGS


def test_role_settings_by_default_are_verls():
    stock = FSDPEngineConfig()
    path = os.path.join(VERL_CONFIG, "engine", "fsdp.yaml")
    yaml = OmegaConf.to_container(OmegaConf.load(path))
    for key in named("engine", "ignored"):
        assert VERL_KEYS["engine"][key].default == yaml[key] and getattr(stock, key) in (yaml[key], {})


# Settings of one role override the shared ones.


@pytest.mark.parametrize(
    ("nodes", "plus"),
    [
        (("engine", "engine", "engine"), ("", "", "")),
        (("fsdp_config", "fsdp_config", "fsdp"), ("", "+", "++")),
        (("fsdp_config", "fsdp_config", "model.fsdp_config"), ("++", "", "")),
    ],
    ids=["ours", "verl's", "critic.model"],
)
def test_role_settings_spelled_either_way_override_engine(nodes, plus, model):
    given = ["engine.ep_size=2", "engine.seed=7", "engine.mixed_precision={param_dtype:bf16}"]
    given += [f"critic.model.path={model}", "+critic.model.load_tokenizer=False"]
    for i, name in enumerate((ACTOR, REF, CRITIC)):
        given.append(f"{plus[i]}{name}.{nodes[i]}.seed={i}")
    given.append(f"{plus[2]}{CRITIC}.{nodes[2]}.mixed_precision.reduce_dtype=bf16")
    whole = composed(*given)
    if not any(plus):
        OmegaConf.resolve(whole)  # as verl's TaskRunner does before it hands the nodes to the workers
    for i, name in enumerate((ACTOR, REF, CRITIC)):
        config = of_role(whole, name).engine
        own = {"reduce_dtype": "bf16"} if name == CRITIC else {}
        assert config.seed == i and config.mixed_precision == {"param_dtype": "bf16"} | own, name
        assert config.ep_size == 2 and config.forward_only is (name == REF)


def test_role_settings_beside_the_node_count_and_the_reference_follows_the_actor():
    given = [
        f"{ACTOR}.ulysses_sequence_parallel_size=4",
        f"{ACTOR}.entropy_checkpointing=True",
        f"{ACTOR}.entropy_from_logits_with_chunking=True",
        f"{ACTOR}.pad_to_length=True",
        f"{ACTOR}.fsdp_config.pad_to_length_bucket=512",
        "engine.ulysses_sequence_parallel_size=2",
        "engine.use_torch_compile=True",
    ]
    whole = composed(*given)
    trained, ref = of_role(whole, ACTOR), of_role(whole, REF)
    assert (trained.engine.ulysses_sequence_parallel_size, ref.engine.ulysses_sequence_parallel_size) == (4, 4)
    assert trained.ulysses_sequence_parallel_size == 4
    assert trained.engine.entropy_checkpointing and not ref.engine.entropy_checkpointing
    assert trained.engine.entropy_from_logits_with_chunking and not ref.engine.entropy_from_logits_with_chunking
    assert (ref.engine.pad_to_length, ref.engine.pad_to_length_bucket) == (True, 512)
    assert trained.engine.use_torch_compile and ref.engine.use_torch_compile
    own = f"{REF}.engine.ulysses_sequence_parallel_size=1"
    assert role(REF, *given, own).engine.ulysses_sequence_parallel_size == 1
    assert not actor(*given, f"{ACTOR}.use_torch_compile=False").engine.use_torch_compile


def test_role_settings_that_are_empty_give_the_shared_engine():
    shared = engine_config(ep_size=2, seed=7)
    whole = composed("engine.ep_size=2", "engine.seed=7")
    for name, forward_only in ((ACTOR, False), (REF, True)):
        config = of_role(whole, name)
        plan = {name: getattr(config.engine, name) for name in ("_sequences_per_update", "_longest_sequence")}
        assert config.engine == replace(shared, forward_only=forward_only, _of_a_role=True, **plan)
        assert config.names == {}


# Refusals and log lines.


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            [f"{ACTOR}.fsdp_config.param_offload=True", f"{ACTOR}.engine.param_offload=False"],
            f"{ACTOR}.fsdp_config.param_offload=True: contradicts {ACTOR}.engine.param_offload=False, which is",
        ),
        (
            [f"{ACTOR}.ulysses_sequence_parallel_size=2", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=4"],
            f"{ACTOR}.ulysses_sequence_parallel_size=2: contradicts {ACTOR}.fsdp_config.ulysses_sequence_parallel",
        ),
        ([f"{ACTOR}.fsdp_config.parm_offload=True"], f"What works: {ACTOR}.fsdp_config.param_offload"),
        ([f"{ACTOR}.fsdp_config.ep_size=8"], f"What works: {ACTOR}.engine.ep_size"),
        ([f"{ACTOR}.fsdp_config=8"], f"{ACTOR}.fsdp_config=8: is a mapping of settings."),
        (
            [f"{ACTOR}.fsdp_config.mixed_precision.buffer_dtype=bf16"],
            f"{ACTOR}.fsdp_config.mixed_precision.buffer_dtype=bf16: buffers are never cast: they stay float32. "
            f"What works: {ACTOR}.fsdp_config.mixed_precision.buffer_dtype=fp32",
        ),
        ([f"{ACTOR}.fsdp_config.qat.enable=True"], f"{ACTOR}.fsdp_config.qat={{'enable': True}}: quantisation-aware"),
        ([f"{ACTOR}.fsdp_config.turbo_config.distributed.expert_parallel_size=8"], "strategy fsdp_turbo"),
        ([f"{ACTOR}.strategy=megatron"], f"{ACTOR}.strategy=megatron: asks for another engine than engine=epfsdp2."),
        ([f"{ACTOR}.fsdp_config.strategy=veomni"], f"{ACTOR}.fsdp_config.strategy=veomni: this engine has one"),
        ([f"{ACTOR}.fsdp_config.forward_only=True"], f"{ACTOR}.fsdp_config.forward_only=True: this role is trained."),
        ([f"+{ACTOR}.ulysses_sequence_paralel_size=2"], f"What works: {ACTOR}.ulysses_sequence_parallel_size"),
        # The reference policy's, on the driver, in the actor's config.
        (
            [f"{REF}.fsdp_config.param_offload=True", f"{REF}.engine.param_offload=False"],
            f"{REF}.fsdp_config.param_offload=True: contradicts {REF}.engine.param_offload=False",
        ),
        ([f"{REF}.fsdp_config.reshard=True"], f"{REF}.fsdp_config.reshard=True: verl's FSDP engine has no such"),
    ],
)
def test_role_settings_that_are_wrong_are_refused_by_their_names(overrides, words):
    with pytest.raises(DriverError) as caught:
        actor(*overrides)
    text = str(caught.value)
    assert words in text and "What works: " in text and "\n" not in text


def test_role_settings_with_unknown_keys_reach_the_check():
    with pytest.raises(HydraException) as caught:
        role(ACTOR, f"{ACTOR}.fsdp_config.parm_offload=True")
    assert isinstance(caught.value.__cause__, DriverError)
    assert str(caught.value.__cause__) in str(caught.value)


def test_role_settings_whose_spellings_agree_are_taken():
    same = [f"{ACTOR}.{node}.param_offload=True" for node in ("engine", "fsdp_config")]
    assert actor(*same).engine.param_offload


@pytest.fixture
def said(caplog, monkeypatch):
    roles._log_once.cache_clear()
    # Other tests may have files in /dev/shm at the moment.
    monkeypatch.setattr("epfsdp2.engine.config.roles.report_leftovers", lambda: None)
    caplog.set_level(logging.WARNING, logger="epfsdp2")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "epfsdp2"]


def validated(model, *overrides, world=2):
    model = {"path": str(model), "override_config": {"attn_implementation": "sdpa"}, "use_remove_padding": True}
    actor(*overrides).validate(world, 256, model)


def test_role_settings_without_effect_are_reported_once_on_the_driver(model, said, monkeypatch):
    monkeypatch.setattr("epfsdp2.engine.config.roles.check_run", lambda *args, **kwargs: None)
    quiet = [f"{ACTOR}.fsdp_config.wrap_policy.min_num_params=0", f"{ACTOR}.fsdp_config.forward_prefetch=False"]
    validated(
        model,
        *quiet,
        f"{ACTOR}.fsdp_config.use_orig_params=False",
        f"{ACTOR}.fsdp_config.qat.enable=False",
        f"{ACTOR}.use_prefix_grouper=False",
    )
    assert said() == []
    loud = [
        f"{ACTOR}.fsdp_config.wrap_policy.min_num_params=100",
        f"{ACTOR}.fsdp_config.forward_prefetch=True",
        f"{REF}.fsdp_config.forward_prefetch=True",
        f"{ACTOR}.fsdp_config.use_orig_params=True",
        f"{ACTOR}.use_prefix_grouper=True",
        f"{ACTOR}.use_rollout_log_probs=True",
    ]
    for _ in range(2):
        validated(model, *loud)
    assert len(said()) == 6 and all("has no use here: " in line for line in said())


def test_role_settings_with_strategy_fsdp2_run_the_engine_and_say_so(model, said, monkeypatch):
    monkeypatch.setattr("epfsdp2.engine.config.roles.check_run", lambda *args, **kwargs: None)
    given = [f"{ACTOR}.strategy=fsdp2", "critic.strategy=fsdp2", f"critic.model.path={model}"]
    given.append("+critic.model.load_tokenizer=False")
    whole = composed(*given)
    for name in (ACTOR, REF, CRITIC):
        config = of_role(whole, name)
        assert (config.strategy, config.engine.strategy) == ("epfsdp2", "epfsdp2")
    of_role(whole, ACTOR).validate(2, 256, {})
    assert said() == [
        f"epfsdp2: {name}.strategy=fsdp2: engine=epfsdp2 was asked for, and is the one that runs"
        for name in (ACTOR, REF, CRITIC)
    ]


def test_role_settings_of_many_ranks_are_logged_on_rank_0_alone(said, monkeypatch):
    for rank, lines in (("1", 0), ("0", 1)):
        monkeypatch.setenv("RANK", rank)
        actor(f"{ACTOR}.strategy=fsdp2")
        assert len(said()) == lines


def test_sft_trainer_takes_verls_keys_in_its_one_node(said):
    with initialize_config_dir(VERL_CONFIG, version_base=None):
        overrides = ["engine=fsdp", "engine.strategy=fsdp2", "engine.use_orig_params=True", "engine=epfsdp2"]
        config = compose("sft_trainer_engine", [*overrides, "engine.ulysses_sequence_parallel_size=2"])
    engine = omega_conf_to_dataclass(config.engine)
    assert isinstance(engine, EPFSDP2EngineConfig) and engine.strategy == "epfsdp2"
    assert engine.ulysses_sequence_parallel_size == 2
    assert len(said()) == 2


def test_role_settings_of_the_reference_are_checked_against_the_world_by_its_own_names(model, monkeypatch):
    monkeypatch.setattr("epfsdp2.engine.config.roles.check_run", lambda *args, **kwargs: None)
    monkeypatch.setattr("epfsdp2.engine.config.roles.get_device_name", lambda: "cpu")
    validated(model, "engine.ep_size=2", f"{REF}.engine.ep_size=1", f"{REF}.fsdp_config.param_offload=True")
    for wrong, world, words in (
        (f"{REF}.engine.ep_size=4", 2, f"{REF}.engine.ep_size=4: "),
        (f"{REF}.engine.ep_size=3", 3, f"{REF}.engine.ep_size=3: "),
        (f"{REF}.fsdp_config.param_offload=7", 2, f"{REF}.fsdp_config.param_offload=7: is true or false"),
    ):
        with pytest.raises(DriverError) as caught:
            validated(model, "engine.ep_size=1", wrong, world=world)
        assert str(caught.value).startswith(words)


def test_role_settings_of_the_critic_are_checked_by_its_own_names(model, monkeypatch):
    monkeypatch.setattr("epfsdp2.engine.config.roles.get_device_name", lambda: "cpu")
    paths = [f"critic.model.path={model}", "+critic.model.load_tokenizer=False"]
    paths.append("+critic.model.override_config.attn_implementation=sdpa")
    config = role(CRITIC, *paths, "engine.ep_size=2", "critic.fsdp.ulysses_sequence_parallel_size=3")
    with pytest.raises(DriverError, match=r"^critic.fsdp.ulysses_sequence_parallel_size=3: "):
        config.validate(2, 256)


# Values of every wrong kind.

WRONG = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**70, -(2**70)]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=6),
    st.sampled_from(["auto", "bf16", "R2", "true", "1"]),
    st.lists(st.one_of(st.none(), st.integers(), st.text(max_size=3)), max_size=2),
    st.dictionaries(
        st.one_of(st.text(max_size=3), st.integers(), st.sampled_from(["mode", "param_dtype", "record_file"])),
        st.one_of(st.none(), st.integers(), st.text(max_size=3), st.lists(st.integers(), max_size=1)),
        max_size=2,
    ),
)
_OF_SEVERAL_TYPES = ("expert_plan", "mixed_precision", "reshard_experts_after_forward", "expert_shard_dim")
PROPERTY = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@PROPERTY
@given(value=WRONG)
@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_engine_settings_of_any_value_are_taken_or_named(name, value):
    try:
        config = engine_config(**{name: value})
    except DriverError as error:
        assert error.setting.startswith(f"engine.{name}"), error
        assert "What works: " in str(error)
        return
    taken, default = getattr(config, name), getattr(EPFSDP2EngineConfig(), name)
    if name not in _OF_SEVERAL_TYPES and default is not None:
        assert isinstance(taken, int | float if isinstance(default, float) else type(default))
        assert isinstance(taken, bool) == isinstance(default, bool)


@PROPERTY
@given(key=st.sampled_from(sorted(VERL_KEYS["engine"])), value=WRONG)
def test_role_settings_of_any_value_are_taken_or_named(key, value):
    batch = {"rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
    try:
        actor_config(**batch, fsdp_config={key: value})
    except DriverError as error:
        assert error.setting.startswith(f"{ACTOR}.fsdp_config.{key}"), error
