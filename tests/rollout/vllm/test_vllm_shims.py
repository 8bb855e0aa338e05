"""The shims for vLLM's reload and for its CPU experts kernel, on vLLM's classes without an engine."""

import contextlib
import functools
import importlib
import inspect
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def shims():
    return pytest.importorskip("epfsdp2.rollout.vllm.shims.reload_shims")


def test_prepare_layer_names_a_partial_loader(shims):
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload, record_metadata_for_reloading

    def layer():
        linear = torch.nn.Linear(3, 2, bias=False)
        linear.weight.weight_loader = functools.partial(lambda extra, param, loaded: param.data.copy_(loaded), 1)
        record_metadata_for_reloading(linear)
        return linear

    with pytest.raises(AttributeError, match="__name__"):
        initialize_layerwise_reload(layer())
    prepared = layer()
    shims.prepare_layer(prepared)
    initialize_layerwise_reload(prepared)
    assert prepared.weight.is_meta


def test_prepare_layer_drops_the_kernel_on_a_cpu_only(shims, monkeypatch):
    for is_cpu in (True, False):
        monkeypatch.setattr(shims, "current_platform", SimpleNamespace(is_cpu=lambda answer=is_cpu: answer))
        layer = torch.nn.Identity()
        layer.quant_method = SimpleNamespace(moe_kernel=object())
        shims.prepare_layer(layer)
        assert (layer.quant_method.moe_kernel is None) == is_cpu


def test_finish_model_renews_sinks_that_vllm_keeps_in_float32(shims):
    """As FlashInfer's of vLLM 0.24, which converts them once."""
    model, sinks = torch.nn.Module(), torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16), requires_grad=False)
    model.sinks, model.attn = sinks, torch.nn.Identity()
    model.attn.impl = SimpleNamespace(sinks=sinks.float())
    kept = model.attn.impl.sinks
    sinks.fill_(3)
    shims.finish_model(model)
    assert model.attn.impl.sinks is kept and kept.tolist() == [3] * 4
    model.attn.impl.sinks = sinks
    shims.finish_model(model)
    assert model.attn.impl.sinks is sinks


def test_finish_model_renews_a_convolution_that_vllm_keeps_beside_the_packed_one(shims):
    """As its CPU build's Mamba2, which makes a view of weights that are then packed elsewhere."""
    mixer, weights = torch.nn.Module(), torch.zeros(3, 4)
    mixer.conv1d = torch.nn.Module()
    mixer.register_buffer("conv_weights", weights, persistent=False)
    shims.finish_model(mixer)  # where nothing is packed the view has the new weights
    assert not weights.any()
    mixer.conv1d._cpu_unpacked_conv_weight = torch.ones(3, 4)
    shims.finish_model(mixer)
    assert mixer.conv_weights is weights and weights.all()


def test_install_has_experts_load_the_correction_bias_that_is_among_them(shims):
    """Of Laguna; vLLM 0.27 drops it."""
    experts = pytest.importorskip("vllm.model_executor.layers.fused_moe.routed_experts").RoutedExperts
    weights = [("e_score_correction_bias", torch.arange(4.0)), ("0.up_proj.weight", torch.ones(2))]
    shims.install()
    shims.install()
    load, seen = experts.load_weights, []

    def others(self, weights):
        seen.extend(name for name, _ in weights)
        yield "w13_weight"

    assert not hasattr(load.__wrapped__, "__wrapped__")
    holder = torch.nn.Module()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "load_weights", others)
        shims.install()
        assert list(experts.load_weights(holder, iter(weights))) == ["w13_weight"]  # it has no such bias
        assert seen == [name for name, _ in weights]
        holder.e_score_correction_bias = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        seen.clear()
        found = list(experts.load_weights(holder, iter(weights)))
    assert found == ["w13_weight", "e_score_correction_bias"] and seen == ["0.up_proj.weight"]
    assert holder.e_score_correction_bias.tolist() == [0, 1, 2, 3]


def test_install_has_phimoe_add_the_bias_of_its_head(shims):
    """vLLM 0.27 loads it and computes without it."""
    model = pytest.importorskip("vllm.model_executor.models.phimoe").PhiMoEForCausalLM
    shims.install()
    shims.install()
    assert not hasattr(getattr(model.compute_logits, "__wrapped__", None), "__wrapped__")
    head = SimpleNamespace(bias=object())
    given = model.compute_logits(SimpleNamespace(lm_head=head, logits_processor=lambda *given: given), "hidden")
    assert given == (head, "hidden", head.bias)


def test_install_has_experts_load_by_the_loaders_of_their_parameters(shims):
    """vLLM 0.24 calls the module's, which a reload does not see."""
    experts = pytest.importorskip("vllm.model_executor.layers.fused_moe.routed_experts").RoutedExperts

    def of_module(self, weights):
        for name, values in weights:
            yield self.weight_loader(param=self.w13_weight, loaded_weight=values, expert_id=int(name))

    holder, seen = torch.nn.Module(), []
    holder.w13_weight = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    holder.w13_weight.weight_loader = lambda param, loaded_weight, expert_id: seen.append(expert_id)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "load_weights", of_module)
        shims.install()
        list(experts.load_weights(holder, iter([("0", torch.ones(2)), ("1", torch.ones(2))])))
    assert seen == [0, 1] and not hasattr(holder, "weight_loader")


@pytest.mark.parametrize("experts", ["experts", "experts.routed_experts"])
def test_install_lets_dbrx_find_the_parameters_of_its_experts(shims, experts):
    """vLLM 0.27 can't load it; where it finds them, names are left as they are."""
    model, seen = pytest.importorskip("vllm.model_executor.models.dbrx").DbrxModel, []

    def load(self, weights):
        seen.extend(name for name, _ in weights)

    holder = SimpleNamespace(named_parameters=lambda: [(f"blocks.0.ffn.{experts}.w13_weight", None)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "load_weights", load)
        shims.install()
        shims.install()
        assert model.load_weights.__wrapped__ is load
        model.load_weights(holder, [("blocks.0.ffn.experts.mlp.w1", 0), ("norm_f.weight", 0)])
    assert seen == [f"blocks.0.ffn.{experts}.mlp.w1", "norm_f.weight"]


@pytest.mark.parametrize("name", ["GptOssModel", "AnotherModel"])
def test_prepare_model_counts_direct_copies_of_gpt_oss(shims, name):
    """vLLM's own reload loses such tensors, which is why gpt-oss needs it; other models are left as they are."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )

    def load(model, value):
        params = dict(model.named_parameters())
        with torch.no_grad():
            params["experts.w13_weight"].copy_(torch.full((2, 3), value))
            params["experts.sinks"].data.copy_(torch.full((4,), value))

    model = type(name, (torch.nn.Module,), {})()
    model.experts = torch.nn.Module()
    model.experts.w13_weight = torch.nn.Parameter(torch.empty(2, 3), requires_grad=False)
    model.experts.sinks = torch.nn.Parameter(torch.empty(4), requires_grad=False)
    kernels = list(model.parameters())
    record_metadata_for_reloading(model)
    load(model, 1.0)
    for value in (2.0, 3.0):
        shims.prepare_model(model)
        initialize_layerwise_reload(model)
        load(model, value)
        finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.float32))
        assert [id(p) for p in model.parameters()] == [id(p) for p in kernels]
        assert {type(p) for p in model.parameters()} == {torch.nn.Parameter}
        expected = value if name == "GptOssModel" else 1.0
        assert all(torch.equal(p, torch.full_like(p, expected)) for p in kernels)


@pytest.mark.parametrize(
    ("dtype", "rows", "answer"),
    [
        (torch.float32, 64, (True, "vec")),
        (torch.float32, 48, (False, "none")),
        (torch.bfloat16, 64, (True, "amx")),
        (torch.bfloat16, 48, None),
    ],
)
def test_amx_shim_lets_float32_experts_run_on_a_cpu_with_amx(monkeypatch, dtype, rows, answer):
    cpu_shims = importlib.import_module("epfsdp2.rollout.vllm.shims.cpu_shims")
    kind = getattr(cpu_shims.cpu_experts_module(), "CPUFusedMOE", None)
    platform = pytest.importorskip("vllm.platforms.cpu").CpuPlatform
    platform.import_kernels()
    monkeypatch.setattr(cpu_shims, "current_platform", SimpleNamespace(is_cpu=lambda: True))
    if kind is None:
        cpu_shims.install()
        pytest.skip("this vLLM chooses its CPU kernel by another class, which takes float32 beside AMX")
    if not hasattr(torch.ops._C, "prepack_moe_weight"):
        pytest.skip("not vLLM's CPU build for x86")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    kernel = object.__new__(kind)
    layer = SimpleNamespace(
        w13_weight=torch.empty(1, rows, 32, dtype=dtype), w2_weight=torch.empty(1, 32, rows // 2, dtype=dtype)
    )
    stock = getattr(kind.check_grouped_gemm, "__wrapped__", kind.check_grouped_gemm)
    refuses = hasattr(kind, "_grouped_gemm_alignment_error")  # before 0.27: a loop over experts, which fails
    if dtype == torch.float32 and refuses:
        with pytest.raises(RuntimeError):  # the day it does not, the shim can go
            stock(kernel, layer)
    elif dtype == torch.float32:
        assert stock(kernel, layer) == (False, "none")
    cpu_shims.install()
    if answer is None and refuses:
        with pytest.raises(RuntimeError):
            kernel.check_grouped_gemm(layer)
    else:
        assert kernel.check_grouped_gemm(layer) == (answer or (False, "none"))
    silu = next(
        function for kind, function in cpu_shims.cpu_experts_module()._CPU_MOE_ACT_FN.items() if "SILU" in kind.name
    )
    rows = torch.randn(3, 8)  # outside of a vLLM config
    assert torch.equal(silu(rows), torch.nn.functional.silu(rows[:, :4]) * rows[:, 4:])


def test_routes_shim_captures_what_the_cpu_kernel_chooses_itself(monkeypatch):
    cpu_shims = importlib.import_module("epfsdp2.rollout.vllm.shims.cpu_shims")
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.v1.worker import gpu_model_runner

    experts = cpu_shims.cpu_experts_module()
    monkeypatch.setattr(cpu_shims, "current_platform", SimpleNamespace(is_cpu=lambda: True))
    monkeypatch.setattr(experts, "select_experts", inspect.unwrap(experts.select_experts))
    in_class = hasattr(gpu_model_runner.GPUModelRunner, "_bind_routed_experts_capturer")
    owner = gpu_model_runner.GPUModelRunner if in_class else gpu_model_runner
    name = "_bind_routed_experts_capturer" if in_class else "bind_routed_experts_capturer"
    monkeypatch.setattr(owner, name, inspect.unwrap(getattr(owner, name)))

    class Layer(MoERunner):
        layer_id = 3
        _quant_method = None
        router = None

        def __init__(self):
            torch.nn.Module.__init__(self)

    def apply(hidden, logits):
        return experts.select_experts(hidden, logits, 2, False, True)

    layer = Layer()
    layer._quant_method = SimpleNamespace(is_monolithic=True, apply_monolithic=apply, moe_kernel=None)
    model = torch.nn.ModuleList([layer])
    held = SimpleNamespace(model=model, compilation_config=SimpleNamespace(static_forward_context={"experts": layer}))
    captured = []
    capturer = SimpleNamespace(capture=lambda number, ids: captured.append((number, ids)))
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0], [5.0, 0.0, 1.0, 6.0]])

    def bind():
        getattr(owner, name)(held if in_class else model, capturer)

    with contextlib.suppress(ValueError):  # before 0.27 no refusal, and zeros
        bind()
    layer._quant_method.apply_monolithic(torch.zeros(2, 4), logits)
    assert not captured  # the day that it is not empty, the shim can go
    cpu_shims.install()
    bind()
    layer._quant_method.apply_monolithic(torch.zeros(2, 4), logits)
    apply(torch.zeros(2, 4), logits)  # of another layer, without a capturer
    ((number, ids),) = captured
    assert number == 3 and [set(row) for row in ids.tolist()] == [{1, 2}, {0, 3}]
