"""Low-rank adapters on every family against the plain Hugging Face model that computes with ``W + scaling * B @ A``."""

import contextlib
import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch.func import functional_call

from epfsdp2.engine.build import shard_and_load
from epfsdp2.engine.checkpoint.safetensors_reader import open_checkpoint
from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.lora.adapters import A, B, Lora
from epfsdp2.engine.lora.targets import find_targets
from epfsdp2.engine.model.layers import layer_names
from epfsdp2.engine.model.meta import build_on_meta
from epfsdp2.engine.moe.outside.families import prepare
from epfsdp2.engine.topology.dtensor import is_adapter
from epfsdp2.engine.topology.mesh import Topology, build_meshes
from tests.parity import families
from tests.parity.float64 import float64
from tests.support.engine.lora import adapters_of, lora_settings, stirred
from tests.support.engine.sharded import full_tensors, whole_tensors
from tests.support.models.tiny import VOCAB, relative_error
from tests.support.ranks import each_case, run_ranks

# Their gradients in float32 have errors of over 1e-5, some in transformers 5.24 alone.
IN_FLOAT64 = ("bailing_hybrid", "gemma3", "lara_mini", "minimax_m3_vl", "step3p7")


def _in_float64(family):
    return family in IN_FLOAT64 or families.ALL[family].dtype == "float64"


def _precision(family):
    return float64() if _in_float64(family) else contextlib.nullcontext()


def _check(name, folder):
    with _precision(name):
        _compare(name, folder)


def _compare(name, folder):
    """Compare a family's logits, adapter gradients and merged weights on two ranks with the plain model's."""
    meshes = build_meshes("cpu", Topology.arrange(2, 1 if name in families.DENSE else 2, -1))
    ids = torch.randint(0, VOCAB, (4, 13), generator=torch.Generator().manual_seed(1))
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    train = families.ALL[name].train
    plain = families.load(name, folder, torch.float32).train(train)
    model = build_on_meta(families.AsAuto(type(plain)), copy.deepcopy(plain.config), torch.float32)
    lora = Lora(model, lora_settings())
    shard_and_load(
        model,
        open_checkpoint(folder),
        meshes,
        ShardingOptions(param_dtype=torch.float32, reduce_dtype=torch.float32),
        device="cpu",
        device_id="cpu",
        initialize=lambda name, tensor, fits: is_adapter(name),
        finish=lambda model: lora.initialize(model, 0, stirred(model)),
    )
    lora.freeze_base(model)
    model.train(train)

    leaves = {n: value.requires_grad_() for n, value in whole_tensors(adapters_of(model)).items()}
    weights = {n: p.detach() for n, p in plain.named_parameters()}
    for target in lora.targets.values():
        delta = target.scaling * leaves[target.name + B] @ leaves[target.name + A]
        delta = delta.mT if target.is_transposed else delta
        weights |= {n: weights[n] + part for n, part in families.plain_values(model, target.name, delta).items()}
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    wanted = functional_call(plain, weights, kwargs=inputs).logits
    families.loss(name, wanted, ids).backward()
    logits = families.logits(model, ids[mine])
    families.loss(name, logits, ids[mine]).backward()
    used = {n: p for n, p in adapters_of(model).items() if leaves[n].grad is not None and leaves[n].grad.norm() > 1e-7}
    bound = 1e-12 if _in_float64(name) else 1e-5
    assert relative_error(logits.detach(), wanted.detach()[mine]) < bound
    for n, grad in whole_tensors({n: p.grad for n, p in used.items()}).items():
        assert grad is not None and relative_error(grad, leaves[n].grad) < bound, n
    streamed = dict(full_tensors(model, meshes, layer_names(model), 1 << 20))
    merged = families.own_values(model, {n: weight.detach() for n, weight in weights.items()})
    for n in lora.targets:
        torch.testing.assert_close(streamed[n], merged[n], rtol=0, atol=1e-6, msg=n)


def _compare_families(tmp_path, names):
    saved = []
    for name in names:
        with _precision(name):
            saved.append((name, families.save(name, tmp_path / name)))
    run_ranks(each_case, 2, saved, _check, timeout=600)


def test_lora_on_dense_models_and_on_transposed_and_shared_experts_equals_the_plain_model(tmp_path):
    _compare_families(tmp_path, ["gpt_oss", "glm4_moe", "qwen3"])


@pytest.mark.long
def test_lora_on_every_family_equals_the_plain_model(tmp_path):
    _compare_families(tmp_path, list(families.ALL))


def _targets(name, **settings):
    with torch.device("meta"):
        model = families.ALL[name].build()
    prepare(model)
    return {target.name for target in find_targets(model, lora_settings(**settings))}


def test_lora_on_weights_that_are_read_without_a_call_adds_no_adapter():
    """Kernels that fuse Mamba2's last projection read its weight."""
    mixer = "model.layers.0.mixer"
    targets = _targets("nemotron_h")
    assert f"{mixer}.in_proj.weight" in targets and f"{mixer}.out_proj.weight" not in targets
    assert "model.layers.0.linear_attn.out_proj.weight" in _targets("qwen3_next")
    with pytest.raises(SettingError, match=r"reads the weight of out_proj without a call"):
        _targets("nemotron_h", target_modules=["in_proj", "out_proj"])
    assert f"{mixer}.in_proj.weight" in _targets("nemotron_h", target_modules=["in_proj"])


@pytest.mark.parametrize("name", ["afmoe", "gemma4", "granitemoe", "hunyuan_v1_moe", "qwen3_moe", "deepseek_v2"])
def test_lora_on_routers_adds_no_adapter(name):
    targets = _targets(name)
    assert targets and not any(re.search(r"\.(gate|router)\.", target) for target in targets)
