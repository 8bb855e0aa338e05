"""The roofline's parts against measurements on an H100, and against arithmetic by hand."""

import re
from functools import partial

import pytest
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.model.meta import build_on_meta
from epfsdp2.engine.planner.memory import Batch
from epfsdp2.engine.planner.model_sizes import ModelSizes, unit_sizes
from epfsdp2.engine.planner.traffic import Collective
from epfsdp2.engine.topology.mesh import Topology
from epfsdp2.recipes.plan.roofline import EAGER, PACKED, STREAMED, Cluster, Roofline, roofline
from epfsdp2.recipes.plan.tables import time_by_part

ONE, ALONE = Cluster(1, 1), Topology.arrange(1, 1)
QWEN3_30B = {
    **{"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
    **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936},
}
# The step of benchmarks/results/gpu.md at 252401d: two layers at the width of Qwen3-30B-A3B, 8,192 tokens in 8
# sequences, with recomputation, on an H100. Milliseconds of its kernels, by part.
MEASURED = {
    "optimizer": [20.3],  # multi_tensor_apply: AdamW
    "norm": [2.8],  # multi_tensor_apply: _foreach_norm
    "products of the head": [14.5, 6.7, 6.6],  # nvjet TNT, NNT, NTT
    "passes over logits": [12.8, 11.2, 10.7, 6.8, 6.2, 4.3],  # elementwise, exp, reduce of float32
    "sums of the head's products": [5.7],  # CUDAFunctor_add<float>
    "weights": [10.3, 4.8],  # bfloat16_copy, the logits' gradient included; Memcpy DtoD
    "gradients": [5.9],  # chunk_cat
}
KERNELS = 160.0
WITHIN = 0.1
TILES, LOGITS = 37.1, 8192 * 151936  # number of tiles of logits, over which the head's gradients are summed


def _sizes(options, layers=2, **more):
    config = Qwen3MoeConfig(**{**QWEN3_30B, **more}, num_hidden_layers=layers)
    return ModelSizes.built_by(partial(build_on_meta, AutoModelForCausalLM, config), options)


def _step(options, batch, length=1024, **more):
    return roofline(_sizes(options, **more), ALONE, options, batch, ONE, [], length)


def _of_that_time(options):
    """Return milliseconds by part for the code of 252401d, with torch's norms and head."""
    found = {part: 1e3 * seconds for part, seconds in _step(options, Batch(8192)).parts.items()}

    def passes(nbytes, share):
        return 1e3 * ONE.passes(nbytes, share)

    layers = ("experts", "linears", "attention", "dense")
    return {
        "optimizer": found["optimizer"],
        "norm": found["norm"],
        "products of the head": found["head"] - passes(6 * LOGITS, STREAMED),
        # Forward: scale, shift by the maximum, exp, sums of products. Backward: scale, shift by lse, exp, multiply,
        # add, multiply.
        "passes over logits": passes((6 + 8 + 8 + 12 + 4 + 4 + 6 + 8 + 8 + 8 + 8 + 12) * LOGITS, EAGER),
        "sums of the head's products": passes(10 * TILES * (2048 + 16384) * 2048, STREAMED),
        "weights": found["weights"] + passes(6 * LOGITS, STREAMED),
        "gradients": found["gradients"],
        # All kernels that the profile does not name, and the maxima of logits.
        "layers": sum(found[part] for part in layers) + passes(4 * LOGITS, EAGER),
    }


def test_parts_of_the_measured_step_are_predicted_within_a_tenth_and_so_is_their_sum():
    predicted = _of_that_time(ShardingOptions(checkpointing="full", expert_shard_dim=0, fuse_dense=False))
    measured = {part: sum(rows) for part, rows in MEASURED.items()}
    measured["layers"] = KERNELS - sum(measured.values())
    off = {part: predicted[part] / measured[part] - 1 for part in measured}
    assert max(map(abs, off.values())) < WITHIN, off
    assert sum(predicted.values()) == pytest.approx(KERNELS, rel=0.02)


@pytest.mark.parametrize(
    ("sizes", "milliseconds"),
    [({}, 8.2), ({"hidden_size": 7168, "moe_intermediate_size": 2048, "num_experts": 64}, 63.1)],
    ids=["Qwen3-30B-A3B", "DeepSeek-V3, 64 of 256 experts"],
)
def test_experts_layers_that_were_measured_are_predicted_within_a_tenth(sizes, milliseconds):
    """16,384 tokens, forward and backward; the last rows of benchmarks/results/gpu.md."""
    found = _step(ShardingOptions(), Batch(16384), layers=1, **sizes)
    assert 1e3 * found.experts == pytest.approx(milliseconds, rel=WITHIN)


def test_step_of_today_takes_six_tenths_of_the_measured_one():
    """169 ms were measured before norms, rotary embeddings and head had kernels."""
    fused, eager = (_step(ShardingOptions(checkpointing="full", fuse_dense=on), Batch(8192)) for on in (True, False))
    assert 0.5 < fused.step / 0.169 < 0.6
    # 3 forwards of 432 kB and 2 backwards of 1,042 kB per token, counted from the operators on a CPU.
    by_hand = 8192 * (3 * 432e3 + 2 * 1042e3) / (3350e9 * EAGER)
    assert eager.dense == pytest.approx(by_hand, rel=0.03)
    assert eager.step - fused.step == eager.dense - fused.dense > 0.8 * eager.dense


def test_parts_of_later_micro_batches_and_of_adapters_equal_those_by_hand():
    one, three = (_step(ShardingOptions(), Batch(512, n)) for n in (1, 3))
    trained = sum(size.trained for _, _, size in unit_sizes(_sizes(ShardingOptions()), ALONE))
    # Packed from 2 bytes into 4, in each micro-batch.
    assert one.gradients == pytest.approx(ONE.passes(6 * trained, PACKED))
    assert three.gradients == pytest.approx(3 * one.gradients)
    assert three.experts == pytest.approx(3 * one.experts) and three.optimizer == one.optimizer


def test_muon_takes_its_products_and_less_of_the_memory():
    options = ShardingOptions()
    sizes, batch = _sizes(options, layers=1), Batch(512)
    muon, adamw = (
        roofline(sizes, ALONE, options, batch, ONE, [], 512, optimizer).optimizer for optimizer in ("muon", "adamw")
    )
    # 128 experts with three matrices of 768 x 2048; q and o of 4096 x 2048, k and v of 512 x 2048.
    shapes = 3 * 128 * [(768, 2048)] + 2 * [(2048, 4096)] + 2 * [(512, 2048)]
    flops = sum(5 * (4 * few**2 * many + 2 * few**3) for few, many in shapes)
    elements = sum(few * many for few, many in shapes)
    assert muon - adamw == pytest.approx(ONE.products(flops) - ONE.passes(8 * elements, STREAMED))


def test_what_is_gathered_is_copied_and_gradients_are_packed_on_several_ranks():
    options = ShardingOptions(checkpointing="full")
    sizes, batch, eight = _sizes(options, layers=1), Batch(512), Topology.arrange(8, 8)
    found, alone = (
        roofline(sizes, topology, options, batch, Cluster(1, topology.world, half_rate_rows=0), [], 512)
        for topology in (eight, ALONE)
    )
    weights = gradients = 0.0
    for _, unit, size in unit_sizes(sizes, eight):
        gathers = 1 + unit.is_gathered_again
        weights += gathers * (6 * size.local + 4 * size.full)
        gradients += ONE.passes(6 * size.full, PACKED)
    assert found.weights == pytest.approx(ONE.passes(weights, STREAMED), rel=1e-3)  # the root is gathered once
    assert found.gradients == pytest.approx(gradients)
    # A token's 8 rows in bfloat16 are read and written for sending, in forward and in backward.
    assert found.experts - alone.experts == pytest.approx(ONE.passes(512 * 8 * 2048 * 2 * 2 * 2, STREAMED))
    assert found.waits - alone.waits == pytest.approx(1e-4)


def test_printed_parts_of_a_step_sum_up_to_it():
    moved = [Collective("all-gather dense", 8, 1, 1, 10**9), Collective("all-to-all tokens", 8, 1, 1, 10**10)]
    options, topology = ShardingOptions(), Topology.arrange(8, 8)
    found = roofline(_sizes(options), topology, options, Batch(8192), Cluster(1, 8), moved, 1024)
    text = time_by_part(found)
    parts = dict(re.findall(r"([\w-]+) ([\d.e-]+)(?: \+|,)", text))
    assert set(parts) == {part.replace("_", "-") for part in found.parts}
    hidden = float(re.search(r"less ([\d.e-]+)", text)[1])
    assert sum(map(float, parts.values())) - hidden == pytest.approx(found.step, rel=0.01)
    assert Roofline(experts=1.0, fsdp=3.0, optimizer=0.5).step == 3.5  # the collectives take longer than the products
