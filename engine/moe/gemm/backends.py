"""What the experts' compute is made of, in torch; and which backend a machine gets.

``torch`` is also the twin that the Triton kernels (``triton_backend.py``) are compared with. ``reference`` is no
backend in this sense: plain operators, with autograd through all of them (``moe/forward.py``).

Shapes: ``R`` rows grouped by expert, ``e`` experts, ``T`` tokens, ``K`` experts per token.
"""

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from ...errors import SettingError
from . import gradient_buffers

__all__ = ["BACKENDS", "TORCH", "Backend", "BackendChoice", "Groups", "TorchBackend", "backend_named", "choose_backend"]

BACKENDS = ("auto", "torch", "triton", "reference")
_SETTING = "engine.experts_backend"
_OLDEST = (8, 0)  # compute capability that the Triton kernels are written for


class Groups:
    """How rows are grouped by expert; what is computed of it is computed once.

    Args:
        counts_e: int64 ``(e,)``, rows per expert; entries may be 0.
        rows: their sum.
    """

    def __init__(self, counts_e: torch.Tensor, rows: int):
        self.counts_e, self.rows = counts_e, rows
        self.offsets_e = torch.cumsum(counts_e, dim=0).to(torch.int32)
        self.tiles: dict[int, Any] = {}  # of kernels, by the rows in a tile

    @cached_property
    def _ends(self) -> list[int]:
        return self.offsets_e.tolist()  # a host sync; torch's and Triton's kernels never ask

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Expert, first row, row after the last."""
        begin = 0
        for expert, end in enumerate(self._ends):
            yield expert, begin, end
            begin = end

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """The same of the experts that have rows."""
        return (span for span in self.spans() if span[2] > span[1])


class Backend(Protocol):
    """The operators of ``moe/fused.py``; none is differentiable. GEMMs and sums accumulate in float32."""

    name: str

    def take(self, x_TD: torch.Tensor, tokens_S: torch.Tensor) -> torch.Tensor:
        """``x_TD[tokens_S]``."""
        ...

    def gather_sum(
        self, rows_SD: torch.Tensor, slots_TK: torch.Tensor, weights_TK: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """``sum_k weights[t, k] * rows[slots[t, k]]``, ``(T, D)`` in ``dtype``; weights of 1 where there are none."""
        ...

    def mm(
        self, rows: torch.Tensor, in_out: torch.Tensor, groups: Groups, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rows ``(R, in)``, each times its expert's ``(e, in, out)``, any strides, plus its bias ``(e, out)``."""
        ...

    def outer(self, a: torch.Tensor, b: torch.Tensor, groups: Groups) -> torch.Tensor:
        """``a.T @ b`` of each expert's rows: ``(R, m)``, ``(R, n)`` -> ``(e, m, n)``, zero without rows."""
        ...

    def gate(self, module: Any, dtype: torch.dtype) -> Any:
        """What ``up_gate`` and ``down_gate_backward`` need to know of the module's activation; ``None``: can't fuse."""
        ...

    def up_gate(
        self, rows: torch.Tensor, in_out: torch.Tensor, groups: Groups, bias: torch.Tensor | None, gate: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``mm`` with the activation at its edge: pre-activation ``(R, 2 * I)`` and activation ``(R, I)``."""
        ...

    def down_gate_backward(
        self,
        grad: torch.Tensor,
        out_in: torch.Tensor,
        groups: Groups,
        pre: torch.Tensor,
        scale_R: torch.Tensor | None,
        gate: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """``mm`` of the gradient with the activation's backward at its edge.

        Returns:
            The pre-activation's gradient ``(R, 2 * I)`` and the activation ``(R, I)``, both times ``scale_R``; and of
            ``scale_R`` the gradient, float32, ``None`` without one.
        """
        ...


class TorchBackend:
    """Torch's operators: its grouped GEMM where that takes the operands, a loop over experts elsewhere."""

    name = "torch"

    def take(self, x_TD, tokens_S):
        return x_TD.index_select(0, tokens_S)

    def gather_sum(self, rows_SD, slots_TK, weights_TK, dtype):
        tokens, k = slots_TK.shape
        if slots_TK.numel() == 0:
            return rows_SD.new_zeros(tokens, rows_SD.shape[1], dtype=dtype)
        if weights_TK is None or weights_TK.dtype == rows_SD.dtype:
            return F.embedding_bag(slots_TK, rows_SD, mode="sum", per_sample_weights=weights_TK).to(dtype)
        total = rows_SD.new_zeros(tokens, rows_SD.shape[1], dtype=torch.promote_types(rows_SD.dtype, weights_TK.dtype))
        for i in range(k):  # what is held at a time is no larger than the result
            total.add_(rows_SD.index_select(0, slots_TK[:, i]) * weights_TK[:, i, None])
        return total.to(dtype)

    def mm(self, rows, in_out, groups, bias=None):
        if torch_grouped_mm is not None and supports_grouped_mm(rows, in_out):
            out = torch_grouped_mm(rows, in_out, offs=groups.offsets_e)
            if bias is not None:
                out.add_(torch.repeat_interleave(bias, groups.counts_e, dim=0, output_size=groups.rows))
            return out
        out = rows.new_empty(groups.rows, in_out.shape[2])
        for expert, begin, end in groups:
            if bias is None:
                torch.mm(rows[begin:end], in_out[expert], out=out[begin:end])
            else:
                torch.addmm(bias[expert], rows[begin:end], in_out[expert], out=out[begin:end])
        return out

    def outer(self, a, b, groups):
        if torch_grouped_mm is not None and supports_grouped_mm(a, b) and not _on_cpu(a):
            return torch_grouped_mm(a.t(), b, offs=groups.offsets_e)
        out = gradient_buffers.empty((groups.counts_e.shape[0], a.shape[1], b.shape[1]), a)
        for expert, begin, end in groups.spans():
            if end > begin:
                torch.mm(a[begin:end].t(), b[begin:end], out=out[expert])
            else:
                out[expert].zero_()
        return out

    def gate(self, module, dtype):
        return None

    def up_gate(self, rows, in_out, groups, bias, gate):
        raise AssertionError("activations are the module's own here")

    def down_gate_backward(self, grad, out_in, groups, pre, scale_R, gate):
        raise AssertionError("activations are the module's own here")


TORCH: Backend = TorchBackend()


def _on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


torch_grouped_mm = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def supports_grouped_mm(rows: torch.Tensor, other: torch.Tensor) -> bool:
    """What torch's grouped GEMM asks for: rows, each of a multiple of 16 bytes; and on an accelerator bfloat16."""
    sizes = (rows.shape[1], *other.shape[-2:]) if other.dim() == 3 else (rows.shape[1], other.shape[1])
    aligned = all(size * rows.element_size() % 16 == 0 for size in sizes)
    return aligned and rows.shape[0] > 0 and (rows.device.type == "cpu" or rows.dtype == torch.bfloat16)


@dataclass(frozen=True)
class BackendChoice:
    """The backend that computes, and where ``auto`` passed over another one, the line that says so."""

    name: str
    fallback: str | None = None


def choose_backend(wanted: str, device_type: str, dtype: torch.dtype) -> BackendChoice:
    """Which backend ``engine.experts_backend`` means on this machine.

    Args:
        wanted: one of ``BACKENDS``.
        device_type: ``cpu``, ``cuda``, ...
        dtype: that the experts compute in.

    Raises:
        SettingError: there is no such backend, or it was asked for by its name and can't run here.
    """
    if wanted not in BACKENDS:
        raise SettingError(_SETTING, wanted, f"is one of {', '.join(BACKENDS)}.", f"{_SETTING}=auto")
    if wanted in ("torch", "reference"):
        return BackendChoice(wanted)
    reason = _why_not_triton(device_type, dtype)
    if wanted == "triton":
        if reason is not None:
            raise SettingError(_SETTING, wanted, reason, f"{_SETTING}=torch, or {_SETTING}=auto")
        return BackendChoice("triton")
    if reason is not None:
        return BackendChoice("torch", f"{_SETTING}=auto: the experts are computed by torch, as {reason}")
    if device_type == "cpu":  # the interpreter is for tests, which ask for it by name
        return BackendChoice("torch")
    return BackendChoice("mixed")


def backend_named(name: str) -> Backend:
    """The backend of a ``BackendChoice`` other than ``reference``."""
    if name == "torch":
        return TORCH
    from . import triton_backend  # Triton may not be installed where it is not asked for

    return triton_backend.TritonBackend() if name == "triton" else triton_backend.MixedBackend()


def _why_not_triton(device_type: str, dtype: torch.dtype) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed."
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the Triton kernels compute float32, bfloat16 and float16, and not {dtype}."
    if device_type == "cpu":
        if os.environ.get("TRITON_INTERPRET") == "1":
            return None
        return "Triton needs a GPU (on a CPU only TRITON_INTERPRET=1 runs its kernels, slowly, for tests)."
    if device_type != "cuda":
        return f"the Triton kernels were not written for {device_type}."
    if not torch.cuda.is_available():
        return None  # a driver without a GPU, whose workers have one
    capability = torch.cuda.get_device_capability()
    if torch.version.hip is None and capability < _OLDEST:
        has, needs = (".".join(map(str, version)) for version in (capability, _OLDEST))
        return f"the Triton kernels need compute capability {needs}, and this GPU has {has}."
    return None
