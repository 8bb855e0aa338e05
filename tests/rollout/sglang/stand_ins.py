"""Stand-ins for SGLang, its server, verl's adapter and the weights of a sync, for two ranks without SGLang."""

import contextlib
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from epfsdp2.engine.topology.rank_consistency import check_agreement
from epfsdp2.rollout import servers
from epfsdp2.rollout.sglang import adapter

__all__ = ["LONG", "TENSORS", "TIMEOUT", "Server", "Weights", "replica_of"]

TIMEOUT, LONG = 1.5, 60.0  # seconds; the latter where nothing is to run into it
TENSORS = 4


class _Request:
    def __init__(self, serialized_named_tensors, load_format, flush_cache):
        self.headers = [json.loads(packed) for packed in serialized_named_tensors]


def _sglang():
    """Return the modules that the adapter imports of SGLang; a bucket is sent as its header alone."""
    serializer = SimpleNamespace(serialize=lambda tensors: tensors[0][0])
    modules = {
        "sglang.srt.managers.io_struct": {"UpdateWeightsFromTensorReqInput": _Request},
        "sglang.srt.utils": {"MultiprocessingSerializer": serializer},
        "sglang.srt.utils.patch_torch": {"monkey_patch_torch_reductions": lambda: None},
    }
    found = {name: ModuleType(name) for name in ("sglang", "sglang.srt", "sglang.srt.managers", *modules)}
    for name, members in modules.items():
        vars(found[name]).update(members)
    return found


class Server:
    """SGLang's server on the replica's first rank: notes the headers of each request."""

    def __init__(self):
        self.requests = []

    async def update_weights_from_tensor(self, request):
        self.requests.append(request.headers)

    async def flush_cache(self):
        pass


class Weights:
    """One worker's tensors, a bucket each; making number ``fails_at`` raises. Records that the generator was closed."""

    def __init__(self, mode="sliced", fails_at=None):
        self.mode, self.has_checksums, self._fails_at, self.closed = mode, False, fails_at, False
        self.is_on_trial = False

    def for_rollout(self, config, worker):
        return self

    def __iter__(self):
        return self.tensors()

    def tensors(self):
        try:
            for number in range(TENSORS):
                if number == self._fails_at:
                    raise ValueError("no memory left")
                yield f"tensor.{number}", torch.ones(1 << 17)
        finally:
            self.closed = True

    def check_plans(self, failure):
        check_agreement({}, failure=failure)

    def planned_layouts(self):
        return [{}, {}]

    def report(self, transfer):
        return f"{transfer.tensors} tensors"


class _Stock:
    """The parts of verl's adapter that the mix-in uses."""

    def __init__(self, server):
        self.device_mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("dp", "infer_tp", "infer_pp"))
        self.config = SimpleNamespace(checkpoint_engine=SimpleNamespace(update_weights_bucket_megabytes=1))
        self.rollout_rank = dist.get_rank()
        self._engine = server if self.rollout_rank == 0 else None

    async def _init_server_adapter(self):
        pass

    async def update_weights(self, weights, global_steps, wire_format, **kwargs):
        for _ in weights:
            dist.barrier(self.device_mesh["infer_tp"].get_group())  # verl gathers a bucket of each rank
            if self._engine is not None:
                await self._engine.update_weights_from_tensor(SimpleNamespace(headers=[]))


class _Adapter(adapter.Updates, _Stock):
    pass


@contextlib.contextmanager
def replica_of(server, timeout=LONG):
    with pytest.MonkeyPatch.context() as patch:
        for name, module in _sglang().items():
            patch.setitem(sys.modules, name, module)
        servers.install(timeout)
        patch.setattr(adapter, "_SHM_BYTES", 1 << 19)
        yield _Adapter(server)
