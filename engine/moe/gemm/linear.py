"""One linear of the experts, with its bias and its low-rank adapter: its output, and its gradients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from .backends import Backend, Groups, Rows

__all__ = ["Linear"]


@dataclass(frozen=True)
class Linear:
    """One of the experts' two linears, with its bias and its low-rank adapter if it has them.

    Args:
        weight: ``(e, out, in)``, or ``(e, in, out)`` where ``is_transposed``.
        bias: ``(e, out)``.
        lora_A: ``(e, r, in)``.
        lora_B: ``(e, out, r)``.
        scaling: multiplies the adapter's output.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    lora_A: torch.Tensor | None
    lora_B: torch.Tensor | None
    scaling: float
    is_transposed: bool

    @classmethod
    def of(cls, name: str, weight: Mapping[str, torch.Tensor], is_transposed: bool, scaling: float | None) -> "Linear":
        """Make it from an experts module's parameters; ``scaling=None`` leaves adapters out, if there are any."""
        if scaling is None:
            return cls(weight[name], weight.get(f"{name}_bias"), None, None, 0.0, is_transposed)
        a, b = (weight.get(f"{name}_lora_{half}") for half in "AB")
        return cls(weight[name], weight.get(f"{name}_bias"), a, b, scaling, is_transposed)

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return (self.weight, self.bias, self.lora_A, self.lora_B)

    def holding(self, tensors: Sequence[torch.Tensor | None]) -> "Linear":
        """Return the same linear with other tensors, in the order of ``tensors``."""
        return replace(self, **dict(zip(("weight", "bias", "lora_A", "lora_B"), tensors, strict=True)))  # type: ignore[arg-type]

    @property
    def in_out(self) -> torch.Tensor:
        return self.weight if self.is_transposed else self.weight.mT

    def forward(
        self, backend: Backend, rows: Rows, groups: Groups, order_R: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the output; ``order_R`` as in ``Backend.mm``."""
        out = backend.mm(rows, self.in_out, groups, self.bias, order_R)
        if self.lora_A is not None and self.lora_B is not None:
            low = backend.mm(rows, self.lora_A.mT, groups)
            out.add_(backend.mm(low, self.lora_B.mT, groups, None, order_R), alpha=self.scaling)
        return out

    def grad_rows(
        self, backend: Backend, grad: Rows, groups: Groups, order_R: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the input's gradient for that of the output; ``order_R`` as in ``Backend.mm``."""
        grad_rows = backend.mm(grad, self.in_out.mT, groups, None, order_R)
        if self.lora_A is not None and self.lora_B is not None:
            low = backend.mm(grad, self.lora_B, groups)
            grad_rows.add_(backend.mm(low, self.lora_A, groups, None, order_R), alpha=self.scaling)
        return grad_rows

    def grad_tensors(
        self,
        backend: Backend,
        rows: Rows,
        grad: Rows,
        groups: Groups,
        needed: Sequence[bool],
        scale_R: torch.Tensor | None = None,
    ) -> list[torch.Tensor | None]:
        """Compute the needed gradients of ``tensors``; dense, because FSDP would skip a ``None`` on this rank only.

        Args:
            rows: the input, times ``scale_R``.
            grad: the gradient of the output.
            scale_R: the routing weights that the output was scaled by.
        """
        grads: list[torch.Tensor | None] = [None] * 4
        if needed[0]:
            grads[0] = backend.outer(rows, grad, groups) if self.is_transposed else backend.outer(grad, rows, groups)
        if needed[1]:
            grads[1] = backend.segment_sum(grad, groups, scale_R)
        if self.lora_A is not None and self.lora_B is not None:
            if needed[2]:
                grads[2] = backend.outer(backend.mm(grad, self.lora_B, groups).mul_(self.scaling), rows, groups)
            if needed[3]:
                grads[3] = backend.outer(grad, backend.mm(rows, self.lora_A.mT, groups).mul_(self.scaling), groups)
        return grads
