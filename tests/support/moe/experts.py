"""Small experts modules of several families, and their outputs and gradients with a backend."""

import copy

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.openai_privacy_filter.modeling_openai_privacy_filter import OpenAIPrivacyFilterExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from epfsdp2.engine.moe.forward import ExpertsRuntime, adapt_experts, attach, compute, experts_forward
from tests.support.models.tiny import relative_error

__all__ = [
    "ENDS",
    "FAMILIES",
    "INNER",
    "RELATIVE",
    "D",
    "E",
    "T",
    "Config",
    "assert_equal",
    "bytes_kept",
    "grads_of",
    "make",
    "routed",
    "rows_with",
    "tokens_with",
]

RELATIVE = 1e-5
E, K, D, INNER, T = 6, 3, 24, 20, 11
ENDS = "gate_up_proj_lora_A", "gate_up_proj_lora_B", "down_proj_lora_A", "down_proj_lora_B"


class Config:
    """The config fields that experts classes of several families read."""

    hidden_size, intermediate_size, moe_intermediate_size = D, INNER, INNER
    num_experts = num_local_experts = n_routed_experts = E
    hidden_act, mlp_hidden_act, swiglu_limit, swiglu_alpha, moe_latent_size = "silu", "relu2", 1.5, 1.702, None
    _experts_implementation = "eager"


FAMILIES = {
    "plain": Qwen3MoeExperts,
    "clamped": DeepseekV4Experts,
    "interleaved, transposed, biases": GptOssExperts,
    "transposed, biases": OpenAIPrivacyFilterExperts,
    "no gate": NemotronHExperts,
}


class Enabled:
    enabled = True


def make(family, dtype=torch.float32, adapters=False, config=Config):
    """Build a family's experts with random weights, with or without adapters."""
    torch.manual_seed(1)
    module = FAMILIES[family](config())
    if adapters:
        enabled = Enabled()
        for name, (out, inner) in {"gate_up_proj": (2 * INNER, D), "down_proj": (D, INNER)}.items():
            module.register_parameter(f"{name}_lora_A", nn.Parameter(torch.empty(E, 3, inner)))
            module.register_parameter(f"{name}_lora_B", nn.Parameter(torch.empty(E, out, 3)))
            adapt_experts(module, enabled, name, 0.5)
    for param in module.parameters():
        nn.init.normal_(param, std=0.5)
    return module.to(dtype)


def routed(tokens=T, dtype=torch.float32, weights_dtype=torch.float32, width=D):
    """Draw tokens, routing weights and ids of all experts but the last, of which each token lists one twice."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, E - 1, (tokens, K), generator=generator)
    ids[:, 1] = ids[:, 0]
    hidden = torch.randn(tokens, width, generator=generator).to(dtype)
    return hidden, ids, torch.rand(tokens, K, generator=generator).to(weights_dtype)


def tokens_with(module, backend, hidden, ids, weights):
    """Return output and gradients of hidden states, routing weights and parameters, with all experts on one rank."""
    leaves = {"hidden": hidden, "weights": weights}
    return _results(module, backend, leaves, lambda own, hidden, weights: experts_forward(own, hidden, ids, weights))


def rows_with(module, backend, rows, counts_e, scale=None):
    """Return the same for received rows, with or without routing weights that are applied on the source rank."""

    def computed(own, rows, scale=None):
        return compute(own, dict(own.named_parameters()), rows, counts_e, scale)

    return _results(module, backend, {"rows": rows} if scale is None else {"rows": rows, "scale": scale}, computed)


def _results(module, backend, leaves, function):
    module, leaves = copy.deepcopy(module), {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
    attach(module, ExpertsRuntime(E, None, backend=backend))
    out = function(module, **leaves)
    (out.float() * torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)).sum().backward()
    return {"out": out} | {name: leaf.grad for name, leaf in leaves.items()} | grads_of(module)


def bytes_kept(function, without):
    """Count the bytes of storages that autograd saves in a call, except parameters and inputs."""
    known, kept = {t.untyped_storage()._cdata for t in without}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return sum(storage.nbytes() for storage in kept.values())


def grads_of(module):
    """Return the gradients of what is trained, by name."""
    return {name: param.grad for name, param in module.named_parameters() if param.requires_grad}


def assert_equal(got, want, bound=RELATIVE):
    """Compare tensors by name: the same shapes and dtypes, and values within ``bound``, relative."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].shape == value.shape and got[name].dtype == value.dtype, name
        assert relative_error(got[name], value) < bound, (name, relative_error(got[name], value))
