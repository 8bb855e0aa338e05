"""Router replay: route tokens to the experts that they were routed to before.

The router of a policy update may choose other experts than it did for the old log-probs (R2), or than vLLM did in
generation (R3). Then the update compares two different networks, which is most of the mismatch between training and
rollout of an MoE (https://arxiv.org/abs/2507.18071, https://arxiv.org/abs/2510.11370). Only the choice is replayed. The
routing weights are those of the current router for the chosen experts, with their gradient.

The family's own code is unchanged. In the block around an experts module the router's ``topk`` or maxima return the
wanted ids (``override.py``). The ids that reach the experts are recorded; if neither was called, they are compared.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...wrap_forward import wrap_forward
from ..find import ExpertsInfo, experts_by_layer
from .override import MaximumRouting, RoutingMode, chooses_by_maximum

__all__ = ["Differing", "ReplayError", "RouterReplay"]


class ReplayError(RuntimeError):
    """Recorded routes can't be replayed."""


class Differing:
    """Counts the replayed choices that would now be others."""

    def __init__(self) -> None:
        self._counts: list[torch.Tensor] = []

    def add(self, differs: torch.Tensor, among: torch.Tensor) -> None:
        """Count choices; both are bool of one shape."""
        self._counts.append(torch.stack([(differs & among).sum(), among.sum()]))

    def take(self, group: dist.ProcessGroup | None = None) -> float | None:
        """Return the share of the choices of a group's ranks, and reset it; None if there were none. Collective."""
        if not self._counts:
            return None
        counts = torch.stack(self._counts).sum(0)
        if group is not None:
            dist.all_reduce(counts, group=group)
        differing, replayed = counts.tolist()
        self._counts.clear()
        return differing / max(replayed, 1)


@dataclass
class _Layer:
    """A layer's experts, and their routing in one forward."""

    index: int
    fqn: str
    num_experts: int
    chosen: torch.Tensor | None = None
    is_replayed: bool = False
    is_counted: bool = False


class RouterReplay:
    """Records and replays the experts of the tokens of a model with ``num_layers``, those without experts included.

    Raises:
        UnsupportedModelError: see ``experts_by_layer``.
    """

    def __init__(self, model: nn.Module, experts: Sequence[ExpertsInfo], num_layers: int):
        self.num_layers = num_layers
        self._routes: torch.Tensor | None = None
        self._is_recording = False
        self.differing = Differing()
        self._layers: dict[int, _Layer] = {}
        for index, info in experts_by_layer(experts, num_layers).items():
            self._layers[index] = layer = _Layer(index, info.fqn, info.num_experts)
            info.module.register_forward_pre_hook(functools.partial(self._arrive, layer), with_kwargs=True)
            block = model.get_submodule(info.block)
            wrap_forward(block, "router_replay", functools.partial(self._block, layer, block))

    def record(self) -> None:
        """Record the routes of the next forward."""
        self._is_recording, self._routes = True, None
        for layer in self._layers.values():
            layer.chosen = None

    def recorded(self) -> torch.Tensor:
        """Return the experts of each token in the last forward, ``[tokens, layers, k]`` int16; 0 in dense layers.

        Raises:
            ReplayError: a layer's experts were not called, or called twice.
        """
        self._is_recording = False
        routes: torch.Tensor | None = None
        for layer in self._layers.values():
            chosen, layer.chosen = layer.chosen, None
            if chosen is None:
                raise ReplayError(f"{layer.fqn} was not called exactly once in a forward, so its routes are not known.")
            if routes is None:
                routes = chosen.new_zeros((chosen.shape[0], self.num_layers, chosen.shape[1]))
            routes[:, layer.index] = chosen
        assert routes is not None, "a model without experts has no replay"
        return routes

    def replay(self, routes: torch.Tensor) -> None:
        """Replay these routes in the next forward and in its recomputations.

        Args:
            routes: ``[tokens, layers, k]``, integers. For a row that lists an expert twice (padding) the router
                chooses.

        Raises:
            ReplayError: the number of layers differs; or there is one expert per token, so that an unrecorded row looks
                like a route.
        """
        if routes.dim() != 3 or routes.shape[1] != self.num_layers:
            raise ReplayError(f"routes have the shape {tuple(routes.shape)}, not [tokens, {self.num_layers}, k].")
        if routes.shape[2] < 2:
            raise ReplayError("routes have one expert per token, which unrecorded rows look like.")
        self._is_recording, self._routes = False, routes
        for layer in self._layers.values():
            layer.is_counted = False

    def stop(self) -> None:
        """Let the router choose again."""
        self._is_recording, self._routes = False, None

    def _block(self, layer: _Layer, block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._routes is None:
            return forward(*args, **kwargs)
        layer.is_replayed, wanted = False, self._routes[:, layer.index]
        is_route = _is_route(wanted)
        count = functools.partial(self._count, layer, wanted, is_route)
        mode: Any = _Replay(layer, wanted, is_route, count)
        if chooses_by_maximum(block):
            mode = MaximumRouting(wanted, is_route, layer.num_experts, block.training, count)
        with mode:
            return forward(*args, **kwargs)

    def _arrive(self, layer: _Layer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record or compare the ids; runs before the experts, whose inputs are ``(hidden states, ids, weights)``."""
        if not self._is_recording and self._routes is None:
            return
        ids = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
        if self._is_recording:
            layer.chosen = ids.detach().to(torch.int16, copy=True) if layer.chosen is None else None
        elif self._routes is not None and not layer.is_replayed:
            wanted = self._routes[:, layer.index].to(ids.dtype)
            if ids.shape != wanted.shape or bool((_is_route(wanted) & ~_same_experts(ids, wanted)).any()):
                raise ReplayError(
                    f"{layer.fqn} got {tuple(ids.shape)} expert ids that no choice among {layer.num_experts} made, and "
                    f"the routes of shape {tuple(wanted.shape)} differ from them."
                )

    def _count(self, layer: _Layer, wanted: torch.Tensor, is_route: torch.Tensor, native: torch.Tensor) -> None:
        """Count the routes for which the router's own choice ``native`` differs."""
        layer.is_replayed = True
        if layer.is_counted:  # a recomputation
            return
        layer.is_counted = True
        self.differing.add(~_same_experts(native, wanted), is_route)


class _Replay(RoutingMode):
    """In one layer's block, ``topk`` returns the wanted ids for the rows that have a route."""

    def __init__(self, layer: _Layer, wanted: torch.Tensor, is_route: torch.Tensor, report: Callable[..., None]):
        super().__init__(layer.num_experts)
        self.layer, self.wanted, self.is_route, self.report = layer, wanted, is_route, report

    def choose(self, scores: torch.Tensor, dim: int, native: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        # Routers with expert groups choose these by topk as well, over one score per group.
        if scores.dim() != 2 or dim not in (-1, 1) or scores.shape[1] != self.layer.num_experts:
            return None
        ids = native()
        wanted = self.wanted.to(ids.dtype)
        if ids.shape != wanted.shape:
            raise ReplayError(
                f"{self.layer.fqn}: the router chose {tuple(ids.shape)} ids, but routes have {tuple(wanted.shape)}."
            )
        self.report(ids)
        return torch.where(self.is_route[:, None], wanted, ids)


def _is_route(routes: torch.Tensor) -> torch.Tensor:
    """Return which rows are routes; padding and rows that vLLM has not recorded list one expert twice."""
    ordered = routes.sort(dim=-1).values
    return (ordered[:, 1:] != ordered[:, :-1]).all(dim=-1)


def _same_experts(ids: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return which rows list the same experts, in any order."""
    return (ids.sort(dim=-1).values == others.sort(dim=-1).values).all(dim=-1)
