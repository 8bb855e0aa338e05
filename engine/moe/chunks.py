"""Choose the number of chunks in which a layer's tokens are dispatched: the number that takes the least time.

With ``n`` chunks an ``n``-th of the first dispatch and of the last combine is exposed. The experts' products hide the
rest as far as they take as long. More chunks cost time: experts with fewer rows per product, more collectives, and sums
of the weights' gradients over the chunks. One chunk lets a recomputation end before the down projection and combine
(``fused.py``); several do not.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import SettingError
from ..topology.dtensor import is_adapter
from ..wrap_forward import wrap_forward
from .find import CustomExperts, ExpertsInfo
from .shared_experts import SharedExperts

__all__ = ["BETWEEN", "HALF_RATE_ROWS", "HBM", "INSIDE", "TFLOPS", "DispatchSizes"]

# An H100's rates.
INSIDE, BETWEEN = 400.0, 45.0  # GB/s of a rank to others of its node, and of its network interface
TFLOPS, HBM = 989.0, 3350.0  # bfloat16 products, and GB/s of memory, as published
HALF_RATE_ROWS = 400.0  # rows of an expert at which a product reaches half of its rate
_REACHED = 0.58  # of the FLOPs, by the experts' products with the passes over memory around them
_NODE = 8  # GPUs
_ISSUE = 20e-6  # seconds of a collective without rows
_MOST = 4


@dataclass(frozen=True)
class DispatchSizes:
    """Sizes of a layer's experts."""

    rows: int  # experts per token, ``K``
    row_bytes: int  # of a sent row
    elements: int  # of one expert's weights
    experts: int  # ``E``
    shared: bool  # whether the block's shared experts can be computed while tokens are dispatched

    @classmethod
    def of(cls, model: Any, experts: Sequence[ExpertsInfo], dtype: torch.dtype) -> "DispatchSizes | None":
        """Read the sizes by running copies of a model's blocks on the meta device, before it is sharded.

        Returns:
            None if no copy can run, layers differ, or experts dispatch their tokens themselves. Shared experts can
            overlap if every copy has run.
        """
        if any(isinstance(info.module, CustomExperts) for info in experts):
            return None
        found = {cls.of_layer(model, info, dtype) for info in experts}
        known = [sizes for sizes in found if sizes is not None]
        return replace(known[0], shared=known[0].shared and None not in found) if len(known) == 1 else None

    @classmethod
    def of_layer(cls, model: Any, info: ExpertsInfo, dtype: torch.dtype) -> "DispatchSizes | None":
        """Read the sizes of one layer; None if its copy can't run."""
        name = info.fqn.removeprefix(f"{info.block}.")
        block: Any = copy.deepcopy(model.get_submodule(info.block)).to("meta")
        shared, found = SharedExperts(block, block.get_submodule(name)), []

        def stand_in(forward: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
            comes_first = bool(shared.forwards) and not shared.called
            found.append((top_k_index.shape[-1], hidden_states.shape[-1] * dtype.itemsize, comes_first))
            if comes_first:
                shared.compute_ahead()
            return torch.empty_like(hidden_states)

        wrap_forward(block.get_submodule(name), "shared_experts", stand_in)
        is_ahead = True
        try:
            width, dtype_of_block = model.config.get_text_config().hidden_size, next(block.parameters()).dtype
            with torch.no_grad():
                block(torch.zeros(1, 2, width, dtype=dtype_of_block, device="meta"))
        except SettingError:  # it calls its shared experts with another tensor than its input
            is_ahead = False
        except Exception:  # it needs more than hidden states; any family's code may fail on the meta device
            return None
        own = info.module.named_parameters()
        elements = sum(param.numel() for name, param in own if param.dim() == 3 and not is_adapter(name))
        rows, row_bytes, comes_first = found[0]
        return cls(rows, row_bytes, elements // info.num_experts, info.num_experts, comes_first and is_ahead)

    def chunks(self, tokens: int, ep: int, etp: int, recomputed: bool) -> int:
        """Return the number of chunks for micro-batches of at most ``tokens`` per rank; the same on all ranks.

        ``recomputed`` says whether backward recomputes layers.
        """
        rows = tokens * self.rows
        near = min(ep, max(_NODE // etp, 1))
        sent = rows * self.row_bytes
        way = max(sent * (near - 1) / ep / INSIDE, sent * (1 - near / ep) / BETWEEN) / 1e9
        product = 2 * rows * self.elements / (_REACHED * TFLOPS * 1e12)
        gradients = 3 * self.elements * self.experts // (ep * etp) * 2 / (HBM * 1e9)  # read twice and written

        def seconds(n: int) -> float:
            forward = product * (1 + n * HALF_RATE_ROWS * self.experts / (rows * ep * etp))

            def of_pass(compute: float) -> float:
                return 2 * way / n + max(compute, 2 * way * (1 - 1 / n)) + 2 * n * _ISSUE

            ends_early = n == 1 and not self.shared
            again = 0.0 if not recomputed else way + forward * 2 / 3 if ends_early else of_pass(forward)
            return of_pass(forward) + again + of_pass(2 * forward) + (n - 1) * gradients

        return min(range(1, _MOST + 1), key=seconds) if rows else 1
