"""Ranks with different models or settings all fail, at once."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from epfsdp2.engine.topology.rank_consistency import RankMismatchError, check_agreement, model_facts, without_paths
from tests.support.ranks import each_case, run_ranks

WORLD = 4


def _model(layers=2, dtype=torch.float32, frozen=False):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(3, 3, dtype=dtype) for _ in range(layers)))
    model[0].weight.requires_grad_(not frozen)
    return model


def _facts(rank, what):
    odd = rank == 2
    return {
        "settings": {"ep_size": 2 if odd and what == "ep_size" else 4, "prefetch_depth": 1},
        "model": model_facts(
            _model(
                layers=3 if odd and what == "layers" else 2,
                dtype=torch.bfloat16 if odd and what == "dtype" else torch.float32,
                frozen=odd and what == "frozen",
            )
        ),
    }


def _disagree(what, words):
    with pytest.raises(RankMismatchError) as error:
        check_agreement(_facts(dist.get_rank(), what))
    assert all(word in str(error.value) for word in words), str(error.value)
    messages = [None] * WORLD
    dist.all_gather_object(messages, str(error.value))
    assert set(messages) == {messages[0]}


DIFFERENCES = [
    ("ep_size", ["settings: ep_size: 4 on ranks 0, 1, 3; 2 on rank 2"]),
    ("layers", ["model: 2.weight: (not there) on ranks 0, 1, 3; (3, 3) torch.float32 trained on rank 2"]),
    ("dtype", ["model: 0.weight", "(3, 3) torch.bfloat16 trained on rank 2"]),
    ("frozen", ["model: 0.weight", "frozen on rank 2"]),
]


def _folders():
    """The folders of a model are not compared, its sizes are."""
    rank = dist.get_rank()
    config = {"hidden_size": 4, "_name_or_path": f"/disk-{rank}/model"}
    config["text_config"] = {"head_dim": 2, "_name_or_path": f"/disk-{rank}/model"}
    check_agreement({"model config": without_paths(config)})
    with pytest.raises(RankMismatchError, match="model config: hidden_size: 0 on rank 0; 1 on rank 1; "):
        check_agreement({"model config": without_paths({**config, "hidden_size": rank})})


def _fails(ranks):
    failure = ValueError("ep_size=3 does not divide") if dist.get_rank() in ranks else None
    wanted = ValueError if len(ranks) == WORLD else RankMismatchError
    with pytest.raises(wanted, match="ep_size=3 does not divide") as error:
        check_agreement({} if failure else _facts(dist.get_rank(), "nothing"), failure=failure)
    if wanted is RankMismatchError:
        assert "ranks 1, 3: ValueError" in str(error.value)


def _agreement():
    check_agreement(_facts(dist.get_rank(), "nothing"))
    each_case(DIFFERENCES, _disagree)
    with pytest.raises(RankMismatchError, match="and 15 more"):
        check_agreement({"settings": {str(i): dist.get_rank() for i in range(20)}})
    _folders()
    each_case([([1, 3],), ([0, 1, 2, 3],)], _fails)


def test_check_agreement_with_ranks_that_differ_or_fail_raises_on_all_and_equal_ranks_pass():
    run_ranks(_agreement, WORLD)
