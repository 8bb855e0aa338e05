"""The engine of each role, with verl's settings, from folders as they are published and as the hub's cache has them."""

import contextlib
import io
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from epfsdp2.engine.config import EPFSDP2EngineConfig
from tests.support.engine.sharded import whole_parameters
from tests.support.models.hub import save_in_hub_cache, use_hub_cache
from tests.support.models.tiny import reference_model, save_glm4_moe, save_qwen3_moe
from tests.support.ranks import run_ranks
from tests.support.trainer.verl_worker import training_worker


def _started(path, model_type="language_model", **settings):
    """Return a worker's engine and the lines that it printed on this rank."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        config = EPFSDP2EngineConfig(ep_size=2, use_dynamic_bsz=False, **settings)
        engine = training_worker(path, model_type, config, None).engine
    return engine, [line for line in said.getvalue().splitlines() if "not read" in line or "no place" in line]


def _from_the_cache(cache, folder, other):
    use_hub_cache(cache)
    wanted = dict(reference_model(folder).named_parameters())
    for settings in ({}, {"forward_only": True}):
        engine, said = _started("some/moe", **settings)
        assert not said
        for name, param in whole_parameters(engine.module).items():
            assert torch.equal(param, wanted[name]), name
    # The config of another repository has another commit.
    config = EPFSDP2EngineConfig(ep_size=2, use_dynamic_bsz=False)
    training_worker("some/moe", "language_model", config, None, hf_config_path=other)
    engine, _ = _started("some/moe", "value_model")
    assert torch.equal(whole_parameters(engine.module)["model.norm.weight"], wanted["model.norm.weight"])


def _says(folders):
    for folder, model_type, settings, *wanted in folders:
        _, said = _started(folder, model_type, **settings)
        assert said == [f"[epfsdp2] {line}" for line in wanted] * (dist.get_rank() == 0), said


def _add(folder: Path, **tensors: torch.Tensor) -> None:
    (file,) = folder.glob("model*.safetensors")
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})


def _each_role(cache, folder, cases):
    _from_the_cache(cache, folder, "other/moe")
    _says(cases)


def test_engine_of_every_role_loads_a_hub_id_without_a_network_and_names_what_it_does_not_read(tmp_path, monkeypatch):
    """Files of another set, computed buffers and a prediction layer; and a critic's former head, of either kind."""
    names = ("strays", "unused", "critic")
    strays, unused, critic = (save_glm4_moe(tmp_path / name, one_file=True) for name in names)
    save_file({"tok_embeddings.weight": torch.ones(2)}, strays / "consolidated.safetensors")
    _add(unused, **{f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(2) for i in range(3)})
    _add(unused, **{"model.layers.92.eh_proj.weight": torch.ones(2), "some.weight": torch.ones(2)})
    qwen = save_qwen3_moe(tmp_path / "qwen")
    no_place = "tensors of the checkpoint have no place in the model"
    listed = "model.layers.*.self_attn.rotary_emb.inv_freq (3), model.layers.*.eh_proj.weight, some.weight"
    cases = [
        (strays, "language_model", {}, f"not read from {strays}, as by transformers: consolidated.safetensors"),
        (unused, "language_model", {"allow_unused_weights": True}, f"5 {no_place}: {listed}"),
        (critic, "value_model", {}, f"1 {no_place}: lm_head.weight"),
        (qwen, "value_model", {}, f"1 {no_place}: lm_head.weight"),
    ]
    save_in_hub_cache(tmp_path / "cache", "some/moe", qwen)
    save_in_hub_cache(tmp_path / "cache", "other/moe", qwen, commit="f" * 40)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run_ranks(_each_role, 2, tmp_path / "cache", qwen, cases)
