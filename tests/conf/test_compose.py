"""``engine=epfsdp2`` composes wherever verl composes, and every stock choice is what it was without this package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import verl.trainer.config
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.errors import HydraException
from omegaconf import OmegaConf
from verl.trainer.config import CheckpointConfig
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.profiler import ProfilerConfig
from verl.workers.config import FSDPOptimizerConfig
from verl.workers.config.model import HFModelConfig, MtpConfig

from epfsdp2.conf.search_path import with_engine_entry
from epfsdp2.engine.config import EPFSDP2CriticConfig, EPFSDP2EngineConfig
from epfsdp2.engine.config.settings import SETTINGS
from epfsdp2.rollout.bitwise.settings import BITWISE
from epfsdp2.rollout.sglang.server import SGLANG_LOADER
from tests.support.trainer.settings import checkpoint

VERL_CONFIG = os.path.dirname(verl.trainer.config.__file__)
EXTENSION = "epfsdp2.rollout.vllm_worker.WeightSyncExtension"
VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"
SGLANG = "actor_rollout_ref.rollout.engine_kwargs.sglang"
SIZES = [
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "critic.ppo_micro_batch_size_per_gpu=2",
]
# Stock verl: the primary config, and what may be chosen. sft's other optimizers only go with their own engine.
STOCK = [
    ("ppo_trainer", []),
    ("ppo_trainer", ["model_engine=megatron"]),
    ("ppo_trainer", ["actor@actor_rollout_ref.actor=dp_actor", "critic=veomni_critic", "trainer.nnodes=2"]),
    ("sft_trainer_engine", []),
    ("sft_trainer_engine", ["engine=veomni", "optim=veomni"]),
]
OTHER_STOCK = [
    *[("ppo_trainer", [f"model_engine={name}"]) for name in ("dp", "veomni", "torchtitan")],
    *[("sft_trainer_engine", [f"engine={name}", f"optim={name}"]) for name in ("fsdp", "megatron", "torchtitan")],
    ("sft_trainer_engine", ["engine=automodel", "optim=automodel"]),
]

# verl's other trainers: where their primary configs are, and what these look for in a checkout.
OTHER_TRAINERS = [
    (os.path.join(os.path.dirname(verl.__file__), "experimental", policy, "config"), name)
    for policy, name in (
        ("one_step_off_policy", "one_step_off_ppo_trainer"),
        ("fully_async_policy", "fully_async_ppo_trainer"),
    )
]
IN_THE_PACKAGE = "hydra.searchpath=[pkg://verl.trainer.config]"

COMPOSE = """
import json, sys
import verl
from hydra import compose, initialize_config_dir, initialize_config_module
from omegaconf import OmegaConf
folder, cases, here, others, path = json.load(sys.stdin)
result = []
with initialize_config_dir(folder, version_base=None):
    for name, overrides in cases:
        result.append(OmegaConf.to_yaml(compose(name, overrides), resolve=False))
with initialize_config_module(here, version_base=None):
    result.append(OmegaConf.to_yaml(compose("ppo_trainer"), resolve=False))
for folder, name in others:
    with initialize_config_dir(folder, version_base=None):
        result.append(OmegaConf.to_yaml(compose(name, [path]), resolve=False))
print("COMPOSED" + json.dumps([result, "epfsdp2.conf.search_path" in sys.modules]))
"""


def composed(name, *overrides, module=False):
    if module:
        context = initialize_config_module("verl.trainer.config", version_base=None)
    else:
        context = initialize_config_dir(VERL_CONFIG, version_base=None)
    with context:
        return compose(name, list(overrides))


def raw(node):
    """The node as it is written, interpolations and all."""
    return OmegaConf.to_container(OmegaConf.create({"node": node}), resolve=False)["node"]


def compose_in_process(plugins, cases):
    done = subprocess.run(
        [sys.executable, "-c", COMPOSE],
        input=json.dumps([VERL_CONFIG, cases, "verl.trainer.config", OTHER_TRAINERS, IN_THE_PACKAGE]),
        env={**os.environ, "VERL_USE_EXTERNAL_PLUGINS": plugins},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.partition("COMPOSED")[2])


@pytest.mark.parametrize("cases", [STOCK, pytest.param(OTHER_STOCK, marks=pytest.mark.long)], ids=["some", "others"])
def test_compose_of_stock_choices_is_unchanged(cases):
    with_us, loaded = compose_in_process("auto", cases)
    without_us, absent = compose_in_process("none", cases)
    assert loaded and not absent
    for ours, theirs in zip(with_us, without_us, strict=True):
        assert ours == theirs and "epfsdp2" not in ours
    # They are different choices indeed, not one config several times.
    assert len(set(with_us)) >= len(cases)


def test_compose_of_main_ppo_has_one_engine_node_that_all_roles_share():
    choices = (
        (["engine=epfsdp2"], False),
        (["model_engine=epfsdp2"], True),
        (["engine=epfsdp2", "model_engine=epfsdp2"], False),
    )
    given = ["engine.ep_size=8", "engine.seed=7", *SIZES]
    config, *others = (composed("ppo_trainer", *choice, *given, module=module) for choice, module in choices)
    roles = {"actor": config.actor_rollout_ref.actor, "ref": config.actor_rollout_ref.ref, "critic": config.critic}
    for role, node in roles.items():
        plain = OmegaConf.to_container(node, resolve=False)
        assert plain["shared_engine"] == "${engine}" and plain["engine"] == {}, role
        assert (node.strategy, node.shared_engine.ep_size, node.shared_engine.seed) == ("epfsdp2", 8, 7), role
        assert node._target_.startswith("epfsdp2.engine.config.")
    assert config.model_engine == "epfsdp2"
    for role in ("actor", "critic"):
        assert roles[role].optim._target_ == "verl.workers.config.FSDPOptimizerConfig"
    for other in others:
        assert OmegaConf.to_yaml(other, sort_keys=True) == OmegaConf.to_yaml(config, sort_keys=True)


def test_compose_with_the_engine_chosen_leaves_everything_else_verls():
    stock = composed("ppo_trainer")
    ours = composed("ppo_trainer", "engine=epfsdp2")
    for key in stock:
        if key not in ("actor_rollout_ref", "critic", "model_engine"):
            assert raw(stock[key]) == raw(ours[key]), key
    del ours.actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls
    del ours.actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config
    del ours.actor_rollout_ref.rollout.engine_kwargs.vllm.lora_target_modules
    del ours.actor_rollout_ref.rollout.engine_kwargs.sglang.custom_weight_loader
    del ours.actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.epfsdp2_p2p
    ours.actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module = None
    for key in ("model", "rollout"):
        assert raw(stock.actor_rollout_ref[key]) == raw(ours.actor_rollout_ref[key]), key
    # Every setting of verl's FSDP roles is there too.
    for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"):
        assert set(OmegaConf.select(stock, role)) <= set(OmegaConf.select(ours, role)), role


def test_rollout_extensions_are_the_default_and_the_user_wins():
    loader = f"{SGLANG}.custom_weight_loader"
    ours = composed("ppo_trainer", "engine=epfsdp2")
    assert OmegaConf.select(ours, f"{VLLM}.worker_extension_cls") == EXTENSION
    assert OmegaConf.select(ours, loader) == [SGLANG_LOADER]
    given = f"{VLLM}.worker_extension_cls=my.Extension", f"+{VLLM}.swap_space=1", f"{loader}=[my.loader]"
    mine = composed("ppo_trainer", "engine=epfsdp2", *given)
    assert OmegaConf.select(mine, VLLM) == {
        "worker_extension_cls": "my.Extension",
        "additional_config": None,
        "lora_target_modules": None,
        "swap_space": 1,
    }
    assert OmegaConf.select(mine, loader) == ["my.loader"]
    assert OmegaConf.select(composed("ppo_trainer"), VLLM) == {}


def test_vllms_workers_are_told_of_the_bits_that_the_trainer_wants():
    for chosen, wanted in ((), None), (("engine.rollout_bitwise=True",), {BITWISE: True}):
        config = composed("ppo_trainer", "engine=epfsdp2", *chosen)
        assert OmegaConf.select(config, f"{VLLM}.additional_config") == wanted


def test_vllm_keeps_memory_for_adapters_of_the_layers_that_get_one():
    config = composed("ppo_trainer", "engine=epfsdp2", *SIZES)
    OmegaConf.set_struct(config, False)
    for chosen, modules in (
        ({}, None),
        ({"lora_rank": 8}, None),  # all-linear
        ({"lora_rank": 8, "target_modules": ["q_proj", "self_attn.o_proj"]}, ["o_proj", "q_proj"]),
        ({"lora_rank": 8, "target_modules": ["q_proj", "gate_proj"]}, ["experts", "gate_proj", "q_proj"]),
        (
            {"lora_rank": 8, "target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]},
            ["experts", "q_proj"],
        ),
        ({"lora_rank": 8, "target_modules": ["q_proj"], "lora": {"merge": True}}, None),
        ({"target_modules": ["q_proj"]}, None),
    ):
        given = OmegaConf.merge(config, {"actor_rollout_ref": {"model": chosen}})
        assert OmegaConf.select(given, f"{VLLM}.lora_target_modules") == modules, chosen


def test_compose_of_the_sft_trainer_takes_the_engine():
    config = composed("sft_trainer_engine", "engine=epfsdp2", "engine.ep_size=4", module=True)
    engine = omega_conf_to_dataclass(config.engine)
    assert isinstance(engine, EPFSDP2EngineConfig) and engine.ep_size == 4
    stock = composed("sft_trainer_engine")
    for key in stock:
        if key != "engine":
            assert raw(stock[key]) == raw(config[key]), key


@pytest.mark.parametrize(
    ("folder", "name", "path"), [(*OTHER_TRAINERS[0], []), (*OTHER_TRAINERS[1], [IN_THE_PACKAGE])], ids=["one", "fully"]
)
@pytest.mark.filterwarnings("ignore:provider=hydra.searchpath")  # verl's own entry, where there is no checkout
def test_compose_of_other_trainers_takes_the_engine(folder, name, path):
    with initialize_config_dir(folder, version_base=None):
        config = compose(name, ["engine=epfsdp2", "engine.ep_size=2", *path, *SIZES])
    assert config.actor_rollout_ref.actor.strategy == "epfsdp2" and config.critic.shared_engine.ep_size == 2
    transport = config.actor_rollout_ref.rollout.checkpoint_engine
    assert transport.custom_backend_module == "epfsdp2.rollout.checkpoint_backend"
    assert OmegaConf.select(config, f"{VLLM}.worker_extension_cls") == EXTENSION
    # They don't leave it to the engine to name the latest checkpoint when it is complete.
    config.actor_rollout_ref.actor.checkpoint.async_save = True
    with pytest.raises(HydraException, match="async_save=True: is for main_ppo"):
        omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def test_grad_clip_by_either_name_is_the_optimizers():
    # verl's FSDP actor has both and reads optim.clip_grad alone.
    for names in (("grad_clip", "optim.clip_grad"), ("optim.clip_grad", "grad_clip")):
        given = [f"{role}.{name}=0.3" for role, name in zip(("actor_rollout_ref.actor", "critic"), names, strict=True)]
        config = composed("ppo_trainer", "engine=epfsdp2", *given)
        assert config.actor_rollout_ref.actor.optim.clip_grad == config.critic.optim.clip_grad == 0.3


def test_main_ppo_with_an_engine_of_sft_is_refused_with_what_works():
    with pytest.raises(HydraException, match="engine=veomni is for sft_trainer; here say model_engine=veomni"):
        composed("ppo_trainer", "engine=veomni")


def test_critic_is_built_of_verls_parts_and_follows_its_own_token_limit(tmp_path):
    checkpoint(tmp_path, architectures=["Qwen3MoeForCausalLM"])
    model = [f"critic.model.path={tmp_path}", "+critic.model.load_tokenizer=False"]
    config = composed("ppo_trainer", "engine=epfsdp2", "engine.ep_size=2", *SIZES, *model)
    assert config.critic.ppo_infer_max_token_len_per_gpu == 32768
    config.critic.ppo_max_token_len_per_gpu = 8192
    for resolve in (False, True):
        if resolve:
            OmegaConf.resolve(config)
        critic = omega_conf_to_dataclass(config.critic)
        assert type(critic) is EPFSDP2CriticConfig and critic.engine.ep_size == 2
        assert type(critic.model) is HFModelConfig and type(critic.model.mtp) is MtpConfig
        assert type(critic.optim) is FSDPOptimizerConfig and type(critic.checkpoint) is CheckpointConfig
        assert type(critic.profiler) is ProfilerConfig
        assert critic.checkpoint.load_contents == ["model", "optimizer", "extra"]
        # verl's trainers pass these to the engine (v1: trainer_base.py, 267).
        assert (critic.ppo_max_token_len_per_gpu, critic.ppo_infer_max_token_len_per_gpu) == (8192, 8192)


def test_compose_instantiates_each_role_with_a_config_of_its_own():
    config = composed(
        "ppo_trainer",
        "engine=epfsdp2",
        "engine.ep_size=2",
        "engine.expert_plan={model.layers.*.moe.w1:0,model.layers.*.moe.w2:1}",
        "engine.fp32_modules=['*.mlp.gate']",
        "engine.reshard_experts_after_forward=false",
        "actor_rollout_ref.actor.checkpoint.async_save=True",
        *SIZES,
    )
    OmegaConf.resolve(config)  # as verl's TaskRunner does before it hands the nodes to the workers
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert actor.checkpoint.async_save
    assert actor.engine.expert_plan == {"model.layers.*.moe.w1": 0, "model.layers.*.moe.w2": 1}
    assert actor.engine.fp32_modules == ["*.mlp.gate"] and actor.engine.reshard_experts_after_forward is False
    ref = config.actor_rollout_ref.ref
    OmegaConf.set_struct(ref, False)
    for ours, theirs in (
        ("ppo_micro_batch_size", "log_prob_micro_batch_size"),
        ("ppo_micro_batch_size_per_gpu", "log_prob_micro_batch_size_per_gpu"),
        ("use_dynamic_bsz", "log_prob_use_dynamic_bsz"),
        ("ppo_max_token_len_per_gpu", "log_prob_max_token_len_per_gpu"),
    ):
        ref[ours] = ref.pop(theirs)  # as verl's worker does (engine_workers.py, init_model)
    ref.ppo_micro_batch_size_per_gpu = 1
    ref = omega_conf_to_dataclass(ref)
    assert (actor.engine.ep_size, actor.engine.forward_only) == (2, False)
    assert (ref.engine.ep_size, ref.engine.forward_only) == (2, True)
    assert ref.use_remove_padding and actor.use_remove_padding
    actor.engine.micro_batch_size_per_gpu = 3
    assert ref.engine.micro_batch_size_per_gpu is None


def test_yaml_lists_every_setting_with_its_default_and_a_comment():
    path = Path(__file__).parents[2] / "conf" / "engine" / "epfsdp2.yaml"
    listed = OmegaConf.to_container(OmegaConf.load(path))
    router_replay = listed.pop("router_replay")
    assert listed.pop("_target_") == "epfsdp2.engine.config.engine_config"
    assert set(listed) == SETTINGS - {"router_replay"}
    default = EPFSDP2EngineConfig()
    assert listed == {name: getattr(default, name) for name in listed}
    assert router_replay["mode"] == default.router_replay.mode


def test_search_path_imports_hydra_alone():
    code = "import sys, epfsdp2.conf.search_path as s; s.install(); assert not {'torch', 'verl'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_compose_with_the_backend_for_separate_rollouts_needs_no_other_setting():
    choice = "model_engine=epfsdp2"
    transport = "actor_rollout_ref.rollout.checkpoint_engine"
    backend = f"{transport}.backend=epfsdp2_p2p"
    config = composed("ppo_trainer", *SIZES, choice, backend, "engine.sync_timeout_seconds=7").actor_rollout_ref.rollout
    assert config.checkpoint_engine.custom_backend_module == "epfsdp2.rollout.checkpoint_backend"
    assert config.checkpoint_engine.engine_kwargs.epfsdp2_p2p == {"timeout_seconds": 7}
    mine = composed("ppo_trainer", *SIZES, choice, f"{transport}.custom_backend_module=mine").actor_rollout_ref.rollout
    assert mine.checkpoint_engine.custom_backend_module == "mine"


def test_compose_of_unknown_layouts_changes_nothing():
    known = [{"model_engine": "dp"}, {"actor@a.actor": "${model_engine}_actor"}, "legacy", "_self_"]
    new = with_engine_entry(known)
    assert new[1] == {"engine": None} and len(new) == len(known) + 1
    after = with_engine_entry([*known, {"rollout@a.rollout": "rollout"}, "_self_"])
    assert list(after[-2]) == ["optional after_rollout"] and len(after) == len(new) + 3
    assert known[1] == {"actor@a.actor": "${model_engine}_actor"}
    for layout in (
        [{"actor@a.actor": "dp_actor"}, "_self_"],
        [{"model_engine": "dp"}, {"actor@a.actor": "dp_actor"}],
        [{"model_engine": "dp"}, {"engine@engine": "fsdp"}, {"actor@a.actor": "${model_engine}_actor"}],
        ["_self_"],
    ):
        assert with_engine_entry(layout) is None


def test_compose_of_an_unknown_layout_with_the_engine_says_so_once(tmp_path, monkeypatch, capsys):
    from epfsdp2.conf import search_path

    (tmp_path / "ppo_trainer.yaml").write_text("defaults:\n  - _self_\n\ntrainer: 1\n")
    monkeypatch.setattr(search_path, "_verl_config_folder", lambda: os.path.realpath(tmp_path))
    for argv, said in ((["main_ppo"], 0), (["main_ppo", "engine=epfsdp2"], 1)):
        monkeypatch.setattr(sys, "argv", argv)
        with initialize_config_dir(str(tmp_path), version_base=None):
            assert compose("ppo_trainer").trainer == 1
        assert capsys.readouterr().err.count("engine=epfsdp2 can't be offered") == said


def test_compose_of_configs_that_are_not_verls_changes_nothing(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults:\n  - model_engine: dp\n  - other: ${model_engine}_x\n  - _self_\n")
    for folder, text in {"model_engine/dp.yaml": "a: 1\n", "other/dp_x.yaml": "b: 2\n"}.items():
        (tmp_path / folder).parent.mkdir(exist_ok=True)
        (tmp_path / folder).write_text(text)
    with initialize_config_dir(str(tmp_path), version_base=None):
        assert OmegaConf.to_container(compose("mine")) == {"model_engine": {"a": 1}, "other": {"b": 2}}
        with pytest.raises(HydraException, match="engine"):
            compose("mine", ["engine=epfsdp2"])


def test_compose_of_a_users_own_primary_config_takes_model_engine(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        f"hydra:\n  searchpath: [file://{VERL_CONFIG}]\ndefaults:\n  - ppo_trainer\n  - _self_\nengine:\n  ep_size: 4\n"
    )
    with initialize_config_dir(str(tmp_path), version_base=None):
        config = compose("mine", ["model_engine=epfsdp2", "engine.seed=3"])
    assert (config.actor_rollout_ref.actor.shared_engine.ep_size, config.critic.shared_engine.seed) == (4, 3)
