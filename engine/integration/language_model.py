"""The causal language model behind verl's engine interface: actor, reference policy and SFT."""

from typing import Any

import torch
from tensordict import TensorDict
from torch import nn
from verl.workers.engine.base import EngineRegistry

from ..fsdp.ulysses import gather_parts, own_part
from ..moe.find import find_experts
from ..moe.router.replay import ReplayError, RouterReplay
from ..preflight.features import check_replay
from ..settings.roles import STRATEGY
from .engine import DEVICES, EPFSDP2Engine

__all__ = ["EPFSDP2EngineWithLMHead"]


@EngineRegistry.register(model_type="language_model", backend=[STRATEGY], device=DEVICES)
class EPFSDP2EngineWithLMHead(EPFSDP2Engine):
    """Actor, reference policy, SFT."""

    _replay: RouterReplay | None = None
    _records = False  # in this pass

    def _build_module(self) -> nn.Module:
        module: Any = super()._build_module()
        config = self.engine_config
        if config.router_replay.mode != "disabled" and not config.forward_only:  # the reference routes for itself
            check_replay(config, self.model_config, None)  # not every trainer of verl has its settings checked
            experts = find_experts(module, config.expert_plan)
            self._replay = RouterReplay(module, experts, module.config.get_text_config().num_hidden_layers)
        return module

    def train_batch(self, data, loss_function):
        if self._replay is not None:
            self._replay.differing()  # that of the log-probs is not of this step
        outputs = super().train_batch(data, loss_function)
        differing = self._replay.differing(self.ulysses_parallel_group) if self._replay is not None else None
        if differing is not None and self.is_mp_src_rank_with_outputs():
            outputs["metrics"]["router_replay_differing"] = [differing]
        return outputs

    def forward_step(self, micro_batch, loss_function, forward_only):
        records = forward_only and self.engine_config.router_replay.mode == "R2"
        self._records = records and not self._routes_for_itself
        if self._replay is not None and self._routes_for_itself:
            self._replay.stop()
        return super().forward_step(micro_batch, loss_function, forward_only)

    def prepare_model_inputs(self, micro_batch):
        inputs, arguments = super().prepare_model_inputs(micro_batch)
        if self._replay is not None and not self._routes_for_itself:
            tokens = inputs["input_ids"].numel()
            if self._records:
                self._replay.record()
            else:
                self._replay.replay(self._routes(micro_batch, tokens))
        return inputs, arguments

    @property
    def _routes_for_itself(self) -> bool:
        """The reference policy does, also where it is the actor without its adapters."""
        return self._lora is not None and not self._lora.enabled

    def _routes(self, micro_batch: TensorDict, tokens: int) -> torch.Tensor:
        """What is to be replayed for this rank's tokens, ``[tokens, layers, k]``; the rows of padding are zeros."""
        mode = self.engine_config.router_replay.mode
        routes = micro_batch.get("routed_experts", None)
        if routes is None:
            source = "compute_log_prob" if mode == "R2" else "the rollout"
            raise ReplayError(f"engine.router_replay.mode={mode}: {source} has left no routed_experts in the batch.")
        routes = routes.values()
        padded = routes.new_zeros((tokens * self.ulysses_sequence_parallel_size, *routes.shape[1:]))
        padded[: routes.shape[0]] = routes
        return own_part(padded, 0, self.ulysses_parallel_group)

    def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func):
        outputs = super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        if self._replay is not None and self._records:
            offsets = micro_batch["input_ids"].offsets()
            routes = gather_parts(self._replay.recorded(), self.ulysses_parallel_group)
            routes = routes[: micro_batch["input_ids"].values().shape[0]]
            outputs["routed_experts"] = torch.nested.nested_tensor_from_jagged(routes, offsets)
        return outputs
