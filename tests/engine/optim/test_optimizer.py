"""MultiOptimizer acts as one optimizer: state by name, and kernels."""

import copy

import pytest
import torch
from torch import nn

from epfsdp2.engine.optim.multi_optimizer import MultiOptimizer, build_multi_optimizer
from tests.support.models.tiny import reference_model, save_qwen3_moe


def _two(second=torch.optim.SGD, **options):
    params = {"a": nn.Parameter(torch.ones(3)), "b": nn.Parameter(torch.ones(2, 2))}
    inner = {"dense": torch.optim.AdamW([params["a"]], lr=0.1), "experts": second([params["b"]], lr=0.1, **options)}
    return params, MultiOptimizer(inner, params.items())


def _backward(params):
    sum(p.sum() for p in params.values()).backward()


def test_multi_optimizer_without_parameters_or_with_a_group_added_later_is_refused():
    with pytest.raises(ValueError, match="no trainable parameter"):
        MultiOptimizer({}, [])
    with pytest.raises(ValueError, match=r"add it to one of .optimizers, \['dense', 'experts'\]"):
        _two()[1].add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def test_multi_optimizer_state_is_by_name_whichever_optimizer_holds_it():
    params, multi = _two(torch.optim.AdamW)
    _backward(params)
    multi.step()
    state = multi.state_dict()
    assert state["state"].keys() == {"a", "b"} and state["state"]["b"]["exp_avg"].shape == (2, 2)
    assert [(g["params"], g["optimizer"], g["algorithm"], g["lr"]) for g in state["param_groups"]] == [
        (["a"], "dense", "AdamW", 0.1),
        (["b"], "experts", "AdamW", 0.1),
    ]
    together = MultiOptimizer({"all": torch.optim.AdamW([params["b"], params["a"]], lr=0.3)}, params.items())
    together.load_state_dict(state)
    assert together.param_groups[0]["lr"] == 0.1
    for name, param in params.items():
        assert torch.equal(together.state[param]["exp_avg"], state["state"][name]["exp_avg"])
    state["param_groups"][1]["lr"] = 0.2
    with pytest.raises(ValueError, match="options of b and a differ"):
        together.load_state_dict(state)


def test_multi_optimizer_state_that_does_not_fit_names_the_parameter_and_changes_nothing():
    params, multi = _two()
    _backward(params)
    multi.step()
    good = multi.state_dict()
    before = copy.deepcopy(good)

    def refused(change, said):
        state = copy.deepcopy(good)
        change(state)
        with pytest.raises(ValueError, match=said):
            multi.load_state_dict(state)
        assert multi.state_dict()["param_groups"] == before["param_groups"]
        assert torch.equal(multi.state[params["a"]]["exp_avg"], before["state"]["a"]["exp_avg"])

    refused(lambda s: s["param_groups"].pop(), "has none of b: it belongs to another model")
    refused(lambda s: s["param_groups"][0]["params"].extend("vwxyz"), r"also has v; w; x; and 2 more")
    refused(lambda s: s["param_groups"][1].update(algorithm="Muon"), "b is Muon's, this run's optimizer for it is SGD")


def test_multi_optimizer_loads_hyperparameters_but_no_kernels():
    params, multi = _two(torch.optim.AdamW)
    state = multi.state_dict()
    for group in state["param_groups"]:
        group.update(fused=True, foreach=True, betas=(0.5, 0.6))
    multi.load_state_dict(state)
    assert [(g["fused"], g["foreach"], g["betas"]) for g in multi.param_groups] == [(None, None, (0.5, 0.6))] * 2


@pytest.mark.parametrize("second", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_init_state_leaves_parameters_unchanged(second):
    params, multi = _two(second)
    params["b"].grad = torch.ones(2, 2)
    multi.step()
    after, had = {n: p.detach().clone() for n, p in params.items()}, copy.deepcopy(dict(multi.state_dict()["state"]))
    multi.init_state()
    assert all(torch.equal(params[n], after[n]) for n in params)
    assert params["a"].grad is None and torch.equal(params["b"].grad, torch.ones(2, 2))
    assert [group["lr"] for group in multi.param_groups] == [0.1, 0.1]
    assert multi.state[params["a"]].keys() == {"step", "exp_avg", "exp_avg_sq"}
    for key, value in had.get("b", {}).items():
        assert value is None or torch.equal(multi.state[params["b"]][key], value)


def test_adam_and_adamw_take_the_fused_kernel_unless_a_kernel_was_chosen(tmp_path):
    model = reference_model(save_qwen3_moe(tmp_path))

    def kernels(build):
        return {(g.get("fused"), g["foreach"]) for g in build_multi_optimizer(model, build).param_groups}

    assert kernels(lambda params: torch.optim.AdamW(params)) == {(True, None)}
    assert kernels(lambda params: torch.optim.Adam(params)) == {(True, None)}
    assert kernels(lambda params: torch.optim.AdamW(params, fused=False)) == {(False, None)}
    assert kernels(lambda params: torch.optim.AdamW(params, foreach=True)) == {(None, True)}
    assert kernels(lambda params: torch.optim.AdamW(params, differentiable=True)) == {(None, None)}
    # NAdam has no fused kernel.
    assert kernels(lambda params: torch.optim.NAdam(params)) == {(None, None)}
