"""Automatic overlap of all-to-alls: decided once, by the sizes of model, mesh and batch."""

from dataclasses import dataclass, replace
from typing import Any

from ..fsdp.options import ShardingOptions
from ..fsdp.wrap_plan import wrap_plan
from ..moe.chunks import DispatchSizes
from ..moe.find import find_experts
from ..moe.shared_experts import shared_experts_of
from ..topology.mesh import Topology

__all__ = ["AutomaticOverlap"]


@dataclass(frozen=True)
class AutomaticOverlap:
    """Sizes of a model's experts, and whether ``engine.dispatch_chunks`` and ``overlap_shared_experts`` follow them.

    Without sizes, only what is set overlaps.
    """

    sizes: DispatchSizes | None = None
    chunks: bool = False
    shared: bool = False

    @classmethod
    def of(cls, config: Any, model: Any, options: ShardingOptions) -> "AutomaticOverlap":
        """Read the engine's settings and a model that is not sharded yet; it may be on the meta device."""
        chunks, shared = config.dispatch_chunks < 0, config.overlap_shared_experts is None
        if options.dispatcher != "all_to_all" or not (chunks or shared):
            return cls()
        experts = find_experts(model, options.expert_plan)
        if shared:
            blocks = [(model.get_submodule(info.block), info.module) for info in experts]
            found = {module for block, experts in blocks for module in shared_experts_of(block, experts)}
            units = {model.get_submodule(fqn) for unit in wrap_plan(model, options) for fqn in unit.modules}
            shared = not found & units  # which are gathered when they are called
        return cls(DispatchSizes.of(model, experts, options.param_dtype), chunks, shared)

    def on(self, options: ShardingOptions, topology: Topology, tokens: int | None) -> ShardingOptions:
        """Return the options of a run on GPUs; elsewhere nothing overlaps that is not set.

        Args:
            tokens: the most of a micro-batch of a rank; None if that is not limited, which leaves one chunk.
        """
        sizes, ep, etp = self.sizes, topology.ep, topology.etp
        if sizes is None or ep == 1:
            return options
        chunks, shared = options.dispatch_chunks, options.overlap_shared_experts
        if self.chunks and tokens:
            chunks = sizes.chunks(tokens, ep, etp, options.checkpointing == "full")
        return replace(options, dispatch_chunks=chunks, overlap_shared_experts=shared or (self.shared and sizes.shared))
