"""The memory of experts' gradients is reused on a CPU."""

import threading

import pytest
import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from epfsdp2.engine.moe.forward import ExpertsRuntime, attach, experts_forward
from epfsdp2.engine.moe.gemm import gradient_buffers

LIKE = torch.empty(0)
SHAPE = (3, 256, 512)  # 1.5 MiB


@pytest.fixture(autouse=True)
def nothing_is_left():
    gradient_buffers.release()
    yield
    gradient_buffers.release()
    assert not gradient_buffers._storages


def test_gradient_buffers_reuse_a_free_storage():
    first = gradient_buffers.empty(SHAPE, LIKE)
    assert (first.shape, first.dtype, first.is_contiguous()) == (SHAPE, torch.float32, True)
    address, view = first.data_ptr(), first[1]
    del first
    second = gradient_buffers.empty(SHAPE, LIKE)
    assert second.data_ptr() != address, "a view still uses the first"
    del view
    assert gradient_buffers.empty((256, 512, 3, 2), LIKE.bfloat16()).data_ptr() == address, (
        "any dtype and shape of its size"
    )
    assert gradient_buffers.empty((4, 256, 512), LIKE).data_ptr() not in (address, second.data_ptr())


def test_gradient_buffers_keep_few_free_storages_and_release_them():
    held = [gradient_buffers.empty((2 + i, 256, 512), LIKE) for i in range(8)]
    assert len(gradient_buffers._storages) == 8
    held.clear()
    gradient_buffers.empty((20, 256, 512), LIKE)
    assert len(gradient_buffers._storages) == gradient_buffers._MAX_FREE + 1
    used = gradient_buffers.empty(SHAPE, LIKE).fill_(1.0)
    gradient_buffers.release()
    assert len(gradient_buffers._storages) == 1 and used.sum() == used.numel()


def test_gradient_buffers_of_small_or_device_tensors_are_not_kept():
    gradient_buffers.empty((10, 10), LIKE)
    assert gradient_buffers.empty(SHAPE, LIKE.to("meta")).is_meta
    assert not gradient_buffers._storages


def test_gradient_buffers_of_threads_share_no_storage():
    addresses, held, barrier = [], [], threading.Barrier(8)

    def take():
        barrier.wait()
        for _ in range(20):
            held.append(gradient_buffers.empty(SHAPE, LIKE))
        addresses.extend(tensor.data_ptr() for tensor in held[-1:])

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({tensor.data_ptr() for tensor in held}) == len(held) == 160


def test_gradient_buffers_give_the_gradients_of_plain_autograd_step_after_step():
    config = Qwen3MoeConfig(num_experts=8, hidden_size=256, moe_intermediate_size=256)
    torch.manual_seed(0)
    modules = []
    for implementation in ("eager", "grouped_mm"):
        config._experts_implementation = implementation
        module = Qwen3MoeExperts(config)
        torch.nn.init.normal_(module.gate_up_proj, std=0.02)
        torch.nn.init.normal_(module.down_proj, std=0.02)
        modules.append(module)
    ours, plain = modules
    ours.load_state_dict(plain.state_dict())
    attach(ours, ExpertsRuntime(8, None))
    addresses = set()
    for step in range(3):
        hidden, weights = torch.randn(40, 256), torch.rand(40, 2)
        ids = torch.randint(step, 8, (40, 2))  # a later step leaves the first experts out: their gradients are zero
        experts_forward(ours, hidden, ids, weights).square().sum().backward()
        plain(hidden, ids, weights).square().sum().backward()
        for mine, its in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, its.grad)
            assert bool((mine.grad[:step] == 0).all())
            addresses.add(mine.grad.data_ptr())
            mine.grad = its.grad = None
    assert len(addresses) == 2, "of two weights, in three steps"


def test_gradient_buffers_are_released_when_a_backward_ends():
    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            addresses.append(gradient_buffers.empty(SHAPE, grad).data_ptr())
            return grad

    for _ in range(2):
        addresses = []
        Layer.apply(Layer.apply(torch.ones(2, requires_grad=True))).sum().backward()
        assert addresses[0] == addresses[1]
        assert not gradient_buffers._storages
