"""A layer-wise reload of the models in a vLLM worker that checks that every element is received.

vLLM's reload (``vllm/model_executor/model_loader/reload``) collects the tensors of a layer until they are complete,
then loads and processes the layer as at start-up and copies the result into the memory that kernels and CUDA graphs
use. This one also tracks every call of a weight loader, so that an error can name the tensor that is missing, unknown
or lost, and it accepts the units of a worker's parameters (``layout/slice_names.py``) besides full tensors.
"""

import re
from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.weight_update_utils import apply_buffer_updates

from ...engine.errors import listed
from ..layout.layout_check import prefix_of
from ..layout.slice_names import is_slice, parse_slice
from ..transport.checksums import PlacedChecksums
from ..transport.watched_sockets import WeightSyncError
from .accounting import CountingCallList, LayerRecord
from .compat import (
    ATTENTION,
    LEAVES_NON_PERSISTENT_BUFFERS,
    SKIP_LOAD_TENSORS,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
    materialize_layer,
    process_layer,
)
from .loaded_weights import running_weights
from .shims import reload_shims

__all__ = ["Reload"]


class Reload:
    """One layer-wise reload of every model of a worker: the actor and, if there is one, its draft model.

    Args:
        models: pairs of a model and its vLLM model config.
        verify: whether to compare loaded slices with the weights that the model computes with afterwards.
    """

    def __init__(self, models: list[tuple[Any, Any]], parallel_config: Any, verify: bool = False):
        self._models = models
        self._verify = verify
        self._checksums = PlacedChecksums()
        self._parallel = parallel_config
        self._layers: list[LayerRecord] = []
        self._buffer_shapes: dict[str, torch.Size] = {}
        self._excluded_modules: set[str] = set()
        self._buffer_updates: list[tuple[str, torch.Tensor]] = []
        self._buffer_units: dict[str, torch.Tensor] = {}
        self._buffers: list[tuple[torch.nn.Module, dict[str, torch.Tensor], set[str]]] = []
        self._kernels: list[tuple[Any, Any]] = []
        self._saved_buffers: list[tuple[str, torch.nn.Module, torch.Tensor, torch.Tensor]] = []
        self.names: set[str] = set()
        self.unused: list[str] = []
        self.loader_calls = 0
        self.touched_storages: set[int] = set()
        self._owners: dict[str, tuple[LayerRecord, str]] = {}

    def start(self) -> None:
        """Put every layer's tensors on meta and start to collect new ones."""
        for model, _ in self._models:
            self._buffer_shapes |= {name: buffer.shape for name, buffer in model.named_buffers()}
            reload_shims.prepare_model(model)
            for layer in model.modules():
                if (kernel := reload_shims.prepare_layer(layer)) is not None:
                    self._kernels.append((layer.quant_method, kernel))
                self._save_buffers(layer)
            initialize_layerwise_reload(model)
            known = {id(record.layer) for record in self._layers}
            for name, layer in model.named_modules():
                if type(layer).__name__ == "StageMissingLayer":  # an encoder of inputs that the user has disabled
                    self._excluded_modules.add(name)
                # vLLM starts a layer that two models share (a draft model's embedding) only once.
                if id(layer) not in known and not isinstance(layer, ATTENTION):
                    record = LayerRecord(name, layer, get_layerwise_info(layer), SKIP_LOAD_TENSORS)
                    record.info.loaded_weights = CountingCallList(record, self)
                    self._layers.append(record)

    def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Load one bucket; its memory may be reused once this returns.

        Raises:
            WeightSyncError: a name was sent twice. vLLM counts elements, so a repeated tensor would hide a missing one.
        """
        kept: list[tuple[str, torch.Tensor]] = []
        for name, tensor in weights:
            if name in self.names:
                raise WeightSyncError(f"the tensor {name} was sent twice in one weight sync")
            self.names.add(name)
            if is_slice(name):
                self._load_unit(name, tensor)
                continue
            # vLLM keeps tensors until their layer is complete, and the bucket is reused before that: copy them.
            (self._buffer_updates if name in self._buffer_shapes else kept).append((name, tensor.clone()))
        if not kept:  # models list all their parameters in each call
            return
        self.touched_storages.clear()
        used: set[str] = set()
        for model, _ in self._models:
            model.load_weights(self._tracked(kept, used))
        for name, tensor in kept:
            if name not in used and tensor.untyped_storage().data_ptr() not in self.touched_storages:
                self.unused.append(name)

    def _load_unit(self, name: str, values: torch.Tensor) -> None:
        """Load some rows of one of this worker's parameters, and process its layer once that is complete.

        Raises:
            WeightSyncError: there is no such parameter, or the rows do not fit.
        """
        parameter, part = parse_slice(name, values)
        if parameter in self._buffer_shapes:
            if parameter not in self._buffer_units:
                self._buffer_units[parameter] = values.new_empty(self._buffer_shapes[parameter])
            self._buffer_units[parameter][part].copy_(values)
            return
        if not self._owners:
            self._owners = {
                prefix_of(record.name) + own: (record, own) for record in self._layers for own in record.shapes
            }
        if parameter not in self._owners:
            raise WeightSyncError(f"a slice of {parameter} was sent, which vLLM's model does not have on this worker")
        record, own = self._owners[parameter]
        shape, received = record.shapes[own], record.received[own] + values.numel()
        if values.shape != torch.empty(shape, device="meta")[part].shape:
            raise WeightSyncError(f"{name} {list(values.shape)} was sent for what is {shape} on this worker")
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
            _process(record)

    def _tracked(self, weights, used: set[str]):
        """Yield the tensors and add to ``used`` the names of those for which a weight loader was called."""
        for name, tensor in weights:
            before = self.loader_calls
            yield name, tensor
            if self.loader_calls > before:
                used.add(name)

    def finish(self) -> None:
        """Process the remaining layers and end the reload.

        Raises:
            WeightSyncError: a layer did not receive every element, no parameter took a tensor, or a slice was lost.
        """
        tied = self._check_complete()
        self._check_unused()
        self._finalize()
        for record in tied:
            # A tied layer shares the parameter but may hold a packed copy of it, which only this refreshes.
            record.layer.quant_method.process_weights_after_loading(record.layer)
        loaded = {(id(record.layer), name) for record in self._layers for name in record.called}
        for name, layer, buffer, before in self._saved_buffers:
            if (id(layer), name) not in loaded:
                buffer.copy_(before)
        for model, _ in self._models:
            reload_shims.finish_model(model)
            apply_buffer_updates(model, [*self._buffer_updates, *self._buffer_units.items()])
        # Without packed linear layers: reading them back takes a matrix product each.
        if wrong := self._checksums.difference(running_weights(self._models[0][0], packed_linears=False)):
            raise WeightSyncError(wrong)

    def abandon(self) -> None:
        """End a failed reload so that nothing stays on meta; loaded values stay, even those of an incomplete layer."""
        for record in self._layers:
            if not record.is_loaded:
                record.info.load_numel = 0
                record.info.loaded_weights.clear()
        self._finalize()

    def _finalize(self) -> None:
        for model, config in self._models:
            finalize_layerwise_reload(model, config)
        for method, kernel in self._kernels:
            if method.moe_kernel is None:
                method.moe_kernel = kernel
        for layer, buffers, non_persistent in self._buffers:
            for name, buffer in buffers.items():
                if layer._buffers.get(name) is not buffer:
                    layer.register_buffer(name, buffer)
            layer._non_persistent_buffers_set = non_persistent

    def _save_buffers(self, layer: torch.nn.Module) -> None:
        # vLLM overwrites a buffer that no loader filled with uninitialized memory, and versions before 0.27 lose track
        # of non-persistent buffers and of those that are views of parameters (which are not in `renewed`).
        buffers = {name: buffer for name, buffer in layer._buffers.items() if buffer is not None}
        self._buffers.append((layer, buffers, set(layer._non_persistent_buffers_set)))
        if not any(parameter is not None for parameter in layer._parameters.values()):
            return
        renewed = get_layerwise_info(layer).restore_metadata[1]
        for name, buffer in buffers.items():
            is_left = LEAVES_NON_PERSISTENT_BUFFERS and name in layer._non_persistent_buffers_set
            if name in renewed and not is_left:
                self._saved_buffers.append((name, layer, buffer, buffer.clone()))

    def _check_complete(self) -> list[LayerRecord]:
        """Raise unless all layers are complete; return those that share all parameters with complete layers."""
        owners: dict[int, list[LayerRecord]] = {}
        for record in self._layers:
            for parameter in record.kernel_parameters:
                owners.setdefault(id(parameter), []).append(record)
        tied, missing = [], []
        for record in self._layers:
            if record.is_loaded:
                continue
            received, expected = record.counts()
            if received >= expected:
                continue
            others = [[o for o in owners[id(p)] if o is not record] for p in record.kernel_parameters]
            if received == 0 and all(any(o.is_complete for o in found) for found in others):
                tied.append(record)
            else:
                missing.append(f"{record.name or type(record.layer).__name__} ({received} of {expected})")
        if missing:
            raise WeightSyncError(
                f"{len(missing)} layers of vLLM's model did not receive every element in this weight sync of "
                f"{len(self.names)} tensors; elements received of expected: {listed(missing)}. "
                f"{self._unused_text()}"
            )
        return tied

    def _check_unused(self) -> None:
        if self._parallel.pipeline_parallel_size > 1:
            return  # a pipeline stage drops the other stages' tensors
        if any(not self._may_be_unused(name) for name in self.unused):
            raise WeightSyncError(self._unused_text())

    def _unused_text(self) -> str:
        names = [name for name in self.unused if not self._may_be_unused(name)]
        if not names:
            return "Every tensor that was sent was loaded into a parameter."
        return (
            f"{len(names)} tensors were sent that vLLM's model silently ignored, because it does not know their names: "
            f"{listed(names)}."
        )

    def _may_be_unused(self, name: str) -> bool:
        config = self._models[0][1].hf_text_config
        last = name.rpartition(".")[2]
        # Loaded without the counting wrappers (as is a correction bias that LFM2's checkpoints name so), or computed.
        if last in SKIP_LOAD_TENSORS or last in ("expert_bias", "inv_freq"):
            return True
        if name.endswith("lm_head.weight") and getattr(config, "tie_word_embeddings", False):
            return True
        if self._parallel.enable_expert_parallel and ".experts." in name:
            return True  # other ranks' experts are ignored once this rank's are complete
        if any(f".{module}." in f".{name}" for module in self._excluded_modules):
            return True
        # Multi-token-prediction layers follow the model's own; without a draft model no parameter takes them.
        numbers = re.findall(r"(?:^|\.)layers\.(\d+)\.", name)
        return name.startswith("mtp.") or any(int(n) >= config.num_hidden_layers for n in numbers)


def _memory_for_units(record: LayerRecord, own: str) -> torch.Tensor:
    """Return memory that collects the units of a parameter until its layer is complete, with zeros for padding rows.

    It is the running parameter's memory if that has the same shape, strides and dtype and is not shared with other
    tensors of the layer: vLLM processes the complete layer into new memory, or in place (FlashInfer's blocks in 0.32),
    and only then copies it into the running parameters. Otherwise it is newly allocated.
    """
    target, memory = getattr(record.layer, own), None
    if not target.is_meta:  # a bias: vLLM waits for it, but leaves it where it is
        memory = target.data
    else:
        running = record.info.kernel_tensors[0].get(own)
        storages = [t.untyped_storage().data_ptr() for kept in record.info.kernel_tensors for t in kept.values()]
        if running is not None and storages.count(running.untyped_storage().data_ptr()) == 1:
            own_layout, target_layout = ((t.shape, t.stride(), t.dtype) for t in (running, target))
            if own_layout == target_layout:
                memory = running.data
    if memory is None:
        memory = torch.empty_like(target, device=record.info.restore_device, requires_grad=False)
    if hasattr(record.layer, "shard_indices"):
        memory[record.shapes[own][0] :].zero_()
    return memory


def _process(record: LayerRecord) -> None:
    """Have vLLM process a layer whose units are complete, and copy the result into the running parameters.

    Its deferred loaders do the same, but sum up what all layers wait for in each call.
    """
    materialize_layer(record.layer, record.info)
    for own, memory in record.units.items():
        getattr(record.layer, own).data = memory
    record.units.clear()
    process_layer(record.layer, record.info)
