"""One optimizer over parameters on different meshes and with different algorithms.

Fused and foreach kernels need tensors of one mesh, and Muon needs matrices, so each mesh and each algorithm has its own
optimizer. For verl and learning-rate schedulers, ``MultiOptimizer`` is one ``torch.optim.Optimizer`` with the
``param_groups`` and ``state`` of all inner optimizers.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..errors import listed
from ..topology.dtensor import is_expert_parameter, local_pieces
from .muon import Muon
from .muon_partition import matrix_groups
from .settings import adamw_arguments, check_optimizer, muon_arguments, wants_muon

__all__ = ["MultiOptimizer", "build_multi_optimizer", "check_optimizer", "optimizer_from_config"]

# Options that choose a kernel and not the algorithm. Loading a state keeps their present values.
_KERNEL_OPTIONS = frozenset({"foreach", "fused", "capturable", "differentiable", "ns_dtype", "bucket_bytes"})
# Entries of ``torch.optim``'s states that have the parameter's shape.
_PER_ELEMENT = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"})
# Parts of module names that wrappers add.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


class MultiOptimizer(Optimizer):
    """Steps several optimizers as one.

    Its own hooks run once per step. torch's global optimizer hooks run for each inner optimizer as well.

    Args:
        optimizers: the inner optimizers by name; their parameters must not overlap.
        named_parameters: names for ``state_dict``, of at least all parameters of the optimizers.

    Raises:
        ValueError: there is no optimizer, a group is empty, or a parameter is in two groups or has no name.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer], named_parameters: Iterable[tuple[str, torch.Tensor]]):
        if not optimizers:
            raise ValueError("MultiOptimizer needs at least one optimizer: the model has no trainable parameter.")
        names: dict[Any, str] = {p: _strip_wrappers(name) for name, p in named_parameters}
        self._fqns: dict[Any, str] = {}
        for name, optimizer in optimizers.items():
            for group in optimizer.param_groups:
                if not group["params"]:
                    raise ValueError(f"The optimizer {name!r} has an empty parameter group.")
                for param in group["params"]:
                    if param not in names:
                        raise ValueError(f"A parameter of the optimizer {name!r} is not one of the model's.")
                    if param in self._fqns:
                        raise ValueError(f"{names[param]} is in more than one parameter group.")
                    self._fqns[param] = names[param]
        self.optimizers: dict[str, Optimizer] = {}
        super().__init__(self._fqns, {})
        self.optimizers = dict(optimizers)

    def __getstate__(self) -> dict[str, Any]:
        return {"defaults": self.defaults, "optimizers": self.optimizers, "_fqns": self._fqns}

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
        """The state of all inner optimizers, by parameter."""
        return _ChainedState(list(self.optimizers.values()))

    @state.setter
    def state(self, _state: MutableMapping[Any, Any]) -> None: ...

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
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers.values():
            optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all inner optimizers by parameter name.

        Returns:
            ``{"state": {name: {...}}, "param_groups": [{"params": [name, ...], "optimizer": its name,
            "algorithm": its class, "lr": ..., ...}]}``. Tensors are the optimizers' own, sharded, not copies.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state = self.state
        packed: dict[str, Any] = {
            "state": {fqn: dict(state[p]) for p, fqn in self._fqns.items() if p in state},
            "param_groups": [
                {**group, "params": [self._fqns[p] for p in group["params"]], "optimizer": name, "algorithm": _name(o)}
                for name, o in self.optimizers.items()
                for group in o.param_groups
            ],
        }
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, packed)
            packed = packed if changed is None else changed
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict``, also one from another mesh.

        A parameter may have been in another inner optimizer or group. As in torch's optimizers, tensors are used, not
        copied. Tensors that are sharded unlike their parameter are gathered and sharded again, one at a time; a
        checkpoint is read in place instead (``checkpoint/state.py``). Options that choose a kernel (``fused`` and the
        like) keep their values.

        Raises:
            ValueError: names the first parameters that are missing, unknown, or of another algorithm or shape. The
                optimizer is unchanged.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        saved_group = self.check_groups(state_dict["param_groups"])
        state = {fqn: self._fitting(p, state_dict["state"].get(fqn)) for p, fqn in self._fqns.items()}
        inner = {name: self._inner_state(o, saved_group, state) for name, o in self.optimizers.items()}
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(inner[name])
            self._restore_dtypes(optimizer, state)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def check_groups(self, saved: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
        """Check that the ``param_groups`` of a ``state_dict`` have this optimizer's parameters and algorithms.

        Returns:
            The saved group of each parameter.

        Raises:
            ValueError: names the first parameters that do not fit.
        """
        group_of = {fqn: group for group in saved for fqn in group["params"]}
        own = {self._fqns[p]: _name(o) for o in self.optimizers.values() for g in o.param_groups for p in g["params"]}
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
            params = [p for group in optimizer.param_groups for p in group["params"]]
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
        ids = {p: i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
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
        packed = {i: state[self._fqns[p]] for p, i in ids.items() if state[self._fqns[p]] is not None}
        return {"state": packed, "param_groups": groups}

    def _restore_dtypes(self, optimizer: Optimizer, state: Mapping[str, Mapping[str, Any] | None]) -> None:
        """Undo torch's cast of loaded states to the parameter's dtype, which rounds NAdam's ``mu_product``."""
        for param, loaded in optimizer.state.items():
            for key, value in (state[self._fqns[param]] or {}).items():
                if isinstance(value, torch.Tensor) and loaded[key].dtype != value.dtype:
                    loaded[key] = value.to(loaded[key].device)

    def _fitting(self, param: torch.Tensor, saved: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Return a parameter's saved state, sharded as the parameter."""
        if saved is None:
            return None
        fitting = {}
        for key, value in saved.items():
            if isinstance(value, torch.Tensor):
                if key in _PER_ELEMENT and value.shape != param.shape:
                    raise ValueError(
                        f"The saved {key} of {self._fqns[param]} is {tuple(value.shape)}, the parameter is "
                        f"{tuple(param.shape)}."
                    )
                value = _sharded_like(param, value)
            fitting[key] = value
        return fitting


def build_multi_optimizer(
    model: nn.Module,
    build: Callable[[list[nn.Parameter]], Optimizer],
    matrices: Callable[[list[dict[str, Any]]], Optimizer] | None = None,
) -> MultiOptimizer:
    """Build one optimizer for the dense parameters and one for the experts, with torch's fused kernels if possible.

    Args:
        build: makes an optimizer for parameters of one mesh.
        matrices: makes an optimizer such as ``Muon`` for the groups of ``matrix_groups``: the matrices of the hidden
            layers on both meshes. ``build``'s optimizers then get the remaining parameters.
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
    ``weight_decay`` apply to both, ``betas`` to AdamW.

    Args:
        build: verl's ``build_optimizer``, for every other optimizer.
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


def _sharded_like(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Shard ``value`` like ``param`` if their shapes are equal; else return it unsharded."""
    if not isinstance(param, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    full = value
    if isinstance(value, DTensor):
        if (value.device_mesh, value.placements) == (param.device_mesh, param.placements):
            return value
        full = value.full_tensor()
    if full.shape != param.shape:
        return full
    sharded = torch.empty_like(param.detach(), dtype=full.dtype)
    for held, values in local_pieces(sharded):
        values.copy_(full[held.slices])
    return sharded


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved group's hyperparameters."""
    return {k: v for k, v in group.items() if k not in _KERNEL_OPTIONS | {"params", "optimizer", "algorithm"}}


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__name__


def _strip_wrappers(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


class _ChainedState(MutableMapping):
    """The per-parameter states of several optimizers as one mapping."""

    def __init__(self, optimizers: Iterable[Optimizer]):
        self._states = [o.state for o in optimizers]
        self._owner = {p: o.state for o in optimizers for group in o.param_groups for p in group["params"]}

    def __getitem__(self, param: Any) -> Any:
        return self._owner[param][param]

    def __setitem__(self, param: Any, value: Any) -> None:
        self._owner[param][param] = value

    def __delitem__(self, param: Any) -> None:
        del self._owner[param][param]

    def __contains__(self, param: Any) -> bool:
        # The states are defaultdicts: reading a missing entry would create it.
        return param in self._owner and param in self._owner[param]

    def __iter__(self) -> Iterator[Any]:
        for state in self._states:
            yield from state

    def __len__(self) -> int:
        return sum(len(state) for state in self._states)
