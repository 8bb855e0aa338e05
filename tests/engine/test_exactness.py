"""EP + FSDP2 against the plain Hugging Face model in one process on the concatenated batch, float32."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from epfsdp2.engine import parallelize
from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.fsdp.wrap_plan import wrap_plan
from epfsdp2.engine.optim.clip import clip_grad_norm_
from epfsdp2.engine.optim.multi_optimizer import build_multi_optimizer
from epfsdp2.engine.topology.mesh import Meshes
from tests.support.engine.sharded import sharded_model, whole_gradients, whole_parameters
from tests.support.models.tiny import adam, reference_model, relative_error, save_qwen3_moe, token_batch, token_loss
from tests.support.ranks import each_case, run_ranks

WORLD = 4
RELATIVE = 1e-5
CLIP = 0.5


def _two_steps_equal_the_reference(folder, cases):
    rank, world = dist.get_rank(), dist.get_world_size()
    ids = token_batch(world)
    reference = reference_model(folder).train()
    optimizer = adam(reference.parameters())
    expected = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = token_loss(reference, ids)
        loss.backward()
        grads = {n: p.grad.clone() for n, p in reference.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), CLIP)
        optimizer.step()
        expected.append((grads, norm, {n: p.detach().clone() for n, p in reference.named_parameters()}))

    def check(ep, fsdp_size, options):
        model, meshes = sharded_model(folder, world, ep, fsdp_size, **options)
        model.train()
        optimizer = build_multi_optimizer(model, adam)
        for grads, norm, params in expected:
            optimizer.zero_grad()
            token_loss(model, ids[2 * rank : 2 * rank + 2]).backward()
            errors = {n: relative_error(grad, grads[n]) for n, grad in whole_gradients(model).items()}
            assert {name: error for name, error in errors.items() if not error < RELATIVE} == {}
            got = clip_grad_norm_(model.parameters(), CLIP, meshes)
            assert abs(got.item() / norm.item() - 1) < RELATIVE
            optimizer.step()
            errors = {n: relative_error(param, params[n]) for n, param in whole_parameters(model).items()}
            assert {name: error for name, error in errors.items() if not error < RELATIVE} == {}

    each_case(cases, check)


WHOLE, INNER = {"expert_shard_dim": 0}, {"expert_shard_dim": 1, "checkpointing": "full"}
USUAL = [
    *((2, -1, INNER), (1, 2, WHOLE), (1, -1, INNER), (4, -1, WHOLE), (2, 2, INNER)),
    (2, -1, {"prefetch_depth": 2, "reshard_after_forward": False}),
    (2, -1, {"checkpointing": "selective", "reshard_experts_after_forward": False}),
    (2, -1, {"cpu_offload": True}),
]
OTHERS = [
    *((1, -1, WHOLE), (2, -1, WHOLE), (1, 2, INNER)),
    (1, 1, WHOLE),  # ep_fsdp is 1, which shards no dim
    *((2, -1, {"prefetch_depth": 0}), (2, -1, {"head_in_root": True})),
]
TIED = [(2, -1, INNER), (1, 2, WHOLE)]
LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("tied", "cases"),
    [(False, USUAL), pytest.param(False, OTHERS, marks=LONG), pytest.param(True, TIED, marks=LONG)],
    ids=["usual", "others", "tied"],
)
def test_training_on_every_mesh_has_the_gradients_norm_and_steps_of_the_plain_model(tmp_path, tied, cases):
    run_ranks(_two_steps_equal_the_reference, WORLD, save_qwen3_moe(tmp_path, tie_word_embeddings=tied), cases)


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (3, [(1, -1, INNER), (3, -1, WHOLE)]),
        pytest.param(6, [(1, -1, WHOLE), (2, -1, INNER), (3, -1, INNER), (6, -1, INNER), (3, 3, WHOLE)], marks=LONG),
    ],
)
def test_training_on_ranks_and_experts_that_are_no_powers_of_two_equals_the_plain_model(tmp_path, world, cases):
    folder = save_qwen3_moe(tmp_path, num_experts=12, hidden_size=60, moe_intermediate_size=18)
    run_ranks(_two_steps_equal_the_reference, world, folder, cases)


def _sums_where_nccl_can_not_multiply(folder):
    model, meshes = sharded_model(folder, WORLD, 2)
    dense = SimpleNamespace(device_type="cuda", get_group=meshes.dense.get_group)
    on_gpu = Meshes(meshes.topology, dense, meshes.experts)
    units = sum(isinstance(m, FSDPModule) for m in model.modules())
    for backends, dtype, summed in (
        ("cpu:gloo,cuda:nccl", torch.float32, 0),
        ("cpu:gloo,cuda:nccl", torch.bfloat16, units),
        (dist.get_backend_config(), torch.float32, units),  # gloo, also for CUDA tensors
    ):
        options = ShardingOptions(param_dtype=torch.float32, reduce_dtype=dtype)
        plan = wrap_plan(model, options)
        sums = mock.patch.object(FSDPModule, "set_force_sum_reduction_for_comms")
        with mock.patch.object(dist, "get_backend_config", return_value=backends), sums as sums:
            for unit in plan:
                parallelize.divide_gradient(model.get_submodule(unit.name), unit, on_gpu, options)
        assert sums.call_count == summed


def test_gradient_reduction_in_bfloat16_or_over_gloo_on_a_gpu_sums_and_divides_after(tmp_path):
    """NCCL's PREMUL_SUM multiplies by zero in bfloat16 (pytorch#190745), and gloo has none."""
    run_ranks(_sums_where_nccl_can_not_multiply, WORLD, save_qwen3_moe(tmp_path))
