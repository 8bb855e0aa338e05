"""An exchange of every family with a known layout brings workers the slices of whole tensors."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.fsdp.wrap_plan import compute_dtypes
from epfsdp2.engine.model.layers import layer_names
from epfsdp2.engine.preflight.rollout import tensors_before_sharding
from epfsdp2.engine.topology.dtensor import persistent_buffers
from epfsdp2.engine.topology.mesh import Topology
from epfsdp2.rollout.layout.specs import Heads, Rollout
from epfsdp2.rollout.plan.transfer_plan import Targets, make_transfer_plan
from epfsdp2.rollout.sent_tensors import slices_of_workers
from epfsdp2.rollout.servers import SERVERS
from epfsdp2.rollout.sync import narrower
from epfsdp2.rollout.transport.exchange import Exchange
from epfsdp2.rollout.transport.report import Traffic
from tests.rollout.families import DENSE, FAMILIES, config_of, model_of
from tests.rollout.served_families import randomise
from tests.support.ranks import each_case, run_ranks
from tests.support.rollout.plans import shard_of
from tests.support.rollout.sent_slices import collected
from tests.support.rollout.units import check_stored, stored_parameters

WORLD = 4
LIMIT = 1 << 17


ROLLOUTS = [Rollout(2, server="vllm"), Rollout(2, 2, expert_parallel=True, server="vllm"), Rollout(4, server="sglang")]
ROLLOUTS.append(replace(ROLLOUTS[-1], expert_parallel=True))


def _rollouts(family):
    """Return the rollouts whose servers know the family's layout, with whole experts only for a model with experts."""
    model_type = config_of(family).model_type
    known = [rollout for rollout in ROLLOUTS if model_type in SERVERS[rollout.server].known_families()]
    return [rollout for rollout in known if not (rollout.expert_parallel and family in DENSE)]


def _compare(families):
    def check(family):
        model = model_of(config_of(family))
        dtypes = compute_dtypes(model, ShardingOptions(param_dtype=torch.bfloat16))
        dtypes = {name: narrower(p.dtype, dtypes[name]) for name, p in model.named_parameters()}
        dtypes |= {name: buffer.dtype for name, buffer in persistent_buffers(model).items()}
        topology, heads = Topology.arrange(WORLD, 1 if family in DENSE else 2), Heads.of(model.config)
        specs = tensors_before_sharding(model, topology, itemsize={n: dtype.itemsize for n, dtype in dtypes.items()})
        by_name = {spec.name: spec for spec in specs}
        whole = {**dict(model.named_parameters()), **persistent_buffers(model)}
        whole = {name: tensor.detach() for name, tensor in whole.items()}
        randomise(model, 1)
        for rollout in _rollouts(family):
            worker = dist.get_rank() % rollout.workers
            slices_of, targets = slices_of_workers(specs, rollout, heads), Targets.colocated(topology, rollout.workers)
            plan = make_transfer_plan(specs, layer_names(model), topology, targets, slices_of, LIMIT)
            exchange = Exchange(plan, dist.get_rank(), slices_of, dtypes.__getitem__, "cpu", head_dim=heads.dim)
            slices = [(part, whole[t.name].to(dtypes[t.name])) for t in specs for part in slices_of(t, worker)]
            found = collected(exchange.named(_shards(whole, by_name, plan), Traffic()))
            check_stored(found, stored_parameters(slices, heads.dim), rollout)

    each_case([(family,) for family in families], check)


def _shards(whole, specs, plan):
    return lambda name: shard_of(whole[name], specs[name], plan, dist.get_rank())


# One for each form of slices, and for each kind of server's layout.
SOME = ("qwen3_moe", "mixtral", "gpt_oss", "gemma4", "deepseek_v3", "qwen3_next", "jamba", "nemotron_h", "llama4")
OTHERS = tuple(family for family in FAMILIES if family not in SOME)


@pytest.mark.parametrize("families", [SOME, pytest.param(OTHERS, marks=pytest.mark.long)], ids=["some", "others"])
def test_exchange_brings_workers_the_parameters_of_every_family(families):
    known = [family for family in families if _rollouts(family)]
    assert len(known) > len(families) / 2
    run_ranks(_compare, WORLD, known, timeout=600)
