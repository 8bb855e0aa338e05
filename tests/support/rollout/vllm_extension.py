"""The worker extension with calls that read back the weights of a running vLLM worker.

Tests name it as ``worker_extension_cls``; vLLM's processes find this package by their ``PYTHONPATH``.
"""

import json
import os
from collections.abc import Iterator

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import get_tp_group

from epfsdp2.rollout.vllm.adapters import without_adapters
from epfsdp2.rollout.vllm.loaded_weights import running_weights
from epfsdp2.rollout.vllm.worker import WeightSyncExtension
from tests.support.rollout.packed_weights import packed_weights
from tests.support.rollout.verify import digest

__all__ = ["ReadableWorker"]


class ReadableWorker(WeightSyncExtension):
    """``WeightSyncExtension``, and calls that return digests of its worker's weights."""

    def epfsdp2_digests(self, path: str | None = None) -> dict:
        """Compute digests of the weights that this worker's model computes with, for ``verify.compare``.

        Args:
            path: also write the result to ``<path>.replica-<r>.rank-<tp rank>.json``, since verl's server actor drops
                what a remote call returns.

        Returns:
            ``{"tp_rank": int, "tp_size": int, "digests": {vLLM's parameter name: digest}}``.
        """
        group = get_tp_group()
        digests = {name: digest(tensor) for name, tensor in self._running_tensors()}
        answer = {"tp_rank": group.rank_in_group, "tp_size": group.world_size, "digests": digests}
        if path is not None:
            target = f"{path}.replica-{os.environ.get('VERL_REPLICA_RANK', '0')}.rank-{group.rank_in_group}.json"
            with open(f"{target}.part", "w") as file:
                json.dump(answer, file)
            os.replace(f"{target}.part", target)  # atomic for readers
        return answer

    def epfsdp2_adapter_digests(self) -> dict[str, str]:
        """Return digests of the one adapter in this worker's layers."""
        layers = self.model_runner.model.lora_manager.modules
        return {
            f"{name}.{half}.{i}": digest(stack[0])
            for name, layer in layers.items()
            for half in ("lora_a_stacked", "lora_b_stacked")
            for i, stack in enumerate(getattr(layer, half))
        }

    def _running_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        model = self.model_runner.model
        with set_current_vllm_config(self.model_runner.vllm_config), torch.no_grad(), without_adapters(model):
            yield from running_weights(model)
            yield from packed_weights(model)
            for drafter, _ in [*self._iter_all_models_with_config()][1:]:
                yield from ((f"drafter.{name}", tensor) for name, tensor in running_weights(drafter))
                yield from ((f"drafter.{name}", tensor) for name, tensor in packed_weights(drafter))
