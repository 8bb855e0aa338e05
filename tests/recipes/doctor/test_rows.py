"""Rows, settings and a machine's figures, from invented measurements of ranks with GPUs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from epfsdp2.engine.topology.mesh import Topology
from epfsdp2.recipes.doctor import host, links, meshes, rates
from epfsdp2.recipes.doctor.check import Ranks, rate_row
from epfsdp2.recipes.doctor.cli import CHECKS, report
from epfsdp2.recipes.plan.roofline import Cluster

H100S = Ranks(0, 16, 8, "cuda", False, Path("."), print)


@pytest.fixture(autouse=True)
def h100(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")


def _by_name(rows):
    return {row.what: row for row in rows}


def test_links_of_two_nodes_keep_tokens_within_a_node_and_find_a_slow_network():
    each = {"all-gather inside": 350.0, "all-to-all inside": 320.0, "all-gather between": 45.0}
    found = [{**each, "all-to-all between": 12.0 if rank == 3 else 44.0, "network": 400.0} for rank in range(16)]
    rows = _by_name(links.judge_links(found, H100S))
    assert rows["all-to-all within a node"].verdict == rows["all-gather between 2 nodes"].verdict == "right"
    slow = rows["all-to-all between 2 nodes"]
    assert slow.verdict == "low" and slow.value == "12 GB/s (median 44; behind: rank 3)" and slow.wanted == ">= 30"
    assert [dict(row.cluster) for row in rows.values() if row.cluster][1::2] == [{"inside": 320}, {"between": 12}]
    (setting,) = rows["tokens stay within a node"].settings
    assert setting.startswith("engine.ep_size=8 ")
    found = [{"all-gather inside": 350.0, "all-to-all inside": 200.0, "network": 0.0}] * 8
    of_one_node = list(links.judge_links(found, replace(H100S, world=8)))
    assert [row.verdict for row in of_one_node] == ["right", "low"] and not any(row.settings for row in of_one_node)


def test_network_rate_is_of_the_active_ports(tmp_path):
    for name, state, rate in (("mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)"), ("mlx5_1", "1: DOWN", "40 Gb/sec")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text(f"{rate}\n")
    assert links.network_rate(tmp_path) == 50 and links.network_rate(tmp_path / "none") == 0


def test_rates_of_an_h100_are_the_published_ones_for_the_plan():
    each = {"tflops": 798.0, "memory": 2970.0, "sdpa": 2e-3, "flash": 1e-3, "flash error": 1e-3}
    rows = _by_name(rates.judge_rates([each] * 16, H100S))
    assert [row.verdict for row in rows.values()] == ["right"] * 3
    assert rows["matrix products"].cluster == {"tflops": 989}
    assert rows["memory of a GPU, copied"].cluster == {"hbm": 3350}
    assert rows["FlashAttention 3"].value.startswith("2.00 x")
    wrong = _by_name(rates.judge_rates([{**each, "flash error": float("nan")}, each], H100S))["FlashAttention 3"]
    assert wrong.verdict == "wrong" and not wrong.settings


@pytest.mark.parametrize(
    ("seconds", "beside", "settings"),
    [
        (
            {"exchanged": 2.0, "2 chunks": 1.5, "4 chunks": 1.6},
            {"0": 9.0, "16": 5.0, "24": 4.0},
            ("chunks=2", "sms=24"),
        ),
        ({"exchanged": 2.0, "2 chunks": 1.5, "deepep": 1.2}, {"0": 5.0, "16": 5.1, "24": 6.0}, ("dispatcher=deepep",)),
        ({"exchanged": 2.0, "2 chunks": 1.99, "4 chunks": 2.5}, {"0": 5.0, "16": 5.0, "24": 6.0}, ()),
    ],
)
def test_experts_propose_settings_that_are_faster_than_the_defaults(seconds, beside, settings):
    each = {"seconds": {"alone": 1.0, **seconds}, "beside": beside, "flops": 4e14, "deepep": ""}
    rows = list(rates.judge_experts([each] * 16, H100S))
    proposed = [setting for row in rows for setting in row.settings]
    assert len(proposed) == len(settings) and all(name in line for name, line in zip(settings, proposed, strict=True))


def test_memory_of_a_gpu_that_another_process_has_is_low():
    each = {"host": 900.0, "shared": 450.0, "free": 78.0, "total": 79.1, "up": 50.0, "down": 48.0}
    rows = _by_name(host.judge_memory([each, {**each, "free": 40.0}], H100S))
    low = rows["memory of a GPU, free"]
    assert low.verdict == "low" and low.value == "40.0 of 79.1 GiB on rank 1" and low.cluster == {"gib": 79.1}
    assert rows["pinned memory to a GPU"].verdict == "right"


def test_versions_that_differ_among_ranks_or_are_refused_are_wrong():
    first = {"torch": "2.13.0", "nccl": "2.28.9", "gpu": "NVIDIA H100 80GB HBM3", "kernels": "triton"}
    row = _by_name(host.judge_versions([first, first], H100S))["versions"]
    assert row.verdict == "right"
    row = _by_name(host.judge_versions([first, {**first, "nccl": "2.27.0"}], H100S))["versions"]
    assert row.verdict == "wrong" and "rank 1 has nccl 2.27.0" in row.value
    row = _by_name(host.judge_versions([{**first, "torch": "2.9.0"}] * 2, H100S))["versions"]
    assert row.verdict == "wrong" and "torch: epfsdp2 works with torch 2.11 and newer" in row.value


@pytest.mark.parametrize("world", [1, 2, 6, 8, 64])
def test_topologies_are_few_and_differ_and_have_experts_and_replicas(world):
    found = meshes.topologies(world)
    assert len(found) == len(set(found)) <= 12 and found[0] == Topology.arrange(world, 1)
    assert world == 1 or {t.ep for t in found} & {world} and {t.dp_replicate for t in found} == {1, 2}


def test_rate_row_names_ranks_that_are_behind():
    assert rate_row("disk", [10.0, 10.0, 9.0], "GB/s").value == "9 GB/s"
    row = rate_row("disk", [10.0, 5.0, 10.0], "GB/s", 7.0, "hbm")
    assert row.value == "5 GB/s (median 10; behind: rank 1)" and row.verdict == "low" and row.cluster == {"hbm": 5}


def test_report_of_two_nodes_of_gpus_has_forty_lines_and_a_file_for_the_plan(tmp_path, capsys):
    rate = {"tflops": 690.0, "memory": 2970.0, "sdpa": 2e-3, "flash": 1e-3, "flash error": 1e-3}
    seconds = {"alone": 7.6e-3, "exchanged": 12e-3, "2 chunks": 9e-3, "4 chunks": 9.5e-3}
    memory = {"host": 1800.0, "shared": 900.0, "free": 78.0, "total": 79.1, "up": 50.0, "down": 48.0}
    network = {"all-gather inside": 350.0, "all-to-all inside": 320.0, "network": 400.0}
    packages = {"python": "3.12.1", "torch": "2.13.0", "vllm": "0.27.1"}
    beside = {"0": 9e-3, "16": 7e-3, "24": 6e-3}
    each = {
        "versions": {**packages, "gpu": "NVIDIA H100", "kernels": "triton"},
        "memory": memory,
        "disk": {"write": 2.5, "read": 5.0},
        "links": {**network, "all-gather between": 45.0, "all-to-all between": 42.0},
        "gradients": {"ep 1": 2e-7, "ep 16": float("nan")},
        "sync": {"differ": [], "parameters": 110, "seconds": 0.02},
        "rates": rate,
        "experts": {"seconds": seconds, "beside": beside, "flops": 3.7e12, "deepep": "deep_ep is not installed."},
        "receiver": {"same": True, "status": 0},
    }
    out = tmp_path / "machine.json"
    report([row for name, check in CHECKS.items() for row in check.judge(16 * [each[name]], H100S)], 16, out)
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 40 and "1 of 2 meshes are wrong: ep 16: nan" in text and "WRONG" in text
    settings = ("ep_size=8", "dispatch_chunks=2", "communication_sms=24")
    assert all(setting in text for setting in settings)
    cluster = Cluster(**json.loads(out.read_text()))
    assert cluster == Cluster(2, 8, gib=79.1, inside=320, between=42, tflops=855, hbm=3350)
