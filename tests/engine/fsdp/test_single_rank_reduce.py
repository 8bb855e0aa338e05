"""Groups of one rank: the gradient is the buffer that FSDP packed, divided there."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from epfsdp2.engine.fsdp import single_rank_reduce
from tests.support.engine.sharded import sharded_model
from tests.support.models.tiny import save_qwen3_moe, token_batch, token_loss
from tests.support.ranks import run_ranks

WORLD = 4


def _one_buffer(folder, ep, fsdp):
    allocate, packed = single_rank_reduce._SameBuffer.allocate, []

    def recorded(self, *args, **kwargs):
        packed.append(allocate(self, *args, **kwargs))
        return packed[-1]

    with mock.patch.object(single_rank_reduce._SameBuffer, "allocate", recorded):
        model, _ = sharded_model(folder, WORLD, ep, fsdp)
        ids, rank = token_batch(WORLD), dist.get_rank()
        for _ in range(2):  # the second adds to what there is
            token_loss(model, ids[2 * rank : 2 * rank + 2]).backward()
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    layers = len(experts) // 2
    first = [p.untyped_storage().data_ptr() for p in packed[: 2 * layers]]
    assert len(packed) == 2 * 2 * layers and first[::2] == first[1::2]
    assert {p.grad.to_local().untyped_storage().data_ptr() for p in experts} == set(first)


def _two_meshes(folder):
    _one_buffer(folder, WORLD, -1)
    _one_buffer(folder, 2, 2)  # with replicas


def test_single_rank_reduce_on_two_meshes_makes_fsdps_packed_buffer_the_gradient(tmp_path):
    run_ranks(_two_meshes, WORLD, save_qwen3_moe(tmp_path))


def test_same_buffer_after_an_error_is_allocated_anew():
    cpu, buffer = torch.device("cpu"), single_rank_reduce._SameBuffer()

    def fails():
        packed = buffer.allocate((4,), dtype=torch.float32, device=cpu)
        raise OSError(f"out of memory after {packed.numel()}")

    with pytest.raises(OSError):
        fails()
    packed = buffer.allocate((4,), dtype=torch.float32, device=cpu)
    with pytest.raises(RuntimeError, match="an odd number of times"):
        buffer.check_is_complete()
    assert buffer.allocate((4,), dtype=torch.float32, device=cpu) is packed
    buffer.check_is_complete()


def test_same_buffer_asked_for_pairs_of_two_sizes_raises():
    cpu, buffer = torch.device("cpu"), single_rank_reduce._SameBuffer()
    for size, dtype in ((5, torch.float32), (4, torch.bfloat16)):
        packed = buffer.allocate((4,), dtype=torch.float32, device=cpu)
        with pytest.raises(RuntimeError, match=f"packed 4 gradients of torch.float32 and asks for {size} of {dtype}"):
            buffer.allocate((size,), dtype=dtype, device=cpu)
        del packed  # nobody else holds it
