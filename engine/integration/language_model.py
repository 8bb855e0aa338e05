"""The causal language model behind verl's engine interface: actor, reference policy and SFT."""

import functools
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn
from verl.utils import tensordict_utils as tu
from verl.workers.engine.base import EngineRegistry

from ..config.settings import mtp_loss_coef
from ..config.values import DTYPES, STRATEGY
from ..fsdp.activation_checkpoint import draws_numbers
from ..head.causal_head import CausalHead, Wanted, why_whole_logits
from ..moe.router.replay import RouterReplay
from ..mtp.draft_loss import DraftLoss
from ..mtp.layers import add_mtp_layers, policy_experts
from ..packing.indexer_replay import IndexerReplay
from ..preflight.features import check_indexer_replay, check_replay
from ..preflight.mtp import check_mtp
from .building import print_lines
from .engine import DEVICES, EPFSDP2Engine
from .step_features import DraftTerm, MismatchWarning, OldLogProbs, ReplayedKeys, ReplayedRoutes, StepFeature

__all__ = ["EPFSDP2EngineWithLMHead"]


@EngineRegistry.register(model_type="language_model", backend=[STRATEGY], device=DEVICES)
class EPFSDP2EngineWithLMHead(EPFSDP2Engine):
    """Actor, reference policy, SFT."""

    _head: CausalHead | None = None  # None: every micro-batch has whole logits
    _old_log_probs: OldLogProbs | None = None  # None: they are computed before an update
    _draft_loss: DraftLoss | None = None  # None: no multi-token prediction layer is trained

    def _build_module(self) -> nn.Module:
        module: Any = super()._build_module()
        config = self.engine_config
        if config.router_replay.mode != "disabled" and not config.forward_only:
            check_replay(config, self.model_config, None)  # not every trainer of verl checks its settings
            experts = policy_experts(module, config.expert_plan)
            replay = RouterReplay(module, experts, module.config.get_text_config().num_hidden_layers)
            mode, sp_group = config.router_replay.mode, self.ulysses_parallel_group
            self.router_features.append(ReplayedRoutes(replay, mode, self._is_reference, sp_group))
        if config.indexer_replay and not config.forward_only:
            check_indexer_replay(config, self.model_config, module)
            assert self.packed is not None, "check_indexer_replay refuses rows that are not packed"
            replayed = IndexerReplay(module, self.packed, self.ulysses_parallel_group)
            self.router_features.append(ReplayedKeys(replayed, self._is_reference))
        return module

    @property
    def _mtp_loss_coef(self) -> float | None:
        if self.engine_config.forward_only:  # the layers give no log-probs
            return None
        return mtp_loss_coef(self.engine_config, self.model_config)

    def _add_modules(self, module: nn.Module) -> None:
        if self._mtp_loss_coef is None:
            return
        count = check_mtp(self.engine_config, self.model_config, module, "model")
        add_mtp_layers(module, count, DTYPES[self.engine_config.model_dtype])

    def _patch(self, module: nn.Module) -> None:
        super()._patch(module)
        # After verl's patches of the forward, and before hooks, which need a real batch.
        if self.engine_config.chunked_logits and not self.model_config.use_fused_kernels:
            if reason := why_whole_logits(module):
                print_lines(self.rank, f"logits are whole: {reason}")
            else:
                self._head = CausalHead(module)
        if self._mtp_loss_coef:
            assert self._head is not None, "check_mtp refuses whole logits"
            self._draft_loss = DraftLoss(module, self._head, self.ulysses_parallel_group)

    def _is_reference(self) -> bool:
        """Whether the model is the reference policy now: the actor without its adapters."""
        return self._lora is not None and not self._lora.enabled

    def _features_of(self, module: Any) -> list[StepFeature]:
        features, config = super()._features_of(module), self.engine_config
        say = functools.partial(print_lines, self.rank)
        if self._draft_loss is not None and (coef := self._mtp_loss_coef):
            groups = self.get_data_parallel_group(), self.ulysses_parallel_group
            features.append(DraftTerm(self._draft_loss, coef, *groups))
        if config.mismatch_warning and not config.forward_only and self.rank == 0:  # no collective in it
            features.append(MismatchWarning(config.mismatch_warning, say))
        if config._one_update is None:
            return features
        why = "logits are whole" if self._head is None else "a forward draws random numbers"
        if self._head is None or draws_numbers(module):
            say(f"old log-probs are computed before updates: {why}")
            return features
        self._old_log_probs = OldLogProbs(self.get_data_parallel_group(), **config._one_update, say=say)
        return [*features, self._old_log_probs]

    def infer_batch(self, data, loss_function=None):
        left_out = None
        if self._old_log_probs is not None and loss_function is None and not self._is_reference():
            left_out = self._old_log_probs.leave_out(data)
        return super().infer_batch(data, loss_function) if left_out is None else left_out

    def prepare_model_inputs(self, micro_batch):
        inputs, arguments = super().prepare_model_inputs(micro_batch)
        if self._head is not None:
            self._head.wanted = None if _reads_logits(micro_batch) else _wanted(arguments, micro_batch)
        return inputs, arguments

    def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func):
        if self._head is not None and self._head.wanted is not None:
            log_probs, entropy = self._head.take(output.logits)
            # With this flag verl returns both unchanged. It is set on a copy, which the loss function does not get.
            output, micro_batch = SimpleNamespace(log_probs=log_probs, entropy=entropy), micro_batch.copy()
            tu.assign_non_tensor(micro_batch, use_fused_kernels=True)
        return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)


def _reads_logits(micro_batch: TensorDict) -> bool:
    """Whether verl computes more from a micro-batch's logits than log-probs and entropies."""
    others = ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only")
    return any(tu.get_non_tensor_data(micro_batch, key=key, default=False) for key in others)


def _wanted(arguments: dict[str, Any], micro_batch: TensorDict) -> Wanted:
    """Return the labels and temperatures of a micro-batch; ``arguments`` is for verl's ``prepare_model_outputs``."""
    labels, temperature = arguments["input_ids_rmpad_rolled"], arguments.get("temperature_rmpad")
    if temperature is None:  # rows are padded, labels are not
        lengths = micro_batch["input_ids"].offsets().diff()
        is_token = torch.arange(int(lengths.max()), device=labels.device) < lengths[:, None]
        labels = torch.zeros_like(is_token, dtype=labels.dtype).masked_scatter_(is_token, labels)
        temperature = arguments["temperature"][:, None].expand_as(labels)
    with_entropy = tu.get_non_tensor_data(micro_batch, key="calculate_entropy", default=False)
    return Wanted(labels, temperature, bool(with_entropy))
