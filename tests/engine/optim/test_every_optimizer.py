"""Every optimizer steps sharded weights like whole ones and resumes bit for bit, or is refused on the driver."""

import inspect
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from epfsdp2.engine.checkpoint import state as checkpoint
from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.optim import settings
from epfsdp2.engine.optim.multi_optimizer import MultiOptimizer, optimizer_from_config
from epfsdp2.engine.topology.dtensor import local_pieces
from tests.support.engine.checkpoints import save_checkpoint
from tests.support.engine.sharded import sharded_model, whole_parameters
from tests.support.models.tiny import reference_model, save_qwen3_moe
from tests.support.ranks import each_case, run_ranks

SAVED = {"model", "optimizer"}
CLASSES = {
    name: member
    for name, member in vars(torch.optim).items()
    if inspect.isclass(member) and issubclass(member, Optimizer) and member is not Optimizer
}


def _config(name, impl="torch.optim", **overrides):
    fields = {"optimizer": name, "optimizer_impl": impl, "override_optimizer_config": overrides}
    return SimpleNamespace(lr=1e-2, weight_decay=0.1, betas=[0.9, 0.95], **fields)


def _refusal(name, device="cuda", **overrides):
    """Return the driver's refusal of an optimizer, or None."""
    try:
        settings.check_optimizer(_config(name, **overrides), "optim", device)
    except SettingError as error:
        return str(error)
    return None


ACCEPTED = [name for name in CLASSES if _refusal(name) is None]


def test_check_optimizer_accepts_the_classes_that_step_each_element_by_itself():
    """A class that a newer torch adds fails here until it is added to one of the sets."""
    refused = {"Adafactor", "LBFGS", "Rprop", "SparseAdam"}
    assert set(CLASSES) - set(ACCEPTED) == refused
    works = {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "SGD"}
    assert set(ACCEPTED) == works


# -- accepted optimizers -----------------------------------------------------------------------------------------------


def _optimizer(model, config):
    kind = CLASSES[config.optimizer]
    return optimizer_from_config(model, config, lambda params: kind(params, **settings._arguments_by_verl(config)))


def _step(model, optimizer, seed):
    """Step on random gradients, equal for a plain and a sharded model."""
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        gradient = torch.randn(param.shape, generator=generator)
        param.grad = torch.empty_like(param)
        for held, values in local_pieces(param.grad):
            values.copy_(gradient[held.slices])
    optimizer.step()


def _works(name, overrides, dtype, folder, out):
    config = _config(name, **overrides)
    model, _ = sharded_model(folder, 2, 2, dtype=dtype)
    optimizer = _optimizer(model, config)
    for seed in range(2):
        _step(model, optimizer, seed)
    if dtype == torch.float32:
        plain = reference_model(folder)
        alone = _optimizer(plain, config)
        for seed in range(2):
            _step(plain, alone, seed)
        torch.testing.assert_close(whole_parameters(model), dict(plain.named_parameters()), rtol=1e-5, atol=1e-7)
    if "foreach" in overrides:
        return
    save_checkpoint(out, model, optimizer, None, SAVED, step=2)
    _step(model, optimizer, 2)
    wanted = whole_parameters(model)
    for ep in (2, 1) if dtype == torch.float32 else (2,):
        other, _ = sharded_model(folder, 2, ep, dtype=dtype)
        resumed = _optimizer(other, config)
        checkpoint.load_checkpoint(out, other, resumed, None, SAVED)
        _step(other, resumed, 2)
        found = whole_parameters(other)
        if ep == 2:
            assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []
        else:  # on another mesh, vectorised kernels and batches of matrices round differently
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def _all_work(folder, out, cases):
    each_case([(*case, folder, out) for case in cases], _works)


@pytest.mark.parametrize("how", ["few", pytest.param("all", marks=pytest.mark.long)])
def test_every_accepted_optimizer_steps_as_on_the_plain_model_and_resumes_bit_for_bit(tmp_path, how):
    # GPUs use foreach kernels by default. These sizes have uneven shards on two ranks.
    folder = save_qwen3_moe(
        tmp_path / "model", vocab_size=97, hidden_size=42, intermediate_size=21, num_hidden_layers=2
    )
    some = ACCEPTED if how == "all" else ["AdamW", "Muon"]
    cases = [(name, {}, torch.float32) for name in ACCEPTED] + [(name, {}, torch.bfloat16) for name in some]
    by_foreach = [name for name in some if "foreach" in inspect.signature(CLASSES[name]).parameters]
    cases += [(name, {"foreach": True}, torch.float32) for name in by_foreach]
    options = [("SGD", "momentum", 0.9), ("RMSprop", "centered", True), ("Adam", "amsgrad", True)]
    cases += [(name, {option: value}, torch.float32) for name, option, value in options if how == "all"]
    run_ranks(_all_work, 2, folder, tmp_path / "saved", cases, timeout=600)


# -- refused optimizers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        ("Adafactor", {}, "=Adafactor: its step of an element depends on other elements of the weight"),
        ("Rprop", {}, "=Rprop: verl passes weight_decay to every optimizer, and this one takes none"),
        ("SGD", {"fused": True}, "=SGD with {'fused': True}: torch lacks an operator of it for sharded tensors: "),
        ("AdamW", {"differentiable": True}, "it raises RuntimeError: a leaf Variable"),
        ("Adafactor", {"impl": "transformers.optimization", "relative_step": False}, "depends on other elements"),
        ("Muon", {"impl": "torch.optim._muon"}, "depends on other elements"),
        ("ByRow", {"impl": __name__}, "depends on other elements"),
        ("CountsSteps", {"impl": __name__}, "its state 'steps' can't be saved, being no plain tensor"),
        ("NeedsArgument", {"impl": __name__}, "it raises TypeError: .*'needed'"),
    ],
)
def test_check_optimizer_refuses_what_would_be_wrong_on_shards_or_could_not_be_saved(name, overrides, said):
    with pytest.raises(SettingError, match=said) as error:
        settings.check_optimizer(_config(name, **overrides), "optim")
    assert error.value.setting == "optim.optimizer" and error.value.works.startswith("optim.optimizer=AdamW")


def test_check_optimizer_refuses_capturable_on_a_cpu_alone():
    assert _refusal("AdamW", capturable=True) is None
    assert "capturable=True, params and state_steps must be on supported devices" in _refusal(
        "AdamW", device="cpu", capturable=True
    )


def test_check_optimizer_accepts_an_optimizer_that_only_a_gpu_can_step():
    assert _refusal("NeedsGpu", impl=__name__) is None


def test_check_optimizer_in_a_torch_without_a_lone_mesh_still_compares_halves(monkeypatch):
    def without_rank(*args, **kwargs):
        raise TypeError("unexpected keyword argument '_rank'")

    assert _refusal("SGD", fused=True) is not None
    monkeypatch.setattr("epfsdp2.engine.compat.lone_mesh.DeviceMesh", without_rank)
    assert _refusal("SGD", fused=True) is None
    assert "depends on other elements" in _refusal("Adafactor")


def test_load_state_dict_of_a_learning_rate_that_is_a_tensor_leaves_it_one():
    """torchao's learning rates are tensors, which a checkpoint stores as numbers."""
    weight = nn.Parameter(torch.ones(2))
    multi = MultiOptimizer({"dense": torch.optim.AdamW([weight], lr=torch.tensor(0.25))}, [("weight", weight)])
    state = json.loads(json.dumps(multi.state_dict(), default=checkpoint.plain_value))
    multi.param_groups[0]["lr"].fill_(0.0)
    multi.load_state_dict(state)
    assert torch.equal(multi.param_groups[0]["lr"], torch.tensor(0.25))


class ByRow(torch.optim.SGD):
    """Divides by a mean over each row, which is correct unless rows are sharded."""

    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                param.grad /= param.grad.square().mean(1, keepdim=True).sqrt()
        super().step()


class CountsSteps(torch.optim.SGD):
    """Counts steps in an int, like older optimizers."""

    def step(self):
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["steps"] = self.state[param].get("steps", 0) + 1


class NeedsArgument(torch.optim.SGD):
    def __init__(self, params, lr, weight_decay, needed):
        super().__init__(params, lr, weight_decay=weight_decay)


class NeedsGpu(torch.optim.SGD):
    def step(self):
        raise RuntimeError("no kernel for a CPU")
