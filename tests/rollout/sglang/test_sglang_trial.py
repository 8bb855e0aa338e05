"""An untested SGLang: its workers compare their layout in a request of its own, before any weight is gathered."""

import asyncio
from unittest import mock

import torch.distributed as dist

from epfsdp2.engine.topology.rank_consistency import gathered
from epfsdp2.rollout.sglang import adapter
from tests.rollout.sglang.stand_ins import TENSORS, Server, Weights, replica_of
from tests.support.ranks import run_ranks


class _OnTrial(Weights):
    """Weights of which full tensors are sent if a rank was told of another layout."""

    def __init__(self):
        super().__init__()
        self.is_on_trial, self.failures = True, []

    def check_plans(self, failure):
        self.failures = gathered("" if failure is None else str(failure))
        if any(self.failures):
            self.mode, self.is_on_trial = "full", False


def _syncs():
    rank = dist.get_rank()
    for other in ("", "worker 1 of a replica: they differ"):
        server, weights = Server(), _OnTrial()
        answer = mock.patch.object(adapter, "answer_of", return_value=other if rank == 1 else "")
        with replica_of(server) as replica, answer:
            asyncio.run(replica.update_weights(weights))
        assert weights.closed and len(weights.failures) == 2 and all(other in text for text in weights.failures)
        if rank > 0:
            continue
        first, *rest = server.requests
        assert [(header["layouts"], header["entries"]) for header in first] == [([{}, {}], [])] * 2
        assert len(rest) == TENSORS and all(header["layouts"] is None for headers in rest for header in headers)
        assert all(len(headers) == (0 if other else 2) for headers in rest)  # verl's own requests have none

    with replica_of(Server()) as replica:  # one that is not there is no reason to hang
        if rank == 0:
            replica._init_server_adapter = _raises
        failure = asyncio.run(replica._other_layout(_OnTrial()))
        assert "worker 0: its trainer rank failed: ConnectionError: nobody listens" in str(failure)


async def _raises():
    raise ConnectionError("nobody listens")


def test_untested_sglang_compares_layouts_first_and_then_gets_slices_or_full_tensors():
    run_ranks(_syncs, 2)
