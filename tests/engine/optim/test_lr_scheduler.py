"""One schedule over several optimizers."""

import json

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from epfsdp2.engine.optim.lr_scheduler import MultiLRScheduler
from epfsdp2.engine.optim.multi_optimizer import MultiOptimizer


def _optimizer():
    names = {name: nn.Parameter(torch.ones(2)) for name in "abc"}
    inner = {
        "dense": torch.optim.AdamW([{"params": [names["a"]]}, {"params": [names["b"]], "lr": 0.5}], lr=0.1),
        "experts": torch.optim.SGD([names["c"]], lr=1.0),
    }
    return MultiOptimizer(inner, names.items())


def _halving(optimizer):
    return LambdaLR(optimizer, lambda step: 0.5**step)


def _warming_up(optimizer):
    return LambdaLR(optimizer, lambda step: min(1.0, step / 4))


def test_lr_scheduler_of_two_optimizers_has_the_rates_of_their_groups_in_order():
    optimizer = _optimizer()
    schedule = MultiLRScheduler(optimizer, _halving)
    assert isinstance(schedule, LRScheduler) and schedule.optimizer is optimizer
    for step in range(3):
        rates = [0.1 * 0.5**step, 0.5 * 0.5**step, 0.5**step]
        assert schedule.get_last_lr() == pytest.approx(rates)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(rates)
        assert schedule.last_epoch == step
        optimizer.step()
        schedule.step()


def test_lr_scheduler_state_is_plain_json_and_continues_with_its_rates():
    optimizer = _optimizer()
    schedule = MultiLRScheduler(optimizer, _warming_up)
    for _ in range(3):
        optimizer.step()
        schedule.step()
    state = json.loads(json.dumps(schedule.state_dict()))
    assert state.keys() == {"dense", "experts"}
    other = _optimizer()
    resumed = MultiLRScheduler(other, _warming_up)
    assert {group["lr"] for group in other.param_groups} == {0.0}
    resumed.load_state_dict(state)
    # The optimizer's own state isn't loaded, and the next step still has the saved rate.
    assert [group["lr"] for group in other.param_groups] == pytest.approx([0.075, 0.375, 0.75])
    other.step()
    resumed.step()
    optimizer.step()
    schedule.step()
    assert resumed.get_last_lr() == schedule.get_last_lr() == [0.1, 0.5, 1.0]


def test_lr_scheduler_state_of_other_optimizers_is_refused():
    schedule = MultiLRScheduler(_optimizer(), _halving)
    with pytest.raises(ValueError, match=r"to the optimizers \['dense'\], but this run has \['dense', 'experts'\]"):
        schedule.check_state_dict({"dense": schedule.state_dict()["dense"]})
