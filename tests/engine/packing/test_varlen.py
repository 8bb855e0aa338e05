"""One call for a packed row beside one per sequence: the same values and gradients, and the rows that it computes."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    causal_mask_function,
    chunked_overlay,
    eager_mask,
    packed_sequence_mask_function,
    sliding_window_overlay,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from epfsdp2.engine.model.layers import layer_names
from epfsdp2.engine.packing import varlen
from epfsdp2.engine.packing.attention import PackedAttention, PackedMask
from epfsdp2.engine.packing.sequences import PackedSequences
from tests.parity.families import ALL, EVERY
from tests.support.engine.rows import LENGTHS, apart, gradients, packed, row
from tests.support.engine.varlen_kernels import varlen_on_a_cpu
from tests.support.models.tiny import relative_error

EXACT = 1e-12  # in float64
ENDS = [0, *itertools.accumulate(LENGTHS)]
SPANS = tuple(itertools.pairwise(ENDS))
WINDOW = 5


def _mask(*functions, **asked):
    """Return the mask of the packed row, with ``functions`` besides those that separate sequences."""
    numbers = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[None]
    function = and_masks(*functions, packed_sequence_mask_function(numbers))
    asked = {"batch_size": 1, "mask_function": function, "device": "cpu", "dtype": torch.float64, **asked}
    return PackedMask(ALL_MASK_ATTENTION_FUNCTIONS["sdpa"], eager_mask, asked)


def _causal():
    return _mask(causal_mask_function)


def _window():
    return _mask(causal_mask_function, sliding_window_overlay(WINDOW), local_size=WINDOW)


def _chunks():
    starts = torch.zeros(1, dtype=torch.long)
    return _mask(causal_mask_function, chunked_overlay(WINDOW, starts), local_size=WINDOW)


def _heads(heads=4, kv_heads=4, dim=16, wide=16, dtype=torch.float64):
    """Return queries, keys and values as families make them: views of ``[1, S, H, D]``."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((heads, dim), (kv_heads, dim), (kv_heads, wide))
    return [
        torch.randn(1, ENDS[-1], *size, generator=generator, dtype=torch.float64).to(dtype).transpose(1, 2)
        for size in sizes
    ]


def _attention(lengths=None):
    ends = torch.tensor(ENDS, dtype=torch.int32)
    row = {"cu_seq_lens_q": ends, "max_length_q": max(LENGTHS)}
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return PackedAttention(sdpa, False, lambda: SPANS, lambda: row if lengths is None else lengths)


def _results(attention, heads, mask, **kwargs):
    """Return the output, and the gradients of queries, keys and values."""
    leaves = [each.detach().clone(memory_format=torch.preserve_format).requires_grad_() for each in heads]
    module = SimpleNamespace(is_causal=True, num_key_value_groups=heads[0].shape[1] // heads[1].shape[1])
    output, _ = attention.attend(module, *leaves, mask, **kwargs)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return output.detach(), *torch.autograd.grad((output.double() * weights).sum(), leaves)


@pytest.mark.parametrize("name", ["torch", "fa3"])
@pytest.mark.parametrize("mask, before", [(_causal, -1), (_window, WINDOW - 1)])
@pytest.mark.parametrize(
    "sizes, kwargs",
    [
        ({}, {}),
        ({"heads": 6, "kv_heads": 2}, {"scaling": 0.3}),
        ({"dim": 24, "wide": 16}, {"scaling": 24**-0.5, "dropout": 0.0, "softcap": None, "s_aux": None}),
        ({"dim": 24, "wide": 10}, {}),
    ],
    ids=["equal", "grouped", "latent", "latent, odd"],
)
def test_one_call_for_a_row_equals_one_for_each_sequence(name, mask, before, sizes, kwargs):
    heads = _heads(**sizes)
    if name == "torch":  # a rotary embedding may leave the last dim with any stride
        heads[:2] = [each.mT.contiguous().mT for each in heads[:2]]
    one_by_one = PackedAttention(ALL_ATTENTION_FUNCTIONS["sdpa"], False, lambda: SPANS)
    wanted = _results(one_by_one, heads, mask(), **kwargs)
    with varlen_on_a_cpu(name) as calls:
        found = _results(_attention(), heads, mask(), **kwargs)
    assert calls == [(list(LENGTHS), before, 1)]
    assert [each.shape for each in found] == [each.shape for each in wanted]
    assert max(map(relative_error, found, wanted)) < EXACT


FALLBACKS = {
    "its mask is neither causal nor a causal window": {"mask": _chunks},
    "it is not causal": {"kwargs": {"is_causal": False}},
    "it has dropout": {"kwargs": {"dropout": 0.1}},
    "it has softcap": {"kwargs": {"softcap": 30.0}},
    "it has s_aux": {"kwargs": {"s_aux": torch.zeros(4)}},
    "it computes in torch.float32": {"sizes": {"dtype": torch.float32}},
    "its heads have 20 and 16 columns": {"sizes": {"dim": 20}},
    "its heads have 16 and 24 columns": {"sizes": {"wide": 24}},
    "its heads have 264 and 16 columns": {"sizes": {"dim": 264}},
}


def test_rows_that_the_kernels_do_not_compute_as_sdpa_does_are_called_by_sequence():
    counted = []

    def sdpa(module, query, *args, **kwargs):
        counted.append(query.shape[2])
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, *args, **kwargs)

    why, causal, both = varlen.why_not_in_one_call, SimpleNamespace(is_causal=True), SimpleNamespace(is_causal=False)
    attention = PackedAttention(sdpa, False, lambda: SPANS, lambda: {"max_length_q": max(LENGTHS)})
    with varlen_on_a_cpu() as calls:
        for reason, case in FALLBACKS.items():
            heads, mask, kwargs = _heads(**case.get("sizes", {})), case.get("mask", _causal)(), case.get("kwargs", {})
            assert why(causal, *heads, mask, kwargs) == reason
            counted.clear()
            attention.attend(causal, *heads, mask, **kwargs)
            assert counted == list(LENGTHS) and calls == []
    query, *others = _heads(dtype=torch.bfloat16)
    assert why(both, query, *others, _causal(), {}) == "it is not causal"
    assert why(causal, query.half(), *others, _causal(), {}) == "it computes in torch.bfloat16, torch.float16"
    for module, kwargs in ((both, {"is_causal": True}), (causal, {}), (SimpleNamespace(), {})):
        assert why(module, query, *others, _causal(), kwargs) is None


@pytest.mark.parametrize(
    "capability, installed, name",
    [
        (None, ("torch", "fa3"), None),
        ((7, 5), ("torch", "fa3"), None),
        ((8, 0), ("torch", "fa3"), "torch"),
        ((9, 0), ("torch", "fa3"), "fa3"),
        ((9, 0), ("torch",), "torch"),
        ((10, 0), ("torch", "fa3"), "torch"),
        ((9, 0), (), None),
    ],
)
def test_fastest_kernel_is_that_of_the_device_among_those_that_are_installed(monkeypatch, capability, installed, name):
    assert varlen.fastest(torch.device("cpu")) is None
    monkeypatch.setattr(varlen, "_capability", lambda device: capability)
    monkeypatch.setattr(varlen, "available", lambda: dict.fromkeys(installed))
    assert varlen.fastest(torch.device("cuda")) == name


def test_varlen_attention_of_torch_2_11_gets_the_parameters_that_it_has(monkeypatch):
    from torch.nn.attention import varlen as of_torch

    def older(query, key, value, ends, key_ends, longest, longest_key, *, scale=None, window_size=(-1, -1)):
        return query

    monkeypatch.setattr(of_torch, "varlen_attn", older)
    with varlen_on_a_cpu():
        heads = _heads(kv_heads=2)
        output, _ = _attention().attend(SimpleNamespace(), *heads, _causal())
    assert torch.equal(output, heads[0].transpose(1, 2))


# Heads of 16 or 24 columns: grouped queries, windows in some layers or all, latent attention, chunks in some layers.
SIZES = {
    "qwen3_moe": {"head_dim": 16},
    "mistral": {"head_dim": 16, "sliding_window": WINDOW},
    "gemma3": {"head_dim": 16, "sliding_window": WINDOW},
    "deepseek_v3": {"qk_nope_head_dim": 16},
    "llama4": {"text_config": {**EVERY["llama4"].sizes["text_config"], "head_dim": 16, "attention_chunk_size": WINDOW}},
}


@pytest.mark.parametrize("name", SIZES)
def test_models_on_a_gpu_compute_packed_rows_in_one_call_a_layer(name):
    model, (ids, _) = ALL[name].build_random("sdpa", **SIZES[name]), row()
    logits = apart(model, ids)
    wanted = gradients(model, logits.square().sum())
    with varlen_on_a_cpu() as calls:
        rows = PackedSequences(model)
        in_one = packed(model, ids)
        found = gradients(model, in_one.square().sum())
    layers = len(layer_names(model))
    text = model.config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["sliding_attention" if name == "mistral" else "full"] * layers
    befores = {"sliding_attention": WINDOW - 1}
    in_one_call = [befores.get(kind, -1) for kind in kinds if kind != "chunked_attention"]
    assert calls == [(list(LENGTHS), before, 1) for before in in_one_call]
    assert ("chunked_attention" in kinds) == (name == "llama4")
    assert relative_error(in_one, logits) < 1e-6
    assert max(relative_error(found[n], grad) for n, grad in wanted.items()) < 1e-6
    assert "once per sequence" in rows.line() and "torch's kernel" not in rows.line(), "there is no GPU"


def test_log_says_which_kernel_computes_rows():
    model = ALL["qwen3_moe"].build_random("sdpa")
    with varlen_on_a_cpu("fa3"):
        line = PackedSequences(model).line()
    wanted = "Qwen3MoeAttention: the row by fa3's kernel where it computes the same, else sdpa once per sequence"
    assert line == f"packed rows: {wanted}"
