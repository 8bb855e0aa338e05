"""Memory that nothing has filled is found before training, on all ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.model.meta import UninitializedError, build_on_meta, check_initialized, materialize
from epfsdp2.engine.parallelize import parallelize
from epfsdp2.engine.topology.dtensor import local_tensor
from epfsdp2.engine.topology.mesh import Topology, build_meshes
from tests.parity import families
from tests.support.engine.sharded import sharded_model
from tests.support.models.tiny import save_qwen3_moe
from tests.support.ranks import run_ranks

WORLD = 2


def _said(error):
    """The message, which has to be the same on all ranks."""
    said = [None] * WORLD
    dist.all_gather_object(said, str(error.value))
    assert set(said) == {said[0]}
    return said[0]


def _what_is_left_out_is_named(folder):
    rank = dist.get_rank()
    config = AutoConfig.from_pretrained(folder)
    model = build_on_meta(AutoModelForCausalLM, config, torch.float32)
    parallelize(model, build_meshes("cpu", Topology.arrange(WORLD, 2)), ShardingOptions(param_dtype=torch.float32))
    materialize(model, "cpu")
    with pytest.raises(UninitializedError, match="model.embed_tokens.weight on rank 0, 1"):
        check_initialized(model)

    model, _ = sharded_model(folder, WORLD, 2)
    check_initialized(model)  # as for each family in tests/parity
    router = local_tensor(model.model.layers[0].mlp.gate.weight.data)
    if rank == 1:  # a few rows, on one rank
        router[1:2] = float("nan")
    with pytest.raises(UninitializedError) as error:
        check_initialized(model)
    assert "1 parameters or buffers" in _said(error) and "model.layers.0.mlp.gate.weight on rank 1." in _said(error)
    router.zero_()
    model.register_buffer("left", torch.tensor([0, torch.iinfo(torch.int64).min]), persistent=False)
    with pytest.raises(UninitializedError, match="left on rank 0, 1"):
        check_initialized(model)
    model.left.zero_()
    model.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    check_initialized(model)


def test_build_with_a_parameter_or_buffer_that_nothing_filled_names_it_on_all_ranks(tmp_path):
    run_ranks(_what_is_left_out_is_named, WORLD, save_qwen3_moe(tmp_path))


class _Forgetful(nn.Module):
    """A buffer that only ``_init_weights``, which is not run, would fill; one that is computed; a large parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1 << 12, 1 << 12))
        self.register_buffer("forgotten", torch.empty(3), persistent=False)
        self.register_buffer("computed", torch.arange(3.0), persistent=False)
        self.register_buffer("ids", torch.empty(2, dtype=torch.int64))

    @classmethod
    def from_config(cls, config, dtype, trust_remote_code):
        return cls()


def test_build_on_meta_with_an_empty_buffer_fills_it_with_nan():
    model = build_on_meta(_Forgetful, PretrainedConfig(), torch.float32)
    assert model.weight.is_meta
    assert model.forgotten.isnan().all() and model.ids.eq(torch.iinfo(torch.int64).min).all()
    assert torch.equal(model.computed, torch.arange(3.0))


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3", "ernie4_5_moe", "nemotron_h", "deepseek_v4"])
def test_build_on_meta_in_bfloat16_keeps_what_from_pretrained_keeps_in_float32(tmp_path, name):
    folder = families.save(name, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ours = build_on_meta(AutoModelForCausalLM, plain.config, torch.bfloat16)
    seen = set()
    for kind in ("named_parameters", "named_buffers"):
        wanted = {n: t.dtype for n, t in getattr(plain, kind)()}
        assert {n: t.dtype for n, t in getattr(ours, kind)()} == wanted
        seen |= {wanted[n] for n in wanted if "bias" in n or "norm" in n}
    assert torch.float32 in seen
