"""The update and the MoE block beside rivals: sides compute the same, and their bytes are counted right."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.rivals import blocks, compare
from benchmarks.rivals.measured import gradient_error, memory_bytes, wire_bytes
from benchmarks.rivals.sides import OURS, THEIRS, Ours, loss_of
from tests.support.engine.wire import counted_collectives
from tests.support.ranks import run_ranks

SIZES = compare.SIZES[compare.QWEN] | {"hidden_size": 32, "moe_intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"head_dim": 8, "num_experts": 8}
CASE = compare.Case(compare.QWEN, 96, 2, 2, ((32, compare.POLICY), (32, compare.TEXT)))
SCALARS = 64  # bytes of the norm's reduction


def _has_rival() -> bool:
    try:
        from transformers.distributed import DistributedConfig
    except ImportError:
        return False
    return "ep_implementation" in DistributedConfig.__dataclass_fields__


def _ours(folder: Path, out: Path) -> None:
    side, batch = Ours(folder, 2, 2), compare.batch_of(dist.get_rank(), 2, 32, compare.POLICY, 96)
    error = gradient_error(side, folder, batch)
    update = partial(side.update, batch)
    found = wire_bytes(update)
    with counted_collectives() as counted:
        update()
    known = torch.tensor(sum(c.wire for c in counted.values()))
    dist.all_reduce(known)
    memory = memory_bytes(update)
    if dist.get_rank() == 0:
        out.write_text(json.dumps([error, found, known.item(), memory]))


def test_our_side_has_exact_gradients_and_its_bytes_are_counted(tmp_path):
    torch.manual_seed(0)
    own = {key: size for key, size in SIZES.items() if key != "model_type"} | {"vocab_size": 96}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **own)).float().save_pretrained(tmp_path)
    run_ranks(_ours, 2, tmp_path, tmp_path / "figures.json")
    error, found, known, memory = json.loads((tmp_path / "figures.json").read_text())
    assert 0 < error < compare.LARGEST_ERROR
    assert known > 0 and 0 < found - known < SCALARS
    assert memory > 32 * 32 * 4


@pytest.mark.skipif(not _has_rival(), reason="transformers before 5.23 has no expert parallelism by all-to-all")
def test_both_sides_train_the_same_in_turns():
    rows = compare.run(CASE, 1, SIZES)
    assert [(row.side, row.loss) for row in rows] == [
        (side, loss) for _, loss in CASE.batches for side in (THEIRS, OURS)
    ]
    assert all(0 < row.error < compare.LARGEST_ERROR for row in rows)
    assert all(row.wire > 0 and row.memory > 0 and row.update > 0 for row in rows)
    assert {len(compare.cells(row)) for row in rows} == {len(compare.COLUMNS)}


def test_rivals_bounds_refuse_slower_rows_and_wrong_gradients():
    row = compare.Row(compare.QWEN, 96, 4, 4, 32, compare.POLICY, OURS, 1.0, 1.15, 1, 1.0, 1e-6)
    assert row.holds and not replace(row, speedup=1.14).holds and not replace(row, error=2e-5).holds
    assert replace(row, ep=2, speedup=1.0).holds and not replace(row, ep=2, speedup=0.99).holds
    assert replace(row, side=THEIRS, speedup=1.0).holds and row.tokens_per_second == 128


def test_a_ranks_batch_has_the_tokens_asked_for_and_its_loss_is_a_mean_of_them():
    text = compare.batch_of(1, 2, 32, compare.TEXT, 96)
    assert [len(ids) for ids in text.ids] == [8] * 4 and text.advantages is None
    answers = compare.batch_of(1, 2, 32, compare.POLICY, 96)
    assert sum(map(len, answers.ids)) == 32 and len({len(ids) for ids in answers.ids}) > 1
    zeros = torch.zeros(28)
    assert loss_of(text, zeros - 2, None).item() == pytest.approx(2 * 28 / 32)
    wanted = -sum(float(each.sum()) for each in answers.advantages) * -3 / 32
    assert loss_of(answers, zeros - 3, zeros).item() == pytest.approx(wanted, rel=1e-4)


def _our_error(out):
    world = dist.get_world_size()
    whole, wanted = blocks.inputs_and_gradients(world, 64)
    side = blocks.Side(blocks.ours(world), float(world), "layers.0.mlp.")
    error = side.error(whole[dist.get_rank()], wanted)
    if dist.get_rank() == 0:
        out.write_text(json.dumps([error, *whole.shape]))


def test_our_block_has_the_plain_blocks_gradients_to_the_precision_of_bfloat16(tmp_path):
    run_ranks(_our_error, 2, tmp_path / "error.json")
    error, *shape = json.loads((tmp_path / "error.json").read_text())
    assert 1e-4 < error < blocks.LARGEST_ERROR
    assert shape == [2, 1, 64, blocks.CONFIG.hidden_size]


def test_rivals_names_hold_gate_and_up_of_the_plain_block():
    block = blocks.OneLayer().layers[0].mlp
    named = blocks.by_rivals_names({name: param.detach() for name, param in block.named_parameters()})
    assert named.keys() == set(blocks.NAMES.values())
    gate, up = (named[f"routed_experts.inner_experts.{name}_EFD"] for name in ("w1", "w3"))
    assert torch.equal(torch.cat([gate, up], dim=1), block.experts.gate_up_proj)


def test_block_bounds_refuse_slower_rows_and_wrong_gradients():
    row = blocks.Row(2, 64, blocks.OURS, 1.0, 1.15, 1.0, 1e-2)
    assert row.holds and not replace(row, speedup=1.14).holds and not replace(row, error=3e-2).holds
    assert replace(row, side=blocks.TITAN, speedup=1.0).holds
    noted = replace(row, side=blocks.VEOMNI, note="no GPU")
    assert {len(blocks.cells(each)) for each in (row, noted)} == {len(blocks.COLUMNS)}
