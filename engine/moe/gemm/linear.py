"""A linear of the experts, with bias and low-rank adapter: its output and its gradients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from .backends import Backend, Groups, Rows

__all__ = ["Linear"]


@dataclass(frozen=True)
class Linear:
    """One of the experts' two linears."""

    weight: torch.Tensor  # ``(e, out, in)``, or ``(e, in, out)`` if ``is_transposed``
    bias: torch.Tensor | None  # ``(e, out)``
    lora_A: torch.Tensor | None  # ``(e, r, in)``
    lora_B: torch.Tensor | None  # ``(e, out, r)``
    scaling: float  # multiplies the adapter's output
    is_transposed: bool

    @classmethod
    def of(cls, name: str, weight: Mapping[str, torch.Tensor], is_transposed: bool, scaling: float | None) -> "Linear":
        """Build it from an experts module's parameters by name; ``scaling=None`` means no adapter."""
        a, b = (None if scaling is None else weight.get(f"{name}_lora_{half}") for half in "AB")
        return cls(weight[name], weight.get(f"{name}_bias"), a, b, scaling or 0.0, is_transposed)

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return (self.weight, self.bias, self.lora_A, self.lora_B)

    def holding(self, tensors: Sequence[torch.Tensor | None]) -> "Linear":
        """Return a copy with these ``tensors``."""
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
        """Return the input's gradient; ``order_R`` as in ``Backend.mm``."""
        a, b = (None if lora is None else lora.mT for lora in (self.lora_B, self.lora_A))
        return Linear(self.in_out, None, a, b, self.scaling, False).forward(backend, grad, groups, order_R)

    def grad_tensors(
        self,
        backend: Backend,
        rows: Rows,
        grad: Rows,
        groups: Groups,
        needed: Sequence[bool],
        scale_R: torch.Tensor | None = None,
    ) -> list[torch.Tensor | None]:
        """Return the needed gradients of ``tensors``; dense, because FSDP would skip a ``None`` on this rank only.

        ``rows`` are the input times the routing weights ``scale_R`` of the output, whose gradient is ``grad``.
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
