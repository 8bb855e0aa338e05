"""Weights quantised by rows have the bits that compressed-tensors makes of the whole weights in bfloat16."""

from functools import partial

import pytest
import torch

from epfsdp2.engine.quantise.channels import CHANNEL_DTYPES, Channels
from epfsdp2.engine.topology.index_ranges import IndexRange
from epfsdp2.rollout.layout.specs import Heads, Rollout, TensorSpec
from epfsdp2.rollout.servers import planned_layout
from tests.support.models.quantised import SIZES, compressed
from tests.support.models.tiny import save_qwen3_moe
from tests.support.ranks import run_ranks
from tests.support.rollout.sent_slices import bits, check_slices_of_the_whole


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("shape", [(96, 200), (3, 33, 7), (5, 1)])
def test_quantise_rows_of_parts_of_a_weight_equals_the_library_on_the_whole(shape, kind):
    torch.manual_seed(sum(shape))
    weight = torch.randn(shape) * torch.randn(shape).exp()
    weight[..., 0, :] = 0.0  # a row of zeros has a scale too
    values, scales = compressed(weight.bfloat16(), kind)
    scheme, dtype = Channels(CHANNEL_DTYPES[kind]), CHANNEL_DTYPES[kind]
    whole, (rows, columns) = IndexRange.of(shape), shape[-2:]
    cuts = [(0, rows // 3, rows), (0, columns // 2, columns)]
    parts = [
        IndexRange((*whole.low[:-2], top, left), (*whole.high[:-2], bottom, right))
        for top, bottom in zip(cuts[0], cuts[0][1:], strict=False)
        for left, right in zip(cuts[1], cuts[1][1:], strict=False)
        if top < bottom and left < right
    ]
    maxima = torch.zeros(scheme.sharing(whole).shape)
    for part in parts:
        at = maxima[scheme.sharing(part).slices]
        at.copy_(torch.maximum(at, scheme.maxima(weight[part.slices], part)))
    found_scales = scheme.scales(maxima)
    assert torch.equal(found_scales, scales)
    found = torch.empty(shape, dtype=dtype)
    for part in parts:
        scheme.quantise(weight[part.slices], scales[scheme.sharing(part).slices], part, found[part.slices])
    assert torch.equal(bits(found), bits(values))


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_quantise_rows_of_every_bfloat16_equals_the_library(kind):
    every = torch.arange(1 << 16, dtype=torch.int32).short().view(torch.bfloat16)
    weight = every[every.isfinite()].reshape(255, -1)  # rows of one exponent, or less
    values, scales = compressed(weight, kind)
    scheme, found = Channels(CHANNEL_DTYPES[kind]), torch.empty(weight.shape, dtype=CHANNEL_DTYPES[kind])
    scheme.quantise(weight.float(), scales, None, found)
    assert torch.equal(scheme.scales(scheme.maxima(weight)), scales)
    assert torch.equal(bits(found), bits(values))


def _sent(folder, cases):
    for *mesh, rollout in cases:
        quantise = partial(compressed, kind=rollout.channels)
        sent = check_slices_of_the_whole(folder, tuple(mesh), rollout, quantise).parameters
        assert {"w13_weight_scale", "w2_weight_scale", "weight_scale"} <= {name.rpartition(".")[2] for name in sent}


FEW = [(2, 1, Rollout(2, channels="fp8"))]
OTHERS = [
    (2, 1, Rollout(1, channels="int8")),
    (1, 2, Rollout(2, channels="int8")),
    (4, 1, Rollout(2, 2, expert_parallel=True, channels="int8")),
]


@pytest.mark.parametrize("cases", [FEW, pytest.param(OTHERS, marks=pytest.mark.long)], ids=["few", "others"])
def test_slices_with_scales_of_rows_are_those_of_the_whole_weights(tmp_path, cases):
    # More experts than a round holds where every worker keeps all of them.
    folder = save_qwen3_moe(tmp_path, **{**SIZES, "num_experts": 12})
    run_ranks(_sent, 4, folder, cases, timeout=600)


def test_layout_of_rows_that_are_cut_has_all_their_scales_on_every_worker():
    tensor, heads = TensorSpec("model.layers.0.self_attn.o_proj.weight", (256, 192), 1), Heads(4, 4, 64, "qwen3_moe")
    found = planned_layout([tensor], Rollout(2, channels="int8"), 1, heads)
    assert found["model.layers.0.self_attn.o_proj.weight"].startswith("[256, 96]")
    assert found["model.layers.0.self_attn.o_proj.weight_scale"].startswith("[256, 1]")
