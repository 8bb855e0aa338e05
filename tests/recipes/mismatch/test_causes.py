"""Each planted cause is named first, and two planted together are the first two."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from epfsdp2.recipes.mismatch.cli import main
from epfsdp2.recipes.mismatch.model import Setup
from epfsdp2.recipes.mismatch.sampling import Sampling
from tests.recipes.mismatch.planted import plant, random_responses, shuffled_routes
from tests.support.models.tiny import save_qwen3, save_qwen3_moe

SAMPLINGS = {
    "temperature 0.7": {"temperature": 0.7},
    "top p 0.8": {"top_p": 0.8},
    "top k 20": {"top_k": 20},
    "repetition penalty 1.3": {"repetition_penalty": 1.3},
    "presence penalty 0.5": {"presence_penalty": 0.5},
    "frequency penalty 0.5": {"frequency_penalty": 0.5},
}
TRIED = [f"{name}={value}" for values in SAMPLINGS.values() for name, value in values.items()]
# Name of the cause -> fields of the planted setup, beside a trainer in float32.
ALONE = {
    "routes: the rollout's, replayed": {"replay": True},
    "dtype of the head: bfloat16": {"head": "bfloat16"},
    "dtype of the routers: bfloat16": {"router": "bfloat16"},
    "dtype of everything: bfloat16": {"dtype": "bfloat16"},
    "weights rounded to bfloat16": {"rounding": "bfloat16"},
    "weights rounded as in fp8": {"rounding": "fp8"},
    "weights rounded as in fp8 by rows": {"rounding": "fp8 by rows"},
    "weights rounded as in int8 by rows": {"rounding": "int8 by rows"},
    **{name: {"sampling": Sampling(**values)} for name, values in SAMPLINGS.items()},
    "weights of the step before": {"weights": "previous"},
    "experts of rank 2 of 4 not synced": {"weights": "previous 2/4"},
}
PAIRS = [
    ("routes: the rollout's, replayed", "top p 0.8"),
    ("temperature 0.7", "experts of rank 2 of 4 not synced"),
    ("weights rounded as in fp8", "frequency penalty 0.5"),
    ("weights of the step before", "top k 20"),
    ("dtype of the head: bfloat16", "dtype of the routers: bfloat16"),
    ("routes: the rollout's, replayed", "weights of the step before"),
    ("weights rounded as in fp8 by rows", "routes: the rollout's, replayed"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return folders of a checkpoint and of the step before it, and responses."""
    root = tmp_path_factory.mktemp("run")
    now, before = (save_qwen3_moe(root / name, one_file=True) for name in ("now", "before"))
    for folder in (now, before):  # a trained checkpoint is float32
        (file,) = folder.glob("*.safetensors")
        draw = torch.Generator().manual_seed(len(folder.name))
        weights = {
            name: w.float() + 0.004 * torch.randn(w.shape, generator=draw) for name, w in load_file(file).items()
        }
        save_file(weights, file, metadata={"format": "pt"})
    return now, before, random_responses(now)


def _named(run, planted, tmp_path, *arguments, trainer=None):
    now, before, responses = run
    of_all = {"dtype": "float32", **planted}
    changed = shuffled_routes(responses) if of_all.get("replay") else responses
    rollouts = plant(now, Setup(**of_all), changed, tmp_path / "rollouts.jsonl", before, trainer)
    out = tmp_path / "out.json"
    given = ["--previous", str(before), "--dtype", "float32", "--ep", "4", "--tokens", "256", "--device", "cpu"]
    assert main([str(now), str(rollouts), *given, "--sampling", *TRIED, "--json", str(out), *arguments]) == 0
    return json.loads(out.read_text())


@pytest.mark.parametrize("name", ALONE)
def test_cause_planted_alone_is_named_first_and_explains_all(run, tmp_path, name):
    found = _named(run, ALONE[name], tmp_path)
    first, second = found["causes"][:2]
    assert first["name"] == name and first["share"] > 0.999 and second["share"] == 0
    assert found["rest"]["mean"] < 1e-3 * found["gap"]["mean"] and first["setting"]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_causes_planted_in_pairs_are_the_first_two_and_their_shares_sum_to_one(run, tmp_path, one, other):
    found = _named(run, ALONE[one] | ALONE[other], tmp_path)
    named = found["causes"][:2]
    assert {cause["name"] for cause in named} == {one, other}, found["causes"][:4]
    assert named[0]["share"] >= named[1]["share"] > 0.03
    assert abs(sum(cause["share"] for cause in named) - 1) < 1e-3


# Beside a trainer in bfloat16, whose rollout differs by rounding too.
NOISY = {
    "dtype of everything: float32": {"dtype": "float32"},
    "dtype of the head: float32": {"head": "float32"},
    "temperature 0.7": ALONE["temperature 0.7"],
    "weights of the step before": {"weights": "previous"},
    "experts of rank 1 of 4 not synced": {"weights": "previous 1/4"},
    "routes: the rollout's, replayed": {"replay": True},
}


@pytest.mark.parametrize("name", NOISY)
def test_cause_beside_noise_of_a_rollout_is_named_first(run, tmp_path, name):
    found = _named(run, {"dtype": "bfloat16", **NOISY[name]}, tmp_path, "--dtype", "bfloat16", trainer=Setup())
    assert found["causes"][0]["name"] == name and found["causes"][0]["share"] > 0.6
    assert found["rest"]["mean"] > 0.1 * found["gap"]["mean"]


@pytest.mark.parametrize(("trainer", "rollout"), [("packed", "alone"), ("padded", "packed")])
def test_rows_of_a_micro_batch_are_named(run, tmp_path, trainer, rollout):
    found = _named(run, {"dtype": "bfloat16", "rows": rollout}, tmp_path, "--dtype", "bfloat16", "--rows", trainer)
    shape = {"alone": "each sequence alone", "packed": "packed rows"}[rollout]
    assert found["causes"][0]["name"] == f"micro-batch: {shape}" and found["causes"][0]["share"] > 0.999


def test_report_is_printed_and_drawn_with_the_setting_that_removes_the_first_cause(run, tmp_path, capsys):
    _named(run, ALONE["top p 0.8"], tmp_path, "--png", str(tmp_path / "out.png"))
    said = capsys.readouterr().out
    row = next(line for line in said.splitlines() if "top p 0.8" in line)
    assert "100%" in row and "actor_rollout_ref.rollout.top_p=1.0" in row
    assert "log-probs differ by" in said and (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"


def test_dense_model_has_no_causes_of_experts_and_the_report_says_what_was_not_tried(tmp_path, capsys):
    folder, out = save_qwen3(tmp_path / "model"), tmp_path / "out.json"
    planted = Setup(sampling=Sampling(top_k=5))
    rollouts = plant(folder, planted, random_responses(folder, 3), tmp_path / "a.jsonl")
    given = [str(folder), str(rollouts), "--device", "cpu", "--json", str(out)]
    assert main([*given, "--sampling", "top_k=5"]) == 0
    found = json.loads(out.read_text())["causes"]
    assert found[0]["name"] == "top k 5" and found[0]["share"] > 0.999
    assert not [cause["name"] for cause in found if "router" in cause["name"] or "experts" in cause["name"]]
    rollouts = plant(folder, Setup(), random_responses(folder, 3), tmp_path / "a.jsonl", None, Setup())
    assert main(given) == 0
    assert "Not tried: --previous." in " ".join(capsys.readouterr().out.split())


def test_equal_rollouts_and_unknown_causes_say_so(run, tmp_path, capsys):
    found = _named(run, {}, tmp_path)
    assert found["gap"]["mean"] == 0 and all(cause["share"] == 0 for cause in found["causes"])
    _named(run, {}, tmp_path, trainer=Setup("float32"))
    assert "No cause explains 3 % of the difference" in " ".join(capsys.readouterr().out.split())
