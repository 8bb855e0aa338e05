"""Transfer plans send every element once, in bounded rounds, and their slices are what vLLM holds."""

import functools
import math
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings

from epfsdp2.engine.topology.index_ranges import IndexRange, ShardStep, shard_ranges
from epfsdp2.engine.topology.mesh import Topology
from epfsdp2.rollout.layout.slice_names import named_values, parse_slice
from epfsdp2.rollout.layout.specs import Heads, Rollout, TensorSpec
from epfsdp2.rollout.layout.transfer_plan import Targets, make_transfer_plan
from epfsdp2.rollout.servers import target_slices
from tests.support.rollout.plans import problems
from tests.support.rollout.verify import expected_tensors

PREFIX = "model.layers.0."


def _plan(tensors, topology, rollout, heads, targets, mode, limit):
    def slices_of(tensor, worker):
        return target_slices(tensor, rollout, worker % rollout.workers, heads, mode)

    layers = ["model.layers.0", "model.layers.1"]
    return make_transfer_plan(tensors, layers, topology, targets, slices_of, limit), slices_of


@settings(max_examples=150, deadline=None)
@given(problems())
def test_plan_transfers_every_element_once_within_the_limit(problem):
    tensors, topology, rollout, heads, targets, mode, limit = problem
    plan, slices_of = _plan(*problem)
    whole = {t.name: torch.arange(math.prod(t.shape)).view(t.shape) for t in tensors}
    by_name = {t.name: t for t in tensors}
    assert [name for name, _ in plan.tensors()] == [t.name for t in tensors]

    # The shard of each trainer rank; all other elements are -1.
    @functools.cache
    def held(name, rank):
        tensor, mine = by_name[name], torch.full(by_name[name].shape, -1)
        for block in shard_ranges(tensor.shape, tensor.cuts, topology.coordinate(rank % topology.fsdp)):
            mine[block.slices] = whole[name][block.slices]
        return mine

    received_values = defaultdict(lambda: None)
    sent_total, received_total = Counter(), Counter()
    for pieces in plan.rounds:
        sent, received, kept = Counter(), Counter(), Counter()
        for piece in pieces:
            name, tensor_plan = plan.tensor(piece)
            for transfer in plan.transfers(piece):
                nbytes = transfer.block.numel * 2
                assert nbytes > 0
                if not tensor_plan.is_local(transfer):
                    sent[transfer.source] += nbytes
                    received[transfer.target] += nbytes
                else:
                    kept[transfer.target] += nbytes
                at = (name, transfer.target)
                if received_values[at] is None:
                    received_values[at] = torch.full(by_name[name].shape, -1)
                taken = received_values[at][transfer.block.slices]
                assert (taken == -1).all(), "an element was sent twice"
                taken.copy_(held(name, transfer.source)[transfer.block.slices])
        assert max([*sent.values(), *received.values(), 0]) <= limit
        assert max([*kept.values(), 0]) <= limit or len(pieces) == 1
        sent_total += sent
        received_total += received
    assert sent_total == Counter(plan.sent)
    assert received_total == Counter(plan.received)

    for worker in range(targets.count):
        wanted = 0
        for tensor in tensors:
            mask = torch.zeros(tensor.shape, dtype=torch.bool)
            for need in slices_of(tensor, worker):
                assert not mask[need.block.slices].any(), "two slices overlap"
                mask[need.block.slices] = True
            got = received_values[tensor.name, worker]
            if got is None:
                got = torch.full(tensor.shape, -1)
            assert torch.equal(got != -1, mask)
            assert torch.equal(got[mask], whole[tensor.name][mask])
            wanted += 2 * int(mask.sum())
        local = plan.needed.get(worker, 0) - plan.received.get(worker, 0)
        assert plan.needed.get(worker, 0) == wanted
        assert local >= 0 and (targets.colocated or local == 0)


@settings(max_examples=40, deadline=None)
@given(problems())
def test_plan_digest_is_equal_only_for_equal_plans(problem):
    plan, _ = _plan(*problem)
    assert plan.digest() == _plan(*problem)[0].digest()
    tensors, topology, rollout, heads, targets, mode, limit = problem
    assert plan.digest() != _plan(tensors, topology, rollout, heads, targets, mode, limit + 1)[0].digest()
    assert plan.digest() != _plan(tensors[:-1], topology, rollout, heads, targets, mode, limit)[0].digest()


def _qwen3_moe(hidden, heads, inner, experts, layers, vocabulary, topology, itemsize=2):
    """Describe the tensors of a Qwen3-MoE as the trainer shards them."""
    dense = (ShardStep(0, "fsdp", topology.fsdp),)
    stacks = (ShardStep(0, "ep", topology.ep), ShardStep(1, "ep_fsdp", topology.ep_fsdp))
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


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_target_slices_assemble_to_what_vllm_holds(tp):
    """Compares with ``verify.expected_tensors``, which other tests compare with real vLLM workers bit for bit."""
    topology, heads = Topology.arrange(4, 2), Heads(4, 2, 6)
    tensors = _qwen3_moe(20, heads, 12, 6, 2, 100, topology)
    torch.manual_seed(0)
    state = {t.name: torch.randn(t.shape) for t in tensors}
    config = SimpleNamespace(
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        num_hidden_layers=2,
        num_experts=6,
        hidden_size=20,
        tie_word_embeddings=False,
    )
    for rank in range(tp):
        placed = {name: torch.zeros_like(t) for name, t in expected_tensors(state, config, tp, rank)}
        for tensor in tensors:
            for need in target_slices(tensor, Rollout(tp), rank, heads):
                target = IndexRange(need.at, tuple(a + s for a, s in zip(need.at, need.block.shape, strict=True)))
                placed[need.parameter][target.slices] = state[tensor.name][need.block.slices]
        for name, want in expected_tensors(state, config, tp, rank):
            assert torch.equal(placed[name], want), (name, rank)


GIGA = 1e9
QWEN3_30B = (2048, Heads(32, 4, 128), 768, 128, 48, 151936)
QWEN3_235B = (4096, Heads(64, 4, 128), 1536, 128, 94, 151936)


def _figures(model, topology, rollout, mode="sliced", node=8, targets=None):
    tensors = _qwen3_moe(*model, topology)
    layers = [f"model.layers.{i}" for i in range(model[4])]
    targets = targets or Targets(topology.world)
    plan = make_transfer_plan(
        tensors,
        layers,
        topology,
        targets,
        lambda tensor, worker: target_slices(tensor, rollout, worker % rollout.workers, model[1], mode),
        512 << 20,
    )
    shift = 0 if targets.colocated else topology.world
    nic = plan.between_nodes(lambda s: s // node, lambda t: (t + shift) // node)
    return plan, [max(amount.values(), default=0) / GIGA for amount in (plan.needed, plan.received, nic)]


@pytest.mark.parametrize(
    ("rollout", "mode", "need", "received", "nic"),
    [
        (Rollout(2), "sliced", 30.54, 28.71, 15.84),
        (Rollout(4), "sliced", 15.29, 14.37, 7.92),
        (Rollout(8), "sliced", 7.68, 7.22, 3.99),
        (Rollout(8, expert_parallel=True), "sliced", 7.68, 4.05, 3.99),
        (Rollout(1, 8, expert_parallel=True), "sliced", 10.33, 6.51, 5.16),
        (Rollout(2), "full", 61.06, 57.25, None),
    ],
)
def test_plan_of_qwen3_30b_on_16_gpus_has_the_published_bytes(rollout, mode, need, received, nic):
    _, figures = _figures(QWEN3_30B, Topology.arrange(16, 8), rollout, mode)
    assert figures[0] == pytest.approx(need, abs=0.011)
    assert figures[1] == pytest.approx(received, abs=0.011)
    assert nic is None or figures[2] == pytest.approx(nic, abs=0.011)


class _EpFsdpFastest(Topology):
    """The other order of ranks, ``e * ep_fsdp + f``, to which some published figures refer."""

    def coordinate(self, fsdp_rank):
        e, f = divmod(fsdp_rank, self.ep_fsdp)
        return {"fsdp": fsdp_rank, "ep": e, "ep_fsdp": f}


@pytest.mark.parametrize(
    ("model", "topology", "rollout", "need", "received", "nic"),
    [
        (QWEN3_30B, (16, 8, 2, 1), Rollout(8, expert_parallel=True), 7.68, 7.67, 7.62),
        (QWEN3_235B, (64, 8, 8, 1), Rollout(8), 58.96, 58.65, 51.75),
        (QWEN3_235B, (64, 32, 2, 1), Rollout(8), 58.96, 58.06, 51.75),
        (QWEN3_235B, (64, 8, 8, 1), Rollout(8, expert_parallel=True), 58.96, 58.95, 58.85),
        (QWEN3_235B, (64, 8, 8, 1), Rollout(16, expert_parallel=True), 29.63, 29.62, 29.57),
        (QWEN3_235B, (64, 8, 8, 1), Rollout(1, 8, expert_parallel=True), 72.77, 72.5, 70.8),
    ],
)
def test_plan_with_ep_fsdp_fastest_has_the_published_bytes(model, topology, rollout, need, received, nic):
    _, figures = _figures(model, _EpFsdpFastest(*topology), rollout)
    assert figures[0] == pytest.approx(need, abs=0.011)
    assert figures[1] == pytest.approx(received, abs=0.06)
    assert figures[2] == pytest.approx(nic, abs=0.06)


@pytest.mark.parametrize(
    ("model", "topology", "rollout", "workers", "need"),
    [
        (QWEN3_30B, (16, 8), Rollout(2), 16, 30.54),
        (QWEN3_30B, (16, 8), Rollout(8, expert_parallel=True), 16, 7.68),
        (QWEN3_235B, (64, 8), Rollout(8), 64, 58.96),
        (QWEN3_235B, (64, 8), Rollout(16, expert_parallel=True), 64, 29.63),
    ],
)
def test_plan_of_standalone_rollout_sends_exactly_what_is_needed(model, topology, rollout, workers, need):
    targets = Targets(workers, colocated=False)
    plan, figures = _figures(model, Topology.arrange(*topology), rollout, targets=targets)
    assert figures[:2] == pytest.approx([need, need], abs=0.011)
    assert sum(plan.sent.values()) == sum(plan.needed.values())
    # The load is balanced over senders.
    assert max(plan.sent.values()) < 1.1 * sum(plan.sent.values()) / topology[0]


def test_plan_of_qwen3_235b_has_nearly_the_fewest_rounds():
    plan, _ = _figures(QWEN3_235B, Topology.arrange(64, 8), Rollout(8))
    least = math.ceil(max(max(plan.received.values()), max(plan.sent.values())) / (512 << 20))
    assert least <= len(plan.rounds) <= 1.25 * least


def test_plan_with_limit_below_a_row_is_refused():
    problem = _qwen3_moe(20, Heads(4, 2, 6), 12, 6, 1, 100, Topology.arrange(4, 2)), Topology.arrange(4, 2)
    plan, _ = _plan(*problem, Rollout(2), Heads(4, 2, 6), Targets(4), "sliced", 8)
    with pytest.raises(
        ValueError, match=r"one row of model.embed_tokens.weight \[100, 20\] is .* more than the 8 bytes"
    ):
        len(plan.rounds)


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
    plan, _ = _plan([keys], Topology.arrange(2, 1), Rollout(2), heads, Targets(2), "sliced", 1 << 20)
    assert plan.needed == {0: 480, 1: 480}
    names = [parse_slice(name)[:2] for name, _ in named_values(parts[0].block, torch.zeros(12, 20), parts)]
    assert names == [("model.layers.1.self_attn.qkv_proj.weight", (at, 0)) for at in (24, 36)]


def test_target_slices_of_transposed_experts_are_named_by_their_place_in_vllms():
    """gpt-oss: ``[E, D, 2 I]`` of the trainer, in blocks of any size, is ``[E, 2 I / tp, D]`` of a worker."""
    heads, values = Heads(4, 4, 6, "gpt_oss"), torch.arange(3 * 4 * 8).view(3, 4, 8)
    stack = TensorSpec("model.layers.0.mlp.experts.gate_up_proj", (3, 4, 8), 2)
    (part,) = slices = target_slices(stack, Rollout(2), 1, heads)
    assert part.end == (3, 4, 4)
    placed = torch.zeros(3, 4, 4, dtype=values.dtype)
    for block in [IndexRange((e, 0, c), (e + 1, 4, c + 3 if c < 6 else 8)) for e in range(3) for c in (0, 3, 6)]:
        for name, found in named_values(block, values[block.slices], slices):
            parameter, corner, form = parse_slice(name)
            assert (parameter, form) == ("model.layers.0.mlp.experts.w13_weight", "transposed")
            found = found.transpose(-1, -2)
            at = tuple(slice(low, low + size) for low, size in zip(corner, found.shape, strict=True))
            placed[at] = found
    assert torch.equal(placed, values[:, :, 4:].transpose(1, 2))
