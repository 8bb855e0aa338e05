"""The update and the MoE block beside rivals: sides compute the same, and their bytes are counted right."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.measure import figures_of, memory_bytes, random_checkpoint
from benchmarks.rivals import blocks, compare
from benchmarks.rivals.measured import gradient_error, wire_bytes
from benchmarks.rivals.sides import OURS, THEIRS, Ours, loss_of
from tests.support.engine.wire import counted_collectives

SIZES = {**compare.MODEL, "vocab_size": 96, "hidden_size": 32, "moe_intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"head_dim": 8, "num_experts": 8}
CASE = compare.Case(compare.QWEN, 96, 2, 2, ((32, compare.POLICY), (32, compare.TEXT)))
SCALARS = 64  # bytes of the norm's reduction


def _has_rival() -> bool:
    try:
        from transformers.distributed import DistributedConfig
    except ImportError:
        return False
    return "ep_implementation" in DistributedConfig.__dataclass_fields__


def _ours(folder: Path) -> list[float]:
    side, batch = Ours(folder, 2, 2), compare.batch_of(dist.get_rank(), 2, 32, compare.POLICY, 96)
    error = gradient_error(side, folder, batch)
    update = partial(side.update, batch)
    found = wire_bytes(update)
    with counted_collectives() as counted:
        update()
    known = torch.tensor(sum(c.wire for c in counted.values()))
    dist.all_reduce(known)
    return [error, found, known.item(), memory_bytes(update)]


def test_our_side_has_exact_gradients_and_its_bytes_are_counted():
    with random_checkpoint("qwen3_moe", SIZES) as folder:
        error, found, known, memory = figures_of(_ours, 2, folder)
    assert 0 < error < compare.LARGEST_ERROR
    assert known > 0 and 0 < found - known < SCALARS
    assert memory > 32 * 32 * 4


@pytest.mark.skipif(not _has_rival(), reason="transformers before 5.23 has no expert parallelism by all-to-all")
def test_both_sides_train_the_same_in_turns():
    rows = compare.run(CASE, 1, "qwen3_moe", SIZES)
    wanted = [(side, loss) for _, loss in CASE.batches for side in (THEIRS, OURS)]
    assert [(row["side"], row["loss"]) for row in rows] == wanted
    for row in rows:
        assert 0 < float(row["gradient error"]) < compare.LARGEST_ERROR
        assert float(row["wire MB"]) > 0 and float(row["seconds"]) > 0


def test_a_ranks_batch_has_the_tokens_asked_for_and_its_loss_is_a_mean_of_them():
    text = compare.batch_of(1, 2, 32, compare.TEXT, 96)
    assert [len(ids) for ids in text.ids] == [8] * 4 and text.advantages is None
    answers = compare.batch_of(1, 2, 32, compare.POLICY, 96)
    assert sum(map(len, answers.ids)) == 32 and len({len(ids) for ids in answers.ids}) > 1
    zeros = torch.zeros(28)
    assert loss_of(text, zeros - 2, None).item() == pytest.approx(2 * 28 / 32)
    wanted = -sum(float(each.sum()) for each in answers.advantages) * -3 / 32
    assert loss_of(answers, zeros - 3, zeros).item() == pytest.approx(wanted, rel=1e-4)


def _our_error() -> list[float]:
    world = dist.get_world_size()
    whole, wanted = blocks.inputs_and_gradients(world, 64)
    side = blocks.Side(blocks.ours(world), float(world))
    return [side.error(whole[dist.get_rank()], wanted), *whole.shape]


def test_our_block_has_the_plain_blocks_gradients_to_the_precision_of_bfloat16():
    error, *shape = figures_of(_our_error, 2)
    assert 1e-4 < error < blocks.LARGEST_ERROR
    assert shape == [2, 1, 64, blocks.CONFIG.hidden_size]


def test_rivals_names_hold_gate_and_up_of_the_plain_block():
    model = blocks.OneLayer()
    named = blocks.by_rivals_names(model.state_dict())
    assert len(named) == 4 and named[f"{blocks.MOE}.router.gate.weight"] is not None
    gate, up = (named[f"{blocks.MOE}.routed_experts.inner_experts.{name}_EFD"] for name in ("w1", "w3"))
    assert torch.equal(torch.cat([gate, up], dim=1), model.layers[0].mlp.experts.gate_up_proj)
