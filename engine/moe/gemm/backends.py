"""The operators of the experts' compute, in torch, and the choice of a backend for a machine.

The settings ``reference`` and ``transformers:NAME`` have no ``Backend``: autograd goes through plain operators
or through a function that is registered with transformers (``moe/forward.py``).

Shapes: ``R`` rows grouped by expert, ``e`` experts, ``T`` tokens, ``K`` experts per token.
"""

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from ...compat.transformers_names import ALL_EXPERTS_FUNCTIONS
from ...errors import SettingError
from .gate import Gate

__all__ = [
    "BACKENDS",
    "EXPERTS_IMPLEMENTATION",
    "MOST_BY_INDEX",
    "REGISTERED",
    "ROWS",
    "TORCH",
    "Backend",
    "BackendChoice",
    "Groups",
    "IndexedRows",
    "Rows",
    "backend_named",
    "choose_backend",
    "has_backend",
    "inverse",
    "supports_grouped_mm",
    "torch_grouped_mm",
    "zeroes_empty_groups",
]

BACKENDS = ("auto", "torch", "triton", "reference")
REGISTERED = "transformers:"
INVARIANT = "invariant"  # the name of ``torch`` on a CPU with ``engine.batch_invariant``
ROWS = 32  # a CPU's operators give each of a multiple of so many rows the same bits (``invariant.py``)
EXPERTS_IMPLEMENTATION = "epfsdp2"  # the name under which ``experts_forward`` is registered with transformers
MOST_BY_INDEX = 1024  # an outer product with more columns copies the rows of an index
_SETTING = "engine.experts_backend"
_BLOCK, _LARGE_BLOCK = 2**17, 2**25  # elements of a pre-activation per block, on a CPU and elsewhere
_WIDTH = 8  # a vector becomes a GEMM operand of this width: rows have at least 16 bytes in every dtype
_OLDEST = (8, 0)  # compute capability that the Triton kernels need
_COMPILED = (8, 9, 10)  # major compute capabilities for which tests compile them
_LEAVES_GARBAGE = 10  # where a product over no rows leaves its memory as it was (pytorch#172439, CUTLASS#2674)
torch_grouped_mm = F.grouped_mm


class Groups:
    """Rows grouped by expert, by int64 counts ``(e,)`` and their sum; derived values are computed once."""

    def __init__(self, counts_e: torch.Tensor, rows: int):
        self.counts_e, self.rows = counts_e, rows
        self.offsets_e = torch.cumsum(counts_e, dim=0).to(torch.int32)
        self.tiles: dict[int, Any] = {}  # tiles of the Triton kernels, by rows per tile

    @cached_property
    def _ends(self) -> list[int]:
        return self.offsets_e.tolist()  # a host sync; only the loop over experts needs it

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Iterate over ``(expert, first row, row after the last)`` of all experts."""
        begin = 0
        for expert, end in enumerate(self._ends):
            yield expert, begin, end
            begin = end


@dataclass(frozen=True)
class IndexedRows:
    """The rows ``x[index_R]``, which operators read through the index instead of from a copy."""

    x: torch.Tensor
    index_R: torch.Tensor


Rows = torch.Tensor | IndexedRows


class Backend:
    """The operators of ``moe/fused.py`` in torch, which ``TritonBackend`` replaces. None is differentiable.

    GEMMs and sums accumulate in float32. GEMMs use torch's grouped GEMM where that supports the operands, else a loop
    over experts.
    """

    reads_index = False  # whether GEMMs read rows through an index

    def indexed(self, x: torch.Tensor, index_R: torch.Tensor) -> Rows:
        """Return ``x[index_R]`` as an operand: without a copy if ``reads_index``."""
        return self.take(x, index_R)

    def take(self, x_TD: torch.Tensor, tokens_S: torch.Tensor) -> torch.Tensor:
        """Return ``x_TD[tokens_S]``."""
        return x_TD.index_select(0, tokens_S)

    def gather_sum(
        self, rows_SD: torch.Tensor, slots_TK: torch.Tensor, weights_TK: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return ``sum_k weights[t, k] * rows[slots[t, k]]``, ``(T, D)`` in ``dtype``; ``None`` means weights of 1."""
        tokens, k = slots_TK.shape
        if slots_TK.numel() == 0:
            return rows_SD.new_zeros(tokens, rows_SD.shape[1], dtype=dtype)
        if weights_TK is None or weights_TK.dtype == rows_SD.dtype:
            return F.embedding_bag(slots_TK, rows_SD, mode="sum", per_sample_weights=weights_TK).to(dtype)
        total = rows_SD.new_zeros(tokens, rows_SD.shape[1], dtype=torch.promote_types(rows_SD.dtype, weights_TK.dtype))
        for i in range(k):  # temporaries are no larger than the result
            total.add_(rows_SD.index_select(0, slots_TK[:, i]) * weights_TK[:, i, None])
        return total.to(dtype)

    def mm(
        self,
        rows: Rows,
        in_out: torch.Tensor,
        groups: Groups,
        bias: torch.Tensor | None = None,
        order_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply rows ``(R, in)`` by their experts' ``(e, in, out)``, any strides, and add the bias ``(e, out)``.

        With a permutation ``order_R`` the ``i``-th result becomes row ``order_R[i]`` of the output.
        """
        assert isinstance(rows, torch.Tensor)
        out = self._products(rows, in_out, groups, bias)
        return out if order_R is None else self.take(out, inverse(order_R))

    def _products(
        self, rows: torch.Tensor, in_out: torch.Tensor, groups: Groups, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if supports_grouped_mm(rows, in_out):
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

    def outer(self, a: Rows, b: Rows, groups: Groups) -> torch.Tensor:
        """Return ``a.T @ b`` of each expert's rows: ``(R, m)``, ``(R, n)`` -> ``(e, m, n)``, zero without rows."""
        assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        if supports_grouped_mm(a, b) and not _on_cpu(a):
            out = torch_grouped_mm(a.t(), b, offs=groups.offsets_e)
            return out if zeroes_empty_groups() else out.masked_fill_((groups.counts_e == 0)[:, None, None], 0)
        out = a.new_empty((groups.counts_e.shape[0], a.shape[1], b.shape[1]))
        for expert, begin, end in groups:
            torch.mm(a[begin:end].t(), b[begin:end], out=out[expert])
        return out

    def segment_sum(self, rows: Rows, groups: Groups, scale_R: torch.Tensor | None = None) -> torch.Tensor:
        """Sum each expert's rows, times ``scale_R``: ``(R, n)`` -> ``(e, n)``, zero without rows."""
        assert isinstance(rows, torch.Tensor)
        ones = rows.new_ones(groups.rows) if scale_R is None else scale_R.to(rows.dtype)
        return self.outer(_columns(ones), rows, groups)[:, 0]

    def row_dot(self, rows: Rows, vectors: torch.Tensor, groups: Groups) -> torch.Tensor:
        """Multiply rows ``(R, n)`` by their experts' vectors ``(e, n)``: ``(R,)``."""
        return self.mm(rows, _columns(vectors), groups)[:, 0]

    def aligned(self, pre: torch.Tensor) -> torch.Tensor:
        """Return a pre-activation to which any function may be applied, with further rows at its end."""
        return pre

    def activate(self, pre: torch.Tensor, gate: Gate) -> torch.Tensor:
        """Compute the gated activation, in float32 at least: ``(R, 2 * I)`` -> ``(R, I)``."""
        act = pre.new_empty(pre.shape[0], pre.shape[1] // 2)
        for rows in _blocks(pre):
            act[rows] = gate(pre[rows].to(_wide(pre)))
        return act

    def activate_backward(
        self, pre: torch.Tensor, grad: torch.Tensor, scale_R: torch.Tensor | None, gate: Gate
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Compute the backward of the activation times ``scale_R`` (1 if ``None``) for its gradient ``(R, I)``.

        Returns:
            The pre-activation's gradient ``(R, 2 * I)`` and the activation ``(R, I)``, both times ``scale_R``; and the
            gradient of ``scale_R`` in float32, ``None`` without one. ``grad`` may be overwritten.
        """
        dtype, grad_pre = _wide(pre), torch.empty_like(pre)
        grad_scale = None if scale_R is None else pre.new_empty(pre.shape[0], dtype=dtype)
        for rows in _blocks(pre):
            scale = None if scale_R is None else scale_R[rows].to(dtype)
            out = grad_pre[rows] if pre.dtype == dtype else pre.new_empty(pre[rows].shape, dtype=dtype)
            grad[rows], of_scale = gate.backward(pre[rows].to(dtype), grad[rows].to(dtype), scale, out)
            if out.dtype != pre.dtype:
                grad_pre[rows] = out
            if grad_scale is not None and of_scale is not None:
                grad_scale[rows] = of_scale
        return grad_pre, grad, grad_scale

    def mm_gate_backward(
        self,
        grad: Rows,
        in_out: torch.Tensor,
        groups: Groups,
        pre: torch.Tensor,
        scale_R: torch.Tensor | None,
        gate: Gate,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return ``activate_backward(pre, mm(grad, in_out, groups), scale_R, gate)``, which one kernel may compute."""
        return self.activate_backward(pre, self.mm(grad, in_out, groups), scale_R, gate)

    def up_gate(
        self, rows: Rows, in_out: torch.Tensor, groups: Groups, bias: torch.Tensor | None, gate: Gate
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``mm``, the pre-activation ``(R, 2 * I)``, and the activation ``(R, I)`` if it is fused, else None."""
        return self.mm(rows, in_out, groups, bias), None


TORCH = Backend()


def inverse(order: torch.Tensor) -> torch.Tensor:
    """Return the permutation that undoes ``order``."""
    undo = torch.empty_like(order)
    undo[order] = torch.arange(order.numel(), dtype=order.dtype, device=order.device)
    return undo


def _columns(vector: torch.Tensor) -> torch.Tensor:
    return vector.unsqueeze(-1).expand(*vector.shape, _WIDTH).contiguous()


def _wide(pre: torch.Tensor) -> torch.dtype:
    return torch.promote_types(pre.dtype, torch.float32)


def _blocks(pre: torch.Tensor) -> Iterator[slice]:
    """Yield blocks of rows: on a CPU as many as a cache holds, elsewhere few enough for small temporaries."""
    rows = max(1, (_BLOCK if _on_cpu(pre) else _LARGE_BLOCK) // pre.shape[1] // ROWS) * ROWS
    yield from (slice(first, first + rows) for first in range(0, pre.shape[0], rows))


def _on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def supports_grouped_mm(rows: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether torch's grouped GEMM supports the operands: some rows, aligned to 16 bytes, in a dtype of the device."""
    sizes = (rows.shape[1], *other.shape[-2:]) if other.dim() == 3 else (rows.shape[1], other.shape[1])
    aligned = all(size * rows.element_size() % 16 == 0 for size in sizes)
    has_dtype = rows.dtype == torch.bfloat16 or (rows.device.type == "cpu" and rows.dtype != torch.float64)
    return aligned and rows.shape[0] > 0 and has_dtype


def zeroes_empty_groups() -> bool:
    """Whether the weights' gradient of torch's grouped GEMM is zero for experts without rows."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != _LEAVES_GARBAGE


@dataclass(frozen=True)
class BackendChoice:
    """A backend's name, and a line for the log if Triton can't run or was not compiled for this GPU."""

    name: str
    line: str | None = None


def choose_backend(wanted: str, device_type: str, dtype: torch.dtype, batch_invariant: bool = False) -> BackendChoice:
    """Choose the backend that ``engine.experts_backend`` means on this machine.

    Args:
        wanted: one of ``BACKENDS``, or ``transformers:NAME``.
        dtype: the experts' compute dtype.
        batch_invariant: whether a row's result must not depend on the other rows.

    Raises:
        SettingError: there is no such backend, it can't run here, or it is not ``batch_invariant``.
    """
    choice = _choose(wanted, device_type, dtype)
    if not batch_invariant or choice.name == "triton":
        return choice
    if choice.name == "torch" and device_type == "cpu":
        return BackendChoice(INVARIANT)
    rule = f"needs experts that compute each row alone, which {_SETTING}={wanted} does not guarantee here."
    works = f"{_SETTING}=auto" if device_type == "cpu" else f"{_SETTING}=triton"
    raise SettingError("engine.batch_invariant", True, rule, works)


def _choose(wanted: str, device_type: str, dtype: torch.dtype) -> BackendChoice:
    if wanted.startswith(REGISTERED):
        names = sorted(set(ALL_EXPERTS_FUNCTIONS.valid_keys()) - {EXPERTS_IMPLEMENTATION})
        if wanted.removeprefix(REGISTERED) not in names:
            rule = f"names no function in transformers' ALL_EXPERTS_FUNCTIONS, which has {', '.join(names)}."
            works = "import the module that registers it in every process, by VERL_USE_EXTERNAL_MODULES=MODULE"
            raise SettingError(_SETTING, wanted, rule, works)
        return BackendChoice(wanted)
    if wanted not in BACKENDS:
        raise SettingError(_SETTING, wanted, f"is {', '.join(BACKENDS)} or {REGISTERED}NAME.", f"{_SETTING}=auto")
    if wanted in ("torch", "reference"):
        return BackendChoice(wanted)
    reason = _why_not_triton(device_type, dtype)
    if reason is not None and wanted == "triton":
        raise SettingError(_SETTING, wanted, reason, f"{_SETTING}=torch, or {_SETTING}=auto")
    if reason is not None:
        return BackendChoice("torch", f"{_SETTING}=auto: torch computes the experts, because {reason}")
    if wanted == "auto" and device_type == "cpu":  # the interpreter is for tests, which name it
        return BackendChoice("torch")
    return BackendChoice("triton", _new_gpu())


def has_backend(setting: str) -> bool:
    """Whether a setting means a ``Backend``, whose gradients are this package's own."""
    return setting != "reference" and not setting.startswith(REGISTERED)


def backend_named(name: str) -> Backend:
    """Return the backend of ``BackendChoice.name``; ``reference`` and ``transformers:NAME`` move rows with torch's."""
    kind, _, parts = name.partition(":")
    if kind == INVARIANT:
        from .invariant import InvariantBackend

        return InvariantBackend(int(parts or 1))
    if name == "torch" or not has_backend(name):
        return TORCH
    from . import triton_backend  # Triton is optional

    return triton_backend.TritonBackend()


def _new_gpu() -> str | None:
    """Return a line for the log if tests don't compile the Triton kernels for this machine's GPU."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    major, minor = torch.cuda.get_device_capability()
    compiled = f"{_SETTING}: the Triton kernels were compiled for compute capability 8, 9 and 10"
    return None if major in _COMPILED else f"{compiled}, and this GPU has {major}.{minor}"


def _why_not_triton(device_type: str, dtype: torch.dtype) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed."
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the Triton kernels compute in float32, bfloat16 and float16, not in {dtype}."
    if device_type == "cpu":
        if os.environ.get("TRITON_INTERPRET") == "1":
            return None
        return "Triton needs a GPU (on a CPU only TRITON_INTERPRET=1 runs its kernels, slowly, for tests)."
    if device_type != "cuda":
        return f"the Triton kernels were not written for {device_type}."
    if not torch.cuda.is_available():
        return None  # the driver has no GPU, its workers do
    capability = torch.cuda.get_device_capability()
    if torch.version.hip is None and capability < _OLDEST:
        has, needs = (".".join(map(str, version)) for version in (capability, _OLDEST))
        return f"the Triton kernels need compute capability {needs}, and this GPU has {has}."
    return None
