"""A layer-wise reload of the models in a vLLM worker that checks that every element is received.

vLLM's reload (``vllm/model_executor/model_loader/reload``) collects a layer's tensors and processes the complete layer
as at start-up. It then copies the result into the memory that kernels and CUDA graphs use. It only warns of missing
elements, and loaders silently skip unknown names. This reload counts the elements of each loader call, and also loads
units of a worker's parameters (``layout/slice_names.py``).
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.weight_update_utils import apply_buffer_updates

from ...engine.errors import listed
from ..layout.layout_check import named_layers, prefix_of, unpadded_shape
from ..layout.slice_names import is_slice, parse_slice
from ..transport.checksums import PlacedChecksums
from ..transport.watched_sockets import WeightSyncError
from . import compat, reload_shims
from .compat import ATTENTION, SKIP_LOAD_TENSORS, get_layerwise_info
from .loaded_weights import running_weights

__all__ = ["Reload"]


class LayerRecord:
    """Counts of elements that one layer, on meta in the checkpoint's layout, expects and has received."""

    def __init__(self, name: str, layer: Any):
        self.name, self.layer, self.info = name, layer, get_layerwise_info(layer)
        self.kernel_parameters = {id(parameter) for parameter in self.info.kernel_tensors[0].values()}
        parameters = {own: parameter for own, parameter in layer._parameters.items() if parameter is not None}
        # By a tensor's name: shape without padding, elements expected, elements received, memory of its units.
        self.shapes = {own: unpadded_shape(layer, own, parameter) for own, parameter in parameters.items()}
        self.expected = {own: math.prod(shape) for own, shape in self.shapes.items() if own not in SKIP_LOAD_TENSORS}
        self.received = Counter[str]()
        self.units: dict[str, torch.Tensor] = {}
        self._last, self._counted = "", 0

    def count_call(self, own: str) -> None:
        """Add the elements of the previous call, and start this one: vLLM counts a call's elements after listing it."""
        if self._last:
            self.received[self._last] += self.info.load_numel - self._counted
        self._last, self._counted = own, self.info.load_numel

    def counts(self) -> tuple[int, int]:
        """Return the elements of parameters received and expected; equal once vLLM has loaded the layer."""
        expected = sum(self.expected.values())
        if not self.info.can_load():
            return expected, expected
        self.count_call("")
        return sum(min(self.received[own], most) for own, most in self.expected.items()), expected

    @property
    def is_complete(self) -> bool:
        received, expected = self.counts()
        return received == expected


class _Calls(list):
    """Replaces vLLM's list of a layer's deferred loader calls, and counts each call that is appended."""

    record: LayerRecord
    reload: "Reload"

    def append(self, call) -> None:
        own, arguments = call
        self.record.count_call(own)
        self.record.received[own] += 0
        given = [value for value in arguments.arguments.values() if isinstance(value, torch.Tensor)]
        storages = [tensor.untyped_storage().data_ptr() for tensor in given if not tensor.is_meta]
        self.reload.used.update([self.reload.offered, *storages])
        super().append(call)


class Reload:
    """One layer-wise reload of every model of a worker: the actor and, if there is one, its draft model.

    Args:
        models: pairs of a model and its vLLM model config.
        verify: whether to compare loaded slices with the weights that the model computes with afterwards.
    """

    def __init__(self, models: list[tuple[Any, Any]], parallel_config: Any, verify: bool = False):
        self._models, self._parallel, self._verify = models, parallel_config, verify
        self._checksums = PlacedChecksums()
        self._layers: list[LayerRecord] = []
        self._owners: dict[str, tuple[LayerRecord, str]] = {}
        self._excluded_modules: set[str] = set()
        self._kernels: list[tuple[Any, Any]] = []
        # Per layer: its buffers, names of the non-persistent ones, and copies of the buffers to restore.
        self._buffers: list[tuple[torch.nn.Module, dict[str, Any], set[str], dict[str, torch.Tensor]]] = []
        self._buffer_shapes: dict[str, torch.Size] = {}
        self._received_buffers: dict[str, torch.Tensor] = {}
        self._names: set[str] = set()
        self._unused: list[str] = []
        # Name of the tensor that a model's loader read last; names and storages with which loaders were called.
        self.offered, self.used = "", set[str | int]()

    def start(self) -> None:
        """Put every layer's tensors on meta and start to collect new ones."""
        for model, _ in self._models:
            self._buffer_shapes |= {name: buffer.shape for name, buffer in model.named_buffers()}
            reload_shims.prepare_model(model)
        # A model and its draft model share layers: embeddings, head, rotary embeddings.
        for layer in dict.fromkeys(layer for model, _ in self._models for layer in model.modules()):
            if (kernel := reload_shims.prepare_layer(layer)) is not None:
                self._kernels.append((layer.quant_method, kernel))
            self._save_buffers(layer)
        for model, _ in self._models:
            compat.initialize_layerwise_reload(model)
            known = {id(record.layer) for record in self._layers}
            for name, layer in named_layers(model):
                if type(layer).__name__ == "StageMissingLayer":  # an encoder of inputs that the user has disabled
                    self._excluded_modules.add(name)
                # vLLM starts a shared layer only once.
                if id(layer) not in known and not isinstance(layer, ATTENTION):
                    record = LayerRecord(name, layer)
                    record.info.loaded_weights = calls = _Calls()
                    calls.record, calls.reload = record, self
                    self._layers.append(record)
                    self._owners |= {prefix_of(name) + own: (record, own) for own in record.shapes}

    def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Load one bucket; its memory may be reused once this returns. Raises if a name was sent twice."""
        kept: list[tuple[str, torch.Tensor]] = []
        for name, tensor in weights:
            if name in self._names:  # vLLM counts elements, so a repeated tensor would hide a missing one
                raise WeightSyncError(f"the tensor {name} was sent twice in one weight sync")
            self._names.add(name)
            if is_slice(name):
                self._load_unit(name, tensor)
            elif name in self._buffer_shapes:
                self._received_buffers[name] = tensor.clone()
            else:  # vLLM keeps tensors until their layer is complete, and the bucket is reused before that
                kept.append((name, tensor.clone()))
        if not kept:  # models list all their parameters in each call
            return
        self.used.clear()
        for model, _ in self._models:
            model.load_weights(self._offer(kept))
        self._unused += [name for name, values in kept if not self.used & {name, values.untyped_storage().data_ptr()}]

    def _offer(self, weights: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self.offered = name
            yield name, tensor
        self.offered = ""

    def _load_unit(self, name: str, values: torch.Tensor) -> None:
        """Load some rows of one of this worker's parameters, and process its layer once that is complete."""
        parameter, part = parse_slice(name, values)
        if parameter in self._buffer_shapes:
            if parameter not in self._received_buffers:
                self._received_buffers[parameter] = values.new_empty(self._buffer_shapes[parameter])
            self._received_buffers[parameter][part].copy_(values)
            return
        if parameter not in self._owners:
            raise WeightSyncError(f"a slice of {parameter} was sent, which vLLM's model does not have on this worker")
        record, own = self._owners[parameter]
        shape, received = record.shapes[own], record.received[own] + values.numel()
        if values.shape != torch.empty(shape, device="meta")[part].shape:
            raise WeightSyncError(f"{name} {list(values.shape)} was sent, and has shape {shape} on this worker")
        if received > record.expected.get(own, received):
            raise WeightSyncError(f"elements of {parameter} were sent twice in one weight sync")
        if own not in record.units:
            record.units[own] = _memory_for_units(record, own)
        memory = record.units[own]
        memory[part].copy_(values)
        record.received[own] = received
        if self._verify:
            self._checksums.add(parameter, part, values.to(memory.dtype))
        if own in record.expected and record.is_complete:
            # By vLLM's function, because its loaders would count all layers in each call.
            compat.materialize_layer(record.layer, record.info)
            for name, memory in record.units.items():
                getattr(record.layer, name).data = memory
            record.units.clear()
            compat.process_layer(record.layer, record.info)

    def finish(self) -> None:
        """Process the remaining layers and end the reload.

        Raises ``WeightSyncError`` if a layer lacks elements, no parameter took a tensor, or a loaded slice is wrong.
        """
        tied = self._check()
        self._finalize()
        for record in tied:
            # A tied layer shares the parameter but may hold a packed copy of it, which only this refreshes.
            record.layer.quant_method.process_weights_after_loading(record.layer)
        loaded = {(id(record.layer), own) for record in self._layers for own in record.received}
        for layer, buffers, _, saved in self._buffers:
            for name, before in saved.items():
                if (id(layer), name) not in loaded:
                    buffers[name].copy_(before)
        for model, _ in self._models:
            reload_shims.finish_model(model)
            apply_buffer_updates(model, list(self._received_buffers.items()))
        running = (named for model, _ in self._models for named in running_weights(model))
        if wrong := self._checksums.difference(running):
            raise WeightSyncError(wrong)

    def abandon(self) -> None:
        """End a failed reload so that nothing stays on meta; loaded values stay, even those of an incomplete layer."""
        for record in self._layers:
            if record.info.can_load():
                record.info.load_numel = 0
                record.info.loaded_weights.clear()
        self._finalize()

    def _finalize(self) -> None:
        for model, config in self._models:
            compat.finalize_layerwise_reload(model, config)
            reload_shims.end_loading(model)
        for method, kernel in self._kernels:
            if method.moe_kernel is None:
                method.moe_kernel = kernel
        for layer, buffers, non_persistent, _ in self._buffers:
            for name, buffer in buffers.items():
                if layer._buffers.get(name) is not buffer:
                    layer.register_buffer(name, buffer)
            layer._non_persistent_buffers_set = non_persistent

    def _save_buffers(self, layer: torch.nn.Module) -> None:
        # vLLM overwrites a buffer that no loader filled with uninitialized memory. Versions before 0.27 also lose
        # non-persistent buffers and views of parameters (which are not in `renewed`).
        buffers = {name: buffer for name, buffer in layer._buffers.items() if buffer is not None}
        has_parameters = any(parameter is not None for parameter in layer._parameters.values())
        renewed = get_layerwise_info(layer).restore_metadata[1] if has_parameters else {}
        saved = {name: buffer.clone() for name, buffer in buffers.items() if name in renewed}
        self._buffers.append((layer, buffers, set(layer._non_persistent_buffers_set), saved))

    def _check(self) -> list[LayerRecord]:
        """Raise unless layers are complete and tensors used; return layers tied to complete ones in all parameters."""
        complete = {p for record in self._layers if record.is_complete for p in record.kernel_parameters}
        tied, missing, said = [], [], ""
        for record in self._layers:
            received, expected = record.counts()
            if received == expected:
                continue
            if not received and record.kernel_parameters <= complete:
                tied.append(record)
            else:
                missing.append(f"{record.name or type(record.layer).__name__} ({received} of {expected})")
        if ignored := [name for name in self._unused if not self._may_be_unused(name)]:
            said = f"{len(ignored)} tensors were sent that vLLM's model silently ignored, because it does not know "
            said += f"their names: {listed(ignored)}."
        if missing:
            raise WeightSyncError(
                f"{len(missing)} layers of vLLM's model did not receive every element in this weight sync of "
                f"{len(self._names)} tensors; elements received of expected: {listed(missing)}. "
                + (said or "Every tensor that was sent was loaded into a parameter.")
            )
        if said and self._parallel.pipeline_parallel_size == 1:  # a pipeline stage drops the other stages' tensors
            raise WeightSyncError(said)
        return tied

    def _may_be_unused(self, name: str) -> bool:
        config, own = self._models[0][1].hf_text_config, name.rpartition(".")[2]
        return (
            # Loaded without the counting wrappers (as LFM2's correction bias, by its checkpoints' name), or computed.
            own in {*SKIP_LOAD_TENSORS, "expert_bias", "inv_freq"}
            or name.endswith(".ffn.gate.bias")  # DeepSeek-V4's correction bias
            or ".vision_tower.post_layernorm." in f".{name}"  # Aria's, which has no effect
            or (name.endswith("lm_head.weight") and getattr(config, "tie_word_embeddings", False))
            # Other ranks' experts are ignored once this rank's are complete.
            or (self._parallel.enable_expert_parallel and ".experts." in name)
            or any(f".{module}." in f".{name}" for module in self._excluded_modules)
            # Multi-token-prediction layers follow the model's own; without a draft model no parameter has their names.
            or name.startswith("mtp.")
            or any(int(n) >= config.num_hidden_layers for n in re.findall(r"(?:^|\.)layers\.(\d+)\.", name))
        )


def _memory_for_units(record: LayerRecord, own: str) -> torch.Tensor:
    """Return memory that collects the units of a parameter until its layer is complete, with zeros for padding rows.

    Return the running parameter's own memory if it has the same layout and dtype and shares no storage. This is safe,
    because vLLM copies a layer into running parameters only after it has processed it, in place or into new memory.
    """
    target, info = getattr(record.layer, own), record.info
    memory = target.data
    if target.is_meta:  # else a bias, which vLLM leaves where it is; a router's may come when its layer is processed
        running = info.kernel_tensors[0].get(own)
        storages = [t.untyped_storage().data_ptr() for kept in info.kernel_tensors for t in kept.values()]
        if (
            running is not None
            and storages.count(running.untyped_storage().data_ptr()) == 1
            and (running.shape, running.stride(), running.dtype) == (target.shape, target.stride(), target.dtype)
        ):
            memory = running.data
        else:
            memory = torch.empty_like(target, device=info.restore_device, requires_grad=False)
    if hasattr(record.layer, "shard_indices"):
        memory[record.shapes[own][0] :].zero_()
    return memory
