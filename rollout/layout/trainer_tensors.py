"""The trainer's tensors as the planner takes them (``vllm_layout.Tensor``)."""

from collections.abc import Iterator, Mapping

from torch import nn

from ...engine.lora.merge import weights
from ...engine.topology.dtensor import persistent_buffers, shard_steps
from ...engine.topology.index_ranges import ShardStep
from .vllm_layout import Tensor

__all__ = ["sharded_tensors", "tensors_of"]


def sharded_tensors(model: nn.Module, itemsize: Mapping[str, int] | int | None = None) -> list[Tensor]:
    """Weights and persistent buffers of a model that ``parallelize`` has sharded, in the model's order.

    Args:
        itemsize: bytes of an element of a parameter when it is sent, of all or by name; by default those it has.
    """
    return list(tensors_of(model, {name: shard_steps(p) for name, p in model.named_parameters()}, itemsize))


def tensors_of(
    model: nn.Module, cuts: Mapping[str, tuple[ShardStep, ...]], itemsize: Mapping[str, int] | int | None
) -> Iterator[Tensor]:
    """Weights and persistent buffers of a model whose parameters are cut so; ``itemsize`` as ``sharded_tensors``'s."""
    for name, param in weights(model):
        size = itemsize.get(name) if isinstance(itemsize, Mapping) else itemsize
        yield Tensor(name, tuple(param.shape), size or param.element_size(), cuts[name])
    for name, buffer in persistent_buffers(model).items():
        yield Tensor(name, tuple(buffer.shape), buffer.element_size())
