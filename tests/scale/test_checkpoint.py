"""One rank's plans of a resume and an export at the published sizes, before it reads a byte."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.scale.work import checkpoint_of, plan_export, plan_resume, state_of
from tests.support.scale import SIZES, Cost, Size, alone, on_fake_ranks

# Every rank reads the headers of all: the cost of a layer is the same, and four have all kinds of parameters.
FEW = tuple(replace(size, layers=4) for size in SIZES)
HALF = replace(FEW[-1], world=FEW[-1].world // 2, ep=FEW[-1].ep // 2)


def _resume(saved: Size, size: Size) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        with on_fake_ranks(saved.world, saved.world // 2):
            model, folder, shards = checkpoint_of(Path(name), saved)
            if size == saved:
                cost, (stored, reads) = Cost.of(plan_resume, model, folder)
        if size != saved:
            with on_fake_ranks(size.world, size.world // 2):
                model = size.shard(size.build())
                cost, (stored, reads) = Cost.of(plan_resume, model, folder)
    return {
        "cost": cost,
        "shards": shards,
        "tensors": len(state_of(model)),
        "kept": sum(len(tensor.shards) for tensor in stored.values()),
        "files": len(reads),
        "reads": sum(map(len, reads.values())),
    }


@pytest.mark.parametrize("size", FEW, ids=str)
def test_resume_on_the_mesh_of_the_save_reads_the_file_of_this_rank(size):
    found = alone(_resume, size, size)
    assert found["files"] <= 2  # rank 0's has what is not sharded
    assert found["reads"] == found["kept"] <= found["tensors"]
    assert found["cost"].ratio < 0.0015 * found["shards"] + 0.05 * found["tensors"]


def test_resume_on_half_the_ranks_reads_twice_as_many_shards():
    found = alone(_resume, FEW[-1], HALF)
    assert found["reads"] == found["kept"] <= 2.1 * found["tensors"]
    assert found["files"] <= 6


def _export(size: Size) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, on_fake_ranks(size.world):
        model, folder, shards = checkpoint_of(Path(name), size, with_states=False)
        cost, planned = Cost.of(plan_export, model, folder, 0, size.world)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
    return {
        "cost": cost,
        "shards": shards,
        "names": len(index["weight_map"]),
        "files": len(set(index["weight_map"].values())),
        "own files": len(planned),
        "own names": sum(len(entries) for entries, _ in planned),
    }


@pytest.mark.parametrize("size", FEW, ids=str)
def test_export_is_planned_in_proportion_to_names_and_shards(size):
    found = alone(_export, size)
    assert found["own files"] == -(-found["files"] // size.world)
    assert found["cost"].ratio < 0.001 * found["shards"] + 0.004 * found["names"] + 2
