"""Describes the tensors of a trainer model for the transfer plan (``specs.TensorSpec``)."""

from collections.abc import Iterator, Mapping

from torch import nn

from ...engine.lora.merge import weights
from ...engine.topology.dtensor import persistent_buffers, shard_steps
from ...engine.topology.index_ranges import ShardStep
from .specs import TensorSpec

__all__ = ["sharded_tensor_specs", "tensor_specs_of"]


def sharded_tensor_specs(model: nn.Module, itemsize: Mapping[str, int] | int | None = None) -> list[TensorSpec]:
    """Describe the weights and persistent buffers of a sharded model; arguments as in ``tensor_specs_of``."""
    return list(tensor_specs_of(model, {name: shard_steps(p) for name, p in model.named_parameters()}, itemsize))


def tensor_specs_of(
    model: nn.Module, cuts: Mapping[str, tuple[ShardStep, ...]], itemsize: Mapping[str, int] | int | None
) -> Iterator[TensorSpec]:
    """Describe weights and persistent buffers, in the model's order, given the sharding ``cuts`` of each parameter.

    Args:
        itemsize: bytes per element as sent, for all parameters or by name; defaults to the parameter's own.
    """
    for name, param in weights(model):
        size = itemsize.get(name) if isinstance(itemsize, Mapping) else itemsize
        yield TensorSpec(name, tuple(param.shape), size or param.element_size(), cuts[name])
    for name, buffer in persistent_buffers(model).items():
        yield TensorSpec(name, tuple(buffer.shape), buffer.element_size())
