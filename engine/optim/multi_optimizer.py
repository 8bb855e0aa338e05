"""One optimizer over parameters on different meshes and with different algorithms.

Fused and foreach kernels need tensors of one mesh, and Muon needs matrices, so each mesh and each algorithm has its own
optimizer. For verl and learning-rate schedulers, ``MultiOptimizer`` is one ``torch.optim.Optimizer`` with the
``param_groups`` and ``state`` of all inner optimizers.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import listed
from ..topology.dtensor import is_expert_parameter
from .muon import Muon
from .muon_partition import matrix_groups
from .settings import adamw_arguments, muon_arguments, wants_muon

__all__ = ["MultiOptimizer", "build_multi_optimizer", "optimizer_from_config"]

# Options that choose a kernel and not the algorithm. Loading a state keeps their present values.
_KERNEL_OPTIONS = frozenset({"foreach", "fused", "capturable", "differentiable", "ns_dtype", "bucket_bytes"})


class MultiOptimizer(Optimizer):
    """Steps several optimizers as one.

    Its own hooks run once per step. torch's global optimizer hooks run for each inner optimizer as well.

    Args:
        optimizers: the inner optimizers by name; their parameters must not overlap.
        named_parameters: names for ``state_dict``, of at least all parameters of the optimizers.

    Raises:
        ValueError: there is no optimizer.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer], named_parameters: Iterable[tuple[str, torch.Tensor]]):
        if not optimizers:
            raise ValueError("MultiOptimizer needs at least one optimizer: the model has no trainable parameter.")
        names: dict[Any, str] = {param: name for name, param in named_parameters}
        self._fqns: dict[Any, str] = {p: names[p] for o in optimizers.values() for p in _parameters(o)}
        self.optimizers: dict[str, Optimizer] = {}
        super().__init__(self._fqns, {})
        self.optimizers = dict(optimizers)

    # Properties, because load_state_dict of an inner optimizer replaces these objects. The setters ignore the
    # assignments in torch.optim.Optimizer.__init__.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all inner optimizers: the same dicts, so a scheduler's ``lr`` reaches the inner optimizer."""
        return [group for o in self.optimizers.values() for group in o.param_groups]

    @param_groups.setter
    def param_groups(self, _groups: list[dict[str, Any]]) -> None: ...

    @property
    def state(self) -> Any:
        """The inner optimizers' own states, by parameter."""
        return defaultdict(dict, {p: state for o in self.optimizers.values() for p, state in o.state.items()})

    @state.setter
    def state(self, _state: Any) -> None: ...

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a group, because the inner optimizer that should get it is unknown.

        Raises:
            ValueError: always, except during ``Optimizer.__init__``.
        """
        if self.optimizers:
            raise ValueError(
                f"MultiOptimizer can't take a further group: add it to one of .optimizers, {list(self.optimizers)}, "
                "before MultiOptimizer is built."
            )

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for optimizer in self.optimizers.values():
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all inner optimizers by parameter name.

        Returns:
            ``{"state": {name: {...}}, "param_groups": [{"params": [name, ...], "optimizer": its name,
            "algorithm": its class, "lr": ..., ...}]}``. Tensors are the optimizers' own, sharded, not copies.
        """
        state = self.state
        return {
            "state": {fqn: dict(state[p]) for p, fqn in self._fqns.items() if p in state},
            "param_groups": [
                {**group, "params": [self._fqns[p] for p in group["params"]], "optimizer": name, "algorithm": _class(o)}
                for name, o in self.optimizers.items()
                for group in o.param_groups
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict`` whose tensors are sharded like this optimizer's; they are used, not copied.

        A parameter may have been in another inner optimizer or group. Options that choose a kernel (``fused`` and the
        like) keep their values.

        Raises:
            ValueError: names the first parameters that are missing, unknown, or of another algorithm. The optimizer is
                unchanged.
        """
        saved_group, state = self.check_groups(state_dict["param_groups"]), state_dict["state"]
        inner = {name: self._inner_state(o, saved_group, state) for name, o in self.optimizers.items()}
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(inner[name])
            # Undo torch's cast of loaded states to the parameter's dtype, which rounds NAdam's ``mu_product``.
            for param, loaded in optimizer.state.items():
                for key, value in state.get(self._fqns[param], {}).items():
                    if isinstance(value, torch.Tensor) and loaded[key].dtype != value.dtype:
                        loaded[key] = value.to(loaded[key].device)

    def check_groups(self, saved: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
        """Check that saved ``param_groups`` have this optimizer's parameters and algorithms; return each one's group.

        Raises:
            ValueError: names the first parameters that do not fit.
        """
        group_of = {fqn: group for group in saved for fqn in group["params"]}
        own = {self._fqns[p]: _class(o) for o in self.optimizers.values() for p in _parameters(o)}
        missing = [fqn for fqn in own if fqn not in group_of]
        extra = [fqn for fqn in group_of if fqn not in own]
        other = [fqn for fqn in own if fqn in group_of and group_of[fqn]["algorithm"] != own[fqn]]
        if missing or extra:
            problems = [f"has none of {listed(missing, 3)}"] if missing else []
            problems += [f"also has {listed(extra, 3)}"] if extra else []
            raise ValueError(f"The saved optimizer state {' and '.join(problems)}: it belongs to another model.")
        if other:
            was, now = group_of[other[0]]["algorithm"], own[other[0]]
            raise ValueError(
                f"The saved optimizer state of {listed(other, 3)} is {was}'s, this run's optimizer for it is {now}. "
                f"Continue with {was}, or leave optimizer and extra out of checkpoint.load_contents."
            )
        return group_of

    @torch.no_grad()
    def init_state(self) -> None:
        """Create the optimizer state, by a step with zero gradients and ``lr=0``; collective.

        Parameters and existing state are unchanged.
        """
        for optimizer in self.optimizers.values():
            params = _parameters(optimizer)
            grads = [p.grad for p in params]
            rates = [group["lr"] for group in optimizer.param_groups]
            for p in params:
                p.grad = None if optimizer.state.get(p) else torch.zeros_like(p)
            for group in optimizer.param_groups:
                group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
            optimizer.step()
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad

    def _inner_state(
        self, optimizer: Optimizer, saved_group: Mapping[str, Mapping[str, Any]], state: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Convert a state to the format of ``torch.optim.Optimizer.load_state_dict``: parameters by number."""
        ids = {p: i for i, p in enumerate(_parameters(optimizer))}
        groups = []
        for group in optimizer.param_groups:
            options = [_options(saved_group[self._fqns[p]]) for p in group["params"]]
            differing = next((i for i, other in enumerate(options) if other != options[0]), None)
            if differing is not None:
                first, second = (self._fqns[group["params"][i]] for i in (0, differing))
                raise ValueError(f"The saved options of {first} and {second} differ, but these are now in one group.")
            # A checkpoint stores numbers in place of tensors. A rate that was a tensor becomes one again, because
            # torchao's optimizers refuse a number.
            loaded = {
                key: torch.full_like(group[key], value) if isinstance(group.get(key), torch.Tensor) else value
                for key, value in options[0].items()
            }
            groups.append({**group, **loaded, "params": [ids[p] for p in group["params"]]})
        packed = {i: state[self._fqns[p]] for p, i in ids.items() if self._fqns[p] in state}
        return {"state": packed, "param_groups": groups}


def build_multi_optimizer(
    model: nn.Module,
    build: Callable[[list[nn.Parameter]], Optimizer],
    matrices: Callable[[list[dict[str, Any]]], Optimizer] | None = None,
) -> MultiOptimizer:
    """Build one optimizer for the dense parameters and one for the experts, with torch's fused kernels if possible.

    Args:
        build: makes an optimizer for parameters of one mesh.
        matrices: makes an optimizer such as ``Muon`` for ``matrix_groups``; ``build`` gets the other parameters then.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = matrix_groups(model) if matrices is not None else []
    taken = {p for group in groups for p in group["params"]}
    split = {
        "dense": [p for p in trainable if p not in taken and not is_expert_parameter(p)],
        "experts": [p for p in trainable if p not in taken and is_expert_parameter(p)],
    }
    optimizers = {name: _fused(build(params)) for name, params in split.items() if params}
    if matrices is not None and groups:
        optimizers["muon"] = matrices(groups)
    return MultiOptimizer(optimizers, model.named_parameters())


def optimizer_from_config(
    model: nn.Module, config: Any, build: Callable[[list[nn.Parameter]], Optimizer]
) -> MultiOptimizer:
    """Build the optimizer of verl's ``optim`` settings (``FSDPOptimizerConfig``, or an object with its fields).

    With ``optimizer=Muon`` of ``torch.optim``, ``Muon`` steps the matrices and AdamW the rest; ``lr`` and
    ``weight_decay`` apply to both, ``betas`` to AdamW. ``build`` (verl's) makes every other optimizer.
    """
    if not wants_muon(config):
        return build_multi_optimizer(model, build)
    adamw, muon = adamw_arguments(config), muon_arguments(config)
    return build_multi_optimizer(
        model, lambda params: torch.optim.AdamW(params, **adamw), lambda groups: Muon(groups, **muon)
    )


def _fused(optimizer: Optimizer) -> Optimizer:
    """Choose torch's fused kernel for Adam and AdamW, unless the settings choose a kernel."""
    for group in optimizer.param_groups:
        ours = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
        free = ours and group["fused"] is None and group["foreach"] is None and not group["differentiable"]
        # On devices without a fused kernel, torch chooses foreach by itself.
        if free and all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in group["params"]):
            group["fused"] = True
    return optimizer


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved group's hyperparameters."""
    return {k: v for k, v in group.items() if k not in _KERNEL_OPTIONS | {"params", "optimizer", "algorithm"}}


def _class(optimizer: Optimizer) -> str:
    return type(optimizer).__name__


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
