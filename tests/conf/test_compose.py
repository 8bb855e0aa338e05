"""``engine=epfsdp2`` composes wherever verl composes, and every stock choice is what it was without this package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import verl.trainer.config
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.errors import HydraException
from omegaconf import OmegaConf
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig
from verl.trainer.config import CheckpointConfig
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.profiler import ProfilerConfig
from verl.workers.config import FSDPOptimizerConfig
from verl.workers.config.model import HFModelConfig, MtpConfig

from epfsdp2.conf.search_path import with_engine_entry
from epfsdp2.engine.config import EPFSDP2CriticConfig, EPFSDP2EngineConfig
from epfsdp2.engine.config.settings import SETTINGS
from epfsdp2.rollout.sglang.server import SGLANG_LOADER

VERL_CONFIG = os.path.dirname(verl.trainer.config.__file__)
EXTENSION = "epfsdp2.rollout.vllm_worker.WeightSyncExtension"
VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"
SGLANG = "actor_rollout_ref.rollout.engine_kwargs.sglang"
SIZES = [
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "critic.ppo_micro_batch_size_per_gpu=2",
]
SFT_ENGINES = ["fsdp", "veomni", "megatron", "torchtitan", "automodel"]
# Stock verl: the primary config, and what may be chosen. sft's other optimizers only go with their own engine.
STOCK = [
    ("ppo_trainer", []),
    *[("ppo_trainer", [f"model_engine={name}"]) for name in ("dp", "veomni", "megatron", "torchtitan")],
    ("ppo_trainer", ["actor@actor_rollout_ref.actor=dp_actor", "critic=veomni_critic", "trainer.nnodes=2"]),
    ("sft_trainer_engine", []),
    *[("sft_trainer_engine", [f"engine={name}", f"optim={name}"]) for name in SFT_ENGINES],
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
for initialize, where in ((initialize_config_dir, folder), (initialize_config_module, here)):
    with initialize(where, version_base=None):
        for name, overrides in cases:
            result.append(OmegaConf.to_yaml(compose(name, overrides), resolve=False))
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


def compose_in_process(plugins):
    done = subprocess.run(
        [sys.executable, "-c", COMPOSE],
        input=json.dumps([VERL_CONFIG, STOCK, "verl.trainer.config", OTHER_TRAINERS, IN_THE_PACKAGE]),
        env={**os.environ, "VERL_USE_EXTERNAL_PLUGINS": plugins},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.partition("COMPOSED")[2])


def test_compose_of_stock_choices_is_unchanged():
    with_us, loaded = compose_in_process("auto")
    without_us, absent = compose_in_process("none")
    assert loaded and not absent
    others = [(name, IN_THE_PACKAGE) for _, name in OTHER_TRAINERS]
    for (name, overrides), ours, theirs in zip([*STOCK * 2, *others], with_us, without_us, strict=True):
        assert ours == theirs, (name, overrides)
        assert "epfsdp2" not in ours
    # They are different choices indeed, not one config eleven times.
    assert len(set(with_us)) >= len(STOCK) - 2


@pytest.mark.parametrize("module", [False, True], ids=["file", "pkg"])
@pytest.mark.parametrize(
    "choice",
    [["engine=epfsdp2"], ["model_engine=epfsdp2"], ["engine=epfsdp2", "model_engine=epfsdp2"]],
    ids=["engine", "model_engine", "both"],
)
def test_compose_of_main_ppo_has_one_engine_node_that_all_roles_share(choice, module):
    config = composed("ppo_trainer", *choice, "engine.ep_size=8", "engine.seed=7", *SIZES, module=module)
    roles = {
        "actor": config.actor_rollout_ref.actor,
        "ref": config.actor_rollout_ref.ref,
        "critic": config.critic,
    }
    for role, node in roles.items():
        plain = OmegaConf.to_container(node, resolve=False)
        assert plain["shared_engine"] == "${engine}" and plain["engine"] == {}, role
        assert (node.strategy, node.shared_engine.ep_size, node.shared_engine.seed) == ("epfsdp2", 8, 7), role
        assert node._target_.startswith("epfsdp2.engine.config.")
    assert config.model_engine == "epfsdp2"
    assert config.actor_rollout_ref.actor.optim._target_ == "verl.workers.config.FSDPOptimizerConfig"
    assert config.critic.optim._target_ == "verl.workers.config.FSDPOptimizerConfig"


def test_compose_with_the_engine_chosen_either_way_is_the_same():
    choices = [["engine=epfsdp2"], ["model_engine=epfsdp2"], ["engine=epfsdp2", "model_engine=epfsdp2"]]
    yaml = {OmegaConf.to_yaml(composed("ppo_trainer", *choice), sort_keys=True) for choice in choices}
    assert len(yaml) == 1


def test_compose_with_the_engine_chosen_leaves_everything_else_verls():
    stock = composed("ppo_trainer")
    ours = composed("ppo_trainer", "engine=epfsdp2")
    for key in stock:
        if key not in ("actor_rollout_ref", "critic", "model_engine"):
            assert raw(stock[key]) == raw(ours[key]), key
    del ours.actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls
    del ours.actor_rollout_ref.rollout.engine_kwargs.vllm.lora_target_modules
    del ours.actor_rollout_ref.rollout.engine_kwargs.sglang.custom_weight_loader
    del ours.actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.epfsdp2_p2p
    ours.actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module = None
    for key in ("model", "rollout"):
        assert raw(stock.actor_rollout_ref[key]) == raw(ours.actor_rollout_ref[key]), key
    # Every setting of verl's FSDP roles is there too.
    for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"):
        assert set(OmegaConf.select(stock, role)) <= set(OmegaConf.select(ours, role)), role


@pytest.mark.parametrize("choice", ["engine=epfsdp2", "model_engine=epfsdp2"])
def test_vllm_worker_extension_is_the_default_and_the_user_wins(choice):
    assert OmegaConf.select(composed("ppo_trainer", choice), f"{VLLM}.worker_extension_cls") == EXTENSION
    mine = composed("ppo_trainer", choice, f"{VLLM}.worker_extension_cls=my.Extension", f"+{VLLM}.swap_space=1")
    assert mine.actor_rollout_ref.rollout.engine_kwargs.vllm == {
        "worker_extension_cls": "my.Extension",
        "lora_target_modules": None,
        "swap_space": 1,
    }
    assert OmegaConf.select(composed("ppo_trainer"), VLLM) == {}


@pytest.mark.parametrize(
    ("chosen", "modules"),
    [
        ([], None),
        (["lora_rank=8"], None),  # all-linear
        (["lora_rank=8", "target_modules=[q_proj,self_attn.o_proj]"], ["o_proj", "q_proj"]),
        (["lora_rank=8", "target_modules=[q_proj,gate_proj,up_proj]"], ["experts", "gate_proj", "q_proj", "up_proj"]),
        (["lora_rank=8", "target_modules=[q_proj]", "+target_parameters=[experts.down_proj]"], ["experts", "q_proj"]),
        (["lora_rank=8", "target_modules=[q_proj]", "lora.merge=True"], None),
        (["target_modules=[q_proj]"], None),
    ],
)
def test_vllm_keeps_memory_for_adapters_of_the_layers_that_get_one(chosen, modules):
    model = [f"{'+' * entry.startswith('+')}actor_rollout_ref.model.{entry.lstrip('+')}" for entry in chosen]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [*SIZES, "engine=epfsdp2", *model])
    OmegaConf.resolve(config)
    assert OmegaConf.select(config, f"{VLLM}.lora_target_modules") == modules


def test_sglang_weight_loader_is_the_default_and_the_user_wins():
    loader = f"{SGLANG}.custom_weight_loader"
    assert OmegaConf.select(composed("ppo_trainer", "engine=epfsdp2"), loader) == [SGLANG_LOADER]
    mine = composed("ppo_trainer", "engine=epfsdp2", f"{loader}=[my.loader]")
    assert OmegaConf.select(mine, loader) == ["my.loader"]


@pytest.mark.parametrize("module", [False, True], ids=["file", "pkg"])
def test_compose_of_the_sft_trainer_takes_the_engine(module):
    config = composed("sft_trainer_engine", "engine=epfsdp2", "engine.ep_size=4", module=module)
    engine = omega_conf_to_dataclass(config.engine)
    assert isinstance(engine, EPFSDP2EngineConfig) and engine.ep_size == 4
    stock = composed("sft_trainer_engine")
    for key in stock:
        if key != "engine":
            assert raw(stock[key]) == raw(config[key]), key


@pytest.mark.parametrize("path", [[], [IN_THE_PACKAGE]], ids=["as it is", "pkg"])
@pytest.mark.parametrize(("folder", "name"), OTHER_TRAINERS, ids=[name for _, name in OTHER_TRAINERS])
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


def test_compose_of_main_ppo_takes_saves_in_the_background():
    config = composed("ppo_trainer", "engine=epfsdp2", "actor_rollout_ref.actor.checkpoint.async_save=True", *SIZES)
    assert omega_conf_to_dataclass(config.actor_rollout_ref.actor).checkpoint.async_save


def test_grad_clip_by_either_name_is_the_optimizers():
    # verl's FSDP actor has both and reads optim.clip_grad alone.
    for role in ("actor_rollout_ref.actor", "critic"):
        for override in (f"{role}.grad_clip=0.3", f"{role}.optim.clip_grad=0.3"):
            config = composed("ppo_trainer", "engine=epfsdp2", override)
            assert OmegaConf.select(config, f"{role}.optim.clip_grad") == 0.3


def test_main_ppo_with_an_engine_of_sft_is_refused_with_what_works():
    with pytest.raises(HydraException, match="engine=veomni is for sft_trainer; here say model_engine=veomni"):
        composed("ppo_trainer", "engine=veomni")


def test_critic_is_built_of_verls_parts_and_follows_its_own_token_limit(tmp_path):
    Qwen3MoeConfig(num_hidden_layers=1, architectures=["Qwen3MoeForCausalLM"]).save_pretrained(tmp_path)
    save_file({"x": torch.zeros(1)}, str(tmp_path / "model.safetensors"))
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
        assert type(critic.profiler) is ProfilerConfig and critic.checkpoint.load_contents == [
            "model",
            "optimizer",
            "extra",
        ]
        # verl's trainers pass these to the engine (v1: trainer_base.py, 267).
        assert (critic.ppo_max_token_len_per_gpu, critic.ppo_infer_max_token_len_per_gpu) == (8192, 8192)
    mine = composed("ppo_trainer", "engine=epfsdp2", "critic.ppo_infer_max_token_len_per_gpu=4096")
    assert mine.critic.ppo_infer_max_token_len_per_gpu == 4096


def test_compose_instantiates_each_role_with_a_config_of_its_own():
    config = composed("ppo_trainer", "engine=epfsdp2", "engine.ep_size=2", *SIZES)
    OmegaConf.resolve(config)  # as verl's TaskRunner does before it hands the nodes to the workers
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
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


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[2].glob("conf/**/*.yaml")), ids=lambda p: p.stem)
def test_yaml_format_is_verls(path):
    previous = ""
    for line in path.read_text().splitlines():
        entry = line.strip()
        if entry and not entry.startswith("#"):
            assert " #" not in line, f"inline comment: {line}"
            assert entry in ("- _self_",) or previous.startswith("#") or entry.endswith(":"), f"no comment: {line}"
        previous = entry


def test_search_path_imports_hydra_alone():
    code = "import sys, epfsdp2.conf.search_path as s; s.install(); assert not {'torch', 'verl'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("choice", ["engine=epfsdp2", "model_engine=epfsdp2"])
def test_compose_with_the_backend_for_separate_rollouts_needs_no_other_setting(choice):
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


def test_compose_with_expert_plan_and_fp32_modules_takes_them_from_the_command_line():
    config = composed(
        "ppo_trainer",
        "engine=epfsdp2",
        "engine.expert_plan={model.layers.*.moe.w1:0,model.layers.*.moe.w2:1}",
        "engine.fp32_modules=['*.mlp.gate']",
        "engine.reshard_experts_after_forward=false",
        *SIZES,
    )
    OmegaConf.resolve(config)
    engine = omega_conf_to_dataclass(config.actor_rollout_ref.actor).engine
    assert engine.expert_plan == {"model.layers.*.moe.w1": 0, "model.layers.*.moe.w2": 1}
    assert engine.fp32_modules == ["*.mlp.gate"] and engine.reshard_experts_after_forward is False
