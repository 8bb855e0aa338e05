"""An export equals the loaded checkpoint bit for bit, and a rank reads only its own experts."""

import functools
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import deserialize
from safetensors.torch import load_file, save_file
from torch import nn

from epfsdp2.engine.checkpoint import safetensors_reader
from epfsdp2.engine.checkpoint import state as checkpoint
from epfsdp2.engine.checkpoint.load import load_weights, match_weights
from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.model.families import RENAMED_WHEN_PUBLISHED, TRANSPOSED_WHEN_PUBLISHED
from epfsdp2.engine.model.meta import build_on_meta, check_initialized, materialize
from epfsdp2.engine.model.safetensors_files import SafetensorsFile
from epfsdp2.engine.parallelize import parallelize
from epfsdp2.engine.topology.dtensor import checkpoint_tensors, is_expert_parameter
from epfsdp2.engine.topology.mesh import Meshes, Topology, build_meshes
from tests.parity.families import ALL, DENSE, AsAuto
from tests.support.engine.checkpoints import save_checkpoint
from tests.support.models.tiny import publish
from tests.support.ranks import run_ranks

# In the name of a checkpoint's tensor (the latter is Granite's). Shared experts have other names.
EXPERT = re.compile(
    r"\.experts\.(?!e_score_correction_bias)|\.block_sparse_moe\.(?:input|output)_linear\.|\.moe\.\w+_proj\."
)
EXPORTED = f"saved/{checkpoint.HF}"
EP = 2


@dataclass(frozen=True)
class Trip:
    """A family's checkpoint, and how many ranks load and export it.

    Args:
        file_size: of the checkpoint's files, at most.
        loaded: ``original``, as transformers saves it, or ``swapped``: stacks of experts are transposed, as in the
            published checkpoints of Qwen3-VL.
    """

    family: str
    world: int
    dtype: str = "float32"
    file_size: str = "1GB"
    loaded: str = "original"

    @property
    def wanted(self) -> str:
        """The form that the export equals, whichever was loaded."""
        return "swapped" if self.family in TRANSPOSED_WHEN_PUBLISHED else "original"

    @property
    def name(self) -> str:
        return f"{self.family}-{self.world}-{self.dtype}-{self.loaded}"


# On 4 ranks the experts of an EP rank are cut as well. Each way in which checkpoints hold experts is among these.
_CUT = (
    *("cohere2_moe", "dbrx", "deepseek_v3", "deepseek_v4", "ernie4_5_moe", "ernie4_5_vl_moe", "gemma4", "glm4_moe"),
    *("gpt_oss", "jamba", "mixtral", "nemotron_h", "qwen3_moe_12", "qwen3_next", "qwen3_vl_moe"),
)
TRIPS = [
    *(Trip(family, 2) for family in ALL),
    *(Trip("qwen3_vl_moe", world, loaded="swapped") for world in (2, 4)),
    *(Trip(family, 4, file_size="40KB") for family in _CUT),
    *(Trip(family, 4, "bfloat16", "40KB") for family in ("glm4_moe", "gpt_oss")),
]
# Experts one by one, as rows of one matrix, beside another stack, transposed, fused; and a dense family.
FEW = ("dbrx", "ernie4_5_vl_moe", "glm4_moe", "gpt_oss", "inkling2", "llama", "nemotron_h", "qwen3_vl_moe")


def _is_long(trip: Trip) -> bool:
    return trip.family not in FEW or (trip.world == 4 and trip.family not in ("dbrx", "glm4_moe"))


def each_trip(trips: Sequence[Trip]) -> pytest.MarkDecorator:
    params = [pytest.param(trip, marks=pytest.mark.long if _is_long(trip) else (), id=trip.name) for trip in trips]
    return pytest.mark.parametrize("trip", params)


def _save(trip: Trip, folder: Path) -> None:
    """Save, by transformers and under published names, a model with random parameters and persistent buffers."""
    model = ALL[trip.family].build()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in checkpoint_tensors(model).values():
            if tensor.is_floating_point():
                tensor.normal_(std=0.2, generator=generator)
            else:
                tensor.random_(0, 8, generator=generator)
    model.save_pretrained(folder, max_shard_size=trip.file_size)
    if trip.dtype != "float32":
        narrow = type(model).from_pretrained(folder, dtype=trip.dtype)
        narrow.save_pretrained(folder, max_shard_size=trip.file_size)
    if model.config.model_type in RENAMED_WHEN_PUBLISHED:
        publish(folder)


def _swap(original: Path, swapped: Path) -> None:
    swapped.mkdir()
    for file in original.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if EXPERT.search(name):
                tensors[name] = tensors[name].transpose(1, 2).contiguous()
        save_file(tensors, swapped / file.name)


def _round_trip(trips: list[Trip], folder: Path) -> None:
    """Load and export on this rank, which writes how many bytes of experts it read and holds, or what failed."""
    by_size = [build_meshes("cpu", Topology.arrange(dist.get_world_size(), ep)) for ep in (EP, 1)]
    for trip in trips:
        meshes = by_size[trip.family in DENSE]
        report = {}
        try:
            model = _loaded(trip, folder / trip.name / trip.loaded, meshes, report)
            save_checkpoint(folder / trip.name / "saved", model, None, None, {"hf_model"}, step=1)
        except Exception as error:  # equal on all ranks, and the other families can go on
            report["failure"] = f"{type(error).__name__}: {error}"
        (folder / trip.name / f"{dist.get_rank()}.json").write_text(json.dumps(report))


def _loaded(trip: Trip, files: Path, meshes: Meshes, report: dict) -> nn.Module:
    plain, dtype = ALL[trip.family].build(), getattr(torch, trip.dtype)
    model = build_on_meta(AsAuto(type(plain)), plain.config, dtype)
    parallelize(model, meshes, ShardingOptions(param_dtype=dtype))
    materialize(model, "cpu")
    counted, read = Counter(), SafetensorsFile.read

    def counting(self, key, index=None):
        tensor = read(self, key, index)
        counted[key] += tensor.nbytes
        return tensor

    with mock.patch.object(SafetensorsFile, "read", counting):
        matched = match_weights(model, safetensors_reader.open_checkpoint(files), meshes)
        assert not load_weights(model, matched, meshes)
    check_initialized(model)
    report["read"] = sum(count for key, count in counted.items() if EXPERT.search(key))
    report["own"] = sum(param.to_local().nbytes for param in model.parameters() if is_expert_parameter(param))
    return model


def _round_trip_all(world: int, folder: Path, session: pytest.Session) -> Path:
    """Make the round trips of the tests that were chosen, which share the ranks."""
    chosen = {item.callspec.params.get("trip") for item in session.items if hasattr(item, "callspec")}
    trips = [trip for trip in TRIPS if trip.world == world and trip in chosen]
    for trip in trips:
        _save(trip, folder / trip.name / "original")
        if trip.wanted == "swapped":
            _swap(folder / trip.name / "original", folder / trip.name / "swapped")
    run_ranks(_round_trip, world, trips, folder)
    return folder


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory, request):
    """Return the folder of all round trips on some number of ranks."""
    return functools.cache(lambda world: _round_trip_all(world, tmp_path_factory.mktemp(f"{world}"), request.session))


@pytest.fixture
def round_trip(trip, on_ranks):
    return on_ranks(trip.world) / trip.name


def _tensors(folder: Path) -> dict[str, dict]:
    """Return dtype, shape and bytes of every tensor of every file."""
    found = [entry for file in sorted(folder.glob("*.safetensors")) for entry in deserialize(file.read_bytes())]
    assert len(dict(found)) == len(found) > 0
    return dict(found)


def _reports(round_trip: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(round_trip.glob("*.json"))]


@each_trip(TRIPS)
def test_export_equals_the_checkpoint_bit_for_bit(round_trip, trip):
    failures = {report["failure"] for report in _reports(round_trip) if "failure" in report}
    assert not failures
    original, exported = (_tensors(round_trip / name) for name in (trip.wanted, EXPORTED))
    assert exported.keys() == original.keys()
    assert not [name for name in original if exported[name] != original[name]]
    if ALL[trip.family].sizes.get("tie_word_embeddings"):  # as transformers saves them
        assert "model.embed_tokens.weight" in exported and "lm_head.weight" not in exported
    files = len(list((round_trip / "original").glob("*.safetensors")))
    assert files == 1 if trip.file_size == "1GB" else files > 2


@each_trip([trip for trip in TRIPS if trip.family not in DENSE])
def test_load_weights_reads_only_own_experts(round_trip, trip):
    ranks = _reports(round_trip)
    assert all("read" in rank for rank in ranks), ranks
    stored = {name: len(facts["data"]) for name, facts in _tensors(round_trip / "original").items()}
    assert sum(rank["own"] for rank in ranks) == sum(size for name, size in stored.items() if EXPERT.search(name)) > 0
    factors = [rank["read"] / rank["own"] for rank in ranks]
    assert min(factors) >= 1 and max(factors) <= 1.1, factors
