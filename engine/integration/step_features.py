"""Optional parts of a step: one protocol, and one class for each feature.

The engine calls all features that are switched on at each point of verl's call order. Some calls are collective: the
order of the engine's list follows from the settings, so it is the same on all ranks.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.utils.padding import no_padding_2_padding

from ..fsdp.ulysses import gather_parts, own_part
from ..model.vision import VisionTowerSync
from ..moe.router.losses import RouterLosses
from ..moe.router.replay import ReplayError, RouterReplay
from ..mtp.draft_loss import DraftLoss
from ..mtp.responses import drafted
from ..packing.indexer_replay import IndexerReplay
from ..planner.run import StepEstimate
from .shims import TrainersMetric

__all__ = [
    "DraftTerm",
    "MismatchWarning",
    "OldLogProbs",
    "PlannedMemory",
    "ReplayedKeys",
    "ReplayedRoutes",
    "RouterTerms",
    "StepFeature",
    "VisionTowers",
]

Loss = Callable[..., tuple[torch.Tensor, dict[str, Any]]]  # verl's, of (model_output, data, dp_group)


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

    def wrap_loss(self, loss_function: Loss | None) -> Loss | None:
        """Return the loss function of a micro-batch, given verl's; None in a forward without a loss."""
        return loss_function

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


class DraftTerm(StepFeature):
    """The loss of multi-token prediction layers on drafts of response tokens (``mtp/draft_loss.py``).

    Args:
        coef: weight of the mean loss of a draft.
        dp_group: ranks whose batches are different.
        sp_group: ranks that share packed rows; None where none do.
    """

    def __init__(self, loss: DraftLoss, coef: float, dp_group: dist.ProcessGroup, sp_group: dist.ProcessGroup | None):
        self._loss, self._coef, self._dp_group, self._sp_group = loss, coef, dp_group, sp_group
        self._drafts = self._sums = torch.empty(0)

    def begin_batch(self, data: TensorDict, forward_only: bool) -> None:
        if forward_only:
            return
        self._drafts = torch.stack([wanted.sum() for wanted in drafted(data, self._loss.depth)]).sum()
        dist.all_reduce(self._drafts, group=self._dp_group)
        self._sums = torch.zeros(2, device=get_device_id())

    def prepare_inputs(self, inputs: dict[str, Any], micro_batch: TensorDict) -> None:
        if not torch.is_grad_enabled():
            return
        positions = inputs["position_ids"].flatten(0, -2)[0]  # of the whole row
        missing = len(positions) - micro_batch["input_ids"].values().shape[0]
        whole = [F.pad(each, (0, missing)) for each in drafted(micro_batch, self._loss.depth)]
        *wanted, starts = (own_part(each, 0, self._sp_group) for each in (*whole, positions == 0))
        self._loss.watch(wanted, starts)

    def add_loss(self, loss: torch.Tensor) -> torch.Tensor:
        if (found := self._loss.take()) is None:
            return loss
        self._sums += torch.stack([each.detach().float() for each in found])
        # FSDP averages over all ranks, and micro-batches sum, so this is the mean over the drafts of the step.
        return loss + dist.get_world_size() * self._coef / self._drafts.clamp(min=1) * found[0]

    def metrics(self) -> Mapping[str, float]:
        """Return the mean loss of a draft, and the share of drafts whose most likely token is the policy's."""
        dist.all_reduce(self._sums)
        return dict(zip(("mtp_loss", "mtp_agreement"), (self._sums / self._drafts.clamp(min=1)).tolist(), strict=True))


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
        self._replay.differing.take()  # drops the count of the forward that computed log-probs

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
        differing = self._replay.differing.take(dist.group.WORLD)
        return {} if differing is None else {"router_replay_differing": differing}


class ReplayedKeys(StepFeature):
    """Attends to keys that indexers chose before (``packing/indexer_replay.py``); see also ``ReplayedRoutes``."""

    def __init__(self, replay: IndexerReplay, is_reference: Callable[[], bool]):
        self._replay, self._is_reference, self._records = replay, is_reference, False

    def prepare_inputs(self, inputs: dict[str, Any], micro_batch: TensorDict) -> None:
        ends = micro_batch["input_ids"].offsets().tolist()
        spans = list(zip(ends[:-1], ends[1:], strict=True))
        self._records = not torch.is_grad_enabled() and not self._is_reference()
        if self._is_reference():
            self._replay.stop()
        elif self._records:
            self._replay.record(spans)
        elif (keys := micro_batch.get("indexer_keys", None)) is None:
            raise ReplayError("engine.indexer_replay=True: compute_log_prob has left no indexer_keys in the batch.")
        else:
            self._replay.replay(dict(zip(spans, keys.unbind(), strict=True)))

    def prepare_outputs(self, outputs: dict[str, Any], micro_batch: TensorDict) -> None:
        if self._records:
            keys = self._replay.recorded(micro_batch["input_ids"].device)
            outputs["indexer_keys"] = torch.nested.as_nested_tensor(keys, layout=torch.jagged)

    def metrics(self) -> Mapping[str, float]:
        differing = self._replay.differing.take(dist.group.WORLD)
        return {} if differing is None else {"indexer_replay_differing": differing}


class OldLogProbs(StepFeature):
    """Takes old log-probs from the forward of a batch's only update, and skips verl's pass before it.

    The trainer gets NaN in place of log-probs and entropies, which shows where something reads them after all. The
    update's metrics replace those that the trainer computes from NaN.

    Args:
        dp_group: ranks whose batches are different.
        sequences: of all ranks in a batch.
        averaged: arguments by which verl's ``agg_loss`` averages entropies.
        say: prints a line.
    """

    def __init__(
        self, dp_group: dist.ProcessGroup, sequences: int, averaged: dict[str, Any], say: Callable[[str], None]
    ):
        self._dp_group, self._sequences, self._averaged, self._say = dp_group, sequences, averaged, functools.cache(say)
        self._is_left_out = self._is_active = self._with_entropy = self._is_padded = False
        self._seen: list[torch.Tensor] = []  # of each micro-batch: log-probs, entropies, mask, the rollout's log-probs

    def leave_out(self, data: TensorDict) -> dict[str, Any] | None:
        """Return the output of a forward for old log-probs that the next update gives; None if it has to run."""
        if not tu.get_non_tensor_data(data, "calculate_entropy", False):  # the trainer asks for them here alone
            return None
        sequences = data.shape[0] * dist.get_world_size(self._dp_group)
        self._is_left_out = sequences == self._sequences
        if not self._is_left_out:
            self._say(f"old log-probs are computed: {sequences} sequences, and {self._sequences} in an update")
            return None
        ids = data["input_ids"]
        missing = torch.full(ids.values().shape, torch.nan, device=ids.device)
        missing = torch.nested.nested_tensor_from_jagged(missing, ids.offsets())
        return {"model_output": {"log_probs": missing, "entropy": missing.clone()}, "loss": [0.0], "metrics": {}}

    def begin_batch(self, data: TensorDict, forward_only: bool) -> None:
        self._is_active, self._seen = False, []
        if forward_only or (old := data.get("old_log_probs", None)) is None:
            return
        self._is_padded = not old.is_nested
        if not (old if self._is_padded else old.values()).isnan().any():
            return
        if not self._is_left_out:
            raise RuntimeError("old log-probs are NaN: their pass was skipped for one update, and this is another.")
        self._is_active, self._is_left_out = True, False
        self._with_entropy = tu.get_non_tensor_data(data, "calculate_entropy", False)
        tu.assign_non_tensor(data, calculate_entropy=True)

    def wrap_loss(self, loss_function: Loss | None) -> Loss | None:
        if not self._is_active or loss_function is None:
            return loss_function

        def with_own(model_output: dict[str, Any], data: TensorDict, **others: Any) -> tuple[torch.Tensor, dict]:
            own = [no_padding_2_padding(model_output[key].detach(), data).float() for key in ("log_probs", "entropy")]
            others_seen = [data[key] for key in ("response_mask", "rollout_log_probs") if key in data]
            padded = [each.to_padded_tensor(0) if each.is_nested else each for each in others_seen]
            self._seen.append(torch.stack([*own, *(each.float() for each in padded)]))
            if not self._with_entropy:
                model_output = {key: value for key, value in model_output.items() if key != "entropy"}
            data = data.copy()
            data["old_log_probs"] = own[0]
            return loss_function(model_output=model_output, data=data, **others)

        return with_own

    def metrics(self) -> Mapping[str, float]:
        """Return the trainer's metrics of old log-probs, which one rank computes."""
        if not self._is_active:
            return {}
        mine, is_first = [seen.cpu() for seen in self._seen], dist.get_rank(self._dp_group) == 0
        found: list[dict[str, float]] = [{}]
        parts: list[Any] | None = [None] * dist.get_world_size(self._dp_group) if is_first else None
        dist.gather_object(mine, parts, group=self._dp_group, group_dst=0)
        if parts is not None:
            seen = [each for part in parts for each in part]
            width = max(each.shape[-1] for each in seen)
            whole = torch.cat([F.pad(each, (0, width - each.shape[-1])) for each in seen], dim=1)
            found = [_trainers_metrics(*whole, averaged=self._averaged)]
        dist.broadcast_object_list(found, group=self._dp_group, group_src=0)
        # Only the older trainers, whose batches are padded, log the utilisation of the forward that did not run.
        idle = {"perf/mfu/actor_infer": 0.0} if self._is_padded else {}
        self._seen = []
        return {TrainersMetric(name): value for name, value in {**found[0], **idle}.items()}


def _trainers_metrics(
    old: torch.Tensor, entropy: torch.Tensor, mask: torch.Tensor, rollout: torch.Tensor | None = None, *, averaged: Any
) -> dict[str, float]:
    """Return the metrics that verl's trainer computes from old log-probs, by its names; all ``[sequences, tokens]``."""
    # Here, because no other feature needs these names of verl.
    from verl import DataProto
    from verl.trainer.ppo.core_algos import agg_loss
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
    from verl.utils.debug.metrics import calculate_debug_metrics

    mask = mask.long()
    found = {"actor/entropy": agg_loss(loss_mat=entropy, loss_mask=mask, **averaged).item()}
    if rollout is None:
        return found
    compared = {"old_log_probs": old, "rollout_log_probs": rollout, "response_mask": mask, "responses": mask}
    found |= calculate_debug_metrics(DataProto.from_dict(compared))
    return found | compute_rollout_correction_and_rejection_mask(old, rollout, mask)[2]


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
        # NaN where the update gives old log-probs (``OldLogProbs``), and without a sampled token.
        if not (found := differences.mean().item()) > self._most:
            return
        self._report(
            f"rollout and trainer differ by {found:.3g} in a token's mean probability, more than "
            f"engine.mismatch_warning={self._most:g}. Find the cause with: python -m epfsdp2.recipes.mismatch "
            f"CHECKPOINT ROLLOUTS --run .hydra/config.yaml (skip.rollout_tq saves rollouts, see --help)"
        )
        self._most = 2 * found
