"""The memory that collects a parameter's slices while vLLM reloads a layer."""

import pytest
import torch

pytestmark = pytest.mark.e2e


def _buffer(running):
    reload = pytest.importorskip("epfsdp2.rollout.vllm.reload")
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    layer = torch.nn.Module()
    info = get_layerwise_info(layer)
    info.kernel_tensors, info.restore_device = (running, {}), torch.device("cpu")
    return reload._slice_buffer(layer, "weight", TARGET)


TARGET = torch.empty(4, 6, dtype=torch.bfloat16, device="meta")


def test_slice_buffer_is_the_running_parameter_of_equal_layout():
    running = torch.zeros(4, 6, dtype=torch.bfloat16)
    assert _buffer({"weight": running}).data_ptr() == running.data_ptr()


@pytest.mark.parametrize(
    "running",
    [
        {},
        {"weight": torch.empty(0)},
        {"weight": torch.zeros(4, 6)},
        {"weight": torch.zeros(6, 4, dtype=torch.bfloat16).t()},
        {"weight": (shared := torch.zeros(4, 6, dtype=torch.bfloat16)), "other": shared[:2]},
    ],
    ids=["none", "dropped", "another dtype", "another layout", "shared"],
)
def test_slice_buffer_is_new_memory_otherwise(running):
    buffer = _buffer(running)
    assert (buffer.shape, buffer.dtype, buffer.device.type) == (TARGET.shape, TARGET.dtype, "cpu")
    assert buffer.data_ptr() not in {tensor.data_ptr() for tensor in running.values()}
