"""Router replay: have tokens take the experts that they took before.

A policy update in which the router chooses other experts than it did for the old log-probs (R2), or than vLLM did when
it generated (R3), compares two different networks: for an MoE that is most of what training and rollout disagree about
(https://arxiv.org/abs/2507.18071, https://arxiv.org/abs/2510.11370). Only the choice is replayed. The routing weights
are those of the present router at the chosen experts, with their gradient.

A family's own code stays as it is. In the block around an experts module the router's ``topk`` returns the wanted ids
(``topk_override.py``), and what arrives at the experts is recorded, or compared where no ``topk`` was seen.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..find import ExpertsInfo, experts_by_layer
from .topk_override import RoutingMode

__all__ = ["ReplayError", "RouterReplay"]


class ReplayError(RuntimeError):
    """Routes can't be replayed as they came."""


@dataclass
class _Layer:
    """A layer's experts, and what one forward has of their routing."""

    index: int
    fqn: str
    num_experts: int
    chosen: torch.Tensor | None = None
    is_replayed: bool = False


class RouterReplay:
    """Records and replays the experts that a model's tokens take, by the index of the layer.

    Install it before anything else wraps the layers: a recomputation of a layer has to replay too.

    Args:
        num_layers: of the model, those without experts included.

    Raises:
        UnsupportedModelError: see ``experts_by_layer``.
    """

    def __init__(self, model: nn.Module, experts: Sequence[ExpertsInfo], num_layers: int):
        self.num_layers = num_layers
        self._routes: torch.Tensor | None = None
        self._is_recording = False
        self._differing: list[torch.Tensor] = []
        self._layers: dict[int, _Layer] = {}
        for index, info in experts_by_layer(experts, num_layers).items():
            self._layers[index] = layer = _Layer(index, info.fqn, info.num_experts)
            info.module.register_forward_pre_hook(functools.partial(self._arrive, layer), with_kwargs=True)
            block = model.get_submodule(info.fqn.rpartition(".")[0])
            block.forward = functools.partial(self._block, layer, block.forward)  # type: ignore[method-assign]

    def record(self) -> None:
        """Have the next forward's routes."""
        self._is_recording, self._routes = True, None
        for layer in self._layers.values():
            layer.chosen = None

    def recorded(self) -> torch.Tensor:
        """``[tokens, layers, k]``, int16: what each token took in the last forward; zeros where there are no experts.

        Raises:
            ReplayError: a layer's experts were not called, or called twice.
        """
        self._is_recording = False
        routes: torch.Tensor | None = None
        for layer in self._layers.values():
            chosen, layer.chosen = layer.chosen, None
            if chosen is None:
                raise ReplayError(f"{layer.fqn} was not called once in a forward, so its routes are not known.")
            if routes is None:
                routes = chosen.new_zeros((chosen.shape[0], self.num_layers, chosen.shape[1]))
            routes[:, layer.index] = chosen
        assert routes is not None, "a model without experts has no replay"
        return routes

    def replay(self, routes: torch.Tensor) -> None:
        """Have the next forward, and its recomputations, take these.

        Args:
            routes: ``[tokens, layers, k]``, integers. A token's row in a layer that does not name different experts is
                no route: it is taken as the router chooses.

        Raises:
            ReplayError: they are of another number of layers, or of one expert per token, where a row that was not
                recorded can't be told from one that was.
        """
        if routes.dim() != 3 or routes.shape[1] != self.num_layers:
            raise ReplayError(f"routes are {tuple(routes.shape)}, where [tokens, {self.num_layers}, k] is needed.")
        if routes.shape[2] < 2:
            raise ReplayError("routes of one expert per token can't be told from rows that were not recorded.")
        self._is_recording, self._routes = False, routes

    def stop(self) -> None:
        """DispatchPlan natively again."""
        self._is_recording, self._routes = False, None

    def differing(self, group: dist.ProcessGroup | None = None) -> float | None:
        """The share of replayed tokens, over all layers, for which the router chose other experts; since last asked.

        Args:
            group: ranks whose tokens are counted together, all of which ask.
        """
        if not self._differing:
            return None
        counts = torch.stack(self._differing).sum(0)
        if group is not None:
            dist.all_reduce(counts, group=group)
        differing, replayed = counts.tolist()
        self._differing.clear()
        return differing / max(replayed, 1)

    def _block(self, layer: _Layer, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._routes is None:
            return forward(*args, **kwargs)
        layer.is_replayed = False
        with _Replay(self, layer, self._routes[:, layer.index]):
            return forward(*args, **kwargs)

    def _arrive(self, layer: _Layer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the experts: ``(hidden states, ids [tokens, k], weights)``."""
        if not self._is_recording and self._routes is None:
            return
        ids = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
        if self._is_recording:
            layer.chosen = ids.detach().to(torch.int16, copy=True) if layer.chosen is None else None
        elif self._routes is not None and not layer.is_replayed:
            wanted = self._routes[:, layer.index].to(ids.dtype)
            if ids.shape != wanted.shape or bool((_is_route(wanted) & ~_same_experts(ids, wanted)).any()):
                raise ReplayError(
                    f"{layer.fqn} takes {tuple(ids.shape)} experts that no topk over {layer.num_experts} chose, and "
                    f"routes of {tuple(wanted.shape)} that differ from them."
                )

    def _count(self, native: torch.Tensor, wanted: torch.Tensor, is_route: torch.Tensor) -> None:
        differs = is_route & ~_same_experts(native, wanted)
        self._differing.append(torch.stack([differs.sum(), is_route.sum()]))


class _Replay(RoutingMode):
    """In one layer's block: the wanted ids for the rows that have some."""

    def __init__(self, owner: RouterReplay, layer: _Layer, wanted: torch.Tensor):
        super().__init__(layer.num_experts)
        self.owner, self.layer, self.wanted = owner, layer, wanted

    def choose(self, scores: torch.Tensor, dim: int, native: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        # Groups of experts are chosen by topk too, over as many scores as there are groups.
        if scores.dim() != 2 or dim not in (-1, 1) or scores.shape[1] != self.layer.num_experts:
            return None
        ids = native()
        wanted = self.wanted.to(ids.dtype)
        if ids.shape != wanted.shape:
            raise ReplayError(f"{self.layer.fqn}: {tuple(ids.shape)} ids are chosen, and routes are {wanted.shape}.")
        is_route = _is_route(wanted)
        self.owner._count(ids, wanted, is_route)
        self.layer.is_replayed = True
        return torch.where(is_route[:, None], wanted, ids)


def _is_route(routes: torch.Tensor) -> torch.Tensor:
    """Which rows name experts: those of padding, and those past what vLLM recorded, name one twice."""
    ordered = routes.sort(dim=-1).values
    return (ordered[:, 1:] != ordered[:, :-1]).all(dim=-1)


def _same_experts(ids: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Which rows name the same experts, in whatever order."""
    return (ids.sort(dim=-1).values == others.sort(dim=-1).values).all(dim=-1)
