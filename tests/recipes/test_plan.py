"""The planner's command line, on published sizes."""

import itertools
import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3Config, Qwen3MoeConfig

from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.model.meta import build_on_meta
from epfsdp2.engine.planner.traffic import Collective
from epfsdp2.engine.topology.expert_placement import check_experts_divide, check_inner_divides
from epfsdp2.engine.topology.mesh import Topology
from epfsdp2.recipes.plan.cards import config_of
from epfsdp2.recipes.plan.cli import main, parse, request_of
from epfsdp2.recipes.plan.meshes import choices, recommended
from epfsdp2.recipes.plan.roofline import Cluster, seconds
from tests.parity.families import FAMILIES

QWEN = ["--model", "Qwen3-30B-A3B", "--nodes", "2"]


@pytest.fixture(scope="module")
def qwen3_30b():
    return request_of(parse(QWEN), config_of("Qwen3-30B-A3B"))


def _joined(text):
    """Return the text without line breaks."""
    return " ".join(text.split())


def _rows(text):
    return [line for line in text.splitlines() if line.startswith("│")]


@pytest.fixture(scope="module")
def found(qwen3_30b):
    return choices(qwen3_30b, Cluster(2, 8))


def test_plan_by_default_has_ten_meshes_that_fit_why_the_next_does_not_json_and_a_picture(capsys, tmp_path, found):
    figures, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    assert main([*QWEN, "--json", str(figures), "--png", str(picture)]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100 and len(text.splitlines()) < 40
    fit, refused = [c for c in found if c.fits], next(c for c in found if not c.fits)
    assert [int(cell) for row in _rows(text) for cell in row.split("│")[1:6]] == [
        size for c in fit[:10] for t in [c.topology] for size in (t.ep, t.etp, t.ep_fsdp, t.dp_replicate, c.sp)
    ]
    said, needs = _joined(text), f"needs {refused.peak.total / 2**30:.1f} GiB"
    assert f"{' '.join(refused.settings)} {needs}" in said
    assert f"{len(fit)} of {len(found)} meshes fit; --all lists all {len(found)}." in text
    result = json.loads(figures.read_text())
    best = result["recommended"]
    assert best["fits"] and best in result["choices"] and " ".join(best["settings"]) in said
    assert sum(n for part, n in best["bytes"].items() if part != "total") == best["bytes"]["total"]
    # The line that the engine prints for this mesh.
    assert f"mesh: 16 ranks = dp_replicate {best['dp_replicate']} x ep_fsdp {best['ep_fsdp']} x ep {best['ep']}" in said
    assert "memory at its peak" in said and "received in a step: all-gather" in said
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_plan_that_fits_nowhere_has_the_ten_meshes_that_need_least(capsys):
    assert main(["--model", "gpt-oss-20b", "--gpus", "4", "--gib", "40", "--tokens", "4096"]) == 2
    text = capsys.readouterr().out
    needed = [float(row.split("│")[8]) for row in _rows(text)]
    assert len(needed) == 10 and needed == sorted(needed) and min(needed) > 36
    assert max(map(len, text.splitlines())) <= 100 and re.search(r"\b0 of \d+ meshes fit", text)


def test_plan_meshes_are_those_that_the_engine_takes(found):
    world, legal = 16, set()
    for ep in range(1, world + 1):
        for fsdp, etp in itertools.product(range(1, world + 1), repeat=2):
            try:
                topology = Topology.arrange(world, ep, fsdp, etp)
                check_experts_divide([128], topology, "it")
                check_inner_divides([768], topology, "it")
            except SettingError:
                continue
            legal |= {(topology, sp) for sp in range(1, world + 1) if world % sp == 0 and 32 % sp == 0}
    assert {(c.topology, c.sp) for c in found} == legal and len(found) == len(legal)


def test_plan_recommendation_is_the_fastest_mesh_that_fits(found):
    best = recommended(found)
    assert best.fits and best.gib <= 0.9 * 80
    assert best.time.step == min(c.time.step for c in found if c.fits)
    assert any(not c.fits for c in found)  # one GPU with 30 billion parameters and their states


@pytest.mark.long
def test_plan_of_few_large_experts_on_more_ranks_recommends_etp(tmp_path):
    """Mixtral 8x7B on 16 GPUs with 1,024 tokens per micro-batch: gathering experts costs more than gathering rows."""
    MixtralConfig().save_pretrained(tmp_path)
    request = request_of(parse(["--model", str(tmp_path), "--tokens", "1024"]), config_of(str(tmp_path)))
    found = choices(request, Cluster(2, 8))
    best = recommended(found)
    assert (best.topology.ep, best.topology.etp, best.topology.ep_fsdp) == (8, 2, 1)
    whole = min(c.time.step for c in found if c.fits and c.topology.etp == 1)
    assert best.time.step < 0.7 * whole


@pytest.mark.parametrize(
    ("name", "mixer"), [("glm_moe_dsa", "GlmMoeDsaAttention"), ("qwen3_next", "Qwen3NextGatedDeltaNet")]
)
def test_plan_of_shared_rows_that_can_not_be_counted_says_so(capsys, tmp_path, name, mixer):
    out = tmp_path / "plan.json"
    FAMILIES[name].build().config.save_pretrained(tmp_path)
    assert main(["--model", str(tmp_path), "--gpus", "2", "--tokens", "64", "--json", str(out)]) == 0
    sizes = {choice["sp"] for choice in json.loads(out.read_text())["choices"]}
    uncounted = f"Not counted where sp is above 1: what {mixer} sends"
    assert sizes == {1, 2} and uncounted in _joined(capsys.readouterr().out)


@pytest.mark.long
def test_plan_that_does_not_fit_names_the_part_and_the_cluster_that_does(capsys, tmp_path):
    out = tmp_path / "plan.json"
    assert main(["--model", "gpt-oss-120b", "--nodes", "1", "--tokens", "4096", "--json", str(out)]) == 2
    text = _joined(capsys.readouterr().out)
    assert "does not fit" in text and "Too big each by itself: optimizer." in text and "smallest cluster" in text
    result = json.loads(out.read_text())
    nodes = result["smallest_cluster"]["nodes"]
    assert result["recommended"] is None and f"has {nodes} ({8 * nodes} GPUs)" in text
    more = ["--model", "gpt-oss-120b", "--tokens", "4096"]
    assert main([*more, "--nodes", str(nodes)]) == 0
    assert main([*more, "--nodes", str(nodes - 1)]) == 2
    fewer = re.search(r"Fewer do with other settings: .*?(\d+) with engine.model_dtype=bf16 --optimizer muon", text)
    bf16 = ["engine.model_dtype=bf16", "--optimizer", "muon"]
    assert main([*more, *bf16, "--nodes", fewer[1]]) == 0 and int(fewer[1]) < nodes


def test_plan_of_a_folder_with_a_config_lists_every_mesh_if_asked(tmp_path, capsys):
    Qwen3MoeConfig(num_hidden_layers=2, num_experts=8, vocab_size=1024).save_pretrained(tmp_path)
    options = ["--model", str(tmp_path), "--gpus", "4", "--tokens", "64"]
    assert main([*options, "--all"]) == 0
    text = capsys.readouterr().out
    request = request_of(parse(options), config_of(str(tmp_path)))
    assert "Recommended" in text and len(_rows(text)) == len(choices(request, Cluster(1, 4))) > 10
    assert {row.split("│")[13].strip() for row in _rows(text)} == {"yes"}


def test_plan_with_adapters_chunks_or_another_backend_changes(tmp_path):
    Qwen3MoeConfig(num_hidden_layers=8, num_experts=8, vocab_size=1024).save_pretrained(tmp_path)

    def planned(*more):
        options = parse(["--model", str(tmp_path), "--gpus", "2", "--tokens", "512", *more])
        found = choices(request_of(options, config_of(str(tmp_path))), Cluster(nodes=1, gpus=2))
        return next(choice for choice in found if choice.topology.ep == 2 and choice.sp == 1)

    plain, lora, chunks = planned(), planned("--lora-rank", "8"), planned("engine.dispatch_chunks=2")
    assert 0 < lora.peak.optimizer < 0.1 * plain.peak.optimizer and lora.peak.parameters > plain.peak.parameters
    calls = [{c.name: c.calls for c in found.traffic}["all-to-all tokens"] for found in (plain, chunks)]
    # 7 of 8 layers are recomputed; without chunks, recomputation stops before the rows are returned.
    assert calls == [7 * 5 + 4, (7 * 6 + 4) * 2]
    assert chunks.time.all_to_all == pytest.approx(
        plain.time.all_to_all * 46 / 39 / 2, rel=0.01
    )  # without counts and weights
    assert planned("engine.dispatch_chunks=4").time.all_to_all < chunks.time.all_to_all
    wide = planned("engine.mixed_precision=null", "engine.mixed_precision.param_dtype=fp32").traffic
    assert sum(c.wire for c in wide) > sum(c.wire for c in plain.traffic)
    reference = planned("engine.experts_backend=reference", "engine.activation_checkpointing=none")
    assert reference.peak.activations > planned("engine.activation_checkpointing=none").peak.activations


@pytest.mark.parametrize(
    ("card", "billions"),
    [
        ("Qwen3-30B-A3B", 30.5),
        ("Qwen3-235B-A22B", 235.1),
        ("gpt-oss-20b", 20.9),
        ("gpt-oss-120b", 116.8),
        ("DeepSeek-V3", 671.0),
        ("GLM-4.5", 352.8),
        ("Kimi-K2", 1026.4),
    ],
)
def test_cards_of_known_models_have_the_published_number_of_parameters(card, billions):
    model = build_on_meta(AutoModelForCausalLM, config_of(card), torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.005)


def test_plan_of_an_unknown_model_names_the_nearest(capsys):
    assert main(["--model", "deepsek-v3"]) == 1
    assert "DeepSeek-V3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nodes", "0"], "--nodes is 0; it has to be at least 1"),
        (["--gib", "-1"], "--gib is -1.0; it has to be positive"),
        (["--tokens", "100", "--sequences", "3"], "does not divide --tokens"),
        (["--imbalance", "0.5"], "1 or more"),
        (["engine.dispatch_chunks=0"], "engine.dispatch_chunks=0: is the number of parts"),
        (["engine.ep_size=8"], "engine.ep_size=8: the plan does not depend on such a setting."),
        (["dispatch_chunks=2"], "dispatch_chunks=2: is no setting of the engine with a value."),
    ],
)
def test_plan_of_impossible_sizes_is_refused(options, words, capsys):
    with pytest.raises(SystemExit):
        parse(["--model", "Qwen3-30B-A3B", *options])
    assert words in capsys.readouterr().err


def test_plan_of_a_dense_model_has_no_expert_parallelism(tmp_path, capsys):
    Qwen3Config(num_hidden_layers=2).save_pretrained(tmp_path)
    report, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    assert main(["--model", str(tmp_path), "--gpus", "4", "--json", str(report), "--png", str(picture)]) == 0
    assert "ep is 1: the model has no experts." in capsys.readouterr().out
    choices = json.loads(report.read_text())["choices"]
    assert {c["ep"] for c in choices} == {1} and {c["dp_replicate"] for c in choices} == {1, 2, 4}
    assert not [c for choice in choices for c in choice["collectives"] if c["name"].startswith("all-to-all tok")]


def test_roofline_seconds_of_a_collective_equal_those_by_hand():
    cluster = Cluster(nodes=2, gpus=8, inside=100, between=10)
    inside = Collective("all-gather dense", ranks=8, stride=1, calls=1, nbytes=80 * 10**9)
    assert inside.wire == 70e9 and seconds(inside, cluster) == pytest.approx(0.7)
    across = Collective("all-gather experts", ranks=2, stride=8, calls=1, nbytes=80 * 10**9)
    assert seconds(across, cluster) == pytest.approx(4.0)
    both = Collective("all-gather dense", ranks=16, stride=1, calls=1, nbytes=80 * 10**9)
    assert seconds(both, cluster) == pytest.approx(0.7)  # each interface receives an eighth of the other node's half
    tokens = Collective("all-to-all tokens", ranks=16, stride=1, calls=1, nbytes=16 * 10**9)
    assert seconds(tokens, cluster) == pytest.approx(0.8)
