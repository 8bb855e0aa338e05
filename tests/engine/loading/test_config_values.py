"""A run's settings win over the values of a checkpoint's config.json, in every role and in nested configs."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from epfsdp2.engine.config import EPFSDP2CriticConfig, EPFSDP2EngineConfig
from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.model.meta import build_on_meta, kept_in_float32, quantisation_of
from epfsdp2.engine.model.run_config import config_parts
from epfsdp2.engine.model.value_head import has_value_class, prepare_config
from epfsdp2.engine.preflight.run import check_training
from tests.parity.families import ALL
from tests.support.engine.sharded import whole_parameters
from tests.support.models.published import as_transformers_4, read_config, write_config
from tests.support.models.tiny import VOCAB, save_glm4_moe, save_qwen3_moe
from tests.support.models.vlm import save_vlm
from tests.support.ranks import each_case, run_ranks
from tests.support.trainer.ppo import RESPONSE, of_this_rank, ppo_batch, ppo_samples, ppo_worker
from tests.support.trainer.verl_worker import training_worker

WORLD = 2
# Each would change an update, or end it, if it won over the run's own setting.
VALUES: dict[str, Any] = {
    "_attn_implementation": "eager",
    "_experts_implementation": "eager",
    "attention_implementation": "eager",
    "classifier_dropout": 0.5,
    "gradient_checkpointing": True,
    "hidden_dropout": 0.5,
    "id2label": {"0": "no", "1": "yes", "2": "maybe"},
    "output_hidden_states": True,
    "output_router_logits": True,
    "return_dict": False,
    "router_aux_loss_coef": 0.5,
    "use_cache": True,
}
CRITICS = sorted(name for name, family in ALL.items() if has_value_class(family.build().config))
FEW = ("gpt_oss", "qwen3_moe", "qwen3_next")


def _with_values(folder: Path, dtype: str) -> Path:
    """Copy a checkpoint; its config, and each nested one, gets VALUES and a dtype, spelled as by transformers 4."""
    changed = folder.with_name(folder.name + "-changed")
    shutil.copytree(folder, changed)
    config = read_config(folder)
    parts = [config, *(value for name, value in config.items() if name.endswith("_config"))]
    for part in parts:
        part.pop("torch_dtype", None)
        part |= {**VALUES, "dtype": dtype}
    write_config(changed, as_transformers_4(config))
    return changed


def _critic(folder: Path, **settings: Any) -> Any:
    from verl.workers.utils.losses import value_loss

    engine = EPFSDP2EngineConfig(
        ep_size=2,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=2,
        infer_micro_batch_size_per_gpu=2,
        mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"},
        **settings,
    )
    critic = EPFSDP2CriticConfig(engine=engine, ppo_micro_batch_size_per_gpu=2)
    return training_worker(folder, "value_model", engine, partial(value_loss, config=critic))


def _update(role: str, folder: Path) -> dict[str, torch.Tensor]:
    """The parameters after an update; those before it have the values of the files, whatever the config says."""
    worker = _critic(folder) if role == "critic" else ppo_worker(folder, 2)
    module = worker.engine.module
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert {part.dtype for part in config_parts(module.config)} == {torch.float32}
    assert {part._attn_implementation for part in config_parts(worker.engine.model_config.hf_config)} == {"sdpa"}
    samples = [(ids % (VOCAB - 16), *others) for ids, *others in of_this_rank(worker, ppo_samples())]
    data = ppo_batch(samples)
    data["returns"] = data["values"] = torch.zeros(len(samples), RESPONSE)
    worker.train_batch(data)
    return whole_parameters(module)


def _equal_updates(cases: list[tuple[str, Path, Path]]) -> None:
    def check(role: str, plain: Path, changed: Path) -> None:
        wanted, found = _update(role, plain), _update(role, changed)
        assert wanted.keys() == found.keys()
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name

    each_case(cases, check)


def test_update_of_a_config_with_other_values_has_the_bits_of_one_without(tmp_path):
    folders = [
        save_qwen3_moe(tmp_path / "own class"),
        save_glm4_moe(tmp_path / "other head"),
        save_vlm("qwen3_vl_moe", tmp_path / "nested"),
    ]
    changed = {folder: _with_values(folder, "float16") for folder in folders}
    roles = zip(("critic", "critic", "actor"), changed.items(), strict=True)
    cases = [(role, *pair) for role, pair in roles]
    run_ranks(_equal_updates, WORLD, cases)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FEW else pytest.mark.long) for n in CRITICS])
def test_critic_of_every_family_is_built_in_the_runs_dtype_whatever_its_config_says(name):
    for dtype, said in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)):
        config = ALL[name].build().config
        prepare_config(config)
        for part in config_parts(config):
            part.dtype = said
        model = build_on_meta(AutoModelForTokenClassification, config, dtype)
        kept = kept_in_float32(model)
        assert {p.dtype for n, p in model.named_parameters() if not kept.search(n)} == {dtype}
        assert {part.dtype for part in config_parts(config)} == {said}, "the caller's config is its own"


def _check(folder: Path) -> None:
    model = {"path": str(folder), "override_config": {"attn_implementation": "sdpa"}}
    check_training(EPFSDP2EngineConfig(ep_size=2), WORLD, model, device="cpu")


def test_driver_of_a_config_that_asks_for_flash_attention_checks_the_runs_attention(tmp_path):
    folder = save_qwen3_moe(tmp_path)
    write_config(folder, {**read_config(folder), "_attn_implementation": "flash_attention_2"})
    _check(folder)


def test_driver_of_an_override_that_the_config_does_not_have_warns_of_it(tmp_path, caplog):
    overrides = {"attn_implementation": "sdpa", "rope_theta": 1e6, "num_experts_per_tok": 1}
    model = {"path": str(save_qwen3_moe(tmp_path)), "override_config": overrides}
    check_training(EPFSDP2EngineConfig(ep_size=2), WORLD, model, device="cpu")
    (line,) = [line for line in caplog.messages if "changes nothing" in line]
    assert "override_config.rope_theta changes nothing, because Qwen3MoeConfig has no such field" in line


@pytest.mark.parametrize("values", [{"output_attentions": True}, {"num_hidden_layers": "three"}], ids=str)
def test_driver_of_a_config_that_transformers_refuses_names_the_path(tmp_path, values):
    folder = save_qwen3_moe(tmp_path)
    write_config(folder, {**read_config(folder), **values})
    with pytest.raises(SettingError, match=r"^actor_rollout_ref\.model\.path=.*can't build a model from its config"):
        _check(folder)


@pytest.mark.parametrize("within", [(), ("text_config",), ("thinker_config", "text_config"), ("vision_config",)])
def test_quantisation_is_found_at_every_depth_of_a_config(within):
    config: dict[str, Any] = {"quantization_config": {"quant_method": "fp8"}}
    for name in reversed(within):
        config = {name: config}
    assert quantisation_of({"model_type": "any", **config}) == {"quant_method": "fp8"}
    assert quantisation_of({"model_type": "any", "text_config": {"dtype": "bfloat16"}}) is None


def test_auto_map_of_a_family_that_transformers_has_is_not_followed_without_trust(tmp_path):
    folder = save_qwen3_moe(tmp_path)
    auto_map = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XForCausalLM"}
    write_config(folder, {**read_config(folder), "auto_map": auto_map})
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    built = build_on_meta(AutoModelForCausalLM, config, torch.float32)
    assert type(built).__module__.startswith("transformers.")
    _check(folder)
