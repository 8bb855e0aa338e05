"""Every tensor in every file of a checkpoint is read, or named as left out, or ends the run."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from epfsdp2.engine import build
from epfsdp2.engine.checkpoint.load import load_weights
from epfsdp2.engine.checkpoint.safetensors_reader import CheckpointFiles, open_checkpoint
from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.model.meta import build_on_meta
from epfsdp2.engine.topology.mesh import Meshes, Topology, build_meshes
from tests.support.engine.sharded import sharded_model, whole_parameters
from tests.support.models.tiny import reference_model, save_glm4_moe, save_qwen3_moe, save_random
from tests.support.ranks import each_case, run_ranks

WORLD = 2
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
STRAY = "tok_embeddings.weight"
MTP, COMPUTED, UNKNOWN = "model.layers.92.eh_proj.weight", "model.layers.0.self_attn.rotary_emb.inv_freq", "some.weight"
OLDER = {"mixtral": ("block_sparse_moe", "mlp")}  # what the older names have in the place of the newer


def _save_mixtral(folder: Path, **overrides) -> Path:
    config = MixtralConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        **overrides,
    )
    return save_random(MixtralForCausalLM(config), folder, 0, one_file=True)


SAVE: dict[str, Callable[..., Path]] = {
    "qwen3_moe": functools.partial(save_qwen3_moe, one_file=True),
    "mixtral": _save_mixtral,
    "glm4_moe": functools.partial(save_glm4_moe, one_file=True),
}


def _with_another_head(folder: Path) -> Path:
    """Give a tied checkpoint a head that differs from the embedding in one row: on one rank, or in both replicas."""
    save_qwen3_moe(folder, one_file=True, tie_word_embeddings=True)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors[HEAD] = tensors[EMBEDDING].clone()
    tensors[HEAD][-1] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def _is_refused(folder, mesh):
    with pytest.raises(SettingError) as error:
        sharded_model(folder, WORLD, *mesh)
    file = next(folder.glob("*.safetensors")).name
    text = str(error.value)
    assert f"ties {HEAD} (in {file}) to {EMBEDDING} (in {file})" in text and "What works" in text and "\n" not in text


def _with_a_wider_head(folder: Path) -> Path:
    """A float32 head beside a bfloat16 embedding: ``from_pretrained`` ties them in bfloat16 and not in float32."""
    save_qwen3_moe(folder, one_file=True, tie_word_embeddings=True)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors[HEAD] = tensors[EMBEDDING].float() * (1 + 2**-12)
    tensors[EMBEDDING] = tensors[HEAD].bfloat16()
    save_file(tensors, file, metadata={"format": "pt"})
    assert reference_model(folder).lm_head.weight is not reference_model(folder).model.embed_tokens.weight
    return folder


def _compared_in_its_dtype(folder):
    sharded_model(folder, WORLD, 2, dtype=torch.bfloat16)
    with pytest.raises(SettingError, match="ties lm_head.weight"):
        sharded_model(folder, WORLD, 2, dtype=torch.float32)


def _each_tied(checks):
    each_case(checks, lambda check, *args: check(*args))


def test_load_weights_of_tied_embeddings_beside_another_head_is_refused(tmp_path):
    other = _with_another_head(tmp_path / "other")
    checks = [(_is_refused, other, mesh) for mesh in ((2, -1), (1, 1))]
    run_ranks(_each_tied, WORLD, [*checks, (_compared_in_its_dtype, _with_a_wider_head(tmp_path / "wider"))])


# -- made-up checkpoints ----------------------------------------------------------------------------------------------


@st.composite
def _checkpoints(draw):
    """A family; its head; tensors to add, to name twice, or to drop; and how they are split into files."""
    family = draw(st.sampled_from(sorted(SAVE)))
    faults = st.sampled_from(["", "", "", "unknown", "two names", "renumbered", "missing", "in two files"])
    return {
        "family": family,
        "head": draw(st.sampled_from(["untied", "tied", "equal", "other", "alone"])),
        "added": draw(st.sets(st.sampled_from([COMPUTED, MTP] if family == "glm4_moe" else [COMPUTED]))),
        "fault": draw(faults),
        "of": draw(st.integers(0, 10**6)),
        "files": draw(st.integers(1, 3)),
        "layout": draw(st.sampled_from(["index", "index", "no index", "index without some"])),
        "stray": draw(st.booleans()),
    }


def _twin(key: str, family: str) -> str:
    """Return another name of a tensor, that transformers reads as the same."""
    old, new = OLDER.get(family, ("", ""))
    return key.replace(old, new) if old and old in key else key.removeprefix("model.")


def _make(folder: Path, saved: dict[str, torch.Tensor], example: dict) -> list[str]:
    """Write a checkpoint, and return the names of which an error has to have one; none of what is to be read."""
    tensors, wrong = dict(saved), []
    tensors |= {key: torch.ones(3) for key in example["added"]}
    if example["head"] in ("equal", "other", "alone"):
        tensors[HEAD] = tensors[EMBEDDING] + (example["head"] == "other")
    if example["head"] == "other":
        wrong.append(HEAD)
    if example["head"] == "alone":
        del tensors[EMBEDDING]
    of_model = sorted(key for key in saved if key in tensors and key.startswith("model."))
    key, fault = of_model[example["of"] % len(of_model)], example["fault"]
    if fault == "unknown":
        tensors[UNKNOWN] = torch.ones(3)
        wrong.append(UNKNOWN)
    elif fault == "two names":
        tensors[_twin(key, example["family"])] = tensors[key] + 1
        wrong.append(key)
    elif fault == "renumbered":
        key = next(key for key in of_model if ".experts.3." in key)
        tensors[key.replace(".experts.3.", ".experts.9.")] = tensors.pop(key)
        wrong.append(key.partition(".experts.")[0].replace(*OLDER.get(example["family"], ("", ""))) + ".experts")
    elif fault == "missing":
        del tensors[key]
        wrong.append(key.partition(".experts.")[0].replace(*OLDER.get(example["family"], ("", ""))))
    names = [f"model-{i + 1:05d}-of-{example['files']:05d}.safetensors" for i in range(example["files"])]
    parts = [dict(sorted(tensors.items())[i :: len(names)]) for i in range(len(names))]
    weight_map = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    if fault == "in two files" and len(names) > 1:
        twice = next(iter(parts[0]))
        parts[1][twice] = parts[0][twice] + 1
        wrong.append(twice)
    if example["layout"] == "index without some":
        for name in names:
            own = [key for key, of in weight_map.items() if of == name]
            weight_map.pop(own[example["of"] % len(own)]) if len(own) > 1 else None
    folder.mkdir(parents=True)
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name, metadata={"format": "pt"})
    if example["stray"]:
        save_file({STRAY: torch.ones(2)}, folder / "consolidated.safetensors")
    if example["layout"] != "no index":
        _write_index(folder, weight_map)
    elif example["stray"]:
        wrong.append(STRAY)
    return wrong


def _write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@functools.cache
def _meshes() -> Meshes:
    """Once for each rank, because each example's own would leave its groups and their threads behind."""
    return build_meshes("cpu", Topology.arrange(WORLD, 2))


def _load(folder: Path, config) -> tuple[nn.Module, CheckpointFiles, set[str]]:
    """Load a checkpoint, and return the model, its files and the tensors that were left out."""
    model, left_out = build_on_meta(AutoModelForCausalLM, config, torch.float32), set()
    files = open_checkpoint(folder)

    def noted(*args, **kwargs):
        left_out.update(names := load_weights(*args, **kwargs))
        return names

    with mock.patch.object(build, "load_weights", noted):
        options = ShardingOptions(param_dtype=torch.float32)
        build.shard_and_load(model, files, _meshes(), options, device="cpu", device_id="cpu")
    return model, files, left_out


def _property(folder, examples):
    configs, saved = {}, {}
    for family, save in SAVE.items():
        for tied in (False, True):
            own = folder / f"{family}-{tied}"
            if dist.get_rank() == 0:
                save(own, tie_word_embeddings=tied)
            dist.barrier()
            configs[family, tied] = AutoConfig.from_pretrained(own, attn_implementation="sdpa")
            (file,) = own.glob("*.safetensors")
            saved[family, tied] = load_file(file)
    counted = {"refused": 0, "read": 0}

    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(_checkpoints())
    def check(example):
        which = example["family"], example["head"] != "untied"
        made = folder / "made"
        wrong = [_make(made, saved[which], example)] if dist.get_rank() == 0 else [None]
        if dist.get_rank() == 0:
            configs[which].save_pretrained(made)
        dist.broadcast_object_list(wrong)
        try:
            _is_accounted_for(made, configs[which], wrong[0], counted)
        finally:
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(made)
            dist.barrier()

    check()
    assert min(counted.values()) > examples // 5, counted


def _is_accounted_for(folder, config, wrong, counted):
    read: set[str] = set()
    plain = CheckpointFiles.read

    def noting(self, key, index=None):
        read.add(key)
        return plain(self, key, index)

    with mock.patch.object(CheckpointFiles, "read", noting):
        if wrong:
            with pytest.raises((ValueError, RuntimeError)) as error:
                _load(folder, config)
            assert any(name in str(error.value) for name in wrong), (wrong, str(error.value))
            counted["refused"] += 1
            return
        model, files, left_out = _load(folder, config)
    counted["read"] += 1
    everyone: list = [None] * WORLD
    dist.all_gather_object(everyone, read)
    read = set().union(*everyone)
    there = {key: file.name for file in folder.glob("*.safetensors") for key in load_file(file)}
    for key, name in there.items():
        assert key in read or key in left_out or name in files.unread, key
    if dist.get_rank() == 0:  # from_pretrained needs one
        _write_index(folder, dict(files.file_of))
    dist.barrier()
    wanted = dict(reference_model(folder).named_parameters())
    for name, param in whole_parameters(model).items():
        assert torch.equal(param, wanted[name]), name


@pytest.mark.parametrize("examples", [12, pytest.param(200, marks=pytest.mark.long)])
def test_load_weights_of_made_up_checkpoints_reads_or_names_every_tensor(tmp_path, examples):
    run_ranks(_property, WORLD, tmp_path, examples, timeout=900.0)
