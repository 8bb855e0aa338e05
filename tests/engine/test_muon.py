"""Muon on sharded parameters against torch's own Muon, in one process, on matrices that were split by hand."""

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import _muon as torch_muon
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma4TextConfig,
    GptOssConfig,
    JambaConfig,
    NemotronHConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from epfsdp2.engine import muon as muon_module
from epfsdp2.engine.matrices import Layout, local_box, matrix_groups, muon_parameters, plan_buckets
from epfsdp2.engine.mesh import Topology, build_meshes
from epfsdp2.engine.modeling import build_on_meta, materialize
from epfsdp2.engine.muon import Muon, newton_schulz
from epfsdp2.engine.optimizer import build_multi_optimizer
from epfsdp2.engine.parallelize import ShardingOptions, parallelize
from epfsdp2.engine.shards import local_tensor
from tests.support.engine import sharded_model
from tests.support.models import VOCAB, reference_model, save_qwen3_moe, token_loss
from tests.support.ranks import run_ranks

WORLD = 4
RELATIVE = 1e-5
MESHES = [(1, -1), (2, -1), (4, -1), (1, 2), (2, 2), (1, 1)]
COMMON = {
    "vocab_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}


def _qwen3(**sizes):
    return Qwen3MoeConfig(
        **{**COMMON, "num_hidden_layers": 2, "num_experts_per_tok": 2, "mlp_only_layers": [1], **sizes}
    )


CONFIGS = {
    # 5 rows over 4 ranks leave the last one with none; 2I = 44 is cut through gate and up.
    "qwen3": lambda: _qwen3(hidden_size=20, intermediate_size=5, moe_intermediate_size=22, num_experts=8),
    # 12 experts, and 2I = 46, which 4 does not divide: ep_fsdp=4 cuts columns.
    "qwen3-odd": lambda: _qwen3(hidden_size=28, intermediate_size=9, moe_intermediate_size=23, num_experts=12),
    "gpt-oss": lambda: GptOssConfig(
        **COMMON, hidden_size=20, intermediate_size=14, num_local_experts=4, num_experts_per_tok=2, num_hidden_layers=2
    ),
    # ep_fsdp=4 can't cut 18 rows: it cuts 2I = 28 columns, in which gate and up alternate.
    "gpt-oss-columns": lambda: GptOssConfig(
        **COMMON, hidden_size=18, intermediate_size=14, num_local_experts=4, num_experts_per_tok=2, num_hidden_layers=1
    ),
    "nemotron-h": lambda: NemotronHConfig(
        **COMMON,
        hidden_size=20,
        layers_block_type=["moe", "attention", "mamba", "mlp"],
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        moe_shared_expert_intermediate_size=14,
        moe_latent_size=16,
        intermediate_size=10,
        mamba_num_heads=4,
        mamba_head_dim=6,
        ssm_state_size=8,
        n_groups=2,
    ),
}


def _model(config):
    config._attn_implementation = "eager"
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _reference(config):
    torch.manual_seed(0)
    model = _model(config)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.02)
    return model


def _sharded(config, reference, ep, fsdp_size, **options):
    meshes = build_meshes("cpu", Topology.plan(WORLD, ep, fsdp_size))
    config._attn_implementation = "eager"
    model = build_on_meta(AutoModelForCausalLM, config, torch.float32)
    parallelize(model, meshes, ShardingOptions(param_dtype=torch.float32, **options))
    materialize(model, "cpu")
    wanted = dict(reference.named_parameters())
    with torch.no_grad():
        for name, param in model.named_parameters():
            local_tensor(param).copy_(_mine(param, wanted[name]))
    return model


def _mine(param, full):
    return full[tuple(slice(*bounds) for bounds in local_box(param))]


def _gradient(name, shape, step):
    generator = torch.Generator().manual_seed(hash_of(name) + step)
    # Rows of different sizes: a matrix that is orthogonalised in pieces comes out otherwise.
    return torch.randn(shape, generator=generator) * torch.linspace(0.1, 2, shape[-2]).unsqueeze(-1)


def hash_of(name):
    return sum(i * ord(c) for i, c in enumerate(name))


def _split(name, weight):
    """The matrices of a parameter, output dim first, by the family's layout; written out, not read from the module."""
    experts = ".experts." in name
    if not experts:
        return [weight]
    transposed = "gpt_oss" in name
    matrices = []
    for expert in weight:
        expert = expert.T if transposed else expert
        if not name.endswith("gate_up_proj"):
            matrices.append(expert)
        elif transposed:
            matrices += [expert[0::2], expert[1::2]]
        else:
            matrices += [expert[: len(expert) // 2], expert[len(expert) // 2 :]]
    return matrices


def _zeropower_fp32(grad, coefficients, steps, eps):
    a, b, c = coefficients
    x = grad / grad.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def _torch_muon(weights, gradients, **options):
    """After each step: the weights, stepped by torch's Muon as separate matrices in float32."""
    pieces = {name: [nn.Parameter(m.clone()) for m in _split(name, w)] for name, w in weights.items()}
    optimizer = torch.optim.Muon([p for parts in pieces.values() for p in parts], **options)
    after = []
    with mock.patch.object(torch_muon, "_zeropower_via_newtonschulz", _zeropower_fp32):
        for grads in gradients:
            for name, parts in pieces.items():
                for part, grad in zip(parts, _split(name, grads[name]), strict=True):
                    part.grad = grad.clone()
            optimizer.step()
            stepped = {name: w.clone() for name, w in weights.items()}
            for name, parts in pieces.items():
                for view, part in zip(_split(name, stepped[name]), parts, strict=True):
                    view.copy_(part.detach())
            after.append(stepped)
    return after


def _relative(value, reference):
    return ((value - reference).norm() / reference.norm().clamp_min(1e-12)).item()


def _equals_torch(family, cases, options):
    config, rank_gradients = CONFIGS[family](), {}
    reference = _reference(config)
    key = "gpt_oss." if family.startswith("gpt-oss") else ""
    names = list(muon_parameters(reference))
    weights = {key + n: p.detach() for n, p in reference.named_parameters() if n in names}
    gradients = [{n: _gradient(n, w.shape, step) for n, w in weights.items()} for step in range(2)]
    expected = _torch_muon(weights, gradients, **options)
    for ep, fsdp_size, sharding in cases:
        model = _sharded(config, reference, ep, fsdp_size, **sharding)
        assert list(muon_parameters(model)) == names
        optimizer = Muon(matrix_groups(model), **options, bucket_bytes=4096)
        params = {key + n: p for n, p in model.named_parameters() if n in names}
        for grads, wanted in zip(gradients, expected, strict=True):
            for name, param in params.items():
                param.grad = torch.zeros_like(param)
                local_tensor(param.grad).copy_(_mine(param, grads[name]))
            optimizer.step()
            for name, param in params.items():
                where = (family, ep, fsdp_size, sharding, name)
                got = param.detach().full_tensor() if hasattr(param, "full_tensor") else param.detach()
                moved, should = got - weights[name], wanted[name] - weights[name]
                assert _relative(moved, should) < RELATIVE, (where, _relative(moved, should))
    assert not rank_gradients


@pytest.mark.parametrize("family", list(CONFIGS))
def test_every_mesh_and_layout_steps_like_torch_muon_on_split_matrices(family):
    dims = ["auto"] if family.endswith(("odd", "columns")) else ["auto", 0]
    cases = [(*mesh, {"expert_shard_dim": dim}) for mesh in MESHES for dim in dims if _divides(family, mesh, dim)]
    options = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    run_ranks(_equals_torch, WORLD, family, cases, options)


def _divides(family, mesh, dim):
    config = CONFIGS[family]()
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 8
    ep, fsdp_size = mesh
    replica = WORLD if fsdp_size == -1 else fsdp_size
    return dim == "auto" or experts % replica == 0
