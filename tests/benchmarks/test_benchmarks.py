"""Benchmarks run at tiny sizes, count right, and report rows below a bound."""

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import silu
from transformers import Qwen3MoeConfig

from benchmarks import tables
from benchmarks.experts import compare, peers
from benchmarks.experts.layer import Geometry, kept_bytes, passes
from benchmarks.gpu import gpu_timed
from benchmarks.measure import in_turns
from benchmarks.update import step
from benchmarks.weights import weight_sync_adapters
from epfsdp2.recipes.plan.cards import config_of
from epfsdp2.recipes.plan.cli import parse, request_of
from epfsdp2.recipes.plan.meshes import choices, recommended
from epfsdp2.recipes.plan.roofline import Cluster

TINY = Geometry("tiny", tokens=24, experts=4, top_k=2, hidden=32, intermediate=16)
MODEL = {**step.MODEL, "vocab_size": 96, "hidden_size": 32, "moe_intermediate_size": 48, "num_hidden_layers": 2}
MODEL |= {"head_dim": 8, "num_experts": 8}


def test_report_writes_the_table_and_fails_if_a_bound_does_not_hold(tmp_path):
    rows = [{"side": "ours", **tables.judged(True)}, {"side": "theirs", **tables.judged(None)}]
    assert tables.report("table", "Heading", "make table", ("torch",), ["Text."], rows, folder=tmp_path) == 0
    written = (tmp_path / "table.md").read_text()
    assert written.endswith("| side | holds |\n| --- | --- |\n| ours | yes |\n| theirs |  |\n")
    rows.append({"side": "slow", **tables.judged(False)})
    assert tables.report("table", "Heading", "make table", ("torch",), [], rows, folder=None) == 1


def test_sides_take_turns_and_the_first_turn_does_not_count():
    order = []
    sides = {name: lambda name=name: order.append(name) or len(order) for name in "ab"}
    assert in_turns(sides, 2) == {"a": [4, 5], "b": [3, 6]} and "".join(order) == "abbaab"


def test_experts_measures_every_side_and_says_which_peer_is_missing(tmp_path):
    found = compare.measure(TINY, 2, tmp_path / "no python")
    rows = {row["side"]: row for row in compare.rows_of(TINY, found)}
    assert set(rows) == {*compare.LOCAL, *compare.PEERS}
    for side in compare.LOCAL:
        assert all(0 < turn["forward"] < turn["total"] for turn in found["turns"][side]) and found["kept"][side] > 0
    assert rows[compare.BASE]["of grouped_mm's"] == rows[compare.BASE]["of its kept"] == "1.00 x"
    assert all("make peers" in rows[side]["note"] for side in compare.PEERS)
    slower = {side: [{"forward": 1.0, "total": 2.0 + (side == compare.OURS)}] for side in compare.LOCAL}
    row = next(r for r in compare.rows_of(TINY, found | {"turns": slower}) if r["side"] == compare.OURS)
    assert row["of grouped_mm's"] == "1.50 x" and row[tables.BOUND] == "NO"


def test_experts_with_a_side_that_computes_otherwise_does_not_time_it(monkeypatch, tmp_path):
    original = compare.Local.passes

    def off(self, side, times):
        found = original(self, side, times)
        return found | {"norm": 1.01 * found["norm"]} if side == compare.OURS else found

    monkeypatch.setattr(compare.Local, "passes", off)
    with pytest.raises(AssertionError, match=compare.OURS):
        compare.measure(TINY, 1, tmp_path / "no python")


def test_kept_bytes_count_each_storage_once():
    weight = torch.nn.Parameter(torch.randn(8, 8))
    hidden = torch.randn(4, 8, requires_grad=True)

    def layer(hidden, index, weights):
        inner = hidden @ weight  # keeps what is its own input and parameter
        return inner.exp() * inner.view(2, 16).view(4, 8)  # exp's result, once; inner, once

    assert kept_bytes(layer, (hidden, hidden, hidden), [weight]) == 2 * 4 * 8 * 4
    took = passes(layer, (hidden, hidden, hidden), [weight], 2)
    assert 0 < took["forward"] < took["total"] and took["norm"] > 0


def test_rates_of_a_gpu_are_measured_on_a_cpu_too():
    measured = gpu_timed.rates(TINY)
    assert len(measured) == 4 and min(measured.values()) > 0


def test_peer_that_fails_answers_with_its_error():
    """There is no GPU for SonicMoE."""
    command = [sys.executable, *compare.PEERS_COMMAND, "sonic-moe"]
    answer = subprocess.run(command, input=json.dumps(vars(TINY)) + "\n", capture_output=True, text=True)
    assert "RuntimeError: needs an H100" in json.loads(answer.stdout)["error"] and answer.returncode == 1


def test_peer_sonic_moe_gets_experts_in_the_order_of_tokens_and_weights_as_hugging_face_stacks_them(monkeypatch):
    """A function on a CPU that computes by SonicMoE's documentation replaces its kernel."""
    given = {}

    def layer(x, scores, tokens, experts, w1, b1, w2, b2, count, stream, activation, *, concat_layout):
        given.update(activation=activation, concat_layout=concat_layout)
        out = torch.zeros_like(x)
        assert tokens.dtype == experts.dtype == torch.int32 and (tokens.diff() >= 0).all() and b1 is b2 is None
        for score, token, expert in zip(scores, tokens, experts, strict=True):
            gate, up = (w1[..., expert] @ x[token]).chunk(2)
            out = out.index_add(0, token[None], (score * (w2[..., expert] @ (silu(gate) * up)))[None])
        return out, torch.bincount(experts, minlength=count)

    enums = SimpleNamespace(ActivationType=SimpleNamespace(SWIGLU="swiglu"))
    module = SimpleNamespace(moe_general_routing_inputs=layer, enums=enums)
    monkeypatch.setitem(sys.modules, "sonicmoe", module)
    monkeypatch.setitem(sys.modules, "sonicmoe.enums", enums)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(peers, "can_run_sonic_moe", lambda geometry: True)
    peer, parameters = peers.sonic_moe(TINY)
    local = compare.Local(TINY)
    local.config._experts_implementation = compare.BASE
    torch.testing.assert_close(peer(*TINY.inputs()), local.module(*local.inputs), rtol=1e-4, atol=1e-5)
    assert given == {"activation": "swiglu", "concat_layout": True} and len(parameters) == 2


@pytest.mark.skipif(not compare.PEERS_PYTHON.exists(), reason="needs `make peers`")
def test_torchtitans_layer_with_equal_weights_computes_the_same():
    """Or ``measure`` would raise."""
    assert compare.measure(replace(TINY, dtype="bfloat16"), 1, compare.PEERS_PYTHON)["kept"]["torchtitan"] > 0


def test_step_of_both_engines_moves_the_planned_bytes():
    rows = step.run(MODEL, 2, [1, 2], [32], 1, etp=2)
    assert [row["side"] for row in rows] == [step.STOCK, "ep 1", "ep 1 etp 2", "ep 2"]
    wire, planned = ([float(row[column] or 0) for row in rows] for column in ("wire MB", "plan MB"))
    assert wire[1:] == planned[1:] and wire[1] > wire[2] > 0 and wire[0] > wire[3] > 0
    assert rows[2]["of ep's"] and [row[tables.BOUND] == "" for row in rows] == [True, False, False, False]


def test_step_samples_have_the_tokens_asked_for_and_experts_are_95_percent():
    for tokens in (32, 256, 1024):
        lengths = [len(ids) for ids, *_ in step.samples_of(2, tokens, 96)]
        assert sum(lengths) == 2 * tokens and len(set(lengths)) > 1 and min(lengths) > 3
    assert 0.945 < step.share_of_experts(step.MODEL) < 0.955


@pytest.mark.long
def test_step_of_other_batches_has_a_ratio_for_each():
    ratios = step.batch_rows(MODEL, 1)
    assert [*ratios] == [*step.BATCHES] and ratios["packed"] == 1.0 and min(ratios.values()) > 0.0


def test_step_of_few_large_experts_is_on_the_mesh_that_the_plan_recommends(tmp_path):
    Qwen3MoeConfig(**step.FEW).save_pretrained(tmp_path)
    request = request_of(parse(["--model", str(tmp_path), "--tokens", str(step.FEW_TOKENS)]), config_of(str(tmp_path)))
    best = recommended(choices(request, Cluster(1, step.FEW_RANKS))).topology
    assert (best.ep, best.etp, best.ep_fsdp) == (step.FEW["num_experts"], 2, 1)


def test_share_of_adapters_is_computed_from_the_models_sizes():
    """q_proj of Qwen3-30B-A3B is [4096, 2048] in 48 layers; an expert has adapters for gate, up and down."""
    base, of_expert = 30_532_122_624, 2 * 32 * (2048 + 768) + 32 * (768 + 2048)
    assert weight_sync_adapters.share(("q_proj",)) == pytest.approx(48 * 32 * (4096 + 2048) / base)
    found = weight_sync_adapters.share(("experts.gate_up_proj", "experts.down_proj"))
    assert found == pytest.approx(48 * 128 * of_expert / base)
