"""Describes the tensors of a trainer model for the transfer plan (``specs.TensorSpec``)."""

from collections.abc import Mapping

from torch import nn

from ...engine.lora.merge import weights
from ...engine.topology.dtensor import persistent_buffers, shard_steps
from ...engine.topology.index_ranges import ShardStep
from .specs import TensorSpec

__all__ = ["tensor_specs"]


def tensor_specs(
    model: nn.Module,
    itemsize: Mapping[str, int] | int | None = None,
    cuts: Mapping[str, tuple[ShardStep, ...]] | None = None,
) -> list[TensorSpec]:
    """Describe weights and persistent buffers, in the model's order.

    Args:
        itemsize: bytes per element as sent, for all parameters or by name; defaults to the parameter's own.
        cuts: by name, for a model that is not sharded yet.
    """
    found = []
    for name, param in weights(model):
        size = itemsize.get(name) if isinstance(itemsize, Mapping) else itemsize
        steps = shard_steps(param) if cuts is None else cuts[name]
        found.append(TensorSpec(name, tuple(param.shape), size or param.element_size(), steps))
    buffers = persistent_buffers(model).items()
    return [*found, *(TensorSpec(name, tuple(buffer.shape), buffer.element_size()) for name, buffer in buffers)]
