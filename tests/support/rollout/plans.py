"""Models, trainers and rollouts for which hypothesis draws plans."""

from hypothesis import strategies as st

from epfsdp2.engine.topology.index_ranges import ShardStep
from epfsdp2.engine.topology.mesh import Topology
from epfsdp2.rollout.layout.specs import Heads, Rollout, TensorSpec
from epfsdp2.rollout.plan.transfer_plan import Targets

__all__ = ["problems"]


@st.composite
def problems(draw):
    """Draw a small model of two layers, a trainer, a rollout, its targets, whether they are separate, and a limit."""
    replicas, ep_fsdp, ep = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 4]))
    etp = draw(st.sampled_from([1, 1, 2]))
    topology = Topology(replicas * ep_fsdp * ep * etp, ep, ep_fsdp, replicas, (("etp", etp),))
    tp, dp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    rollout = Rollout(tp, dp, draw(st.booleans()))
    kv = draw(st.sampled_from([1, 2, 4]))
    heads = Heads(kv * draw(st.sampled_from([1, 2])) * (4 // kv), kv, draw(st.sampled_from([3, 4])))
    hidden, inner = draw(st.integers(2, 9)), ep_fsdp * 8 * draw(st.integers(1, 2))
    experts, vocabulary = ep * draw(st.integers(1, 3)), draw(st.integers(3, 90))
    shard_dim = draw(st.sampled_from([0, 1] if experts // ep % ep_fsdp == 0 else [1]))
    dense, over_ep = (ShardStep(0, "fsdp", topology.fsdp),), ShardStep(0, "ep", ep)
    stacks = (over_ep, ShardStep(shard_dim, "ep_fsdp", ep_fsdp))
    down = stacks if shard_dim == 0 or hidden % ep_fsdp == 0 else (over_ep, ShardStep(2, "ep_fsdp", ep_fsdp))
    if etp > 1:
        whole = shard_dim == 0 or hidden % ep_fsdp
        over_hidden = [ShardStep(0 if whole else dim, "ep_fsdp", ep_fsdp) for dim in (2, 1)]
        stacks = (over_ep, ShardStep(1, "etp", etp, split_factor=2), over_hidden[0])
        down = (over_ep, ShardStep(2, "etp", etp), over_hidden[1])
    inside = {
        "self_attn.q_proj.weight": ((heads.queries * heads.dim, hidden), dense),
        "self_attn.k_proj.weight": ((heads.keys * heads.dim, hidden), dense),
        "self_attn.o_proj.weight": ((hidden, heads.queries * heads.dim), dense),
        "mlp.gate.weight": ((experts, hidden), dense),
        "mlp.gate.e_score_correction_bias": ((experts,), ()),
        "mlp.experts.gate_up_proj": ((experts, 2 * inner, hidden), stacks),
        "mlp.experts.down_proj": ((experts, hidden, inner), down),
        "mlp.shared_expert.up_proj.weight": ((inner, hidden), dense),
        "input_layernorm.weight": ((hidden,), dense),
    }
    tensors = [TensorSpec("model.embed_tokens.weight", (vocabulary, hidden), 2, dense)]
    tensors += [
        TensorSpec(f"model.layers.{i}.{n}", shape, 2, cuts) for i in (0, 1) for n, (shape, cuts) in inside.items()
    ]
    tensors += [
        TensorSpec("model.norm.weight", (hidden,), 2, dense),
        TensorSpec("lm_head.weight", (vocabulary, hidden), 2, dense),
    ]
    if separate := draw(st.booleans()):
        targets = Targets.separate([*range(rollout.workers)] * draw(st.integers(1, 2)), topology)
    else:
        targets = Targets.colocated(topology, rollout.workers)
    return tensors, topology, rollout, heads, (targets, separate), draw(st.integers(6000, 60000))
