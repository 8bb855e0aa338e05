"""Settings check themselves, whatever the model and the ranks."""

import os
import pickle
import re
import subprocess
import sys
from dataclasses import fields

import pytest
import torch
import verl.trainer.config
import yaml
from hydra.errors import CompactHydraException
from omegaconf import OmegaConf
from verl.trainer.config import CheckpointConfig
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config.engine import FSDPEngineConfig

from epfsdp2.engine.config import (
    EPFSDP2ActorConfig,
    EPFSDP2CriticConfig,
    EPFSDP2EngineConfig,
    critic_config,
    engine_config,
)
from epfsdp2.engine.config.roles import DriverError
from epfsdp2.engine.config.settings import (
    SETTINGS,
    EngineSettings,
    param_dtype,
    planned_overrides,
    planned_settings,
    sharding_options,
)
from epfsdp2.engine.config.values import DTYPES, STRATEGY
from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.rollout.layout.specs import SYNC_MODES


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"ep_size": 0}, "engine.ep_size=0: "),
        ({"ep_size": 2.0}, "engine.ep_size=2.0: "),
        ({"ep_size": True}, "engine.ep_size=True: "),
        ({"strategy": "veomni"}, "engine.strategy=veomni: this engine has one strategy."),
        ({"expert_shard_dim": 2}, "engine.expert_shard_dim=2: "),
        ({"expert_shard_dim": True}, "engine.expert_shard_dim=True: "),
        ({"fsdp_size": 0}, "engine.fsdp_size=0: "),
        ({"prefetch_depth": 1.5}, "engine.prefetch_depth=1.5: "),
        ({"dispatch_chunks": 0, "ep_size": 2}, "engine.dispatch_chunks=0: is the number of parts"),
        ({"dispatch_chunks": 2}, "engine.dispatch_chunks=2: no token is sent"),
        ({"overlap_shared_experts": True}, "engine.overlap_shared_experts=True: no token is sent"),
        ({"dispatcher": "nccl", "ep_size": 2}, "engine.dispatcher=nccl: is one of all_to_all, deepep"),
        ({"dispatcher": "deepep"}, "engine.dispatcher=deepep: no token is sent"),
        ({"dispatcher": "deepep", "ep_size": 2, "dispatch_chunks": 2}, "engine.dispatch_chunks=2: is for all_to_all"),
        ({"overlap_shared_experts": 1, "ep_size": 2}, "engine.overlap_shared_experts=1: is true or false"),
        ({"reshard_experts_after_forward": 1}, "engine.reshard_experts_after_forward=1: "),
        ({"activation_checkpointing": "some"}, "engine.activation_checkpointing=some: is one of auto, none, selective"),
        ({"expert_plan": ["*.w1"]}, "engine.expert_plan=['*.w1']: maps patterns"),
        ({"expert_plan": {"*.w1": "0"}}, "engine.expert_plan={'*.w1': '0'}: maps patterns"),
        ({"fp32_modules": "*.gate"}, "engine.fp32_modules=*.gate: is a list"),
        ({"model_dtype": "fp8"}, "engine.model_dtype=fp8: "),
        ({"model_dtype": "fp16"}, "engine.model_dtype=fp16: is one of fp32, float32, bf16, bfloat16: float16 is for"),
        ({"dtype": "float8"}, "engine.dtype=float8: is one of fp32, float32, bf16, bfloat16, fp16, float16."),
        ({"dtype": "float16", "model_dtype": "bf16"}, "engine.model_dtype=bf16: parameters whose"),
        ({"mixed_precision": {"param_dtype": "fp8"}}, "engine.mixed_precision.param_dtype=fp8: "),
        ({"mixed_precision": {"reduce_dtype": "float16"}}, "engine.mixed_precision.reduce_dtype=float16: "),
        ({"mixed_precision": {"buffer_dtype": "bf16"}}, "engine.mixed_precision.buffer_dtype=bf16: buffers are never"),
        ({"mixed_precision": "bf16"}, "engine.mixed_precision=bf16: is null or a mapping"),
        ({"mixed_precision": {"params": "bf16"}}, "engine.mixed_precision.params=bf16: "),
        ({"sync_megabytes": 0}, "engine.sync_megabytes=0: "),
        ({"rollout_sync_verify": -2}, "engine.rollout_sync_verify=-2: is the number of syncs that are verified"),
        ({"rollout_sync": "slices"}, "engine.rollout_sync=slices: is one of auto, full, sliced."),
        ({"sync_timeout_seconds": 0}, "engine.sync_timeout_seconds=0: "),
        ({"ulysses_sequence_parallel_size": 0}, "engine.ulysses_sequence_parallel_size=0: "),
        (
            {"ulysses_sequence_parallel_size": 2, "compile_dense": True},
            "engine.compile_dense=True: compiled parts must",
        ),
        ({"mismatch_warning": 2}, "engine.mismatch_warning=2: is a difference of probabilities, from 0 (never) to 1."),
        ({"epsize": 2}, "engine.epsize=2: the engine has no such setting. What works: engine.ep_size"),
        ({"router_replay": {"mode": "R4"}}, "engine.router_replay.mode=R4: is one of disabled, R2, R3"),
        (
            {"router_replay": {"record_file": "a.pt"}},
            "engine.router_replay.record_file=a.pt: routes are kept in the batch",
        ),
        ({"router_replay": "R2"}, "engine.router_replay=R2: is a mapping. What works: engine.router_replay.mode=R2"),
        ({"seed": "abc"}, "engine.seed=abc: is a whole number from 0 to 4294967295. What works: engine.seed=42"),
        ({"qat": {"enable": True}}, "engine.qat={'enable': True}: quantisation-aware training is not done"),
        ({"router_replay": {"mod": "R2"}}, "engine.router_replay.mod=R2: the engine has no such setting. What works: "),
        ({"use_remove_padding": True}, "engine.use_remove_padding=True: the engine has no such setting."),
    ],
)
def test_engine_config_with_wrong_settings_names_setting_and_rule(settings, words):
    with pytest.raises(SettingError) as caught:
        engine_config(**settings)
    text = str(caught.value)
    assert text.startswith(words) and "What works: " in text and "\n" not in text
    name, _, value = caught.value.works.rpartition("=")
    (key,) = settings if len(settings) == 1 else [""]
    if name == f"engine.{key}" and re.fullmatch(r"[\w.-]+", value):
        engine_config(**{key: yaml.safe_load(value)})  # the value that is named as working


def test_engine_config_takes_every_dtype_and_dim():
    for dtype in ("fp32", "float32", "bf16", "bfloat16"):
        precision = {"param_dtype": dtype, "reduce_dtype": dtype, "buffer_dtype": "fp32"}
        config = engine_config(model_dtype=dtype, dtype=dtype, mixed_precision=precision)
        assert (config.model_dtype, config.dtype, config.mixed_precision) == (dtype, dtype, precision)
        assert DTYPES[dtype] == PrecisionType.to_dtype(dtype)  # as engine/integration/engine.py reads it
    engine_config(mixed_precision={"buffer_dtype": "float32"})
    for settings in ({"dtype": "float16"}, {"mixed_precision": {"param_dtype": "fp16"}}):
        assert param_dtype(engine_config(**settings)) is torch.float16
    for dim in ("auto", 0, 1):
        assert engine_config(expert_shard_dim=dim).expert_shard_dim == dim


def test_sharding_options_of_a_config_come_from_the_settings_declared_to_feed_them():
    model = {"enable_gradient_checkpointing": True, "enable_activation_offload": True, "use_fused_kernels": True}
    assert sharding_options(engine_config(), model) == ShardingOptions(
        fp32_modules=[], checkpointing="full", activation_offload=True, head_in_root=True
    )
    config = engine_config(ep_size=2, dispatch_chunks=3, offload_policy=True, mixed_precision={"reduce_dtype": "bf16"})
    assert sharding_options(config) == ShardingOptions(
        fp32_modules=[], dispatch_chunks=3, cpu_offload=True, reduce_dtype=torch.bfloat16
    )


def test_sharding_options_are_each_fed_by_a_setting():
    """By one setting, by the settings of dtypes, or by verl's settings of the model."""
    declared = [f.name if f.metadata["shards"] is True else f.metadata["shards"] for f in fields(EngineSettings)]
    fed = [name for name in declared if name] + ["param_dtype", "reduce_dtype", "activation_offload", "head_in_root"]
    assert sorted(fed) == sorted(f.name for f in fields(ShardingOptions))


def test_planned_overrides_of_a_plan_are_read_back():
    settings = {"dispatch_chunks": 2, "fp32_modules": ["*.gate"], "mixed_precision": {"reduce_dtype": "bf16"}}
    config = engine_config(ep_size=2, reshard_experts_after_forward=False, **settings)
    overrides = planned_overrides(config, sharding_options(config))
    assert "engine.mixed_precision={reduce_dtype: bf16}" in overrides
    read = {
        word.partition("=")[0].removeprefix("engine."): yaml.safe_load(word.partition("=")[2]) for word in overrides
    }
    assert sharding_options(planned_settings(read)) == sharding_options(config)
    assert planned_overrides(engine_config(), ShardingOptions(checkpointing="full")) == []


def test_engine_config_that_asks_for_no_overlap_needs_no_expert_parallelism():
    for settings in ({"dispatch_chunks": 1}, {"dispatch_chunks": -1}, {"overlap_shared_experts": False}):
        options = sharding_options(engine_config(**settings))
        assert (options.dispatch_chunks, options.overlap_shared_experts) == (1, False)
        engine_config(ep_size=2, dispatcher="deepep", **settings)


def critic(folder):
    return EPFSDP2CriticConfig(ppo_micro_batch_size_per_gpu=1, model={"path": str(folder)})


def test_critic_config_whose_model_is_not_there_is_refused(tmp_path):
    for path, rule in (("/no/such/critic", "there is no such folder"), (tmp_path, "safetensors")):
        with pytest.raises(DriverError, match=rule) as caught:
            critic(path).validate(2, 256)
        assert str(caught.value).startswith(f"critic.model.path={path}: ")
        with pytest.raises(DriverError, match=rule) as caught:
            critic_config(model={"path": str(path)})
        assert str(caught.value).startswith(f"critic.model.path={path}: ")


def test_checkpoint_config_of_each_role_with_unknown_contents_is_refused(tmp_path):
    wrong = CheckpointConfig(save_contents=["model", "hf"], load_contents=["model"])
    actor = EPFSDP2ActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=1, checkpoint=wrong)
    with pytest.raises(DriverError, match="there is no hf in a checkpoint") as caught:
        actor.validate(2, 256, {"path": str(tmp_path)})
    assert caught.value.setting == "actor_rollout_ref.actor.checkpoint.save_contents"
    config = critic(tmp_path)
    config.checkpoint.load_contents.append("optimiser")
    with pytest.raises(DriverError, match="there is no optimiser in a checkpoint") as caught:
        config.validate(2, 256)
    assert caught.value.setting == "critic.checkpoint.load_contents"


def test_engine_config_with_an_unknown_key_names_the_nearest_setting():
    for wrong, right in {"fsdp_sise": "fsdp_size", "prefetch": "prefetch_depth", "seeds": "seed"}.items():
        with pytest.raises(SettingError) as caught:
            engine_config(**{wrong: 1})
        assert caught.value.works == f"engine.{right}"
    with pytest.raises(SettingError) as caught:
        engine_config(xyzzy=1)
    assert set(caught.value.works.removeprefix("one of: ").split(", ")) == SETTINGS


def test_setting_error_through_hydra_prints_the_paragraph_and_can_be_pickled():
    with pytest.raises(DriverError) as caught:
        engine_config(ep_size=0)
    assert isinstance(caught.value, CompactHydraException)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), repr(copy), str(copy)) == (DriverError, str(caught.value), str(caught.value))


def test_engine_config_settings_shared_with_verl_have_its_names_and_defaults():
    ours = EPFSDP2EngineConfig()
    path = os.path.join(os.path.dirname(verl.trainer.config.__file__), "engine", "fsdp.yaml")
    theirs = OmegaConf.to_container(OmegaConf.load(path))
    assert {"mixed_precision"} <= SETTINGS & set(FSDPEngineConfig())
    shared = SETTINGS & set(theirs) - {"strategy"}
    assert {"fsdp_size", "model_dtype", "reshard_after_forward", "offload_policy", "param_offload", "seed"} <= shared
    different = {name for name in shared if getattr(ours, name) != theirs[name]}
    # Nothing is compiled unless it is asked for: it costs start-up time.
    assert different == {"use_torch_compile"} and not ours.use_torch_compile


def test_engine_config_with_router_replay_takes_its_modes():
    assert engine_config(router_replay={"mode": "R2"}).router_replay.mode == "R2"
    assert engine_config(router_replay={"mode": "disabled"}) == engine_config()


def test_engine_config_of_each_role_is_an_object_of_its_own():
    engine = engine_config(ep_size=2)
    actor = EPFSDP2ActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=1, engine=engine)
    ref = EPFSDP2ActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=1, engine=engine, forward_only=True)
    critic = EPFSDP2CriticConfig(ppo_micro_batch_size_per_gpu=1, engine=engine)
    assert [role.strategy for role in (actor, ref, critic)] == [STRATEGY] * 3
    assert [role.engine.forward_only for role in (actor, ref, critic)] == [False, True, False]
    actor.engine.use_remove_padding = False  # as verl's worker does
    assert engine.use_remove_padding and ref.engine.use_remove_padding and critic.engine.use_remove_padding


def test_engine_config_with_sequence_parallelism_divides_the_ranks_that_verl_counts(tmp_path):
    """Two samples at once are too few for four ranks, but not for two pairs of them."""
    batches = {"rollout_n": 1, "ppo_mini_batch_size": 8, "ppo_micro_batch_size": 2}
    with pytest.raises(ValueError, match=r"ulysses_sequence_parallel_size \(1\) must be >= n_gpus \(4\)"):
        EPFSDP2ActorConfig(**batches).validate(4, 8, {"path": str(tmp_path)})
    engine = engine_config(ulysses_sequence_parallel_size=2)
    with pytest.raises(DriverError, match="safetensors"):  # the next thing that is wrong
        EPFSDP2ActorConfig(**batches, engine=engine).validate(4, 8, {"path": str(tmp_path)})


def test_engine_config_unpickled_in_a_new_process_registers_the_engine(tmp_path):
    """As verl hands the critic's to its workers, which make none of their own."""
    (tmp_path / "config").write_bytes(pickle.dumps(engine_config(ep_size=2)))
    code = """if True:
        import pickle, sys
        from verl.workers.engine.base import EngineRegistry
        config = pickle.load(open(sys.argv[1], "rb"))
        assert config.ep_size == 2
        for model_type in ("language_model", "value_model"):
            assert set(EngineRegistry._engines[model_type]["epfsdp2"]) == {"cuda", "npu", "cpu"}
            print(EngineRegistry.get_engine_cls(model_type, config.strategy).__name__)
    """
    found = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "config"], capture_output=True, text=True, timeout=120
    )
    assert found.stdout.split() == ["EPFSDP2EngineWithLMHead", "EPFSDP2EngineWithValueHead"], found.stderr[-2000:]


def test_engine_config_with_rollout_sync_takes_auto_and_each_mode_of_the_rollout():
    with pytest.raises(SettingError, match=f"is one of {', '.join(('auto', *SYNC_MODES))}\\."):
        EPFSDP2EngineConfig(rollout_sync="slices")
