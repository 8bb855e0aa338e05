"""Weights quantised on the trainer's ranks have the bits of vLLM's, or of compressed-tensors', in bfloat16."""

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from epfsdp2.engine.quantise.blocks import Blocks
from epfsdp2.engine.quantise.schemes import CHANNEL_DTYPES, Channels
from epfsdp2.engine.quantise.shards import QuantisedShards
from epfsdp2.engine.topology.index_ranges import IndexRange
from epfsdp2.rollout.layout.layout_check import difference
from epfsdp2.rollout.layout.slices import scale_slices
from epfsdp2.rollout.layout.specs import Heads, Rollout, TensorSpec
from epfsdp2.rollout.servers import planned_layout, target_slices
from tests.support.models.quantised import BLOCK, SIZES, compressed
from tests.support.models.tiny import save_qwen3_moe
from tests.support.ranks import run_ranks
from tests.support.rollout.sent_slices import bits, check_slices_of_the_whole, collected, weights_for


def _of_vllm(weight):
    """Values and scales as vLLM's online quantisation makes them; of stacks, expert by expert."""
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    if weight.dim() == 2:
        return per_block_cast_to_fp8(weight, [BLOCK, BLOCK], use_ue8m0=False)
    values, scales = zip(*map(_of_vllm, weight), strict=True)
    return torch.stack(values), torch.stack(scales)


WHOLE = {
    "blocks": (Blocks(BLOCK), _of_vllm),
    **{kind: (Channels(CHANNEL_DTYPES[kind]), partial(compressed, kind=kind)) for kind in CHANNEL_DTYPES},
}


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("shape", [(256, 384), (200, 576), (1, 130), (127, 3)])
def test_quantise_of_parts_of_a_weight_equals_that_of_the_whole(shape, kind):
    scheme, of_whole = WHOLE[kind]
    torch.manual_seed(sum(shape))
    weight = (torch.randn(shape) * torch.randn(shape).exp()).bfloat16()
    weight[:64, :128] = 0.0  # a whole block of zeros has a scale too, as has a row
    values, scales = of_whole(weight)
    rows, columns = (sorted({0, size, *torch.randint(0, size + 1, (3,)).tolist()}) for size in shape)
    parts = [
        IndexRange((a, c), (b, d))
        for a, b in zip(rows, rows[1:], strict=False)
        for c, d in zip(columns, columns[1:], strict=False)
    ]
    maxima = torch.zeros(scheme.sharing(IndexRange.of(shape)).shape)
    for part in parts:
        at = maxima[scheme.sharing(part).slices]
        at.copy_(torch.maximum(at, scheme.maxima(weight[part.slices], part)))
    assert torch.equal(scheme.scales(maxima), scales)
    for part in parts:
        found = torch.empty(part.shape, dtype=scheme.dtype)
        scheme.quantise(weight[part.slices], scales[scheme.sharing(part).slices], part, found)
        assert torch.equal(bits(found), bits(values[part.slices]))


@pytest.mark.parametrize("kind", CHANNEL_DTYPES)
def test_quantise_of_rows_of_every_bfloat16_equals_the_library(kind):
    scheme, of_whole = WHOLE[kind]
    every = torch.arange(1 << 16, dtype=torch.int32).short().view(torch.bfloat16)
    weight = every[every.isfinite()].reshape(255, -1)  # rows of one exponent, or less
    values, scales = of_whole(weight)
    found = torch.empty(weight.shape, dtype=scheme.dtype)
    scheme.quantise(weight.float(), scales, None, found)
    assert torch.equal(scheme.scales(scheme.maxima(weight)), scales)
    assert torch.equal(bits(found), bits(values))


def _sent(folder, cases):
    for *mesh, rollout in cases:
        of_whole = WHOLE[rollout.channels or "blocks"][1]
        sync, weights, sent = check_slices_of_the_whole(folder, tuple(mesh), rollout, of_whole)
        if rollout.channels:
            assert {"w13_weight_scale", "w2_weight_scale", "weight_scale"} <= {name.rpartition(".")[2] for name in sent}
            continue
        assert any(parameter.endswith("w13_weight_scale_inv") for parameter in sent)
        plain = weights_for(sync, replace(rollout, block=0), dist.get_rank() % rollout.workers)
        elements = sum(values.numel() for values in collected(plain.tensors()).values())
        scales = sum(values.numel() for name, values in sent.items() if name.endswith("_scale_inv"))
        assert elements == sum(values.numel() for values in sent.values()) - scales
        assert weights.traffic.received < 0.6 * plain.traffic.received, "embeddings and norms stay in bfloat16"


FEW = [
    (1, 2, Rollout(2, block=BLOCK)),
    (4, 1, Rollout(2, 2, expert_parallel=True, block=BLOCK)),
    (2, 1, Rollout(2, channels="fp8")),
]
OTHERS = [
    *((2, 1, Rollout(workers, block=BLOCK)) for workers in (1, 2)),
    (2, 1, Rollout(1, channels="int8")),
    (1, 2, Rollout(2, channels="int8")),
    (4, 1, Rollout(2, 2, expert_parallel=True, channels="int8")),
]


@pytest.mark.parametrize("cases", [FEW, pytest.param(OTHERS, marks=pytest.mark.long)], ids=["few", "others"])
def test_quantise_of_slices_has_the_bits_of_the_whole_weights(tmp_path, cases):
    # More experts than a round holds where every worker keeps all of them.
    folder = save_qwen3_moe(tmp_path, **{**SIZES, "num_experts": 12})
    run_ranks(_sent, 4, folder, cases, timeout=600)


def test_quantise_reduces_scales_within_the_limit_and_of_one_weight_at_least():
    torch.manual_seed(0)
    weights = {f"{i}": torch.randn(128 * i, 300).bfloat16() for i in range(1, 5)}  # with 12 bytes of scales times i
    found = []
    for limit, reductions in ((0, 4), (40, 3), (1 << 20, 1)):
        shards = QuantisedShards(weights, lambda name, tensor: tensor, Blocks(BLOCK), "cpu", limit)
        with mock.patch.object(dist, "all_reduce") as reduced:
            found.append(
                {name: (bits(shards(name, weight)), shards.scales_of(name)) for name, weight in weights.items()}
            )
        assert reduced.call_count == reductions, limit
    for name, (values, scales) in found[0].items():
        for others in found[1:]:
            assert torch.equal(others[name][0], values) and torch.equal(others[name][1], scales), name


def test_quantise_of_a_slice_that_cuts_a_block_is_refused():
    tensor = TensorSpec("model.layers.0.self_attn.q_proj.weight", (384, 256), 1)
    heads, whole = Heads(6, 6, 64, "qwen3_moe"), Rollout(1, block=BLOCK)
    assert len(scale_slices(tensor, target_slices(tensor, whole, 0, heads), whole)) == 1
    with pytest.raises(ValueError, match=r"qkv_proj.weight holds .*q_proj.weight \[0, 0\] to \[192, 256\].* 128 x 128"):
        planned_layout([tensor], Rollout(2, block=BLOCK), 0, heads)


def test_layout_difference_of_a_worker_that_is_not_quantised_names_the_first_scale():
    tensor, heads = TensorSpec("model.layers.0.self_attn.o_proj.weight", (256, 256), 1), Heads(4, 4, 64, "qwen3_moe")
    planned, plain = (planned_layout([tensor], Rollout(2, block=block), 1, heads) for block in (BLOCK, 0))
    said = difference(planned, plain)
    assert "first model.layers.0.self_attn.o_proj.weight_scale_inv: planned is [2, 1] from 0, actual is nothing" in said


def test_layout_of_rows_that_are_cut_has_all_their_scales_on_every_worker():
    tensor, heads = TensorSpec("model.layers.0.self_attn.o_proj.weight", (256, 192), 1), Heads(4, 4, 64, "qwen3_moe")
    found = planned_layout([tensor], Rollout(2, channels="int8"), 1, heads)
    assert found["model.layers.0.self_attn.o_proj.weight"].startswith("[256, 96]")
    assert found["model.layers.0.self_attn.o_proj.weight_scale"].startswith("[256, 1]")
