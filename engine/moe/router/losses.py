"""The routers' load-balancing loss and z-loss, and metrics of the experts' load.

The load-balancing loss of a layer is ``E * sum_e f_e * P_e`` (https://arxiv.org/abs/2101.03961). ``f_e`` is the number
of assignments to expert ``e`` per token, ``P_e`` its mean routing probability. The loss is ``K``, the experts per
token, if the load is even. Means are over the tokens of all ranks in a micro-batch, so that experts may specialise on
data of a single rank (https://arxiv.org/abs/2501.11873). The z-loss is the mean square of ``logsumexp(logits)``
(https://arxiv.org/abs/2202.08906). Both losses are means over the layers.

The family's own code is unchanged. The logits are the output of the last linear map onto ``E`` outputs before the
experts are called. The losses are computed from them outside of the layer, so activation checkpointing does not
recompute the losses.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from ...wrap_forward import wrap_forward
from ..find import ExpertsInfo, UnsupportedModelError, experts_by_layer
from ..forward import runtime_of

__all__ = ["RouterLosses", "check_router_logits"]

_LINEAR = (F.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm)
_SUMS = ("aux", "z", "loads", "dropped")  # summed over the micro-batches of a step; loads are [layers, E]
_SIGMOID = (torch.sigmoid, torch.Tensor.sigmoid, F.sigmoid, torch.special.expit)


def check_router_logits(experts: Sequence[ExpertsInfo], num_layers: int) -> None:
    """Check that router losses and metrics are defined for a model of ``num_layers``, with or without experts.

    Raises:
        UnsupportedModelError: layers differ in their number of experts; or see ``experts_by_layer``.
    """
    experts_by_layer(experts, num_layers)
    if len({info.num_experts for info in experts}) > 1:
        raise UnsupportedModelError(
            "router losses are means over layers, and the layers differ in their number of experts."
        )


@dataclass
class _Layer:
    """One experts module, and its routing in the current forward."""

    info: ExpertsInfo
    ids: torch.Tensor | None = None  # [tokens, K]
    logits: torch.Tensor | None = None  # [tokens, E]
    by_sigmoid: bool = False
    rows_before: int = 0

    def reset(self) -> None:
        self.ids = self.logits = None
        runtime = runtime_of(self.info.module)
        self.rows_before = 0 if runtime is None else runtime.rows_computed

    def load(self, is_token: torch.Tensor) -> torch.Tensor:
        """Count the tokens of each expert, int64 ``[E]``."""
        assert self.ids is not None
        ids = self.ids.long()
        counts = torch.zeros(self.info.num_experts, dtype=torch.long, device=ids.device)
        return counts.scatter_add_(0, ids.reshape(-1), is_token[:, None].expand_as(ids).reshape(-1).long())

    def assignments(self) -> tuple[int, int]:
        """Count the assignments that this rank's tokens have, padding included, and those its experts have computed."""
        assert self.ids is not None
        routed, runtime = self.ids.numel(), runtime_of(self.info.module)
        return routed, routed if runtime is None else runtime.rows_computed - self.rows_before


class RouterLosses:
    """Records the routing of a model; returns its router losses and the metrics of its experts' load.

    Install it after the process group is initialised.

    Raises:
        UnsupportedModelError: see ``check_router_logits``.
    """

    def __init__(self, model: nn.Module, experts: Sequence[ExpertsInfo], aux_coef: float = 0.0, z_coef: float = 0.0):
        check_router_logits(experts, model.config.get_text_config().num_hidden_layers)  # type: ignore[union-attr,operator]
        self.aux_coef, self.z_coef = aux_coef, z_coef
        self._layers = [_Layer(info) for info in experts]
        self._watching = False
        self._logits: _Logits | None = None
        self._sums: dict[str, Any] = dict.fromkeys(_SUMS, 0.0)
        self._batch_tokens = torch.ones(())
        for layer in self._layers:
            layer.info.module.register_forward_pre_hook(functools.partial(self._arrive, layer), with_kwargs=True)
            if self._has_loss:
                block = model.get_submodule(layer.info.block)
                wrap_forward(block, "router_losses", functools.partial(self._block, layer.info.num_experts))

    @property
    def _has_loss(self) -> bool:
        return bool(self.aux_coef or self.z_coef)

    def begin(self, tokens: torch.Tensor) -> None:
        """Begin a step with ``tokens`` in all micro-batches of all ranks, a scalar on the device."""
        self._batch_tokens = tokens.clamp(min=1)
        self._sums = dict.fromkeys(_SUMS, 0.0)

    def watch(self) -> None:
        """Record the routing of the next forward."""
        self._watching = True
        for layer in self._layers:
            layer.reset()

    def loss(self, is_token: torch.Tensor) -> torch.Tensor | None:
        """Return the router loss of the forward, to be added to this rank's loss; collective.

        FSDP averages gradients over all ranks, and micro-batches sum them. With the scale of this loss that is the
        mean over the tokens of the step. It is None if both coefficients are 0. ``is_token`` ``[tokens]`` is False for
        rows of padding.

        Raises:
            UnsupportedModelError: a layer's experts were not called exactly once, or its logits were not found.
        """
        self._watching = False
        for layer in self._layers:
            if layer.ids is None:
                raise UnsupportedModelError(f"{layer.info.fqn} was not called in a forward.")
        loads = torch.stack([layer.load(is_token) for layer in self._layers])
        everyone = torch.cat([loads.reshape(-1), torch.stack([is_token.sum(), self._dropped(loads)])])
        dist.all_reduce(everyone)
        loads, (tokens, dropped) = everyone[:-2].view_as(loads), everyone[-2:].unbind()
        tokens = tokens.clamp(min=1)
        self._add(loads=loads, dropped=dropped)
        added = self._added(loads / tokens, is_token) if self._has_loss else None
        for layer in self._layers:
            layer.reset()
        return added

    def _dropped(self, like: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the number of assignments that no expert has computed: the sum over all ranks is
        that number. Collective over the ranks that share experts.

        A shared expert has computed an assignment once each of its ranks has computed a part. So these ranks take the
        minimum of their counts for each layer, and the first of them subtracts it.
        """
        # ``new_full``, because a copy from the host's memory would wait for the device.
        counts = [layer.assignments() for layer in self._layers]
        routed = like.new_full((), sum(routed for routed, _ in counts))
        computed = torch.stack([like.new_full((), computed) for _, computed in counts])
        runtime = runtime_of(self._layers[0].info.module)
        sharing = None if runtime is None else runtime.etp_group
        if sharing is None:
            return routed - computed.sum()
        dist.all_reduce(computed, dist.ReduceOp.MIN, group=sharing)
        return routed - computed.sum() if dist.get_rank(sharing) == 0 else routed

    def _added(self, per_token: torch.Tensor, is_token: torch.Tensor) -> torch.Tensor:
        aux, z = [], []
        for layer, f_E in zip(self._layers, per_token.float(), strict=True):
            if layer.logits is None:
                raise UnsupportedModelError(
                    f"{layer.info.fqn}: no linear map onto {layer.info.num_experts} experts was called before it."
                )
            # Mask padding instead of indexing: the number of real rows is not known on the host.
            logits_TE = layer.logits.reshape(-1, layer.info.num_experts)
            logits_TE = torch.where(is_token[:, None], logits_TE, 0).float()
            # A token's scores sum to one; for sigmoid routers as in DeepSeek-V3's balance loss.
            scores_TE = logits_TE.sigmoid() if layer.by_sigmoid else logits_TE.softmax(-1)
            if layer.by_sigmoid:
                scores_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
            probs_TE = scores_TE * is_token[:, None]
            aux.append(layer.info.num_experts * (f_E * probs_TE.sum(0)).sum())
            z.append((logits_TE.logsumexp(-1).square() * is_token).sum())
        share = 1 / (len(self._layers) * self._batch_tokens)
        aux_sum, z_sum = torch.stack(aux).sum() * share, torch.stack(z).sum() * share
        self._add(aux=aux_sum.detach(), z=z_sum.detach())
        return dist.get_world_size() * (self.aux_coef * aux_sum + self.z_coef * z_sum)

    def _add(self, **summands: torch.Tensor) -> None:
        self._sums |= {name: self._sums[name] + summand for name, summand in summands.items()}

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step since ``begin``, over all ranks; collective.

        ``router_load_max`` and ``router_load_min`` are the loads of a layer's busiest and idlest expert relative to an
        even load, averaged over the layers; ``router_dropped`` counts (token, expert) pairs that no expert computed.
        """
        loads = torch.as_tensor(self._sums["loads"]).float()
        relative = loads / loads.mean(1, keepdim=True)
        found = {
            "router_load_max": relative.amax(1).mean().item(),
            "router_load_min": relative.amin(1).mean().item(),
            "router_dropped": float(self._sums["dropped"]),
        }
        if self._has_loss:
            losses = torch.stack([torch.as_tensor(self._sums["aux"]), torch.as_tensor(self._sums["z"])])
            dist.all_reduce(losses)
            found |= dict(zip(("router_aux_loss", "router_z_loss"), losses.tolist(), strict=True))
        return found

    def _block(self, num_experts: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._watching:
            return forward(*args, **kwargs)
        with _Logits(num_experts) as self._logits:
            return forward(*args, **kwargs)

    def _arrive(self, layer: _Layer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the ids; runs before the experts, whose inputs are ``(hidden states, ids [tokens, K], weights)``."""
        if not self._watching:
            return
        ids = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
        if layer.ids is not None:
            raise UnsupportedModelError(f"{layer.info.fqn} was called twice in a forward.")
        layer.ids = ids.detach()
        if self._logits is not None:
            layer.logits, layer.by_sigmoid = self._logits.found, self._logits.by_sigmoid


class _Logits(TorchFunctionMode):
    """Records, in one layer's block, the last linear map onto the experts, and whether a sigmoid follows it."""

    def __init__(self, num_experts: int):
        super().__init__()
        self.num_experts = num_experts
        self.found: torch.Tensor | None = None
        self.by_sigmoid = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in _LINEAR and result.shape[-1] == self.num_experts:
            self.found, self.by_sigmoid = result, False
        elif func in _SIGMOID and self.found is not None and result.shape[-1] == self.num_experts:
            self.by_sigmoid = True
        return result
