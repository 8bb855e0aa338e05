"""Every family whose layout in a server is known: an exchange brings workers what whole tensors, cut by it, have."""

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
from tests.rollout.families import DENSE, FAMILIES, config_of, model_of
from tests.rollout.served_families import randomise
from tests.support.ranks import run_ranks
from tests.support.rollout.plans import shard_of
from tests.support.rollout.sent_slices import bits, stored_parameters

WORLD = 4
LIMIT = 1 << 17


def _cases(server, rollout):
    """Name the families that the server is known to cut, those with experts alone where experts are spread."""
    known = SERVERS[server].known_families()
    families = [family for family in FAMILIES if config_of(family).model_type in known]
    return [family for family in families if not (rollout.expert_parallel and family in DENSE)]


def _compare(rollout):
    wrong = []
    for family in _cases(rollout.server, rollout):
        model = model_of(config_of(family))
        dtypes = compute_dtypes(model, ShardingOptions(param_dtype=torch.bfloat16))
        dtypes = {name: narrower(p.dtype, dtypes[name]) for name, p in model.named_parameters()}
        dtypes |= {name: buffer.dtype for name, buffer in persistent_buffers(model).items()}
        topology = Topology.arrange(WORLD, 1 if family in DENSE else 2)
        specs = tensors_before_sharding(model, topology, itemsize={n: dtype.itemsize for n, dtype in dtypes.items()})
        heads, worker = Heads.of(model.config), dist.get_rank() % rollout.workers
        slices_of, targets = slices_of_workers(specs, rollout, heads), Targets.colocated(topology, rollout.workers)
        plan = make_transfer_plan(specs, layer_names(model), topology, targets, slices_of, LIMIT)
        exchange = Exchange(plan, dist.get_rank(), slices_of, dtypes.__getitem__, "cpu", head_dim=heads.dim)
        by_name = {spec.name: spec for spec in specs}
        for seed in range(2):
            randomise(model, seed)
            whole = {**dict(model.named_parameters()), **persistent_buffers(model)}
            whole = {name: tensor.detach() for name, tensor in whole.items()}
            found: dict[str, torch.Tensor] = {}

            def held(name, whole=whole, specs=by_name, plan=plan):
                return shard_of(whole[name], specs[name], plan, dist.get_rank())

            slices = [(part, whole[t.name].to(dtypes[t.name])) for t in specs for part in slices_of(t, worker)]
            expected = stored_parameters(slices, heads.dim)
            for name, axis, first, step, rows in exchange.run(held):
                shape = expected[name][0].shape
                into = found.setdefault(name, torch.zeros(shape, dtype=rows.dtype)).movedim(axis, 0)
                into[first::step] = rows.movedim(axis, 0)
            assert found.keys() == expected.keys(), (family, found.keys() ^ expected.keys())
            for name, (values, is_filled) in expected.items():
                if found[name].dtype != values.dtype or not torch.equal(
                    bits(found[name][is_filled]), bits(values[is_filled])
                ):
                    wrong.append((family, name))
    assert not wrong, wrong[:10]


ROLLOUTS = [Rollout(2, server="vllm"), Rollout(2, 2, expert_parallel=True, server="vllm"), Rollout(4, server="sglang")]
ROLLOUTS.append(replace(ROLLOUTS[-1], expert_parallel=True))


@pytest.mark.parametrize(
    "rollout", ROLLOUTS, ids=lambda r: f"{r.server}-{r.tp}-{r.dp}{'-experts' if r.expert_parallel else ''}"
)
def test_exchange_brings_workers_the_parameters_of_every_family(rollout):
    assert len(_cases(rollout.server, rollout)) > 4
    run_ranks(_compare, WORLD, rollout, timeout=600)
