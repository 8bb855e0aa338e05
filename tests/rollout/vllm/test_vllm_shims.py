"""The shims for vLLM's reload, on vLLM's classes without an engine."""

import contextlib
import functools
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def shims():
    return pytest.importorskip("epfsdp2.rollout.vllm.reload_shims")


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


@contextlib.contextmanager
def _installed(shims, module, owner, stock):
    """Install the shims over the function ``stock`` of this name in a class of vLLM."""
    found = getattr(pytest.importorskip(f"vllm.model_executor.{module}"), owner)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(found, stock.__name__, stock)
        shims.install()
        shims.install()
        assert getattr(found, stock.__name__).__wrapped__ is stock
        yield getattr(found, stock.__name__)


def test_install_has_experts_load_the_correction_bias_that_is_among_them(shims):
    """Laguna has such a bias, and vLLM 0.27 drops it."""
    weights = [("e_score_correction_bias", torch.arange(4.0)), ("0.up_proj.weight", torch.ones(2))]
    holder, seen = torch.nn.Module(), []

    def load_weights(self, weights):
        seen.extend(name for name, _ in weights)
        yield "w13_weight"

    with _installed(shims, "layers.fused_moe.routed_experts", "RoutedExperts", load_weights) as load:
        assert list(load(holder, iter(weights))) == ["w13_weight"]  # it has no such bias
        assert seen == [name for name, _ in weights]
        holder.e_score_correction_bias = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        seen.clear()
        assert list(load(holder, iter(weights))) == ["w13_weight", "e_score_correction_bias"]
    assert seen == ["0.up_proj.weight"] and holder.e_score_correction_bias.tolist() == [0, 1, 2, 3]


def test_install_has_experts_load_by_the_loaders_of_their_parameters(shims):
    """vLLM 0.24 calls the module's, which a reload does not see."""

    def load_weights(self, weights):
        for name, values in weights:
            yield self.weight_loader(param=self.w13_weight, loaded_weight=values, expert_id=int(name))

    holder, seen = torch.nn.Module(), []
    holder.w13_weight = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    holder.w13_weight.weight_loader = lambda param, loaded_weight, expert_id: seen.append(expert_id)
    with _installed(shims, "layers.fused_moe.routed_experts", "RoutedExperts", load_weights) as load:
        list(load(holder, iter([("0", torch.ones(2)), ("1", torch.ones(2))])))
    assert seen == [0, 1] and not hasattr(holder, "weight_loader")


def test_install_has_phimoe_add_the_bias_of_its_head(shims):
    """vLLM 0.27 loads it and computes without it."""

    def compute_logits(self, hidden_states): ...

    head = SimpleNamespace(bias=object())
    model = SimpleNamespace(lm_head=head, logits_processor=lambda *given: given)
    with _installed(shims, "models.phimoe", "PhiMoEForCausalLM", compute_logits) as compute:
        assert compute(model, "hidden") == (head, "hidden", head.bias)


@pytest.mark.parametrize("experts", ["experts", "experts.routed_experts"])
def test_install_lets_dbrx_find_the_parameters_of_its_experts(shims, experts):
    """vLLM 0.27 can't load it; where it finds them, names are left as they are."""
    seen = []

    def load_weights(self, weights):
        seen.extend(name for name, _ in weights)

    holder = SimpleNamespace(named_parameters=lambda: [(f"blocks.0.ffn.{experts}.w13_weight", None)])
    with _installed(shims, "models.dbrx", "DbrxModel", load_weights) as load:
        load(holder, [("blocks.0.ffn.experts.mlp.w1", 0), ("norm_f.weight", 0)])
    assert seen == [f"blocks.0.ffn.{experts}.mlp.w1", "norm_f.weight"]


@pytest.fixture
def record(shims):
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    return record_metadata_for_reloading


@pytest.fixture
def reloading(shims):
    """Prepare a model as a worker does, let the block load its weights, and end vLLM's reload."""
    from vllm.model_executor.model_loader import reload

    @contextlib.contextmanager
    def reloading(model):
        shims.prepare_model(model)
        reload.initialize_layerwise_reload(model)
        yield
        reload.finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.float32))

    return reloading


@pytest.mark.parametrize("name", ["GptOssModel", "AnotherModel"])
def test_prepare_model_counts_direct_copies_of_gpt_oss(record, reloading, name):
    """vLLM's own reload loses such tensors, which is why gpt-oss needs it; other models are left as they are."""

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
    record(model)
    load(model, 1.0)
    for value in (2.0, 3.0):
        with reloading(model):
            load(model, value)
        assert [id(p) for p in model.parameters()] == [id(p) for p in kernels]
        assert {type(p) for p in model.parameters()} == {torch.nn.Parameter}
        expected = value if name == "GptOssModel" else 1.0
        assert all(torch.equal(p, torch.full_like(p, expected)) for p in kernels)


def test_prepare_model_loads_the_first_sinks_of_deepseek_v4_and_pads_them(record, reloading):
    """vLLM copies a worker's sinks into the first rows, and heads that only pad have -inf."""
    model = type("DeepseekV4Model", (torch.nn.Module,), {})()
    model.attn = torch.nn.Module()
    model.attn.attn_sink = kept = torch.nn.Parameter(torch.full((4,), -torch.inf), requires_grad=False)
    record(model)
    with reloading(model):
        dict(model.named_parameters())["attn.attn_sink"][:3].copy_(torch.arange(3.0))
    assert model.attn.attn_sink is kept and kept.tolist() == [0, 1, 2, -torch.inf]


def test_prepare_model_collects_the_parts_of_inklings_experts(record, reloading):
    """vLLM moves values to the parameter's device, and copies gate and up of each expert apart."""
    model = type("InklingMoE", (torch.nn.Module,), {})()
    model.experts = torch.nn.Module()
    model.experts.w13_weight = kept = torch.nn.Parameter(torch.zeros(2, 4, 3), requires_grad=False)
    record(model)
    rows = torch.arange(24.0).view(2, 4, 3)
    with reloading(model):
        loading = model.experts.w13_weight
        for expert, values in enumerate(rows.to(loading.device)):
            loading.data[expert, :2].copy_(values[0::2])
            loading.data[expert, 2:].copy_(values[1::2])
    assert model.experts.w13_weight is kept and torch.equal(kept, rows[:, [0, 2, 1, 3]])


def test_prepare_model_lets_deepseek_v4_derive_tensors_once_all_are_loaded(shims, record, reloading):
    """Its class for NVIDIA GPUs does it after each bucket, from parameters on meta."""

    class Model(torch.nn.Linear):
        finalizes_weights_during_load = True

        def process_weights_after_loading(self):
            self.sums.copy_(self.weight.detach().sum(dim=1))

    model = Model(3, 2, bias=False)
    model.sums = sums = torch.zeros(2)
    record(model)
    with reloading(model):
        model.process_weights_after_loading()
        model.weight.weight_loader(model.weight, torch.ones(2, 3))
    shims.end_loading(model)
    assert model.sums is sums and sums.tolist() == [3, 3]
    assert "process_weights_after_loading" not in vars(model)


@pytest.mark.parametrize("is_sparse", [True, False])
def test_prepare_model_removes_the_norm_that_dense_layers_of_a_x_k1_do_not_call(shims, is_sparse):
    layer = type("AXK1DecoderLayer", (torch.nn.Module,), {"is_layer_sparse": is_sparse})()
    layer.post_mlp_layernorm = norm = torch.nn.LayerNorm(2)
    shims.prepare_model(layer)
    assert list(layer.parameters()) == (list(norm.parameters()) if is_sparse else [])


@pytest.mark.parametrize(
    ("name", "sinks"),
    [
        ("DeepseekV4Model", "attn_sink"),
        ("GptOssModel", "sinks"),
        ("HYV4Model", "learnable_sink_param"),
        ("MiMoV2Model", "attention_sink_bias"),
    ],
)
def test_prepare_model_keeps_the_loader_of_sinks(record, reloading, name, sinks):
    """vLLM 0.33 has one, which cuts them for the worker."""

    def second_half(param, loaded):
        param.data.copy_(loaded[2:])

    model = type(name, (torch.nn.Module,), {})()
    kept = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    model.register_parameter(sinks, kept)
    kept.weight_loader = second_half
    record(model)
    with reloading(model):
        loading = getattr(model, sinks)
        loading.weight_loader(loading, torch.arange(4.0))
    assert getattr(model, sinks) is kept and kept.tolist() == [2, 3]
