"""Weight syncs at published sizes: a rank's plan, and its Python in a sync."""

from typing import Any

import pytest

from epfsdp2.rollout.layout.specs import Rollout
from tests.scale.syncs import MEMORY, colocated, no_bytes, run, sent_model, separate, shards_of, sync_of
from tests.support.scale import MOST_GROWTH, SIZES, Cost, Size, alone, growth, on_fake_ranks

# A rollout of each size, and the rounds and parameters of a sync of worker 0.
ROLLOUTS = {
    SIZES[0]: (Rollout(4), 146, 435),
    SIZES[1]: (Rollout(8), 190, 849),
    SIZES[2]: (Rollout(8), 469, 1193),
    SIZES[3]: (Rollout(16), 365, 1093),
}
# The tensors of a sync in full, for sizes of which it is measured; and syncs to workers apart.
FULL = {SIZES[0]: 18867, SIZES[1]: 36945}
# Four workers would cut blocks of its experts, which have 768 rows.
QUANTISED, IN_BLOCKS = SIZES[0], Rollout(2, block=128)


def _costs(size: Size) -> dict[str, Any]:
    """Plan and run syncs of one rank; those in full, in FP8 and to workers apart where they are measured."""
    found: dict[str, Any] = {}
    with on_fake_ranks(size.world), no_bytes():
        sync, rollout = sync_of(size), ROLLOUTS[size][0]
        found["plan"], exchange = Cost.of(sync.exchange, rollout)
        found["digest"], _ = Cost.of(exchange.plan.digest)
        found["first"], found["parameters"] = Cost.of(run, exchange, sync.values())
        found["again"], _ = Cost.of(lambda: run(exchange, sync.values()))
        found["rounds"], found["peak"] = len(list(exchange.plan.rounds)), exchange.traffic.peak
        if size in FULL:
            found["full first"], found["tensors"] = Cost.of(lambda: sum(1 for _ in sync.full()))
            found["full again"], _ = Cost.of(lambda: sum(1 for _ in sync.full()))
        if size == QUANTISED:
            exchange = sync.exchange(IN_BLOCKS)
            found["fp8"], found["fp8 parameters"] = Cost.of(lambda: run(exchange, sync.values("merged", IN_BLOCKS)))
            found["fp8 peak"] = exchange.traffic.peak
        sent = sync.sent_model()
    for name, rank in (("trainer", 0), ("worker", size.world)) if size in FULL else ():
        workers = size.world // 2
        with on_fake_ranks(size.world + workers, rank), no_bytes():
            values = shards_of(sent) if name == "trainer" else None
            found[f"{name} plans"], exchange = Cost.of(separate, sent, rollout, workers, rank)
            found[f"{name} first"], found[f"{name} gets"] = Cost.of(run, exchange, values)
            found[f"{name} again"], _ = Cost.of(run, exchange, values)
            found[f"{name} peak"] = exchange.traffic.peak
    return found


@pytest.fixture(scope="module", params=SIZES, ids=str)
def measured(request) -> tuple[Size, dict[str, Any]]:
    return request.param, alone(_costs, request.param)


def test_sync_of_a_published_size_has_few_parameters_and_little_python(measured):
    size, found = measured
    _, rounds, parameters = ROLLOUTS[size]
    assert (found["rounds"], found["parameters"]) == (rounds, parameters)
    assert parameters <= 2000 and found["peak"] <= MEMORY
    assert found["plan"].ratio <= 85 and found["digest"].ratio <= 1
    # Some loops of 30 ms for each round and parameter.
    assert found["first"].ratio <= 0.02 * (rounds + parameters)
    assert found["again"].ratio <= 0.016 * (rounds + parameters)


def test_full_sync_of_a_published_size_is_planned_once(measured):
    size, found = measured
    if size not in FULL:
        pytest.skip("as many tensors as these take the same for each")
    assert found["tensors"] == FULL[size]
    assert found["full first"].ratio <= 0.005 * FULL[size]
    assert found["full again"].ratio <= 0.0035 * FULL[size]


def test_sync_in_fp8_has_a_parameter_more_for_the_scales_of_each_quantised_one(measured):
    size, found = measured
    if size != QUANTISED:
        pytest.skip("as many parameters as these take the same for each")
    assert found["fp8 parameters"] == 435 + 4 * 48 and found["fp8 peak"] <= MEMORY
    assert found["fp8"].ratio <= 100


def test_sync_to_workers_apart_costs_no_more_on_either_side(measured):
    size, found = measured
    if size not in FULL:
        pytest.skip("as many parameters as these take the same for each")
    _, rounds, parameters = ROLLOUTS[size]
    assert (found["trainer gets"], found["worker gets"]) == (0, parameters)
    for name in ("trainer", "worker"):
        assert found[f"{name} peak"] <= MEMORY and found[f"{name} plans"].ratio <= 8
        assert found[f"{name} first"].ratio <= 0.02 * (rounds + parameters)
        assert found[f"{name} again"].ratio <= 0.01 * (rounds + parameters)


def _growth(size: Size, what: str) -> dict[str, float]:
    rollout = Rollout(8)

    def prepare(each: Size) -> tuple[Any, ...]:
        sent = sent_model(each)
        return (sent, rollout) if what == "plan" else (colocated(sent, rollout), shards_of(sent))

    with no_bytes():
        return growth(prepare, colocated if what == "plan" else run, size)


@pytest.mark.parametrize("what", ["plan", "sync"])
def test_twice_the_ranks_cost_at_most_a_little_more_than_twice(what):
    found = alone(_growth, Size("Qwen3-235B-A22B", 256, 8, layers=4), what)
    assert found["calls"] <= MOST_GROWTH and found["seconds"] <= MOST_GROWTH, found
