"""Frequencies that depend on a sequence's length: each sequence's own, or the rollout's for all."""

import contextlib
from dataclasses import replace

import pytest
import torch

from epfsdp2.engine.packing.positions import embed_apart, positions_line, rotary_by_length
from epfsdp2.engine.packing.sequences import PackedSequences
from epfsdp2.engine.wrap_forward import wrapped_by
from tests.parity import families
from tests.parity.float64 import float64
from tests.support.engine.rows import IN_FLOAT64, LENGTHS, apart, packed, row
from tests.support.models.rope import PHI_SCALES, longrope, with_rope
from tests.support.models.tiny import relative_error, save_qwen3_moe
from tests.support.ranks import run_ranks
from tests.support.trainer.ppo import PADDED, check_ppo_updates

EXACT = 1e-6  # in float64; norms, some softmaxes and some routers always compute in float32
ORIGINAL = 12  # one of them is longer
# One set of frequencies; Phi-3.5-MoE's own scale; one set for each type of layer; complex numbers.
KINDS = [("qwen3_moe", "longrope"), ("qwen3_moe", "dynamic"), ("phimoe", "longrope"), ("gemma3", "longrope")]
KINDS += [("gemma3", "dynamic"), ("deepseek_v2", "longrope")]
NO_PLAIN_MODEL = {
    ("deepseek_v4", "longrope"): "transformers 5.9 finds no frequencies in the second call of its rotary embedding",
    ("dots3_note", "longrope"): "transformers 5.23 reads a width of heads that its layers differ in",
    ("step3p7", "longrope"): "transformers 5.24 reads one number of heads, and its layers have two",
    ("ernie4_5_vl_moe", "longrope"): "it takes default frequencies alone",
    ("ernie4_5_vl_moe", "dynamic"): "it takes default frequencies alone",
}


def _build(name, kind, **own):
    """Return a new model in float64, because a plain one keeps frequencies of earlier sequences."""
    # With sdpa GLM-MoE-DSA (transformers 5.9) is not causal.
    attention = "eager" if name == "glm_moe_dsa" else families.ALL[name].attention
    family = with_rope(families.ALL[name], kind, ORIGINAL)
    if family is None:
        pytest.skip(f"{name} has no rotary embeddings")
    for key, value in own.items():
        family = replace(family, sizes={**family.sizes, key: {**family.sizes[key], **value}})
    return family.build_random(attention)


@torch.no_grad()
def _alone(name, kind, **own):
    return torch.cat([apart(_build(name, kind, **own), [each]) for each in row()[0]], 1)


@torch.no_grad()
def _packed(model):
    return packed(model, row()[0])


@torch.no_grad()
def _padded(model):
    """Return the logits of the sequences as rows of one batch."""
    ids = [each[0] for each in row()[0]]
    rows = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in ids], batch_first=True)
    positions = (mask.cumsum(1) - 1) * mask
    logits = model(input_ids=rows, position_ids=positions, attention_mask=mask, use_cache=False).logits
    return torch.cat([row[None, :length] for row, length in zip(logits, LENGTHS, strict=True)], 1)


@pytest.mark.parametrize("name, kind", KINDS)
def test_positions_of_rows_with_a_longer_sequence_are_those_of_each_alone(name, kind):
    alone = _alone(name, kind)
    assert relative_error(_padded(_build(name, kind)), alone) > 1e-3, "the case is none"
    in_one_row, padded = _build(name, kind), _build(name, kind)
    PackedSequences(in_one_row)
    embed_apart(padded, lambda: None)
    for _ in range(2):  # a longer sequence leaves nothing
        assert relative_error(_packed(in_one_row), alone) < EXACT
        assert relative_error(_padded(padded), alone) < EXACT


@pytest.mark.long
@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
@pytest.mark.parametrize("name", families.ALL)
def test_positions_of_packed_rows_of_every_family_are_those_of_each_alone(name, kind):
    if (name, kind) in NO_PLAIN_MODEL:
        pytest.skip(NO_PLAIN_MODEL[name, kind])
    with float64() if name in IN_FLOAT64 else contextlib.nullcontext():
        alone, model = _alone(name, kind), _build(name, kind)
        assert rotary_by_length(model)
        PackedSequences(model)
        assert relative_error(_packed(model), alone) < EXACT


def _of_the_longest(kind, longest):
    """Return parameters whose frequencies for every length are ``kind``'s for ``longest`` tokens."""
    given = {**longrope(12, ORIGINAL), **PHI_SCALES}
    if kind == "longrope":
        return {f"short_{what}": given[f"long_{what}"] for what in ("factor", "mscale")}
    return {"rope_type": "default", "rope_theta": 1e4 * (4.0 * longest / ORIGINAL - 3.0) ** (12 / (12 - 2))}


@pytest.mark.parametrize("name, kind", [("qwen3_moe", "longrope"), ("phimoe", "longrope"), ("qwen3_moe", "dynamic")])
def test_positions_of_a_rollout_are_those_of_its_longest_sequence_for_all(name, kind):
    one = {"rope_parameters": _of_the_longest(kind, 64)}
    wanted = _alone(name, kind, **one)
    in_one_row, padded = _build(name, kind), _build(name, kind)
    PackedSequences(in_one_row, longest=64)
    embed_apart(padded, lambda: None, longest=64)
    assert relative_error(_alone(name, kind), wanted) > 1e-3
    assert relative_error(_packed(in_one_row), wanted) < EXACT
    assert relative_error(_padded(padded), wanted) < EXACT


def test_positions_that_do_not_depend_on_a_length_are_left_to_the_family():
    for kind in ("yarn", "llama3", "linear"):
        model = _build("qwen3_moe", kind)
        PackedSequences(model)
        assert positions_line(model, 0) == "" and wrapped_by(model.model.rotary_emb) == ()
        assert relative_error(_packed(model), _alone("qwen3_moe", kind)) < EXACT
    model = _build("qwen3_moe", "longrope")
    assert positions_line(model, 0) == "positions (longrope): frequencies of each sequence's own length"
    assert positions_line(model, 64) == "positions (longrope): frequencies of 64 tokens, as in the rollout"


def test_positions_in_ppo_updates_are_those_of_each_alone(tmp_path):
    pytest.importorskip("verl")
    shared = {"ulysses_sequence_parallel_size": 2, "pad_to_length": True, "pad_to_length_bucket": 17}
    cases = [{"ep": 1, "model": PADDED}, {"ep": 2, "dynamic": True, **shared}]
    folder = save_qwen3_moe(tmp_path, rope_parameters=longrope(16, 8))
    run_ranks(check_ppo_updates, 2, folder, cases, timeout=300)
