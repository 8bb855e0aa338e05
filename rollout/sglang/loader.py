"""Load weights inside SGLang's workers: SGLang calls ``load``, the update's ``load_format``, for each bucket.

A unit is copied into its rows of a parameter without conversion. After the last bucket, elements are counted and
compared with checksums, as in vLLM's workers, and tensors derived from weights are recomputed.
"""

import traceback
from collections.abc import Iterable
from typing import Any

import torch

from ..layout.layout_check import actual_layout, difference, prefix_of, rank_entry, unpadded_shape
from ..layout.slice_names import parse_slice
from ..layout.specs import Rollout
from ..transport.buckets import tensors_of
from ..transport.checksums import PlacedChecksums, ReceivedChecksums
from ..transport.watched_sockets import WeightSyncError
from .bucket import Header, synchronize, write_answer

__all__ = ["changed_layout", "load"]

_STATE = "_epfsdp2_update"
# Flags of ``UnquantizedFusedMoEMethod``: backends that reorder experts' elements, often without a change of shape.
_BACKENDS = {
    "use_flashinfer_cutlass": "flashinfer_cutlass (up projections come first)",
    "use_flashinfer_trtllm_moe": "flashinfer_trtllm (rows are shuffled)",
    "use_triton_kernels": "triton_kernel (inputs are rows)",
    "_aiter_runner": "aiter (rows are shuffled)",
}
_RUNNER = "actor_rollout_ref.rollout.engine_kwargs.sglang.moe_runner_backend"
_INTERLEAVED = "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"  # an environment variable, from SGLang 0.5.20 on


def load(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Load one bucket, ``[(header, memory)]``, and write an error's text into its memory; called by SGLang."""
    ((text, memory),) = named_tensors
    try:
        _load(model, Header.of(text), memory)
        answer = ""
    except Exception as error:
        traceback.print_exc()
        answer = f"{type(error).__name__}: {error}"
    write_answer(memory, answer)
    synchronize(memory)


@torch.no_grad()
def _load(model: Any, header: Header, memory: torch.Tensor) -> None:
    if header.layouts is not None:
        _compare_layout(model, header.layouts)
    if not header.entries and not header.is_last:
        return  # an idle bucket, because another worker of the replica still receives tensors
    update: _Update | None = vars(model).pop(_STATE, None)
    if header.is_first:
        update = _Update(model, header.verify)
    if update is None:
        raise WeightSyncError("a bucket came before the first one of its sync, or after one that failed")
    update.load(tensors_of(header.entries, memory))
    if header.is_last:
        update.finish()
    else:
        setattr(model, _STATE, update)


def _layers(model: Any) -> list[tuple[str, Any, dict[str, Any]]]:
    return [(name, layer, dict(layer.named_parameters(recurse=False))) for name, layer in model.named_modules()]


def _compare_layout(model: Any, layouts: list[dict[str, str]]) -> None:
    """Raise where the layouts planned for a replica's workers differ from this worker's model."""
    rank, entry = rank_of()
    held = actual_layout(_layers(model), entry, lambda name, own, is_parameter: True)
    if wrong := changed_layout(model) or difference(layouts[rank], held):
        works = "engine.rollout_sync=full works without a plan."
        raise WeightSyncError(f"worker {rank} of a replica: {wrong}. {works}")


class _Update:
    """One update of a worker's model."""

    def __init__(self, model: Any, verify: bool):
        self._model = model
        self._parameters = {
            prefix_of(name) + own: (layer, tensor)
            for name, layer, tensors in _layers(model)
            for own, tensor in tensors.items()
        }
        self._received, self._names = ReceivedChecksums(verify), set[str]()
        self._verify, self._placed = verify, PlacedChecksums()
        self._counts = dict.fromkeys(self._parameters, 0)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load a bucket's tensors; raise if a name is unknown or repeated, or a shape does not fit."""
        for name, values in self._received.record(tensors):
            if name in self._names:
                raise WeightSyncError(f"the tensor {name} was sent twice in one weight sync")
            self._names.add(name)
            parameter, part = parse_slice(name, values)
            if parameter not in self._parameters:
                raise WeightSyncError(f"{name} was sent, for which SGLang's model has no place on this worker")
            target = self._parameters[parameter][1].data
            if values.dim() != target.dim() or target[part].shape != values.shape:
                raise WeightSyncError(
                    f"{name} {list(values.shape)} was sent, which does not fit into {list(target.shape)} on this worker"
                )
            target[part].copy_(values)
            self._counts[parameter] += values.numel()
            if self._verify:
                self._placed.add(parameter, part, values.to(target.dtype))

    def finish(self) -> None:
        """Recompute derived tensors; raise if elements are missing or differ from their checksums."""
        missing = []
        for parameter, (layer, tensor) in self._parameters.items():
            shape = torch.Size(unpadded_shape(layer, parameter.rpartition(".")[2], tensor))
            received = self._counts[parameter]
            if received != shape.numel():
                missing.append(f"{parameter} ({received} of {shape.numel()})")
            elif list(shape) != list(tensor.shape):
                tensor.data[shape[0] :].zero_()  # a vocabulary's padding
        if missing:
            raise WeightSyncError(
                f"{len(missing)} parameters of SGLang's model did not receive every element, first {missing[0]}"
            )
        if hasattr(self._model, "post_load_weights"):  # latent attention's w_kc and w_vc
            self._model.post_load_weights()
        held = ((name, tensor.detach()) for name, (_, tensor) in self._parameters.items())
        if wrong := self._received.difference() or self._placed.difference(held):
            raise WeightSyncError(wrong)


def changed_layout(model: Any) -> str:
    """Describe the first layer with another layout than slices assume, and a setting to change; empty if none."""
    from sglang.srt.layers.quantization import unquant

    plain = (unquant.UnquantizedEmbeddingMethod, unquant.UnquantizedFusedMoEMethod, unquant.UnquantizedLinearMethod)
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if method is None:
            continue
        if not isinstance(method, plain):
            return f"{name} is quantised by {type(method).__name__}"
        if getattr(layer, "use_intel_amx_backend", False):
            return f"{name} is packed for AMX"
        if getattr(method, "w13_swiglu_interleaved", False):
            return f"{name} has the rows of gates and up projections in turn; set {_INTERLEAVED}=0"
        for flag, backend in _BACKENDS.items():
            if getattr(method, flag, None):
                return f"{name} runs on {backend}; set {_RUNNER}=triton"
    return ""


def rank_of() -> tuple[int, str]:
    """Return this worker's tensor-parallel rank and its ``rank_entry``."""
    from sglang.srt import distributed

    rank, size = distributed.get_tensor_model_parallel_rank(), distributed.get_tensor_model_parallel_world_size()
    experts_are_whole = distributed.get_moe_expert_parallel_world_size() > 1
    return rank, rank_entry(rank, Rollout(size, expert_parallel=experts_are_whole))
