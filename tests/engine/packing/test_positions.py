"""Frequencies that depend on a sequence's length: those of each sequence alone, or those of the rollout for all."""

import contextlib
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from epfsdp2.engine.fsdp.ulysses import SequenceParallel
from epfsdp2.engine.model.vision import VisionTowerSync
from epfsdp2.engine.packing.positions import embed_apart, positions_line, rotary_by_length
from epfsdp2.engine.packing.sequences import PackedSequences
from epfsdp2.engine.wrap_forward import wrapped_by
from tests.parity import families
from tests.parity.float64 import float64
from tests.support.models.rope import PHI_SCALES, longrope, with_rope
from tests.support.models.tiny import VOCAB, relative_error, save_qwen3_moe
from tests.support.ranks import run_ranks
from tests.support.trainer.ppo import PADDED, check_ppo_updates

EXACT = 1e-6  # in float64; norms, some softmaxes and some routers compute in float32 whatever they are given
LENGTHS = (11, 1, 14, 6)
ORIGINAL = 12  # one of them is longer
# One set of frequencies; Phi-3.5-MoE's own scale; one set for each type of layer; complex numbers.
KINDS = [("qwen3_moe", "longrope"), ("qwen3_moe", "dynamic"), ("phimoe", "longrope"), ("gemma3", "longrope")]
KINDS += [("gemma3", "dynamic"), ("deepseek_v2", "longrope")]
IN_FLOAT64 = ("deepseek_v4", "glm5_next", "inkling2", "openai_privacy_filter")  # as in test_packing.py
NO_PLAIN_MODEL = {
    ("deepseek_v4", "longrope"): "transformers 5.9 finds no frequencies in the second call of its rotary embedding",
    ("dots3_note", "longrope"): "transformers 5.23 reads a width of heads that its layers differ in",
    ("ernie4_5_vl_moe", "longrope"): "it takes default frequencies alone",
    ("ernie4_5_vl_moe", "dynamic"): "it takes default frequencies alone",
}


def _build(name, kind, **own):
    """The model in float64, new, since the plain one keeps frequencies of former sequences."""
    # With sdpa GLM-MoE-DSA (transformers 5.9) sees what comes later.
    attention = "eager" if name == "glm_moe_dsa" else families.ALL[name].attention
    family = with_rope(families.ALL[name], kind, ORIGINAL)
    if family is None:
        pytest.skip(f"{name} has no rotary embeddings")
    for key, value in own.items():
        family = replace(family, sizes={**family.sizes, key: {**family.sizes[key], **value}})
    return family.build_random(attention)


def _ids():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB - 6, (1, length), generator=generator) for length in LENGTHS]


@torch.no_grad()
def _alone(build, *arguments, **own):
    return [build(*arguments, **own)(input_ids=each, use_cache=False).logits for each in _ids()]


@torch.no_grad()
def _packed(model, own=slice(None)):
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    inputs = {"input_ids": torch.cat(_ids(), 1)[:, own], "position_ids": positions, "attention_mask": None}
    if hasattr(model.config, "vision_config"):
        VisionTowerSync(model).prepare_inputs(inputs)
    return model(**inputs, use_cache=False).logits


@torch.no_grad()
def _padded(model):
    """Of each sequence, in rows of one batch."""
    rows = torch.nn.utils.rnn.pad_sequence([each[0] for each in _ids()], batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each[0]) for each in _ids()], batch_first=True)
    positions = (mask.cumsum(1) - 1) * mask
    logits = model(input_ids=rows, position_ids=positions, attention_mask=mask, use_cache=False).logits
    return torch.cat([row[None, :length] for row, length in zip(logits, LENGTHS, strict=True)], 1)


@pytest.mark.parametrize("name, kind", KINDS)
def test_positions_of_rows_with_a_longer_sequence_are_those_of_each_alone(name, kind):
    alone = torch.cat(_alone(_build, name, kind), 1)
    assert relative_error(_padded(_build(name, kind)), alone) > 1e-3, "the case is none"
    packed, padded = _build(name, kind), _build(name, kind)
    PackedSequences(packed)
    embed_apart(padded, lambda: None)
    for _ in range(2):  # nothing is left by a longer sequence
        assert relative_error(_packed(packed), alone) < EXACT
        assert relative_error(_padded(padded), alone) < EXACT


@pytest.mark.long
@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
@pytest.mark.parametrize("name", families.ALL)
def test_positions_of_packed_rows_of_every_family_are_those_of_each_alone(name, kind):
    if (name, kind) in NO_PLAIN_MODEL:
        pytest.skip(NO_PLAIN_MODEL[name, kind])
    with float64() if name in IN_FLOAT64 else contextlib.nullcontext():
        alone, model = torch.cat(_alone(_build, name, kind), 1), _build(name, kind)
        assert rotary_by_length(model)
        PackedSequences(model)
        assert relative_error(_packed(model), alone) < EXACT


def _of_the_longest(kind, longest):
    """Parameters whose frequencies are for every length what ``kind`` has for ``longest`` tokens."""
    given = {**longrope(12, ORIGINAL), **PHI_SCALES}
    if kind == "longrope":
        return {f"short_{what}": given[f"long_{what}"] for what in ("factor", "mscale")}
    return {"rope_type": "default", "rope_theta": 1e4 * (4.0 * longest / ORIGINAL - 3.0) ** (12 / (12 - 2))}


@pytest.mark.parametrize("name, kind", [("qwen3_moe", "longrope"), ("phimoe", "longrope"), ("qwen3_moe", "dynamic")])
def test_positions_of_a_rollout_are_those_of_its_longest_sequence_for_all(name, kind):
    one = {"rope_parameters": _of_the_longest(kind, 64)}
    wanted = torch.cat(_alone(_build, name, kind, **one), 1)
    packed, padded = _build(name, kind), _build(name, kind)
    PackedSequences(packed, longest=64)
    embed_apart(padded, lambda: None, longest=64)
    assert relative_error(torch.cat(_alone(_build, name, kind), 1), wanted) > 1e-3
    assert relative_error(_packed(packed), wanted) < EXACT
    assert relative_error(_padded(padded), wanted) < EXACT


def test_positions_that_do_not_depend_on_a_length_are_left_to_the_family():
    for kind in ("yarn", "llama3", "linear"):
        model = _build("qwen3_moe", kind)
        PackedSequences(model)
        assert positions_line(model, 0) == "" and wrapped_by(model.model.rotary_emb) == ()
        assert relative_error(_packed(model), torch.cat(_alone(_build, "qwen3_moe", kind), 1)) < EXACT
    model = _build("qwen3_moe", "longrope")
    assert positions_line(model, 0) == "positions (longrope): frequencies of each sequence's own length"
    assert positions_line(model, 64) == "positions (longrope): frequencies of 64 tokens, as in the rollout"


def _shared():
    alone, model = torch.cat(_alone(_build, "qwen3_moe", "longrope"), 1), _build("qwen3_moe", "longrope")
    SequenceParallel(model, dist.group.WORLD, PackedSequences(model))
    own = slice(16 * dist.get_rank(), 16 * (dist.get_rank() + 1))
    assert relative_error(_packed(model, own), alone[:, own]) < EXACT


def test_positions_of_rows_that_ranks_share_are_those_of_each_alone():
    run_ranks(_shared, 2)


def test_positions_in_ppo_updates_are_those_of_each_alone(tmp_path):
    pytest.importorskip("verl")
    cases = [
        {"ep": 2, "dynamic": True, "activation_checkpointing": "full"},
        {"ep": 1, "model": PADDED},
        {"ep": 2, "ulysses_sequence_parallel_size": 2, "pad_to_length": True, "pad_to_length_bucket": 17},
    ]
    folder = save_qwen3_moe(tmp_path, rope_parameters=longrope(16, 8))
    run_ranks(check_ppo_updates, 2, folder, cases, timeout=300)
