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

from benchmarks.experts import compare, peers
from benchmarks.experts.layer import Geometry, kept_bytes, passes
from benchmarks.update import step
from benchmarks.weights import weight_sync, weight_sync_adapters, weight_sync_fp8
from epfsdp2.recipes.plan.cards import config_of
from epfsdp2.recipes.plan.cli import parse, request_of
from epfsdp2.recipes.plan.meshes import choices, recommended
from epfsdp2.recipes.plan.roofline import Cluster

TINY = Geometry("tiny", tokens=24, experts=4, top_k=2, hidden=32, intermediate=16)
MODEL = {**step.MODEL, "vocab_size": 96, "hidden_size": 32, "moe_intermediate_size": 48, "num_hidden_layers": 2}
MODEL |= {"head_dim": 8, "num_experts": 8}


def test_experts_measures_every_side_and_says_which_peer_is_missing(tmp_path):
    rows = {row.side: row for row in compare.measure(TINY, 2, tmp_path / "no python")}
    assert set(rows) == {*compare.LOCAL, *compare.PEERS}
    for side in compare.LOCAL:
        assert 0 < rows[side].forward < rows[side].total and rows[side].kept > 0
    assert rows[compare.BASE].ratio == rows[compare.BASE].kept_ratio == 1
    for side in compare.PEERS:
        assert "make peers" in rows[side].note and compare.cells(rows[side])[-1] == rows[side].note
    assert {len(compare.cells(row)) for row in rows.values()} == {len(compare.COLUMNS)}


def test_experts_with_a_side_that_computes_otherwise_does_not_time_it(monkeypatch, tmp_path):
    original = compare.Local.passes

    def off(self, side, times):
        found = original(self, side, times)
        return found | {"norm": 1.01 * found["norm"]} if side == compare.OURS else found

    monkeypatch.setattr(compare.Local, "passes", off)
    with pytest.raises(AssertionError, match=compare.OURS):
        compare.measure(TINY, 1, tmp_path / "no python")


def test_experts_bounds_refuse_slower_rows():
    row = compare.Row(TINY, compare.OURS, ratio=0.99, kept_ratio=0.4)
    assert row.holds and not replace(row, ratio=1.01).holds and not replace(row, kept_ratio=0.41).holds
    on_gpu = replace(row, geometry=compare.ON_A_GPU[0])
    assert not on_gpu.holds and replace(on_gpu, ratio=0.66).holds  # there it has to be 1.5 x as fast
    found = {"matrix rate": 0.5, "permute": 0.7, "sum": 0.7}
    assert compare.fast_enough(found) and not any(compare.fast_enough(found | {name: 0.4}) for name in found)
    assert replace(row, side="eager", ratio=3.0).holds


def test_kept_bytes_count_each_storage_once():
    weight = torch.nn.Parameter(torch.randn(8, 8))
    hidden = torch.randn(4, 8, requires_grad=True)

    def layer(hidden, index, weights):
        inner = hidden @ weight  # keeps what is its own input and parameter
        return inner.exp() * inner.view(2, 16).view(4, 8)  # exp's result, once; inner, once

    assert kept_bytes(layer, (hidden, hidden, hidden), [weight]) == 2 * 4 * 8 * 4
    took = passes(layer, (hidden, hidden, hidden), [weight], 2)
    assert 0 < took["forward"] < took["total"] and took["norm"] > 0


def test_experts_rows_of_a_gpu_run_on_a_cpu():
    measured = compare.rates(TINY)
    assert min(measured.values()) > 0
    found = compare.shares(compare.Row(TINY, compare.OURS, total=1.0), measured)
    assert set(found) == {"matrix rate", "permute", "sum"}
    assert found["matrix rate"] == pytest.approx(TINY.flops / 1e12 / measured["matrix_tflops"])


def test_peer_that_fails_answers_with_its_error():
    """In this environment, which has none of them and no GPU for SonicMoE."""
    question = json.dumps({**vars(TINY)}) + "\n"
    for name, said in (("veomni", "ModuleNotFoundError"), ("sonic-moe", "RuntimeError: needs an H100")):
        command = [sys.executable, *compare.PEERS_COMMAND, name]
        answer = subprocess.run(command, input=question, capture_output=True, text=True)
        assert said in json.loads(answer.stdout)["error"] and answer.returncode == 1


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
    """Or ``measure`` would say so."""
    rows = compare.measure(replace(TINY, dtype="bfloat16"), 1, compare.PEERS_PYTHON)
    assert next(row for row in rows if row.side == "torchtitan").kept > 0


def test_step_of_both_engines_moves_the_planned_bytes():
    rows = step.run(MODEL, 2, [1, 2], [32], 1, etp=2)
    assert [row.side for row in rows] == [step.STOCK, "ep 1", "ep 1 etp 2", "ep 2"]
    stock, whole, shared, split = rows
    assert (shared.ep, shared.etp) == (1, 2) and shared.over_ep > 0 and whole.wire > shared.wire == shared.plan
    assert stock.speedup == 1 and stock.holds and stock.plan == 0
    assert whole.wire == whole.plan > split.wire == split.plan > 0
    assert stock.wire > split.wire and split.tokens_per_second == 2 * 32 / split.update
    assert {len(step.cells(row)) for row in rows} == {len(step.COLUMNS)}


def test_step_samples_have_the_tokens_asked_for():
    for tokens in (32, 256, 1024):
        lengths = [len(ids) for ids, *_ in step.samples_of(2, tokens, 96)]
        assert sum(lengths) == 2 * tokens and len(set(lengths)) > 1 and min(lengths) > 3


def test_step_bounds_refuse_slower_rows_and_experts_are_95_percent():
    row = step.Row(2, 32, "ep 2", 2, 1.0, 1.0, 2.0, 1, 1)
    assert row.holds and not replace(row, speedup=1.99).holds and replace(row, tokens=1024, speedup=1.99).holds
    assert replace(row, ep=1, speedup=0.95).holds and not replace(row, ep=1, speedup=0.94).holds
    assert replace(row, world=1, ep=1, speedup=0.95).holds
    shared = replace(row, ep=1, etp=2, over_ep=step.ETP_SPEEDUP)
    assert shared.holds and not replace(shared, over_ep=step.ETP_SPEEDUP - 0.01).holds
    assert 0.945 < step.share_of_experts(step.MODEL) < 0.955


def test_step_of_few_large_experts_is_on_the_mesh_that_the_plan_recommends(tmp_path):
    Qwen3MoeConfig(**step.FEW).save_pretrained(tmp_path)
    request = request_of(parse(["--model", str(tmp_path), "--tokens", str(step.FEW_TOKENS)]), config_of(str(tmp_path)))
    best = recommended(choices(request, Cluster(1, step.FEW_RANKS))).topology
    assert (best.ep, best.etp, best.ep_fsdp) == (step.FEW["num_experts"], 2, 1)


def test_adapter_benchmark_of_rank_32_is_held_to_a_share_of_the_base():
    row = {"tp": 1, "sync": "adapters", "bytes": 2, "of_bytes": 0.02, "seconds": 1.0, "of_seconds": 0.5}
    assert weight_sync_adapters.holds(row) and not weight_sync_adapters.holds(row | {"of_bytes": 0.021})
    assert weight_sync_adapters.holds(row | {"sync": "base", "of_bytes": 1.0})
    assert weight_sync_adapters.section([row])[-1] == "| TP 1 | adapters | 0.00 | 2.00% | 1.00 | 0.50 x |"
    # q_proj of Qwen3-30B-A3B is [4096, 2048] in 48 layers. Adapters of its experts are far above the bound.
    base = 30_532_122_624
    assert weight_sync_adapters.share(("q_proj",)) == pytest.approx(48 * 32 * (4096 + 2048) / base)
    of_expert = 2 * 32 * (2048 + 768) + 32 * (768 + 2048)  # gate and up, and down
    assert weight_sync_adapters.share(("experts.gate_up_proj", "experts.down_proj")) == pytest.approx(
        48 * 128 * of_expert / base
    )


def test_weight_sync_bounds_refuse_slower_rows():
    row = {"side": "sliced", "tp": 2, "times_stock": 3.0, "times_passes": 1.3, "peak_megabytes": 128}
    assert weight_sync.holds(row)
    for worse in ({"times_stock": 2.9}, {"times_passes": 1.31}, {"peak_megabytes": 129}):
        assert not weight_sync.holds(row | worse)
    assert weight_sync.holds(row | {"tp": 1, "times_stock": 2.0})
    assert weight_sync.holds({"side": "stock", "tp": 2, "times_stock": 1.0, "peak_megabytes": 288})
    assert not weight_sync.holds({"side": "full", "tp": 2, "times_stock": 1.0, "peak_megabytes": 288})


def test_fp8_weight_sync_bounds_refuse_slower_rows_and_more_bytes():
    row = {"side": "sliced", "times_stock": 1.5, "of_bfloat16": 0.55}
    assert weight_sync_fp8.holds(row) and weight_sync_fp8.holds({"side": "stock"})
    assert not weight_sync_fp8.holds(row | {"times_stock": 1.4}) and not weight_sync_fp8.holds(row | {"of_bfloat16": 1})
