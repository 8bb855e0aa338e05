"""Weight syncs of one rank whose buffers are on meta, on a fake group."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist

from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.fsdp.wrap_plan import compute_dtypes
from epfsdp2.engine.model.layers import layer_names
from epfsdp2.engine.parallelize import parallelize
from epfsdp2.engine.preflight.rollout import tensors_before_sharding
from epfsdp2.engine.topology.mesh import build_meshes
from epfsdp2.rollout.layout.specs import Heads, Rollout
from epfsdp2.rollout.plan.senders import senders_of
from epfsdp2.rollout.plan.transfer_plan import Targets, round_bytes
from epfsdp2.rollout.sent_tensors import SentModel
from epfsdp2.rollout.sync import RolloutSync, SyncSettings
from epfsdp2.rollout.transport.exchange import Exchange, Values
from tests.support.scale import Size

__all__ = ["MEMORY", "colocated", "no_bytes", "run", "sent_model", "separate", "shards_of", "sync_of"]

MEMORY = 2048 << 20


class _Done(dist.Work):
    def wait(self, *args):
        return True


@contextmanager
def no_bytes() -> Iterator[None]:
    """Let collectives do nothing, since a fake group has no backend for meta tensors."""
    names = ("all_to_all_single", "all_gather_into_tensor", "all_reduce")
    with mock.patch.multiple(dist, **{name: lambda *args, **options: _Done() for name in names}):
        yield


def sync_of(size: Size) -> RolloutSync:
    """Make the exporter of a sharded model, within a fake group of this size's ranks."""
    meshes, options = build_meshes("cpu", size.topology), ShardingOptions(param_dtype=torch.bfloat16)
    model = parallelize(size.build(torch.float32), meshes, options)
    settings = SyncSettings("auto", MEMORY, server="vllm")
    sync = RolloutSync(model, meshes, layer_names(model), compute_dtypes(model, options), settings)
    sync.device = "meta"
    return sync


def sent_model(size: Size) -> SentModel:
    """Describe a model's weights in bfloat16 without sharding it."""
    model = size.build()
    tensors = tuple(tensors_before_sharding(model, size.topology))
    dtypes = tuple((tensor.name, torch.bfloat16) for tensor in tensors)
    return SentModel(tensors, dtypes, tuple(layer_names(model)), size.topology, Heads.of(model.config))


def shards_of(sent: SentModel) -> Values:
    """Return the values that rank 0 holds."""
    found = {}
    for tensor in sent.tensors:
        shape = senders_of(tensor, sent.topology).shard[0].tolist() if tensor.shape else ()
        found[tensor.name] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return found.__getitem__


def colocated(sent: SentModel, rollout: Rollout) -> Exchange:
    """Plan the part of rank 0 in a sync to workers beside the trainer's ranks."""
    targets = Targets.colocated(sent.topology, rollout.workers)
    return sent.exchange(rollout, targets, round_bytes(MEMORY), 0, "meta", None)


def separate(sent: SentModel, rollout: Rollout, workers: int, rank: int) -> Exchange:
    """Plan the part of a rank in a sync to workers that follow the trainer's ranks in the group."""
    targets = Targets.separate([worker % rollout.workers for worker in range(workers)], sent.topology)
    return sent.exchange(rollout, targets, round_bytes(MEMORY), rank, "meta", None)


def run(exchange: Exchange, values: Values | None) -> int:
    """Run a sync and return how many parameters it yields."""
    return sum(1 for _ in exchange.run(values))
