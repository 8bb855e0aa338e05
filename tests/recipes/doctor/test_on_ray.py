"""Placement of ranks on the actors of a cluster, with a stand-in for Ray."""

import sys
from types import SimpleNamespace

import pytest

from epfsdp2.engine.errors import SettingError
from epfsdp2.recipes.doctor.on_ray import run_on_ray


def _cluster(monkeypatch, nodes, statuses=None):
    """Fake a cluster with one actor on each of ``nodes``; return the environments of its ranks."""
    environments, waiting = [], [*nodes]

    def place():
        node = waiting.pop(0)

        def run(words, environment, seconds):
            environments.append(environment)
            rank = int(environment["RANK"])
            return (statuses or {}).get(rank, 0), "" if statuses else f"rank {rank} ", "why", '{"nodes": 2}'

        return SimpleNamespace(
            node=SimpleNamespace(remote=lambda: (node, f"host-{node}", 1)), run=SimpleNamespace(remote=run)
        )

    actor = SimpleNamespace(options=lambda **resources: SimpleNamespace(remote=place))
    exceptions = SimpleNamespace(GetTimeoutError=TimeoutError, RayError=ConnectionError)
    fake = SimpleNamespace(
        init=lambda **how: None,
        available_resources=lambda: {"GPU": float(len(nodes))} if nodes else {},
        remote=lambda kind: actor,
        get=lambda found, timeout=None: found,
        exceptions=exceptions,
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    return environments


def test_ranks_of_a_node_are_neighbours_and_meet_on_that_of_rank_0(monkeypatch, tmp_path, capsys):
    environments = _cluster(monkeypatch, ["b", "a", "a", "b"])
    assert run_on_ray([], 0, 60.0, tmp_path / "machine.json") == 0
    places = [tuple(int(e[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")) for e in environments]
    assert places == [(0, 0, 2), (1, 1, 2), (2, 0, 2), (3, 1, 2)]
    assert {e["MASTER_ADDR"] for e in environments} == {"host-a"}
    assert capsys.readouterr().out == "rank 0 " and (tmp_path / "machine.json").read_text() == '{"nodes": 2}'


def test_a_rank_that_fails_before_anything_is_printed_is_named(monkeypatch, capsys):
    _cluster(monkeypatch, ["a", "a"], {1: 3})
    assert run_on_ray([], 0, 60.0, None) == 3
    assert "rank 1 ended with status 3:\nwhy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("nodes", "said"), [([], "the cluster has no free GPU"), (["a", "a", "b"], r"its nodes have \[1, 2\] free GPUs")]
)
def test_clusters_that_can_not_be_checked_are_refused(nodes, said, monkeypatch):
    _cluster(monkeypatch, nodes)
    with pytest.raises(SettingError, match=said):
        run_on_ray([], 0, 60.0, None)
