"""The trainer's tensors as the planner takes them (``vllm_layout.Tensor``)."""

from collections.abc import Iterator, Mapping

from torch import nn

from ...engine.fsdp.fp32_modules import correction_biases
from ...engine.lora.merge import weights
from ...engine.moe.find import find_experts
from ...engine.topology.dtensor import cuts_of, persistent_buffers
from ...engine.topology.expert_placement import ep_fsdp_dim
from ...engine.topology.index_ranges import Cut
from ...engine.topology.mesh import Topology
from .vllm_layout import Tensor

__all__ = ["sharded_tensors", "tensors_before_sharding"]


def sharded_tensors(model: nn.Module, itemsize: Mapping[str, int] | int | None = None) -> list[Tensor]:
    """Weights and persistent buffers of a model that ``parallelize`` has sharded, in the model's order.

    Args:
        itemsize: bytes of an element of a parameter when it is sent, of all or by name; by default those it has.
    """
    return list(_tensors(model, {name: cuts_of(p) for name, p in model.named_parameters()}, itemsize))


def tensors_before_sharding(
    model: nn.Module,
    topology: Topology,
    expert_shard_dim: int | str = "auto",
    expert_plan: Mapping[str, int] | None = None,
    itemsize: Mapping[str, int] | int | None = None,
) -> list[Tensor]:
    """What ``sharded_tensors`` would say, of a model that is not sharded, on the meta device or elsewhere.

    Raises:
        UnsupportedModelError, SettingError: as ``parallelize``.
    """
    experts = find_experts(model, expert_plan)
    whole = correction_biases(model, {e.num_experts for e in experts})
    cuts: dict[str, tuple[Cut, ...]] = {
        name: () if param in whole else (Cut(0, "fsdp", topology.fsdp),) for name, param in model.named_parameters()
    }
    for info in experts:
        for name, param in info.module.named_parameters(recurse=False):
            ep_dim = info.ep_dims.get(name, 0)
            over_ep = (Cut(ep_dim, "ep", topology.ep),) if name in info.ep_dims else ()
            dim = ep_fsdp_dim(param.shape, topology, expert_shard_dim, ep_dim)
            cuts[f"{info.fqn}.{name}"] = (*over_ep, Cut(dim, "ep_fsdp", topology.ep_fsdp))
    return list(_tensors(model, cuts, itemsize))


def _tensors(
    model: nn.Module, cuts: Mapping[str, tuple[Cut, ...]], itemsize: Mapping[str, int] | int | None
) -> Iterator[Tensor]:
    for name, param in weights(model):
        size = itemsize.get(name) if isinstance(itemsize, Mapping) else itemsize
        yield Tensor(name, tuple(param.shape), size or param.element_size(), cuts[name])
    for name, buffer in persistent_buffers(model).items():
        yield Tensor(name, tuple(buffer.shape), buffer.element_size())
