"""The worker extension with calls that read back what a running vLLM worker holds.

Tests name it as ``worker_extension_cls``; vLLM's processes find this package by their ``PYTHONPATH``.
"""

import json
import os
from collections.abc import Iterator, Sequence

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import get_tp_group

from epfsdp2.rollout.layout.layout_check import prefix_of
from epfsdp2.rollout.layout.specs import TargetSlice
from epfsdp2.rollout.vllm.adapters import without_adapters
from epfsdp2.rollout.vllm.compat import get_layer_tensors
from epfsdp2.rollout.vllm.loaded_weights import running_weights
from epfsdp2.rollout.vllm.reload import Reload
from epfsdp2.rollout.vllm.worker import WeightSyncExtension
from tests.support.rollout.loader_trace import LoaderTracer, View
from tests.support.rollout.packed_weights import packed_weights
from tests.support.rollout.verify import digest

__all__ = ["ReadableWorker"]


class ReadableWorker(WeightSyncExtension):
    """``WeightSyncExtension``, and calls that return the weights and the layout of its worker."""

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
        """Return digests of what this worker's layers hold of the one adapter that they compute with."""
        layers = self.model_runner.model.lora_manager.modules
        return {
            f"{name}.{half}.{i}": digest(stack[0])
            for name, layer in layers.items()
            for half in ("lora_a_stacked", "lora_b_stacked")
            for i, stack in enumerate(getattr(layer, half))
        }

    def epfsdp2_read_parameters(self, names: list[str]) -> dict:
        """Return the values of the named parameters of the running model as ``{name: (dtype, shape, bytes)}``.

        Raises:
            KeyError: the model has no such parameter; see ``epfsdp2_digests`` for the names.
        """
        found = {name: tensor for name, tensor in self._running_tensors() if name in set(names)}
        return {
            name: (
                str(found[name].dtype).removeprefix("torch."),
                list(found[name].shape),
                found[name].cpu().reshape(-1).view(torch.uint8).numpy().tobytes(),
            )
            for name in names
        }

    def epfsdp2_layout(self, views: Sequence[View]) -> dict[str, list[TargetSlice]]:
        """Trace where this worker's loaders put each checkpoint tensor (``loader_trace.py``); its weights stay.

        Args:
            views: the checkpoint tensors (``loader_trace.checkpoint_views``).

        Raises:
            ValueError: a loader does more than copy blocks.
        """
        reload = Reload(list(self._iter_all_models_with_config())[:1], self.model_runner.vllm_config.parallel_config)
        with set_current_vllm_config(self.model_runner.vllm_config), torch.no_grad():
            try:
                reload.start()
                return _traced(reload, views)
            finally:
                reload.abandon()

    def _running_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        model = self.model_runner.model
        with set_current_vllm_config(self.model_runner.vllm_config), torch.no_grad(), without_adapters(model):
            yield from running_weights(model)
            yield from packed_weights(model)


def _traced(reload: Reload, views: Sequence[View]) -> dict[str, list[TargetSlice]]:
    """Run the models' loaders on tensors without values and return what they would have copied where."""
    for record in reload._layers:
        record.info.load_numel = -(1 << 62)  # so low that no layer becomes complete and is processed
    parameters = {
        prefix_of(record.name) + own: tensor
        for record in reload._layers
        for own, tensor in get_layer_tensors(record.layer).items()
    }
    with LoaderTracer(views, parameters) as tracer:
        for model, _ in reload._models:
            model.load_weights(tracer.weights())
    return tracer.slices()
