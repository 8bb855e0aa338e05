"""Where the slices of a parameter wait while vLLM reloads a layer."""

import pytest
import torch

pytestmark = pytest.mark.e2e


def _landing(running):
    reload = pytest.importorskip("epfsdp2.rollout.vllm.reload")
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    layer = torch.nn.Module()
    info = get_layerwise_info(layer)
    info.kernel_tensors, info.restore_device = (running, {}), torch.device("cpu")
    return reload._landing(layer, "weight", TARGET)


TARGET = torch.empty(4, 6, dtype=torch.bfloat16, device="meta")


def test_in_the_running_parameter_that_is_alike():
    running = torch.zeros(4, 6, dtype=torch.bfloat16)
    assert _landing({"weight": running}).data_ptr() == running.data_ptr()


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
def test_in_memory_of_its_own_otherwise(running):
    landing = _landing(running)
    assert (landing.shape, landing.dtype, landing.device.type) == (TARGET.shape, TARGET.dtype, "cpu")
    assert landing.data_ptr() not in {tensor.data_ptr() for tensor in running.values()}
