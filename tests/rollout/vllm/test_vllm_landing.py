"""The memory that collects a parameter's units while vLLM reloads a layer, and layouts of kernels."""

from types import SimpleNamespace

import pytest
import torch

from epfsdp2.rollout.layout.slice_names import slice_name
from epfsdp2.rollout.transport.watched_sockets import WeightSyncError

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    ("running", "is_shared"),
    [
        ({"weight": torch.zeros(4, 6, dtype=torch.bfloat16)}, True),
        ({}, False),
        ({"weight": torch.empty(0)}, False),
        ({"weight": torch.zeros(4, 6)}, False),
        ({"weight": torch.zeros(6, 4, dtype=torch.bfloat16).t()}, False),
        ({"weight": (held := torch.zeros(4, 6, dtype=torch.bfloat16)), "other": held[:2]}, False),
    ],
    ids=["equal", "none", "dropped", "another dtype", "another layout", "shared"],
)
def test_memory_for_units_is_the_running_parameter_if_that_has_the_layout_for_itself(running, is_shared):
    reload = pytest.importorskip("epfsdp2.rollout.vllm.reload")
    layer, target = torch.nn.Module(), torch.empty(4, 6, dtype=torch.bfloat16, device="meta")
    layer.weight = torch.nn.Parameter(target, requires_grad=False)
    info = reload.get_layerwise_info(layer)
    info.kernel_tensors, info.restore_device = (running, {}), torch.device("cpu")
    memory = reload._memory_for_units(reload.LayerRecord("", layer), "weight")
    assert (memory.shape, memory.dtype, memory.device.type) == (target.shape, target.dtype, "cpu")
    assert (memory.data_ptr() in {tensor.data_ptr() for tensor in running.values()}) == is_shared


E, INNER, D = 3, 4, 6


def _swapped(w13):
    return torch.cat([w13[:, INNER:], w13[:, :INNER]], dim=1)


def _in_blocks(weight):
    return weight.view(E, 2, -1, weight.shape[2]).transpose(2, 3).contiguous()


def _replaced(layer):
    """FlashInfer's CUTLASS kernel: the up projection comes first."""
    layer.w13_weight = torch.nn.Parameter(_swapped(layer.w13_weight.data), requires_grad=False)


def _in_place(layer):
    layer.w13_weight.data.copy_(_swapped(layer.w13_weight.data.clone()))


def _as_blocks(layer):
    """FlashInfer's TRT-LLM kernel: four dimensions."""
    for name in ("w13_weight", "w2_weight"):
        blocks = _in_blocks(_swapped(layer.w13_weight.data) if name == "w13_weight" else layer.w2_weight.data)
        setattr(layer, name, torch.nn.Parameter(blocks, requires_grad=False))


def _worker(process, backend):
    """A model of one experts layer, as a vLLM whose kernel wants the layout that ``process`` makes."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    class Method(QuantizeMethodBase):
        unquantized_backend, moe_kernel = SimpleNamespace(name=backend), None

        def create_weights(self, layer, *args, **kwargs): ...

        def apply(self, layer, *args, **kwargs): ...

        def process_weights_after_loading(self, layer):
            process(layer)

    layer, model = torch.nn.Module(), torch.nn.Module()
    for name, shape in (("w13_weight", (E, 2 * INNER, D)), ("w2_weight", (E, D, INNER))):
        layer.register_parameter(name, torch.nn.Parameter(torch.zeros(shape), requires_grad=False))
    sizes = {"intermediate_size_per_partition": INNER, "hidden_dim": D}
    sizes |= {f"{name}_unpadded": size for name, size in sizes.items()}
    layer.moe_config = SimpleNamespace(**sizes, is_act_and_mul=True)
    layer.quant_method, model.experts, model.load_weights = Method(), layer, list
    record_metadata_for_reloading(model)
    process(layer)  # as at start-up
    return model


def _synced(model, w13, w2, more=()):
    """Send it the experts, verified, and other parameters behind them."""
    reload = pytest.importorskip("epfsdp2.rollout.vllm.reload")
    parallel = SimpleNamespace(pipeline_parallel_size=1, enable_expert_parallel=False)
    config = SimpleNamespace(dtype=torch.float32, hf_text_config=SimpleNamespace(num_hidden_layers=1))
    one = reload.Reload([(model, config)], parallel, verify=True)
    one.start()
    for first in (1, 0):
        one.load([(slice_name("experts.w13_weight", first, 2), w13[first::2].contiguous())])
    one.load([(slice_name("experts.w2_weight"), w2), *((slice_name(name), values) for name, values in more)])
    one.finish()


def _experts(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ((E, 2 * INNER, D), (E, D, INNER))]


@pytest.mark.parametrize(
    ("process", "backend"),
    [(_replaced, "FLASHINFER_CUTLASS"), (_in_place, "FLASHINFER_CUTLASS"), (_as_blocks, "FLASHINFER_TRTLLM")],
)
def test_sync_of_units_to_a_kernels_own_layout_keeps_its_memory(process, backend):
    """Layouts of the experts that vLLM has on GPUs of compute capability 10 and 12."""
    model, wanted = _worker(process, backend), torch.nn.Module()
    memory = [tensor.data_ptr() for tensor in model.parameters()]
    for seed in range(3):
        w13, w2 = _experts(seed)
        _synced(model, w13, w2)
        wanted.w13_weight, wanted.w2_weight = (torch.nn.Parameter(w, requires_grad=False) for w in (w13, w2))
        process(wanted)
        for name, parameter in wanted.named_parameters():
            assert torch.equal(model.experts.get_parameter(name), parameter)
        assert [tensor.data_ptr() for tensor in model.parameters()] == memory, "kernels and graphs have these addresses"


def test_sync_of_a_routers_bias_after_its_experts_are_processed_lands_in_place():
    """vLLM does not wait for it, and the bias of Laguna is a parameter of the layer of the experts."""
    model = _worker(_replaced, "FLASHINFER_CUTLASS")
    bias = model.experts.e_score_correction_bias = torch.nn.Parameter(torch.zeros(E), requires_grad=False)
    for seed in range(2):
        _synced(model, *_experts(seed), more=[("experts.e_score_correction_bias", torch.arange(E) + float(seed))])
        assert model.experts.e_score_correction_bias is bias and bias.tolist() == [seed, seed + 1, seed + 2]


def test_verified_sync_of_experts_in_another_kernel_layout_raises():
    with pytest.raises(WeightSyncError, match="the values of experts.w13_weight on the worker differ"):
        _synced(_worker(_replaced, "TRITON"), *_experts(0))


@pytest.mark.parametrize(
    ("process", "backend", "is_read"),
    [
        (lambda layer: None, "TRITON", True),
        (_replaced, "FLASHINFER_CUTLASS", True),
        (_as_blocks, "FLASHINFER_TRTLLM", False),  # vLLM's default on compute capability 10
    ],
)
def test_running_weights_leave_out_experts_in_an_unknown_layout_with_a_warning(caplog, process, backend, is_read):
    from epfsdp2.rollout.vllm.loaded_weights import _warn_of, running_weights

    model = _worker(process, backend)
    model.norm = torch.nn.LayerNorm(D)
    _warn_of.cache_clear()
    held = dict(running_weights(model))
    assert held.keys() >= {"norm.weight"}
    assert ("experts.w13_weight" in held) == is_read == (f"{backend} backend can't be read back" not in caplog.text)
