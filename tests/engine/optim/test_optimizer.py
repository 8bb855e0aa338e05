"""MultiOptimizer acts as one optimizer: state by name, hooks and kernels."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from epfsdp2.engine.optim.multi_optimizer import (
    MultiOptimizer,
    build_multi_optimizer,
)
from epfsdp2.engine.optim.muon import Muon
from tests.support.engine.sharded import sharded_model, whole_parameters
from tests.support.models.tiny import VOCAB, reference_model, save_qwen3_moe, token_loss
from tests.support.ranks import run_ranks


def _two(second=torch.optim.SGD, **options):
    params = {"a": nn.Parameter(torch.ones(3)), "b": nn.Parameter(torch.ones(2, 2))}
    inner = {"dense": torch.optim.AdamW([params["a"]], lr=0.1), "experts": second([params["b"]], lr=0.1, **options)}
    return params, MultiOptimizer(inner, params.items())


def _backward(params):
    sum(p.sum() for p in params.values()).backward()


# -- one optimizer -----------------------------------------------------------------------------------------------------


def test_multi_optimizer_is_one_optimizer_to_a_scheduler():
    params, multi = _two()
    assert isinstance(multi, torch.optim.Optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(multi, lambda step: 0.5**step)
    _backward(params)
    multi.step()
    schedule.step()
    assert [group["lr"] for o in multi.optimizers.values() for group in o.param_groups] == [0.05, 0.05]
    assert set(multi.state) == {params["a"]} | set(multi.optimizers["experts"].state)
    assert multi.state[params["a"]]["exp_avg"].shape == (3,)
    assert torch.equal(params["b"].detach(), torch.full((2, 2), 0.9))
    multi.zero_grad()
    assert all(p.grad is None for p in params.values())


def test_multi_optimizer_runs_hooks_once_per_step_and_per_state_dict():
    params, multi = _two()
    seen = []
    multi.register_step_pre_hook(lambda o, args, kwargs: seen.append(("pre", o)))
    multi.register_step_post_hook(lambda o, args, kwargs: seen.append(("post", o)))
    multi.register_state_dict_pre_hook(lambda o: seen.append(("saves", o)))
    multi.register_state_dict_post_hook(lambda o, state: {**state, "note": 1})
    multi.register_load_state_dict_pre_hook(lambda o, state: seen.append(("loads", state.pop("note"))))
    multi.register_load_state_dict_post_hook(lambda o: seen.append(("loaded", o)))
    _backward(params)
    multi.step()
    assert seen == [("pre", multi), ("post", multi)]
    state = multi.state_dict()
    assert state["note"] == 1
    multi.load_state_dict(state)
    assert seen[2:] == [("saves", multi), ("loads", 1), ("loaded", multi)]
    assert state["note"] == 1


def test_multi_optimizer_calls_a_closure_once_with_gradients_on():
    params, multi = _two()
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        loss = sum(p.sum() for p in params.values())
        loss.backward()
        return loss

    assert multi.step(closure).item() == 7.0
    assert calls == [True]


def test_multi_optimizer_with_a_grad_scaler_steps_and_skips():
    params, multi = _two()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(sum(p.sum() for p in params.values())).backward()
    scaler.unscale_(multi)
    assert torch.equal(params["b"].grad, torch.ones(2, 2))
    scaler.step(multi)
    scaler.update()
    assert torch.equal(params["b"].detach(), torch.full((2, 2), 0.9))
    params["a"].grad.fill_(float("inf"))
    scaler.step(multi)
    assert torch.equal(params["b"].detach(), torch.full((2, 2), 0.9))


def test_multi_optimizer_copy_is_independent():
    params, multi = _two()
    _backward(params)
    multi.step()
    other = copy.deepcopy(multi)
    assert other.state_dict()["param_groups"] == multi.state_dict()["param_groups"]
    copied = other.param_groups[0]["params"][0]
    assert copied is not params["a"] and torch.equal(copied, params["a"])
    copied.grad = torch.ones(3)
    other.step()
    assert not torch.equal(copied, params["a"])


def test_multi_optimizer_refuses_groups_that_are_empty_shared_or_added_later():
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    one = torch.optim.SGD([a], lr=1.0)
    with pytest.raises(ValueError, match="no trainable parameter"):
        MultiOptimizer({}, [])
    with pytest.raises(ValueError, match="'dense' has an empty parameter group"):
        MultiOptimizer({"dense": torch.optim.SGD([{"params": [a]}, {"params": []}], lr=1.0)}, [("a", a)])
    with pytest.raises(ValueError, match="a is in more than one"):
        MultiOptimizer({"dense": one, "experts": torch.optim.SGD([a], lr=1.0)}, [("a", a)])
    with pytest.raises(ValueError, match="not one of the model's"):
        MultiOptimizer({"dense": one}, [("b", b)])
    with pytest.raises(ValueError, match=r"add it to one of .optimizers, \['dense'\]"):
        MultiOptimizer({"dense": one}, [("a", a)]).add_param_group({"params": [b]})


def test_multi_optimizer_strips_wrappers_from_names():
    model = nn.Sequential(nn.Linear(2, 2))
    wrapped = [(n.replace("0.", "0._orig_mod._checkpoint_wrapped_module."), p) for n, p in model.named_parameters()]
    multi = MultiOptimizer({"dense": torch.optim.SGD(model.parameters(), lr=1.0)}, wrapped)
    assert multi.state_dict()["param_groups"][0]["params"] == ["0.weight", "0.bias"]


# -- its state ---------------------------------------------------------------------------------------------------------


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
    refused(lambda s: s["state"]["a"].update(exp_avg=torch.ones(4)), r"exp_avg of a is \(4,\), the parameter is \(3,\)")


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


def _adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def _muon(groups):
    return Muon(groups, lr=1e-2)


def _step(model, optimizer, ids):
    rank, each = dist.get_rank(), len(ids) // dist.get_world_size()
    optimizer.zero_grad()
    token_loss(model, ids[rank * each : (rank + 1) * each]).backward()
    optimizer.step()


def _state_moves_between_meshes(folder, elsewhere):
    ids = torch.randint(0, VOCAB, (8, 11), generator=torch.Generator().manual_seed(2))
    for matrices in (None, _muon):
        model, _ = sharded_model(folder, 4, 2)
        optimizer = build_multi_optimizer(model, _adamw, matrices)
        assert set(optimizer.optimizers) == ({"dense", "experts"} if matrices is None else {"dense", "muon"})
        _step(model, optimizer, ids)
        state = optimizer.state_dict()
        assert state["state"].keys() == {name for name, _ in model.named_parameters()}
        full = {fqn: _full(entries) for fqn, entries in state["state"].items()}
        for ep, fsdp_size, dim in elsewhere:
            other, _ = sharded_model(folder, 4, ep, fsdp_size, expert_shard_dim=dim)
            resumed = build_multi_optimizer(other, _adamw, matrices)
            resumed.load_state_dict(state)
            for name, param in other.named_parameters():
                sharded = [value for value in resumed.state[param].values() if hasattr(value, "placements")]
                assert sharded and all(v.placements == param.placements for v in sharded)
                assert _same(_full(resumed.state[param]), full[name]), (ep, fsdp_size, dim, name)
        # As in torch's optimizers, tensors that fit are used, not copied.
        _step(other, resumed, ids)


def _full(entries):
    return {key: v.full_tensor() if hasattr(v, "full_tensor") else v for key, v in entries.items()}


def _same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_multi_optimizer_state_dict_loads_on_other_meshes(tmp_path):
    elsewhere = [(4, -1, "auto"), (1, -1, 0), (2, -1, 0), (2, 2, "auto")]
    run_ranks(_state_moves_between_meshes, 4, save_qwen3_moe(tmp_path), elsewhere)


# -- kernels -----------------------------------------------------------------------------------------------------------


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


def _fused_is_called(folder, cases):
    ids = torch.randint(0, VOCAB, (8, 11), generator=torch.Generator().manual_seed(2))
    for ep, fsdp_size, options in cases:
        after = []
        for fused in (None, False):
            model, _ = sharded_model(folder, 4, ep, fsdp_size, **options)
            optimizer = build_multi_optimizer(model, lambda p, fused=fused: torch.optim.AdamW(p, lr=1e-2, fused=fused))
            with torch.profiler.profile() as profile:
                _step(model, optimizer, ids)
            called = {event.name for event in profile.events()}
            assert ("aten::_fused_adamw_" in called) == (fused is None), (ep, fsdp_size, options, fused)
            after.append(whole_parameters(model))
        for name, value in after[0].items():
            torch.testing.assert_close(value, after[1][name], rtol=1e-5, atol=1e-6, msg=f"{ep} {options} {name}")


@pytest.mark.long
def test_fused_adamw_of_every_placement_steps_as_the_plain_one_does(tmp_path):
    cases = [(1, -1, {}), (2, -1, {"expert_shard_dim": 0}), (2, -1, {"expert_shard_dim": 1}), (2, 2, {})]
    cases += [(2, -1, {"cpu_offload": True})]
    run_ranks(_fused_is_called, 4, save_qwen3_moe(tmp_path), cases)
