"""A model that computes with the weights of a rollout in FP8 has the gradients of a plain model with those weights."""

import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.fsdp import after_gather as after_gather_module
from epfsdp2.engine.integration.rounded_weights import compute_as_rollout
from epfsdp2.engine.optim.multi_optimizer import build_multi_optimizer
from epfsdp2.engine.topology.dtensor import local_pieces, local_tensor
from epfsdp2.engine.topology.index_ranges import IndexRange
from epfsdp2.rollout.layout.slices import is_experts
from epfsdp2.rollout.servers import is_quantised
from tests.support.engine.sharded import sharded_model, whole_gradients, whole_parameters
from tests.support.models.quantised import BLOCK, SIZES, compressed
from tests.support.models.tiny import adam, reference_model, relative_error, save_qwen3_moe, token_batch, token_loss
from tests.support.ranks import each_case, run_ranks

RELATIVE = 1e-5


def _rounded(weight, channels):
    """Return a whole weight after vLLM's own quantisation by blocks, or compressed-tensors' by rows."""
    if channels:
        values, scales = compressed(weight.bfloat16(), channels)
        return values.float() * scales
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    if weight.dim() == 3:
        return torch.stack([_rounded(one, channels) for one in weight])
    values, scales = per_block_cast_to_fp8(weight.bfloat16(), [BLOCK, BLOCK], use_ue8m0=False)
    spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return values.float() * spread[: weight.shape[0], : weight.shape[1]]


def _rounded_names(model, which):
    names = [name for name, _ in model.named_parameters() if is_quantised(model.config.model_type, name)]
    return {name for name in names if which is True or is_experts(name)}


def _reference(folder, which, channels, ids):
    """Gradients with rounded weights, and the weights after a step of the plain ones."""
    model = reference_model(folder).train()
    names = _rounded_names(model, which)
    assert {"o_proj" in name for name in names} == ({True, False} if which is True else {False})
    plain = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = adam(model.parameters())
    with torch.no_grad():
        for name in names:
            model.get_parameter(name).copy_(_rounded(plain[name], channels))
    token_loss(model, ids).backward()
    with torch.no_grad():
        for name in names:
            model.get_parameter(name).copy_(plain[name])
    optimizer.step()
    return {name: param.grad for name, param in model.named_parameters()}, dict(model.named_parameters())


def _differing(model, which, channels, run):
    """Names of what a forward computes with in other bits than vLLM's own quantisation has; collective."""
    names, found, hooks, seen = _rounded_names(model, which), [], [], set()
    expected = whole_parameters(model)
    expected |= {name: _rounded(expected[name], channels) for name in names}

    def look(fqn, module, args):
        for own, param in module.named_parameters(recurse=False):
            name = f"{fqn}.{own}"
            pieces = local_pieces(param) if isinstance(param, DTensor) else [(IndexRange.of(param.shape), param)]
            found.extend(name for at, values in pieces if not torch.equal(values, expected[name][at.slices]))
            seen.add(name)

    for fqn, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(functools.partial(look, fqn)))
    run()
    for hook in hooks:
        hook.remove()
    assert names <= seen
    return found


def _equals_the_plain_model_with_rounded_weights(folder, which, channels, cases):
    rank, world = dist.get_rank(), dist.get_world_size()
    ids = token_batch(world)
    grads, stepped = _reference(folder, which, channels, ids)

    def check(ep, fsdp_size, options):
        model, _ = sharded_model(folder, world, ep, fsdp_size, **options)
        compute_as_rollout(model.train(), which, channels)
        optimizer = build_multi_optimizer(model, adam)

        def update():
            token_loss(model, ids[2 * rank : 2 * rank + 2]).backward()

        before = [local_tensor(param).clone() for param in model.parameters()]
        assert _differing(model, which, channels, update) == []
        assert all(map(torch.equal, map(local_tensor, model.parameters()), before)), "shards stay as they are"
        for name, grad in whole_gradients(model).items():
            assert relative_error(grad, grads[name]) < RELATIVE, name
        optimizer.step()
        for name, param in whole_parameters(model).items():
            assert relative_error(param, stepped[name]) < RELATIVE, name
        assert _differing(model, which, channels, update) == [], "weights are rounded anew"

    each_case(cases, check)


DIM0, DIM1 = {"expert_shard_dim": 0}, {"expert_shard_dim": 1}
MESHES = [(1, -1, DIM1), (2, -1, {**DIM1, "checkpointing": "full"}), (2, -1, DIM0), (4, -1, {}), (2, 2, DIM1)]
OPTIONS = [{"etp": 2}, {"reshard_after_forward": False}, {"cpu_offload": True}]
OPTIONS += [{"checkpointing": "selective", "prefetch_depth": 2}]


@pytest.mark.parametrize(
    ("world", "which", "channels", "cases"),
    [
        (2, True, "", [(1, -1, {**DIM1, "checkpointing": "full"}), (1, -1, {"etp": 2})]),
        (2, True, "int8", [(2, -1, {"checkpointing": "full"})]),
        pytest.param(2, True, "fp8", [(1, -1, DIM1)], marks=pytest.mark.long),
        pytest.param(4, "experts", "", MESHES, marks=pytest.mark.long),
        pytest.param(4, True, "", MESHES + [(2, -1, options) for options in OPTIONS], marks=pytest.mark.long),
    ],
    ids=["blocks", "int8 rows", "fp8 rows", "experts on every mesh", "all on every mesh"],
)
def test_gradients_and_steps_equal_the_plain_model_with_rounded_weights(tmp_path, world, which, channels, cases):
    folder = save_qwen3_moe(tmp_path, **SIZES)
    run_ranks(_equals_the_plain_model_with_rounded_weights, world, folder, which, channels, cases, timeout=600)


def _is_refused(folder):
    model, _ = sharded_model(folder, 1)
    with pytest.raises(SettingError, match=r"quantization_aware=True: which weights of a glm4v_moe vLLM quantises"):
        model.config.model_type = "glm4v_moe"
        compute_as_rollout(model, True)
    other_torch = mock.patch.object(after_gather_module, "parameter_groups", lambda module: [])
    with other_torch, pytest.raises(RuntimeError, match="has no gathered model.embed_tokens.weight"):
        after_gather_module.after_gather(model, ["model.embed_tokens.weight"], lambda values: None)


def test_other_families_and_another_torch_are_refused(tmp_path):
    run_ranks(_is_refused, 1, save_qwen3_moe(tmp_path))
