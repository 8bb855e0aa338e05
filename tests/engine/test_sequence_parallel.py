"""Ranks that share rows compute what the plain model does in one process."""

from tests.support.models import save_qwen3_moe
from tests.support.ppo import check_ppo_updates
from tests.support.ranks import run_ranks

WORLD = 4


def _sp(size, ep, **settings):
    return {"ep": ep, "ulysses_sequence_parallel_size": size, **settings}


def test_a_ppo_update_equals_the_plain_model(tmp_path):
    """The model has two heads of keys, so four ranks have each of them twice."""
    run_ranks(check_ppo_updates, WORLD, save_qwen3_moe(tmp_path), [_sp(2, 2), _sp(4, 2)], timeout=300)
