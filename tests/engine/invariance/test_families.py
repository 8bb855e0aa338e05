"""Every family computes a sequence with the same bits alone and among others."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from epfsdp2.engine.build import shard_and_load
from epfsdp2.engine.checkpoint.safetensors_reader import open_checkpoint
from epfsdp2.engine.dense.products import replace_products
from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.invariance import first_difference
from epfsdp2.engine.model.meta import build_on_meta
from epfsdp2.engine.packing.sequences import PackedSequences
from epfsdp2.engine.topology.mesh import Topology, build_meshes
from tests.parity import families
from tests.support.moe.interpreter import interpreted_kernels
from tests.support.ranks import run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _sharded(name, folder, dtype, batch_invariant=True, before=lambda model: None, **options):
    plain = families.ALL[name].build()
    kind = SimpleNamespace(from_config=lambda config, dtype, **_: type(plain)._from_config(config, dtype=dtype))
    model = build_on_meta(kind, plain.config, torch.float32)
    PackedSequences(model)
    before(model)
    options = ShardingOptions(param_dtype=dtype, batch_invariant=batch_invariant, **options)
    meshes = build_meshes("cpu", Topology.arrange(1, 1, -1, 1))
    shard_and_load(model, open_checkpoint(folder), meshes, options, device="cpu", device_id="cpu")
    return model


def _equal(root, dtypes_of):
    for name, dtypes in dtypes_of.items():
        folder = families.save(name, root / name)
        for dtype in dtypes:
            assert first_difference(_sharded(name, folder, dtype), "cpu") is None, (name, dtype)


def test_sequence_of_every_family_has_the_same_bits_among_others(tmp_path):
    """Each family in one dtype."""
    dtypes_of = {name: [DTYPES[i % 3]] for i, name in enumerate(families.ALL)}
    run_ranks(_equal, 1, tmp_path, dtypes_of, timeout=400)


@pytest.mark.long
def test_sequence_of_every_family_has_the_same_bits_in_every_dtype(tmp_path):
    run_ranks(_equal, 1, tmp_path, dict.fromkeys(families.ALL, DTYPES), timeout=1200)


class _Centred(nn.Module):
    """Subtracts the mean over the tokens of a row."""

    def forward(self, x):
        return x - x.mean(1, keepdim=True)


def _named(root):
    name = "qwen3_moe"
    folder = families.save(name, root)
    assert first_difference(_sharded(name, folder, torch.float32, batch_invariant=False), "cpu") == (
        "model.layers.0.mlp.experts (Qwen3MoeExperts)"
    )

    def plant(model):
        norm = model.model.layers[1].post_attention_layernorm
        norm.register_forward_hook(lambda module, args, out: _Centred()(out))

    assert first_difference(_sharded(name, folder, torch.bfloat16, before=plant), "cpu") == (
        "model.layers.1.post_attention_layernorm (Qwen3MoeRMSNorm)"
    )


def test_first_module_whose_bits_differ_is_named(tmp_path):
    run_ranks(_named, 1, tmp_path)


def _interpreted(root):
    folder = families.save("qwen3_moe", root)
    with interpreted_kernels():
        replace_products("cpu")
        model = _sharded("qwen3_moe", folder, torch.bfloat16, experts_backend="triton")
        assert first_difference(model, "cpu") is None


def test_kernels_of_a_gpu_compute_a_sequence_with_the_same_bits(tmp_path):
    """Interpreted: products and experts."""
    run_ranks(_interpreted, 1, tmp_path)
