"""The MoE block beside torchtitan's: our side has the plain block's gradients, and bounds hold."""

import json
from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks.rivals import blocks
from tests.support.ranks import run_ranks


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
