"""A vLLM worker's load of all its parameters, in models with the layers of advertised sizes and tiny widths.

Plain modules with the names of Qwen3-MoE are reloaded by vLLM's own functions. Nothing may grow faster than the layers.
"""

import sys
import time
from types import SimpleNamespace

import pytest
import torch

from epfsdp2.rollout.layout.slice_names import slice_name

pytestmark = pytest.mark.e2e

INSIDE = {
    "self_attn.qkv_proj.weight": (12, 8),
    "self_attn.o_proj.weight": (8, 8),
    "mlp.gate.weight": (4, 8),
    "mlp.experts.w13_weight": (4, 8, 8),
    "mlp.experts.w2_weight": (4, 8, 4),
    # They come later than other parameters of the same layer.
    "self_attn.qkv_proj.bias": (12,),
    "self_attn.q_norm.weight": (2,),
    "self_attn.k_norm.weight": (2,),
    "input_layernorm.weight": (8,),
    "post_attention_layernorm.weight": (8,),
}
LAYERS_30B, LAYERS_235B = 48, 94
BUCKET = 20


@pytest.fixture(autouse=True)
def device_tensors(monkeypatch):
    """Make vLLM treat all tensors as device tensors, whose loads it tracks."""
    layerwise = pytest.importorskip("vllm.model_executor.model_loader.reload.layerwise")
    monkeypatch.setattr(layerwise, "has_device_tensors", lambda arguments: True)


def _worker(layers: int) -> tuple[torch.nn.Module, list[tuple[str, torch.Tensor]]]:
    """A model in vLLM's state after start-up, and the units of a sync."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    shapes = {"model.embed_tokens.weight": (64, 8)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in INSIDE.items()}
    shapes |= {"model.norm.weight": (8,), "lm_head.weight": (64, 8)}
    model = torch.nn.Module()
    for name, shape in shapes.items():
        *path, own = name.split(".")
        module = model
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]
        module.register_parameter(own, torch.nn.Parameter(torch.empty(shape), requires_grad=False))
    record_metadata_for_reloading(model)
    return model, [(slice_name(name), torch.randn(shape)) for name, shape in shapes.items()]


def _sync(model: torch.nn.Module, units: list[tuple[str, torch.Tensor]]) -> None:
    from epfsdp2.rollout.vllm.reload import Reload

    config = SimpleNamespace(hf_text_config=SimpleNamespace(tie_word_embeddings=False, num_hidden_layers=1))
    reload = Reload([(model, config)], SimpleNamespace(pipeline_parallel_size=1, enable_expert_parallel=False))
    reload.start()
    for first in range(0, len(units), BUCKET):
        reload.load(units[first : first + BUCKET])
    reload.finish()


def _calls(model: torch.nn.Module, units: list[tuple[str, torch.Tensor]]) -> int:
    """Number of Python and C functions that a sync calls."""
    count = 0

    def counts(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counts)
    try:
        _sync(model, units)
    finally:
        sys.setprofile(None)
    return count


def _seconds(function, *arguments) -> float:
    found = []
    for _ in range(3):
        started = time.process_time()
        function(*arguments)
        found.append(time.process_time() - started)
    return min(found)


def _calibration() -> None:
    """A thousand small operations of torch."""
    values = torch.zeros(8, 8)
    for _ in range(1000):
        values.clone()


def test_worker_load_of_twice_the_layers_calls_twice_the_functions():
    found = {}
    for layers in (LAYERS_30B, LAYERS_235B, 2 * LAYERS_235B):
        model, units = _worker(layers)
        addresses = [parameter.data_ptr() for parameter in model.parameters()]
        _sync(model, units)  # first syncs also import
        found[layers] = _calls(model, units)
        assert found[layers] <= 450 * len(units), found
        held = dict(model.named_parameters())
        assert all(torch.equal(held[name.split("/")[1]], values) for name, values in units)
        assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert found[2 * LAYERS_235B] <= 2.2 * found[LAYERS_235B], found


@pytest.mark.parametrize("layers", [LAYERS_30B, LAYERS_235B])
def test_worker_load_takes_as_long_as_some_small_operations_for_each_unit(layers):
    """Less than 0.3 s for 235B, where such an operation takes a microsecond."""
    model, units = _worker(layers)
    each = _seconds(_sync, model, units) / len(units)
    assert each <= 0.25 * _seconds(_calibration), each
