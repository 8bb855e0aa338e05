"""What takes part in a step beside the model: one protocol, and an implementation for each feature that is switched on.

The engine calls every feature at each point of verl's call order and asks none whether it is there. Some of these calls
are collective. Features are called in the order of the engine's list, which the settings decide, so that their
collectives come in the same order on all ranks.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.utils.device import get_device_id

from ...rollout.sync import RolloutSync
from ..fsdp.ulysses import gather_parts, own_part
from ..model.vision import VisionTowerSync
from ..moe.router.losses import RouterLosses
from ..moe.router.replay import ReplayError, RouterReplay
from ..planner.run import StepEstimate

__all__ = ["PlannedMemory", "ReplayedRoutes", "RouterTerms", "StepFeature", "SyncMetrics", "VisionTowers"]


class StepFeature:
    """The protocol, in the order of the calls; here every method does nothing."""

    def begin_update(self) -> None:
        """Run before the forward of a mini-batch that is trained on."""

    def begin_batch(self, data: TensorDict, forward_only: bool) -> None:
        """Run before a batch is divided into micro-batches, trained on or not."""

    def begin_micro_batch(self, forward_only: bool) -> None:
        """Run before a micro-batch's inputs are made."""

    def prepare_inputs(self, inputs: dict[str, Any], micro_batch: TensorDict) -> None:
        """Look at, or change, the arguments of the model's forward."""

    def prepare_outputs(self, outputs: dict[str, Any], micro_batch: TensorDict) -> None:
        """Look at, or change, what verl keeps of the model's forward."""

    def add_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss that backward starts from, given the one of verl's loss function."""
        return loss

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the update, after the optimizer's step; called on all ranks."""
        return {}

    def outcome(self) -> str | None:
        """Return a line to print after the run's last update, on rank 0."""
        return None


class VisionTowers(StepFeature):
    """All ranks run a vision tower in a micro-batch, or none does (``model/vision.py``)."""

    def __init__(self, towers: VisionTowerSync):
        self._towers = towers

    def begin_batch(self, data: TensorDict, forward_only: bool) -> None:
        self._towers.sync_modalities(data.get("multi_modal_inputs", ()), get_device_id())

    def prepare_inputs(self, inputs: dict[str, Any], micro_batch: TensorDict) -> None:
        self._towers.prepare_inputs(inputs)


class RouterTerms(StepFeature):
    """Auxiliary losses and metrics of the routers (``moe/router/losses.py``).

    Args:
        dp_group: ranks whose batches are different.
        sp_group: ranks that share packed rows; None where none do.
    """

    def __init__(self, losses: RouterLosses, dp_group: dist.ProcessGroup, sp_group: dist.ProcessGroup | None):
        self._losses, self._dp_group, self._sp_group = losses, dp_group, sp_group
        self._trains = False
        self._is_token = torch.empty(0, dtype=torch.bool)

    def begin_batch(self, data: TensorDict, forward_only: bool) -> None:
        if forward_only:
            return
        # Filled in and left on the device: to copy it either way would wait.
        tokens = torch.full((), data["input_ids"].values().numel(), device=get_device_id())
        dist.all_reduce(tokens, group=self._dp_group)
        self._losses.begin(tokens)

    def begin_micro_batch(self, forward_only: bool) -> None:
        self._trains = not forward_only
        if self._trains:
            self._losses.watch()

    def prepare_inputs(self, inputs: dict[str, Any], micro_batch: TensorDict) -> None:
        """Find which rows of the model's input are no padding: bool ``[rows]``."""
        if inputs.get("attention_mask") is not None:
            self._is_token = inputs["attention_mask"].reshape(-1).bool()
            return
        positions = inputs["position_ids"]  # of the whole row
        rows = torch.arange(positions.shape[-1], device=positions.device)
        self._is_token = own_part(rows < micro_batch["input_ids"].values().shape[0], 0, self._sp_group)

    def add_loss(self, loss: torch.Tensor) -> torch.Tensor:
        added = self._losses.loss(self._is_token) if self._trains else None
        return loss if added is None else loss + added

    def metrics(self) -> Mapping[str, float]:
        return self._losses.metrics()


class ReplayedRoutes(StepFeature):
    """Tokens take the experts that they took before (``moe/router/replay.py``).

    Args:
        mode: ``R2``, routes recorded when log-probs are computed, or ``R3``, routes of the rollout.
        routes_for_itself: whether the model is the reference policy now, which replays nothing: the actor without its
            adapters.
        sp_group: ranks that share packed rows; None where none do.
    """

    def __init__(
        self,
        replay: RouterReplay,
        mode: str,
        routes_for_itself: Callable[[], bool],
        sp_group: dist.ProcessGroup | None,
    ):
        self._replay, self._mode, self._sp_group = replay, mode, sp_group
        self._routes_for_itself, self._records = routes_for_itself, False

    def begin_update(self) -> None:
        self._replay.differing()  # what differed when log-probs were computed is not of this update

    def begin_micro_batch(self, forward_only: bool) -> None:
        self._records = forward_only and self._mode == "R2" and not self._routes_for_itself()
        if self._routes_for_itself():
            self._replay.stop()

    def prepare_inputs(self, inputs: dict[str, Any], micro_batch: TensorDict) -> None:
        if self._records:
            self._replay.record()
        elif not self._routes_for_itself():
            self._replay.replay(self._routes(micro_batch, inputs["position_ids"].shape[-1]))

    def _routes(self, micro_batch: TensorDict, tokens: int) -> torch.Tensor:
        """What is to be replayed for this rank's tokens, ``[own tokens, layers, k]``; the rows of padding are zeros.

        Args:
            tokens: of the whole packed row.
        """
        routes = micro_batch.get("routed_experts", None)
        if routes is None:
            source = "compute_log_prob" if self._mode == "R2" else "the rollout"
            raise ReplayError(
                f"engine.router_replay.mode={self._mode}: {source} has left no routed_experts in the batch."
            )
        routes = routes.values()
        padded = routes.new_zeros((tokens, *routes.shape[1:]))
        padded[: routes.shape[0]] = routes
        return own_part(padded, 0, self._sp_group)

    def prepare_outputs(self, outputs: dict[str, Any], micro_batch: TensorDict) -> None:
        if not self._records:
            return
        offsets = micro_batch["input_ids"].offsets()
        routes = gather_parts(self._replay.recorded(), self._sp_group)
        routes = routes[: micro_batch["input_ids"].values().shape[0]]
        outputs["routed_experts"] = torch.nested.nested_tensor_from_jagged(routes, offsets)

    def metrics(self) -> Mapping[str, float]:
        # Of all ranks: verl averages what they return, whatever their numbers of tokens.
        differing = self._replay.differing(dist.group.WORLD)
        return {} if differing is None else {"router_replay_differing": differing}


class PlannedMemory(StepFeature):
    """The memory that was planned for the micro-batches of an update, beside what was measured (``planner/run.py``)."""

    def __init__(self, plan: StepEstimate):
        self._plan = plan

    def begin_update(self) -> None:
        self._plan.begin_update()

    def prepare_inputs(self, inputs: dict[str, Any], micro_batch: TensorDict) -> None:
        if torch.is_grad_enabled():
            # The ids may be of this rank or of the row, positions are of the row.
            self._plan.see(inputs["position_ids"].shape[-2:].numel() // self._plan.sp)

    def metrics(self) -> Mapping[str, float]:
        return self._plan.metrics()

    def outcome(self) -> str | None:
        return self._plan.outcome()


class SyncMetrics(StepFeature):
    """Metrics of the last weight sync: verl drops what the sync itself returns."""

    def __init__(self, sync: RolloutSync):
        self._sync = sync

    def metrics(self) -> Mapping[str, float]:
        return {} if self._sync.last_report is None else self._sync.last_report.metrics()
