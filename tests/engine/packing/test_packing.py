"""Sequences packed into one row against the same apart, for every family of the parity table."""

import contextlib
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_next import modeling_qwen3_next

from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.fsdp.activation_checkpoint import checkpoint_layers
from epfsdp2.engine.model.layers import layer_names
from epfsdp2.engine.packing import sequences as packing
from epfsdp2.engine.packing.attention import spans_of
from epfsdp2.engine.packing.sequences import PackedSequences, lengths_taken, why_not_packed
from epfsdp2.engine.preflight.features import check_packing
from tests.parity import families
from tests.parity.float64 import float64
from tests.support.engine.rows import IN_FLOAT64, LENGTHS, SIZES, apart, gradients, packed, row
from tests.support.engine.varlen_kernels import flash_by_sdpa
from tests.support.models.tiny import VOCAB, relative_error
from tests.support.ranks import run_ranks
from tests.support.trainer.ppo import check_ppo_updates_in_float64

EXACT = 1e-6  # in float64; norms, some softmaxes and some routers always compute in float32
# One of each kind of mask, mixer or position; all others are long.
KINDS = {"afmoe", "deepseek_v3", "deepseek_v4", "gemma4", "glm_moe_dsa", "gpt_oss", "jamba", "lfm2_moe", "llama4"}
KINDS |= {"minimax", "mistral", "qwen3_moe", "qwen3_next"}
EAGER = {"deepseek_v3", "glm_moe_dsa", "mistral", "qwen3_next"}  # whose masks differ


def _model(name, attention="sdpa"):
    return families.ALL[name].build_random(attention, **SIZES.get(name, {}))


def _attend_by(model, attention):
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = attention


def _loss(logits, targets, of=None):
    losses = nn.functional.cross_entropy(logits[0].double(), targets, reduction="none").split(LENGTHS)
    return (sum(loss.sum() for loss in losses) if of is None else losses[of].sum()) / sum(LENGTHS)


def _check_close(found, wanted, bound):
    bad = {n: error for n, grad in wanted.items() if (error := relative_error(found[n], grad)) > bound}
    assert not bad, bad


def _check_family(name, attention):
    # With sdpa GLM-MoE-DSA (transformers 5.9) sees what comes later: the reference is its eager attention.
    model = _model(name, "eager" if name == "glm_moe_dsa" else attention)
    ids, targets = row()
    logits = apart(model, ids)
    wanted = gradients(model, _loss(logits, targets))
    _attend_by(model, attention)
    PackedSequences(model)
    found = packed(model, ids)
    assert relative_error(found, logits) < EXACT
    _check_close(gradients(model, _loss(found, targets)), wanted, EXACT)

    # No gradient of a sequence's loss reaches the embeddings of another.
    embedded = []
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: embedded.append(output))
    of_third = _loss(packed(model, ids), targets, 2)
    (seen,) = torch.autograd.grad(of_third, embedded[:1])
    assert [bool(each.any()) for each in seen[0].split(LENGTHS)] == [False, False, True, False]


def _families():
    for name, attention in itertools.product(families.ALL, ("", "eager")):
        marks = () if name in (EAGER if attention else KINDS) else pytest.mark.long
        yield pytest.param(name, attention or families.ALL[name].attention, marks=marks)


@pytest.mark.parametrize(("name", "attention"), _families())
def test_packed_sequences_of_every_family_equal_separate_ones(name, attention):
    with float64() if name in IN_FLOAT64 else contextlib.nullcontext():
        _check_family(name, attention)


class _Pairs:
    """Counts the pairs of queries and keys, and the masks, that sdpa gets."""

    def __init__(self, monkeypatch):
        self.pairs = self.masks = 0
        self._real = nn.functional.scaled_dot_product_attention
        monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", self)

    def __call__(self, query, key, value, attn_mask=None, **kwargs):
        queries = query.shape[2] if attn_mask is None else attn_mask.shape[2]  # transformers 5.23 doubles one alone
        self.pairs += queries * key.shape[2]
        self.masks += attn_mask is not None
        return self._real(query, key, value, attn_mask=attn_mask, **kwargs)


def test_packed_sequences_make_no_mask_and_compute_no_pair_across_sequences(monkeypatch):
    model, (ids, _) = _model("qwen3_moe"), row()
    asked = []
    for name in ("sdpa", "eager"):
        real = ALL_MASK_ATTENTION_FUNCTIONS[name]
        spy = functools.partial(lambda real, **kwargs: asked.append(real(**kwargs)) or asked[-1], real)
        monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, name, spy)
    PackedSequences(model)
    counted = _Pairs(monkeypatch)
    packed(model, ids)
    layers = model.config.num_hidden_layers
    assert (counted.pairs, counted.masks) == (layers * sum(length**2 for length in LENGTHS), 0)
    assert asked and all(mask is None for mask in asked)


def test_packed_sequences_with_a_sliding_window_compute_it_in_blocks(monkeypatch):
    model, (ids, _) = _model("mistral"), row()
    PackedSequences(model)
    counted = _Pairs(monkeypatch)
    packed(model, ids)
    # 14 tokens: 5 x 5, then 5 x 10 and 4 x 9; so 11: 5 x 5, 5 x 10, 1 x 6; the others whole.
    assert counted.pairs == model.config.num_hidden_layers * (25 + 50 + 36 + 25 + 50 + 6 + 36 + 1)


def test_packed_sequences_with_one_mask_of_the_row_stay_separate(monkeypatch):
    """sdpa replaces flex attention; AFMoE makes no mask between sequences."""
    for interface in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        monkeypatch.setitem(interface._global_mapping, "flex_attention", interface["sdpa"])
    model, (ids, _) = _model("afmoe"), row()
    _attend_by(model, "flex_attention")
    wanted = apart(model, ids)
    assert relative_error(packed(model, ids), wanted) > 1e-2
    PackedSequences(model)
    counted = _Pairs(monkeypatch)
    assert relative_error(packed(model, ids), wanted) < EXACT
    assert counted.pairs == model.config.num_hidden_layers * sum(LENGTHS) ** 2


def test_packed_attention_of_rows_that_are_not_packed_changes_nothing():
    model, plain, (ids, _) = _model("qwen3_next"), _model("qwen3_next"), row()
    PackedSequences(model)
    batch = {
        "input_ids": torch.cat([ids[0], ids[0].flip(1)]),
        "attention_mask": torch.tensor([[0] * 3 + [1] * 8, [1] * 11]),
        "position_ids": torch.arange(11).expand(2, -1),
    }
    assert torch.equal(model(**batch, use_cache=False).logits, plain(**batch, use_cache=False).logits)
    batch["attention_mask"] = None
    assert torch.equal(model(**batch, use_cache=False).logits, plain(**batch, use_cache=False).logits)
    with pytest.raises(ValueError, match="need one row of position_ids, and there are 2"):
        model(**{**batch, "position_ids": torch.arange(11).expand(2, -1) % 6})
    assert plain.config._attn_implementation == "sdpa"  # configs may be shared with what else is built of them


@pytest.mark.skipif(
    not hasattr(modeling_qwen3_next, "is_fast_path_available"), reason="this transformers takes kernels from its hub"
)
def test_packed_sequences_pass_their_lengths_to_kernels_if_all_take_them(monkeypatch):
    """``test_shared_mixers.py`` calls the kernels."""
    model = _model("qwen3_next")
    mixers = [layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn")]
    assert all(lengths_taken(mixer) == () for mixer in mixers)
    monkeypatch.setattr(modeling_qwen3_next, "is_fast_path_available", True)
    for mixer in mixers:
        mixer.chunk_gated_delta_rule = lambda query, key, value, g, beta, cu_seqlens=None: value
        mixer.causal_conv1d_fn = lambda x, weight, bias, activation: x
        assert lengths_taken(mixer) == ()
        mixer.causal_conv1d_fn = lambda x, weight, bias, activation, seq_idx=None: x
        assert lengths_taken(mixer) == ("seq_idx", "cu_seq_lens_q")
    line = PackedSequences(model).line()
    assert "Qwen3NextGatedDeltaNet: kernels that take seq_idx and cu_seq_lens_q" in line


@pytest.mark.parametrize("sequences", [LENGTHS, LENGTHS[:1]])
def test_packed_sequences_with_flash_attention_compute_the_lengths_of_a_row_once(monkeypatch, sequences):
    model, (ids, _) = _model("qwen3_moe", "sdpa"), row()
    ids = ids[: len(sequences)]
    wanted = apart(model, ids)
    calls, mapping = [], ALL_ATTENTION_FUNCTIONS._global_mapping
    monkeypatch.setitem(mapping, "flash_attention_2", functools.partial(flash_by_sdpa, calls))
    _attend_by(model, "flash_attention_2")
    found = []
    monkeypatch.setattr(packing, "spans_of", lambda positions: found.append(1) or spans_of(positions))
    for _ in range(2):  # the attention is wrapped once
        PackedSequences(model)
    layers = [model.get_submodule(fqn) for fqn in layer_names(model)]
    checkpoint_layers(layers, (), 8, "full")
    model.train()
    logits = packed(model, ids)
    assert relative_error(logits, wanted) < EXACT
    logits.sum().backward()
    ends = [0, *itertools.accumulate(sequences)]
    assert calls == [(ends, max(sequences))] * 2 * len(layers), "in the forward, and computed again"
    assert len(found) == 2, "by each of the two, for all layers"


def test_packed_sequences_of_unknown_mixers_are_refused(tmp_path):
    from epfsdp2.engine.preflight.model import inspect_model

    model = _model("lfm2_moe")
    model.model.layers[0].feed_forward.conv = nn.Conv1d(4, 4, 3)  # where no module takes a mask or a cache
    assert "a convolution mixes tokens in model.layers.0.feed_forward" in why_not_packed(model, "sdpa")
    with pytest.raises(ValueError, match="a convolution mixes tokens"):
        PackedSequences(model)
    assert "GlmMoeDsaAttention needs masks" in why_not_packed(_model("glm_moe_dsa"), "flash_attention_2")

    settings = {"path": str(families.save("glm4v_moe", tmp_path))}
    facts = inspect_model(settings)
    with pytest.raises(SettingError, match=r"use_remove_padding=True: packs .* three rows .*=False"):
        check_packing(settings, facts)
    check_packing(settings | {"use_remove_padding": False}, facts)
    check_packing(settings | {"override_config": {"attn_implementation": "sdpa"}}, facts)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padded_batch_of_a_family_that_would_see_later_tokens_is_refused(tmp_path, attention):
    from epfsdp2.engine.preflight.model import inspect_model

    plain = families.ALL["glm_moe_dsa"].build_random(attention)
    seen = [plain(input_ids=torch.tensor([[3, *later]]), use_cache=False).logits[:, 0] for later in ((4, 5), (6, 7))]
    settings = {
        "path": str(families.save("glm_moe_dsa", tmp_path)),
        "use_remove_padding": False,
        "override_config": {"attn_implementation": attention},
    }
    words = "use_remove_padding=False: pads sequences, and .* sees later tokens .*attn_implementation=eager"
    is_right = torch.equal(*seen)
    with contextlib.nullcontext() if is_right else pytest.raises(SettingError, match=words):
        check_packing(settings, inspect_model(settings))
    assert is_right or attention == "sdpa"


@pytest.mark.parametrize("name", ["qwen3_next", pytest.param("gpt_oss", marks=pytest.mark.long)])
def test_packed_sequences_in_ppo_updates_equal_the_plain_model(tmp_path, name):
    pytest.importorskip("verl")
    attention = families.ALL[name].attention
    cases = [{"ep": 2, "dynamic": True, "activation_checkpointing": "full"}]
    with float64():
        families.save(name, tmp_path)
    # An eps that does not magnify rounding errors of tiny gradients.
    run_ranks(check_ppo_updates_in_float64, 2, tmp_path, cases, attention, {"eps": 1e-5}, timeout=300)


UNEVEN = ((9, 4, 7), (5,))  # lengths of the sequences of each rank's row


def _uneven():
    """Parts of mixers are FSDP units, like norms kept in float32: each call is a collective."""
    generator = torch.Generator().manual_seed(1)
    ids = [[torch.randint(3, VOCAB, (1, length), generator=generator) for length in own] for own in UNEVEN]
    model, own = _model("qwen3_next"), ids[dist.get_rank()]
    for each in ids:
        apart(model, each).square().sum().backward()
    wanted = {name: param.grad for name, param in model.named_parameters()}
    model.zero_grad()
    PackedSequences(model)
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            fully_shard(layer.linear_attn.out_proj)
            fully_shard([layer.linear_attn.in_proj_qkvz, layer.linear_attn.in_proj_ba])
        fully_shard(layer)
    fully_shard(model)
    for _ in range(2):
        model.zero_grad()
        (2 * packed(model, own).square().sum()).backward()  # FSDP takes the mean over two ranks
        _check_close({n: p.grad.full_tensor() for n, p in model.named_parameters()}, wanted, EXACT)


def test_packed_sequences_of_unequal_number_on_ranks_make_the_same_collectives():
    run_ranks(_uneven, 2, timeout=120)
