"""Optional parts of a step: one protocol, and one class for each feature.

The engine calls all features that are switched on at each point of verl's call order. Some calls are collective: the
order of the engine's list follows from the settings, so it is the same on all ranks.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.utils.device import get_device_id

from ..fsdp.ulysses import gather_parts, own_part
from ..model.vision import VisionTowerSync
from ..moe.router.losses import RouterLosses
from ..moe.router.replay import ReplayError, RouterReplay
from ..planner.run import StepEstimate

__all__ = ["MismatchWarning", "PlannedMemory", "ReplayedRoutes", "RouterTerms", "StepFeature", "VisionTowers"]


class StepFeature:
    """The protocol, in the order of the calls; the methods here do nothing."""

    def begin_update(self) -> None:
        """Run before the forward of a mini-batch, in training."""

    def begin_batch(self, data: TensorDict, forward_only: bool) -> None:
        """Run before a batch is split into micro-batches."""

    def prepare_inputs(self, inputs: dict[str, Any], micro_batch: TensorDict) -> None:
        """Read or change the arguments of the model's forward; gradients are enabled in training."""

    def prepare_outputs(self, outputs: dict[str, Any], micro_batch: TensorDict) -> None:
        """Read or change the outputs that verl keeps."""

    def add_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss for backward, given the loss of verl's loss function."""
        return loss

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the update, after the optimizer's step; called on all ranks."""
        return {}


class VisionTowers(StepFeature):
    """Runs a vision tower on all ranks in a micro-batch, or on none (``model/vision.py``)."""

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
        # Filled on the device, because a copy to or from the host would wait.
        tokens = torch.full((), data["input_ids"].values().numel(), device=get_device_id())
        dist.all_reduce(tokens, group=self._dp_group)
        self._losses.begin(tokens)

    def prepare_inputs(self, inputs: dict[str, Any], micro_batch: TensorDict) -> None:
        """Mark the rows of the model's input that are not padding: bool ``[rows]``."""
        self._trains = torch.is_grad_enabled()
        if self._trains:
            self._losses.watch()
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
    """Sends tokens to the experts of an earlier forward (``moe/router/replay.py``).

    Args:
        mode: ``R2`` for routes recorded when log-probs are computed, ``R3`` for routes of the rollout.
        is_reference: whether the model is the reference policy now, which replays nothing.
        sp_group: ranks that share packed rows; None where none do.
    """

    def __init__(
        self, replay: RouterReplay, mode: str, is_reference: Callable[[], bool], sp_group: dist.ProcessGroup | None
    ):
        self._replay, self._mode, self._sp_group = replay, mode, sp_group
        self._is_reference, self._records = is_reference, False

    def begin_update(self) -> None:
        self._replay.differing()  # drops the count of the forward that computed log-probs

    def prepare_inputs(self, inputs: dict[str, Any], micro_batch: TensorDict) -> None:
        self._records = self._mode == "R2" and not torch.is_grad_enabled() and not self._is_reference()
        if self._is_reference():
            self._replay.stop()
        elif self._records:
            self._replay.record()
        else:
            self._replay.replay(self._routes(micro_batch, inputs["position_ids"].shape[-1]))

    def _routes(self, micro_batch: TensorDict, tokens: int) -> torch.Tensor:
        """Return the routes of this rank's part of a packed row of ``tokens``: ``[own tokens, layers, k]``."""
        if (routes := micro_batch.get("routed_experts", None)) is None:
            source = "compute_log_prob" if self._mode == "R2" else "the rollout"
            rule = f"{source} has left no routed_experts in the batch."
            raise ReplayError(f"engine.router_replay.mode={self._mode}: {rule}")
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
        # Summed over all ranks, because verl averages their metrics whatever their numbers of tokens.
        differing = self._replay.differing(dist.group.WORLD)
        return {} if differing is None else {"router_replay_differing": differing}


class PlannedMemory(StepFeature):
    """Compares the planned memory of an update with the measured memory (``planner/run.py``)."""

    def __init__(self, plan: StepEstimate):
        self._plan = plan

    def begin_update(self) -> None:
        self._plan.begin_update()

    def prepare_inputs(self, inputs: dict[str, Any], micro_batch: TensorDict) -> None:
        if torch.is_grad_enabled():
            # Positions are of the whole row; input ids may be this rank's part.
            self._plan.see(inputs["position_ids"].shape[-2:].numel() // self._plan.sp)

    def metrics(self) -> Mapping[str, float]:
        return self._plan.metrics()


class MismatchWarning(StepFeature):
    """Prints a line when trainer and rollout differ more than usual, and whenever the difference has doubled.

    It compares the probabilities of sampled tokens, as verl's ``training/rollout_probs_diff_mean`` does.

    Args:
        most: usual mean difference of probabilities, at most.
        report: prints a line.
    """

    def __init__(self, most: float, report: Callable[[str], object]):
        self._most, self._report = most, report

    def begin_batch(self, data: TensorDict, forward_only: bool) -> None:
        names = "rollout_log_probs", "old_log_probs", "response_mask"
        if forward_only or any(data.get(name, None) is None for name in names):
            return
        rollout, trainer, mask = (v.values() if v.is_nested else v for v in (data[name] for name in names))
        if not rollout.shape == trainer.shape == mask.shape:
            return
        differences = (rollout.exp() - trainer.exp()).abs()[mask.bool()]
        if not differences.numel() or (found := differences.mean().item()) <= self._most:
            return
        self._report(
            f"rollout and trainer differ by {found:.3g} in a token's mean probability, more than "
            f"engine.mismatch_warning={self._most:g}. Find the cause with: python -m epfsdp2.recipes.mismatch "
            f"CHECKPOINT ROLLOUTS --run .hydra/config.yaml (skip.rollout_tq saves rollouts, see --help)"
        )
        self._most = 2 * found
