"""The section of ``gpu_check.py`` on ``engine.batch_invariant``: bits of a small model, and its dense products' cost."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.experts.layer import seconds_of
from benchmarks.gpu.gpu_rows import DEVICE, HAS_GPU, Row
from benchmarks.measure import figures_of
from epfsdp2.engine.dense.products import replace_products
from epfsdp2.engine.invariance import first_difference
from epfsdp2.engine.packing.sequences import PackedSequences
from tests.support.engine.sharded import sharded_model
from tests.support.models.tiny import save_qwen3_moe

__all__ = ["invariant"]

DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
TOKENS, WIDTHS = (8192, [(2048, 5120), (4096, 2048)]) if HAS_GPU else (6, [(8, 16)])  # linears of Qwen3-30B-A3B
MOST = 1.5  # x cuBLAS's seconds: linears are a seventh of a planned step, which may become 1.1 x as long


def invariant() -> Iterator[Row]:
    """Bits of a sequence in two rows of a small model; dense products beside cuBLAS's."""
    before = [_seconds(*widths) for widths in WIDTHS]
    replace_products(DEVICE)
    for (inputs, outputs), cublas in zip(WIDTHS, before, strict=True):
        ratio = _seconds(inputs, outputs) / cublas
        wanted, holds = (f"<= {MOST} x", ratio <= MOST) if HAS_GPU else ("", None)
        yield Row(f"linear {inputs} to {outputs}, forward + backward", f"{ratio:.2f} x cuBLAS's", wanted, holds)
    with tempfile.TemporaryDirectory() as folder:
        found = figures_of(_differs, 1, save_qwen3_moe(Path(folder)), backend="gloo")
    yield Row("first module whose bits differ", found or "none", "none", found is None)


def _differs(folder: Path) -> str | None:
    settings = {"param_dtype": DTYPE, "experts_backend": "triton", "batch_invariant": True}
    model, _ = sharded_model(folder, 1, device=DEVICE, before=PackedSequences, **settings)
    return first_difference(model, DEVICE)


def _seconds(inputs: int, outputs: int) -> float:
    x, weight, grad = (
        torch.randn(shape, device=DEVICE).to(DTYPE) for shape in ((TOKENS, inputs), (outputs, inputs), (TOKENS, outputs))
    )
    x.requires_grad_(), weight.requires_grad_()
    return seconds_of(lambda: F.linear(x, weight).backward(grad), DEVICE)
