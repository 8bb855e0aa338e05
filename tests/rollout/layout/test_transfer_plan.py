"""Transfer plans bring every worker exactly its parameters, in bounded rounds, with the fewest bytes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from epfsdp2.engine.topology.index_ranges import ShardStep
from epfsdp2.engine.topology.mesh import Topology
from epfsdp2.recipes.plan_sync import from_other_nodes
from epfsdp2.rollout.layout.specs import Heads, Rollout, TensorSpec
from epfsdp2.rollout.plan.transfer_plan import RoundTooSmallError, Targets, make_transfer_plan
from epfsdp2.rollout.servers import target_slices
from tests.support.rollout.plans import Emulated, problems
from tests.support.rollout.units import check_stored, stored_parameters


def _plan(tensors, topology, rollout, heads, targets, limit):
    def slices_of(tensor, worker):
        return target_slices(tensor, rollout, worker, heads)

    layers = ["model.layers.0", "model.layers.1"]
    return make_transfer_plan(tensors, layers, topology, targets, slices_of, limit), slices_of


@settings(max_examples=80, deadline=None)
@given(problems())
def test_plan_brings_every_worker_its_parameters_within_the_limit(problem):
    tensors, topology, rollout, heads, targets, limit = problem
    try:
        plan, slices_of = _plan(tensors, topology, rollout, heads, targets, limit)
    except RoundTooSmallError as error:
        assert error.needed > limit
        return
    whole = {t.name: torch.randn(t.shape).bfloat16() for t in tensors}
    emulated = Emulated(plan, whole)
    for worker, found in enumerate(emulated.parameters):
        kind = targets.kinds[worker]
        wanted = stored_parameters((part, whole[t.name]) for t in tensors for part in slices_of(t, kind))
        check_stored(found, wanted)
        assert sum(int(is_filled.sum()) * 2 for _, is_filled in wanted.values()) == plan.needed[kind]
    for moved, (_, round_) in zip(emulated.moved, [*plan.rounds] * topology.dp_replicate, strict=False):
        # Short tensors in a message are padded to the runs of the others.
        padding = max(len(targets.kinds), topology.fsdp) * round_.alignment
        assert max(most for pair in moved for most in pair) <= limit + padding


def _qwen3_moe(hidden, heads, inner, experts, layers, vocabulary, topology, itemsize=2):
    """Describe the tensors of a Qwen3-MoE, with ``expert_shard_dim`` as ``auto`` chooses it."""
    dense = (ShardStep(0, "fsdp", topology.fsdp),)
    stacks = (ShardStep(0, "ep", topology.ep), ShardStep(int(experts % topology.fsdp > 0), "ep_fsdp", topology.ep_fsdp))
    q, kv = heads.queries * heads.dim, heads.keys * heads.dim
    inside = {
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "self_attn.q_norm.weight": (heads.dim,),
        "self_attn.k_norm.weight": (heads.dim,),
        "mlp.gate.weight": (experts, hidden),
        "mlp.experts.gate_up_proj": (experts, 2 * inner, hidden),
        "mlp.experts.down_proj": (experts, hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in inside.items()}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
    return [TensorSpec(n, s, itemsize, stacks if ".experts." in n else dense) for n, s in shapes.items()]


GIGA = 1e9
QWEN3_30B = (2048, Heads(32, 4, 128), 768, 128, 48, 151936)
QWEN3_235B = (4096, Heads(64, 4, 128), 1536, 128, 94, 151936)


def _figures(model, topology, rollout, node=8, workers=0):
    """Plan a sync; return the plan and the most GB that a worker needs, receives, and receives from other nodes."""
    tensors, layers = _qwen3_moe(*model, topology), [f"model.layers.{i}" for i in range(model[4])]
    own = [i % rollout.workers for i in range(workers)]
    targets = Targets.separate(own, topology) if workers else Targets.colocated(topology, rollout.workers)

    def slices_of(tensor, kind):
        return target_slices(tensor, rollout, kind, model[1])

    plan = make_transfer_plan(tensors, layers, topology, targets, slices_of, 512 << 20)
    shift = topology.world if workers else 0
    nodes = np.arange(topology.world) // node, (np.arange(len(targets.kinds)) + shift) // node
    needed = plan.needed[list(targets.kinds)]
    kept = 0 if workers else [plan.sent[rank % topology.fsdp, kind] for rank, kind in enumerate(targets.kinds)]
    return plan, [amount.max() / GIGA for amount in (needed, needed - kept, from_other_nodes(plan, *nodes))]


@pytest.mark.parametrize(
    ("model", "topology", "rollout", "need", "received", "nic"),
    [
        (QWEN3_30B, (16, 8), Rollout(8), 7.68, 7.22, 3.99),
        (QWEN3_30B, (16, 8), Rollout(1, 8, expert_parallel=True), 10.33, 6.51, 5.16),
        (QWEN3_235B, (64, 8), Rollout(8), 58.96, 58.06, 51.75),
        (QWEN3_235B, (64, 8), Rollout(16, expert_parallel=True), 29.63, 29.62, 29.57),
    ],
)
def test_plan_has_the_published_bytes(model, topology, rollout, need, received, nic):
    _, figures = _figures(model, Topology.arrange(*topology), rollout)
    assert figures == pytest.approx([need, received, nic], abs=0.011)


def test_plan_of_standalone_rollout_sends_exactly_what_is_needed_from_balanced_senders():
    plan, figures = _figures(QWEN3_235B, Topology.arrange(64, 8), Rollout(8), workers=64)
    assert figures[:2] == pytest.approx([58.96, 58.96], abs=0.011)
    sent = plan.sent @ plan.targets.count.T
    assert sent.sum() == plan.needed[list(plan.targets.kinds)].sum()
    assert sent.max() < 1.1 * sent.mean()


def test_plan_of_qwen3_235b_has_nearly_the_fewest_rounds_in_a_layer():
    plan, _ = _figures(QWEN3_235B, Topology.arrange(64, 8), Rollout(8))
    layer = max(plan.templates, key=lambda template: len(template.rounds))
    least = math.ceil(plan.needed.max() / 94 / (512 << 20))
    # One more for experts' rows, and one for the norms.
    assert least <= len(layer.rounds) <= least + 2
    parameters = [p.name for b in layer.bundles for p in b.by_kind[0]]
    assert len(parameters) == len(set(parameters)) == 9
    assert sum(len(template.bundles) for _, i in plan.layers for template in [plan.templates[i]]) < 2000


def test_plan_with_limit_below_a_row_is_refused_and_digests_differ_with_plans():
    heads, topology = Heads(4, 2, 6), Topology.arrange(4, 2)
    problem = (
        _qwen3_moe(20, heads, 12, 6, 1, 100, topology),
        topology,
        Rollout(2),
        heads,
        Targets.colocated(topology, 2),
    )
    with pytest.raises(RoundTooSmallError, match=r"one row of model.embed_tokens.weight \[64, 20\] is .* the 8 bytes"):
        _plan(*problem, 8)
    digest = _plan(*problem, 1 << 20)[0].digest()
    assert digest == _plan(*problem, 1 << 20)[0].digest() != _plan(*problem, (1 << 20) + 1)[0].digest()
    assert digest != _plan(problem[0][:-1], *problem[1:], 1 << 20)[0].digest()


def test_target_slices_name_a_tensor_parallel_size_that_divides_no_heads():
    tensor = TensorSpec("model.layers.0.self_attn.k_proj.weight", (18, 8), 2)
    with pytest.raises(ValueError, match="self_attn.k_proj.weight has 6 heads, which tensor parallelism 4"):
        target_slices(tensor, Rollout(4), 0, Heads(12, 6, 3))


def test_plan_of_a_block_that_a_worker_keeps_twice_sends_it_once():
    """Gemma 4's full attention, whose keys are values too: one of its two heads on each of two workers."""
    heads = Heads(4, 2, 6, "gemma4_text", layers=((2, 6, False), (2, 12, True)))
    keys = TensorSpec("model.layers.1.self_attn.k_proj.weight", (24, 20), 2, (ShardStep(dim=0, axis="fsdp", parts=2),))
    parts = target_slices(keys, Rollout(2), 1, heads)
    assert [(part.block.low, part.block.high, part.at) for part in parts] == [
        ((12, 0), (24, 20), (24, 0)),
        ((12, 0), (24, 20), (36, 0)),
    ]
    topology = Topology.arrange(2, 1)
    plan, slices_of = _plan([keys], topology, Rollout(2), heads, Targets.colocated(topology, 2), 1 << 20)
    assert plan.needed.tolist() == [960, 960]
    whole = {keys.name: torch.randn(24, 20).bfloat16()}
    found = Emulated(plan, whole).parameters[1]["model.layers.1.self_attn.qkv_proj.weight"]
    assert torch.equal(found[24:36], whole[keys.name][12:]) and torch.equal(found[36:48], whole[keys.name][12:])
