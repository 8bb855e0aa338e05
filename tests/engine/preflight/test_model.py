"""A model's folder and config, meshes that can't cut its experts, and settings of experts for models without any."""

import contextlib
import json
import logging
import sys
from types import SimpleNamespace

import pytest

from epfsdp2.engine import plugin
from epfsdp2.engine.compat import versions
from epfsdp2.engine.config.values import OPTIMIZERS
from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.preflight import model as model_checks
from epfsdp2.engine.preflight.model import inspect_model, largest_sent, not_applied, without_experts
from epfsdp2.engine.preflight.run import check_run, check_training, check_versions
from epfsdp2.engine.topology.expert_placement import EtpDim
from tests.parity import families
from tests.support.trainer.preflight import BACKEND, MODEL, SDPA, refused, rollout
from tests.support.trainer.settings import checkpoint, engine


@pytest.mark.parametrize("name", ["verl", "vllm", "sglang"])
def test_check_versions_of_a_missing_distribution_is_refused(installs, name):
    installs(name, None)
    with pytest.raises(SettingError, match=f"(?i){name} is not installed.*pip install"):
        check_versions("sglang" if name == "sglang" else "vllm")
    if name != "verl":
        check_versions("trtllm")


@pytest.mark.parametrize(
    ("name", "version", "rule", "works"),
    [
        ("verl", "0.9.0", "verl 0.9.1 and newer", "verl>=0.9.1"),
        ("vllm", "0.23.0", "vllm 0.24 and newer", "vllm>=0.24"),
        ("transformers", "5.6.0", "without attention sinks", "transformers>=5.5.3,!=5.6.0"),
    ],
)
def test_check_versions_that_are_known_to_break_are_refused_with_the_reason(installs, name, version, rule, works):
    installs(name, version)
    with refused(name, version, rule, works=f"pip install '{works}'"):
        check_versions("vllm" if name == "vllm" else None)


NEWER = [("verl", "0.10.0.dev0"), ("verl", "1.2"), ("vllm", "0.99.0"), ("vllm", "0.25.1"), ("transformers", "5.24.0")]


@pytest.mark.parametrize(("name", "version"), [*NEWER, ("torch", "2.13.0a0+nv26.10"), ("ray", "3.1"), (None, None)])
def test_check_versions_that_were_not_tested_warns_in_one_line(installs, caplog, monkeypatch, name, version):
    monkeypatch.setattr(versions, "_distribution", lambda name: None)  # without requirements
    monkeypatch.setattr(versions, "installed", versions.TESTED["default"].get)
    installs(name, version)
    with caplog.at_level(logging.WARNING, "epfsdp2"):
        check_versions("vllm")
    shown = f"epfsdp2: {name} {version} was not tested with (tested: {', '.join(versions.tested(name))})"
    shown += "; the first weight sync compares layouts and checksums" * (name == "vllm")
    assert [record.getMessage() for record in caplog.records] == ([shown] if name else [])


@pytest.fixture
def requires(monkeypatch):
    """Return a function that gives distributions versions and requirements."""

    def give(**found):
        have = {name: SimpleNamespace(version=has, requires=asks) for name, (has, asks) in found.items()}
        monkeypatch.setattr(versions, "_distribution", have.get)
        return {name: version for name, (version, _) in found.items()}

    return give


def test_versions_that_can_not_go_together_are_named_with_ones_that_can(requires):
    beside = {"verl": ("0.9.1", ['torch==2.11.0; extra == "vllm"', "transformers<5.11"])}
    found = requires(vllm=("0.33.0+cpu", ["torch==2.14.0+cpu"]), torch=("2.11.0+cu130", ()), **beside)
    ((name, rule, works),) = versions.faults(found)
    assert name == "vllm" and "compiled for torch 2.14.0 and do not load beside torch 2.11.0+cu130" in rule
    assert works == "torch==2.14.0', or 'vllm==0.24.0"
    # A patch release, and a vLLM that was built here, perhaps for this torch.
    for version, torch in (("0.33.0", "2.14.1"), ("0.33.1.dev4+g1234", "2.11.0")):
        found = requires(vllm=(version, ["torch==2.14.0"]), torch=(torch, ()))
        assert (
            not list(versions.faults(found)) and f"asks for torch==2.14.0 and has {torch}" in versions.doubts(found)[-1]
        )


def test_requirements_that_are_not_met_are_said_but_in_tested_stacks(requires):
    pinned = {name: (version, ()) for name, version in versions.TESTED["next"].items()}
    for transformers, said in (("5.12.1", []), ("5.12.0", ["verl 0.9.1 asks for transformers<5.11 and has 5.12.0"])):
        pinned |= {"transformers": (transformers, ()), "verl": ("0.9.1", ["transformers<5.11"])}
        assert [line for line in versions.doubts(requires(**pinned)) if "asks for" in line] == said


@pytest.mark.parametrize(
    ("transformers", "verl", "family", "reason"),
    [
        ("5.24.0", "0.11.0", "llama4", "forward of Llama 4"),
        ("5.23.0", "0.9.1", "qwen3_vl_moe", "verl's patches"),
        ("5.23.0", "0.11.0", "qwen3_vl_moe", ""),
        ("5.22.2", "0.9.1", "qwen3_vl_moe", ""),
    ],
)
def test_family_that_breaks_with_the_installed_versions_is_refused(
    installs, tmp_path, transformers, verl, family, reason
):
    families.EVERY[family].build().save_pretrained(tmp_path)
    installs("transformers", transformers)
    installs("verl", verl)
    with pytest.raises(SettingError, match=reason) if reason else contextlib.nullcontext():
        inspect_model({"path": str(tmp_path)})


@pytest.mark.parametrize(
    ("words", "transformers", "verl", "is_refused"),
    [
        ("-m verl.trainer.sft_trainer engine=epfsdp2", "5.24.0", "0.9.1", True),
        ("-m verl.trainer.sft_trainer_ray engine=epfsdp2", "5.23.0", "0.10.0.dev0", True),
        ("-m verl.trainer.sft_trainer engine=fsdp", "5.24.0", "0.9.1", False),
        ("-m verl.trainer.sft_trainer engine=epfsdp2", "5.22.2", "0.9.1", False),
        ("-m verl.trainer.sft_trainer engine=epfsdp2", "5.24.0", "0.11.0", False),
        ("-m verl.trainer.main_ppo engine=epfsdp2", "5.24.0", "0.9.1", False),
    ],
)
def test_plugin_ends_a_run_whose_imports_in_verl_will_fail(
    installs, monkeypatch, words, transformers, verl, is_refused
):
    installs("transformers", transformers)
    installs("verl", verl)
    monkeypatch.setattr(sys, "orig_argv", ["python", *words.split()])
    expected = pytest.raises(SystemExit, match=rf"transformers={transformers}: .*What works: .*<5\.23'")
    with expected if is_refused else contextlib.nullcontext():
        plugin.install()


@pytest.mark.parametrize(
    ("kind", "experts", "settings"),
    [
        ("jetmoe", "JetMoeParallelExperts", {}),
        ("longcat_flash", "LongcatFlashExperts", {"num_layers": 1}),
    ],
)
def test_inspect_model_of_experts_outside_the_interface_refuses_their_class(tmp_path, kind, experts, settings):
    model = checkpoint(tmp_path, kind, num_hidden_layers=2, **settings)
    with pytest.raises(SettingError, match=f"{experts}.* outside transformers' experts interface") as caught:
        inspect_model(model)
    assert "Attention" not in str(caught.value) and "Norm" not in str(caught.value)


@pytest.mark.parametrize("path", ["/no/such/model", "~/no-such-model", "./no/such", "a/b/c"])
def test_inspect_model_of_a_path_that_is_not_there_is_refused(path):
    with refused(f"{MODEL}.path", path, "there is no such folder"):
        inspect_model({"path": path})


def test_inspect_model_of_a_folder_without_all_of_its_files_is_refused(tmp_path, model):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with refused(f"{MODEL}.path", model["path"], "model-00002.safetensors, which is not there"):
        inspect_model(model)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(SettingError, match="has no .*safetensors"):
        inspect_model(model)


@pytest.mark.parametrize("path", ["hdfs://host/model", "no-such-org/no-such-model-123"])
def test_check_training_of_a_model_that_is_not_local_checks_settings_alone_with_a_warning(path, caplog):
    with caplog.at_level(logging.WARNING, "epfsdp2"):
        assert check_training(engine(), 2, {"path": path} | SDPA, device="cpu") is None
    assert [record.getMessage() for record in caplog.records] == [
        f"epfsdp2: {MODEL}.path={path} is not on this machine yet, so it is not checked"
    ]
    with pytest.raises(SettingError, match="number of ranks"):
        check_training(engine(ep_size=3), 8, {"path": path}, device="cpu")
    with pytest.raises(SettingError, match="needs an accelerator"):
        check_training(engine(), 2, {"path": path}, device="cpu")


def test_inspect_model_of_a_hub_id_in_the_cache_checks_it(tmp_path, model, monkeypatch):
    monkeypatch.setattr(model_checks, "try_to_load_from_cache", lambda path, name: str(tmp_path / name))
    assert inspect_model({"path": "some-org/some-model"}).experts == (8, 8)


def test_inspect_model_of_a_config_that_transformers_can_not_build_is_refused(tmp_path, model):
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "no_such_type"}))
    with refused(f"{MODEL}.path", model["path"], "transformers can't build"):
        inspect_model(model)
    (tmp_path / "config.json").unlink()
    with refused(f"{MODEL}.path", model["path"], "transformers can't build"):
        inspect_model(model)


# Meshes.


def test_check_training_of_a_valid_run_passes_and_counts_its_experts(model, stacks_are_sent):
    facts = check_training(engine(ep_size=4), 8, model, device="cpu")
    assert facts.experts == (8, 8)
    assert facts.stacked == (((8, 32, 16), 0, EtpDim(2)), ((8, 32, 32), 0, EtpDim(1, parts=2)))
    assert largest_sent(facts.model) == ("model.layers.0.mlp.experts.gate_up_proj", 8 * 2 * 16 * 32)


@pytest.mark.parametrize(
    ("settings", "world", "name", "words"),
    [
        ({"ep_size": 3}, 8, "ep_size", ["number of ranks", "[1, 2, 4, 8]"]),
        ({"ep_size": 4}, 6, "ep_size", ["number of ranks", "[1, 2, 3, 6]"]),
        ({"ep_size": 8, "fsdp_size": 4}, 16, "ep_size", ["engine.fsdp_size=4"]),
        ({"fsdp_size": 3}, 8, "fsdp_size", ["[1, 2, 4, 8]"]),
        ({"ep_size": 3}, 12, "ep_size", ["number of experts", "8 in Qwen3MoeForCausalLM", "[1, 2, 4]"]),
        ({"ep_size": 4, "etp_size": 4}, 8, "etp_size", ["engine.etp_size= one of [1, 2]"]),
        ({"etp_size": 32}, 32, "etp_size", ["engine.etp_size= one of [1, 2, 4, 8, 16]"]),  # the inner size is 16
        # gate_up_proj [8, 32, 32], down_proj [8, 32, 16]
        ({"expert_shard_dim": 0, "ep_size": 4}, 12, "expert_shard_dim", ["size 2 along this dim", "ep_fsdp=3 "]),
        ({"expert_shard_dim": 0, "ep_size": 2}, 32, "expert_shard_dim", ["size 4 along this dim", "ep_fsdp=16 "]),
        ({"expert_shard_dim": 1, "ep_size": 2}, 6, "expert_shard_dim", ["size 32 along this dim", "ep_fsdp=3 "]),
    ],
)
def test_mesh_that_does_not_divide_ranks_experts_or_dims_is_refused(model, settings, world, name, words):
    with refused(f"engine.{name}", settings[name], *words):
        check_training(engine(**settings), world, model, device="cpu")


def test_mesh_that_divides_everything_passes(model):
    for dim, ep, world in ((0, 2, 4), (0, 8, 8), (1, 2, 64), ("auto", 2, 6)):
        check_training(engine(ep_size=ep, expert_shard_dim=dim), world, model, device="cpu")


def test_etp_size_with_settings_that_exclude_it_is_refused(model, installs):
    installs("vllm", "0.27.1")
    cut, optimizer = engine(ep_size=2, etp_size=2), f"{OPTIMIZERS[MODEL]}.optimizer"
    muon = {"optimizer": "Muon", "optimizer_impl": "torch.optim", "lr": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.99)}
    for role in (model, {**model, "lora_rank": 8, "target_modules": "all-linear"}):
        check_training(cut, 8, role, optim=muon, device="cpu")
        with refused(optimizer, "Muon"):
            check_training(engine(ep_size=8, etp_size=2), 64, role, optim=muon, device="cpu")
    check_run(cut, 8, model, rollout(backend="naive"), device="cpu")
    with refused(BACKEND, "delta_sharded", "takes a shard to be one block"):
        check_run(cut, 8, model, rollout(backend="delta_sharded"), device="cpu")


@pytest.mark.parametrize(("setting", "optim"), OPTIMIZERS.items())
def test_optimizer_that_needs_whole_weights_is_refused_in_every_role(model, setting, optim):
    settings = {"optimizer": "Adafactor", "lr": 1e-6, "weight_decay": 0.0, "betas": (0.9, 0.99)}
    name = f"{optim}.optimizer"
    with refused(name, "Adafactor", "depends on other elements of the weight", f"{name}=AdamW"):
        check_training(engine(ep_size=2), 8, model, optim=settings, device="cpu", setting=setting)


# Models without experts.


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
    settings = engine(fp32_modules=["*.mlp.gate", "*.self_attn"])
    facts = check_training(settings, 4, dense, device="cpu")
    assert without_experts(settings, facts.model).fp32_modules == ["*.self_attn"]
    said = not_applied(settings, "its/path", facts.model)
    assert "engine.fp32_modules=['*.mlp.gate'] does not apply" in said
    with refused("engine.fp32_modules", "*.mlp.gate", "matches no module of the model"):
        check_run(settings, 4, dense, {}, device="cpu")


@pytest.mark.parametrize(
    ("name", "value"),
    [("ep_size", 2), ("experts_backend", "torch"), ("router_metrics", True), ("router_replay.mode", "R2")],
)
def test_setting_of_experts_for_a_dense_model_alone_is_refused(dense, name, value):
    settings = engine(replay=value) if name.startswith("router_replay") else engine(**{name: value})
    for critic in ({}, {"critic_enable": True, "critic_path": dense["path"]}, {"critic_path": "no/such"}):
        beside = ["nor has that of the critic, Qwen3ForCausalLM"] if "critic_enable" in critic else []
        with refused(f"engine.{name}", value, f"Qwen3ForCausalLM ({MODEL}.path) is a dense model", *beside):
            check_run(settings, 4, dense, critic, device="cpu")


def test_expert_plan_and_expert_parallel_rollout_of_a_dense_model_are_refused(dense, installs):
    installs("vllm", "0.27.1")
    with refused("engine.expert_plan", "*.w1", "matches no parameter of the model"):
        check_run(engine(expert_plan={"*.w1": 0}), 4, dense, {}, device="cpu")
    spread = {"name": "vllm", "tensor_model_parallel_size": 2, "expert_parallel_size": 2}
    with pytest.raises(SettingError, match="rollout.expert_parallel_size=2: vLLM spreads experts, and the model has"):
        check_run(engine(), 4, dense, spread, device="cuda")
    check_run(engine(), 4, dense, {}, device="cpu")


@pytest.mark.parametrize("which", [{"critic_enable": True}, {"critic_enable": None, "adv_estimator": "gae"}])
def test_settings_of_experts_where_the_critic_alone_has_some_are_checked_for_it(dense, model, which):
    beside = {**which, "critic_path": model["path"]}
    check_run(engine(ep_size=2, router_z_loss_coef=0.1), 4, dense, beside, device="cpu")
    with refused("engine.router_replay.mode", "R2", "can't be with Qwen3ForCausalLM"):
        check_run(engine(ep_size=2, replay="R2"), 4, dense, beside, device="cpu")
    with refused("engine.ep_size", 2, "concerns experts"):
        check_run(engine(ep_size=2), 4, dense, {**beside, "critic_enable": False}, device="cpu")
