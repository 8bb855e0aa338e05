"""Ranks that share rows equal the plain model, for layers that need whole sequences."""

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers.models.qwen3_next import modeling_qwen3_next

from epfsdp2.engine.fsdp.ulysses import SequenceParallel
from epfsdp2.engine.model.layers import layer_names
from epfsdp2.engine.packing import sequences, shared_mixers
from epfsdp2.engine.packing.compressors import use_every_compressor
from epfsdp2.engine.packing.head_parts import head_parts_of
from epfsdp2.engine.packing.sequences import PackedSequences, find_mixers
from epfsdp2.engine.packing.shared_mixers import _reach, assign
from tests.parity.families import ALL, BY_SEQUENCES, STATES, save
from tests.parity.float64 import float64
from tests.support.engine.rows import IN_FLOAT64, LENGTHS, SIZES, errors, loss, one_by_one, own_slice, packed, row
from tests.support.models.tiny import relative_error
from tests.support.ranks import each_case, run_ranks
from tests.support.trainer.ppo import check_ppo_updates_in_float64

EXACT = 1e-6  # in float64; norms and some routers always compute in float32
DELTA_RULES = ["qwen3_5_moe", "qwen3_next"]
UNEVEN = LENGTHS
LONG = (32,)  # on one rank, or over heads
MOSTLY_ONE = (3, 1, 26, 2)  # over heads, of several sequences
TWO_LONG = (21, 9, 2)  # on four ranks, each has tokens of one of them
ONE_QUERY = (7, 25)  # on four ranks, the first has one token of the second sequence
FEW = (4, 2)  # slices shorter than the convolution's reach, on four ranks with two tokens of padding


def _model(name):
    # As in test_packing.py.
    attention = "eager" if name == "glm_moe_dsa" else ALL[name].attention
    return ALL[name].build_random(attention, **SIZES.get(name, {}))


def _fast_kernels(model, calls):
    """Replace kernels that need a GPU by the family's own code, with the kernels' arguments; record what rules get."""

    def by_sequence(function, ends, dim):
        return torch.cat([function(slice(*span)) for span in itertools.pairwise(ends)], dim)

    def conv(x, weight, bias, activation, seq_idx=None):
        assert x.stride(1) == 1  # causal-conv1d needs this layout to separate sequences
        assert seq_idx is None or (seq_idx.shape == (1, x.shape[2]) and seq_idx.dtype == torch.int32)

        def one(at):
            padding, channels = weight.shape[1] - 1, x.shape[1]
            out = nn.functional.conv1d(x[..., at], weight[:, None], bias, padding=padding, groups=channels)
            return nn.functional.silu(out[..., : at.stop - at.start])

        inner = [] if seq_idx is None else (seq_idx[0].diff().nonzero()[:, 0] + 1).tolist()
        return by_sequence(one, [0, *inner, x.shape[2]], 2)

    def rule(query, key, value, g, beta, cu_seqlens=None, **kwargs):
        ends = [0, query.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        calls.append(tuple(value.shape[1:3]))

        def one(at):
            parts = (x[:, at] for x in (query, key, value))
            return modeling_qwen3_next.torch_chunk_gated_delta_rule(*parts, g=g[:, at], beta=beta[:, at], **kwargs)[0]

        return by_sequence(one, ends, 1), None

    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.causal_conv1d_fn, layer.linear_attn.chunk_gated_delta_rule = conv, rule


def _compare(cases):
    def check(name, lengths, how):
        with float64() if name in IN_FLOAT64 else contextlib.nullcontext():
            wanted = one_by_one(_model(name), lengths)
            found = errors(_model(name), dist.group.WORLD, wanted, lengths, checkpointing=how)
        assert {n: error for n, error in found.items() if error > EXACT} == {}

    each_case([case for case in cases if case[0] in BY_SEQUENCES], check)


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 4])
def test_shared_mixer_of_every_family_equals_the_plain_model(world):
    rows = [(UNEVEN, "none"), (LONG, "full"), (MOSTLY_ONE, "selective"), ((*FEW, 2), "selective")]
    rows += [(TWO_LONG, "full"), (ONE_QUERY, "none")]
    run_ranks(_compare, world, [(name, *row) for name in sorted(BY_SEQUENCES) for row in rows], timeout=900)


def _kernels():
    """In each of two layers, a kernel gets all sequences of this rank, or every sequence and half of the heads."""
    of_rank = [(15, 4), (17, 4)][dist.get_rank()]
    for lengths, called in ((UNEVEN, [of_rank] * 2), (MOSTLY_ONE, [(length, 2) for length in MOSTLY_ONE] * 2)):
        calls = []
        with pytest.MonkeyPatch.context() as patch:
            wanted, model = one_by_one(_model("qwen3_next"), lengths), _model("qwen3_next")
            patch.setattr(modeling_qwen3_next, "is_fast_path_available", True)
            _fast_kernels(model, calls)
            found = errors(model, dist.group.WORLD, wanted, lengths)
        assert max(found.values()) < EXACT, found
        assert calls == called


def _gathered_keys():
    """Attention of any family can gather its keys through transformers' cache; here that of DeepSeek-V3."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequences, "attention_modules", lambda model: {})
        patch.setattr(shared_mixers, "_keeps_keys", lambda module: True)
        real, gathered = shared_mixers.SharedKeys.update, []
        patch.setattr(shared_mixers.SharedKeys, "update", lambda *args, **kw: gathered.append(1) or real(*args, **kw))
        for lengths, how in ((LONG, "none"), (MOSTLY_ONE, "full"), (TWO_LONG, "selective")):
            wanted = one_by_one(_model("deepseek_v3"), lengths)
            found = errors(_model("deepseek_v3"), dist.group.WORLD, wanted, lengths, checkpointing=how)
            assert max(found.values()) < EXACT and gathered, found
            gathered.clear()


# Each kind of mixer over heads or slices, and by whole sequences; chosen and compressed keys.
KINDS = [(name, MOSTLY_ONE, "none") for name in ("bailing_hybrid", "lfm2_moe", "minimax", "nemotron_h", "qwen3_next")]
KINDS += [("jamba", MOSTLY_ONE, "full"), ("jamba", UNEVEN, "selective"), ("lfm2_moe", LONG, "full")]
KINDS += [("glm_moe_dsa", UNEVEN, "full"), ("glm_moe_dsa", LONG, "none")]
KINDS += [("deepseek_v4", UNEVEN, "none"), ("deepseek_v4", MOSTLY_ONE, "selective")]


def _on_two_ranks():
    _compare(KINDS)
    _gathered_keys()
    if hasattr(modeling_qwen3_next, "is_fast_path_available"):  # else transformers takes kernels from its hub
        _kernels()


def test_shared_mixer_of_each_kind_equals_the_plain_model_and_splits_a_long_sequence():
    run_ranks(_on_two_ranks, 2)


@pytest.mark.parametrize("name", STATES)
def test_shared_mixer_of_every_known_state_can_be_split_over_heads_or_slices(name):
    with torch.device("meta"):
        mixers = find_mixers(ALL[name].build()).others.values()
    assert mixers, f"no layer of {name} carries a state"
    for mixer in mixers:
        assert _reach(mixer) is not None or head_parts_of(mixer, 2) is not None, type(mixer).__name__


def test_shared_mixer_that_does_not_divide_or_has_adapters_without_a_call_is_not_split():
    mixers = PackedSequences(ALL["jamba"].build_random("sdpa"))._mixers.others.values()
    mixer = next(m for m in mixers if type(m).__name__ == "JambaMambaMixer")
    assert head_parts_of(mixer, 2) is not None and head_parts_of(mixer, 5) is None
    mixer.in_proj.register_parameter("weight_lora_A", nn.Parameter(torch.zeros(1)))
    assert head_parts_of(mixer, 2) is not None
    mixer.x_proj.register_parameter("weight_lora_A", nn.Parameter(torch.zeros(1)))
    assert head_parts_of(mixer, 2) is None


def _uneven(name, rows, units):
    """Mixers and parts of them are FSDP units, like norms kept in float32: each call is a collective."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    mine = dist.get_rank() // 2
    wanted = [one_by_one(_model(name), lengths)[1] for lengths in rows]
    model, (ids, targets) = _model(name), row(rows[mine])
    sequences = PackedSequences(model)
    SequenceParallel(model, groups[mine], sequences)
    way = "by slices" if name in KEEP_KEYS else "over its heads"
    assert f": whole sequences by rank, a long one {way}" in sequences.line()
    use_every_compressor(model)
    for mixer in sequences._mixers.others.values():
        for unit in units:
            fully_shard(mixer.get_submodule(unit))
    for layer in layer_names(model):
        fully_shard(model.get_submodule(layer))
    fully_shard(model)
    own = own_slice(rows[mine], groups[mine])
    for _ in range(2):
        model.zero_grad()
        (4 * loss(packed(model, ids, own), targets[own])).backward()  # FSDP takes the mean over four ranks
        for fqn, param in model.named_parameters():
            both = [of_row[fqn] for of_row in wanted if fqn in of_row]
            assert not both or relative_error(param.grad.full_tensor(), sum(both)) < EXACT, fqn


# Attention whose keys pass through a cache: parts that may be FSDP units.
KEEP_KEYS = {"deepseek_v4": ("compressor.kv_norm", "q_a_norm", "")}
# On more ranks than sequences.
MANY = [("lfm2_moe", (*FEW, 2), "selective"), ("qwen3_next", UNEVEN, "selective"), ("qwen3_next", LONG, "none")]


def _on_four_ranks(name, cases):
    _compare(cases)
    if name in KEEP_KEYS:
        with float64():
            _uneven(name, (TWO_LONG, MOSTLY_ONE), KEEP_KEYS[name])
        return
    _gathered_keys()
    _uneven(name, (UNEVEN, LONG), ("norm", "out_proj", ""))  # each rank two sequences, and one over heads


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("qwen3_next", MANY),
        ("deepseek_v4", [("deepseek_v4", ONE_QUERY, "full")]),
        *(pytest.param(n, [], marks=pytest.mark.long) for n in ("minimax", "nemotron_h")),
    ],
)
def test_shared_mixer_of_unequal_rows_on_ranks_makes_the_same_collectives(name, cases):
    run_ranks(_on_four_ranks, 4, name, cases)


def test_assign_of_sequences_balances_their_lengths():
    assert assign([11, 1, 14, 6], 2) == [1, 0, 0, 1]
    assert assign([5, 5, 5], 2) == [0, 1, 0]
    assert assign([7], 3) == [0]


@pytest.mark.parametrize(
    ("name", "world"),
    [
        ("qwen3_next", 2),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (("qwen3_next", 4), ("jamba", 2), ("glm_moe_dsa", 2))
        ),
    ],
)
def test_shared_mixer_in_ppo_updates_equals_the_plain_model(tmp_path, name, world):
    pytest.importorskip("verl")
    cases = [{"ep": 2, "ulysses_sequence_parallel_size": 2, "dynamic": True, "activation_checkpointing": "full"}]
    with float64():
        save(name, tmp_path)
    # This eps does not magnify rounding errors of tiny gradients.
    attention = "eager" if name == "glm_moe_dsa" else "sdpa"
    run_ranks(check_ppo_updates_in_float64, world, tmp_path, cases, attention, {"eps": 1e-5}, timeout=300)
