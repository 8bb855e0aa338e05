"""The causal language model behind verl's engine interface: actor, reference policy and SFT."""

from typing import Any

from torch import nn
from verl.workers.engine.base import EngineRegistry

from ..moe.find import find_experts
from ..moe.router.replay import RouterReplay
from ..preflight.features import check_replay
from ..settings.roles import STRATEGY
from .engine import DEVICES, EPFSDP2Engine
from .step_features import ReplayedRoutes

__all__ = ["EPFSDP2EngineWithLMHead"]


@EngineRegistry.register(model_type="language_model", backend=[STRATEGY], device=DEVICES)
class EPFSDP2EngineWithLMHead(EPFSDP2Engine):
    """Actor, reference policy, SFT."""

    def _build_module(self) -> nn.Module:
        module: Any = super()._build_module()
        config = self.engine_config
        if config.router_replay.mode != "disabled" and not config.forward_only:  # the reference routes for itself
            check_replay(config, self.model_config, None)  # not every trainer of verl has its settings checked
            experts = find_experts(module, config.expert_plan)
            replay = RouterReplay(module, experts, module.config.get_text_config().num_hidden_layers)
            mode, sp_group = config.router_replay.mode, self.ulysses_parallel_group
            self.router_features.append(ReplayedRoutes(replay, mode, self._is_reference, sp_group))
        return module

    def _is_reference(self) -> bool:
        """Whether the model is the reference policy now: the actor without its adapters."""
        return self._lora is not None and not self._lora.enabled
