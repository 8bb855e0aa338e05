"""The sections of ``gpu_check.py`` on the dense part of a layer: fused kernels, and ``engine.batch_invariant``."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3

from benchmarks.experts.layer import seconds_of
from benchmarks.gpu.gpu_rows import DEVICE, HAS_GPU, Row
from benchmarks.measure import figures_of
from epfsdp2.engine.dense.norms import fuse_norms, rms_norm_of
from epfsdp2.engine.dense.products import replace_products
from epfsdp2.engine.dense.rotary import FusedRotary, Rotation, fuse_rotary
from epfsdp2.engine.invariance import first_difference
from epfsdp2.engine.packing.sequences import PackedSequences
from tests.support.engine.sharded import sharded_model
from tests.support.models.tiny import relative_error, save_qwen3_moe

__all__ = ["dense", "invariant"]

DTYPE, BOUND = (torch.bfloat16, 1e-2) if HAS_GPU else (torch.float32, 1e-5)
TOKENS = 8192 if HAS_GPU else 6
WIDTHS = [(2048, 5120), (4096, 2048)] if HAS_GPU else [(8, 16)]  # linears of Qwen3-30B-A3B
MOST = 1.5  # x cuBLAS's seconds: linears are a seventh of a planned step, which may take 1.1 x as long
_Calls = dict[str, Callable[..., Any]]


class Layer(nn.Module):
    """The part of a layer of Qwen3-30B outside of its experts."""

    def __init__(self) -> None:
        super().__init__()
        config = Qwen3MoeConfig(head_dim=128, attn_implementation="sdpa")
        self.before, self.after = (qwen3.Qwen3MoeRMSNorm(2048) for _ in range(2))
        self.attention, self.rotary = qwen3.Qwen3MoeAttention(config, 0), qwen3.Qwen3MoeRotaryEmbedding(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = self.rotary(x, torch.arange(x.shape[1], device=x.device)[None])
        found, _ = self.attention(hidden_states=self.before(x), position_embeddings=positions, attention_mask=None)
        x = x + found
        return x + self.after(x)


def dense() -> Iterator[Row]:
    """Values, gradients and times of RMSNorms, rotary embeddings, and the dense part of a layer."""
    for name, shape in (("hidden states", (TOKENS, 2048)), ("heads", (TOKENS, 36, 128))):
        module = qwen3.Qwen3MoeRMSNorm(shape[-1]).to(DEVICE, DTYPE)
        norm = rms_norm_of(module)
        assert norm is not None, "Qwen3MoeRMSNorm is an RMSNorm no more"
        calls: _Calls = {
            "fused": lambda x, norm=norm, module=module: norm.fused(x, module.weight),
            "eager": module,
            "F.rms_norm": lambda x, module=module: F.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon),
        }
        yield from _compared(f"norm of {name}", calls, shape)
    plain = qwen3.apply_rotary_pos_emb
    cos, sin = (torch.randn(1, TOKENS, 128, device=DEVICE, dtype=DTYPE) for _ in range(2))
    fused = FusedRotary(plain, Rotation(), device=DEVICE)
    calls = {name: lambda q, f=f: f(q, q[:, :4], cos, sin)[0] for name, f in (("fused", fused), ("eager", plain))}
    yield from _compared("rotary", calls, (1, 32, TOKENS, 128))
    if not HAS_GPU:
        return
    layer, fused_layer, compiled = (Layer().to(DEVICE, DTYPE) for _ in range(3))
    calls = {"eager": layer, "compiled": torch.compile(compiled), "fused": fused_layer}
    times = {name: _seconds(calls[name], (TOKENS // 2048, 2048, 2048)) for name in ("eager", "compiled")}
    fuse_norms(fused_layer)
    fuse_rotary(fused_layer)  # the function is that of all three layers, so the other two are measured before
    times["fused"] = _seconds(fused_layer, (TOKENS // 2048, 2048, 2048))
    value = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in times.items())
    yield Row("a layer without experts, forward + backward", value, "", None)


def _compared(what: str, calls: _Calls, shape: tuple[int, ...]) -> Iterator[Row]:
    x, grad = (torch.randn(shape, device=DEVICE).to(DTYPE) for _ in range(2))
    found = {}
    for name in ("fused", "eager"):
        leaf = x.clone().requires_grad_()
        out = calls[name](leaf)
        found[name] = out.detach(), torch.autograd.grad(out, leaf, grad)[0]
    error = max(map(relative_error, found["fused"], found["eager"]))
    yield Row(f"{what}, fused beside eager", f"{error:.1e}", f"< {BOUND}", error < BOUND)
    if HAS_GPU:
        copy = seconds_of(x.clone, DEVICE)
        times = {name: _seconds(call, shape) / copy for name, call in calls.items()}
        value = ", ".join(f"{name} {ratio:.1f} x" for name, ratio in times.items())
        yield Row(
            f"{what}, forward + backward, beside a copy", value, "fused least", times["fused"] <= min(times.values())
        )


def _seconds(call: Callable[..., Any], shape: tuple[int, ...]) -> float:
    x = torch.randn(shape, device=DEVICE).to(DTYPE).requires_grad_()
    grad = torch.randn_like(call(x))
    return seconds_of(lambda: call(x).backward(grad), DEVICE)


def invariant() -> Iterator[Row]:
    """Bits of a sequence in two rows of a small model; dense products beside cuBLAS's."""
    linears = [nn.Linear(*widths, bias=False).to(DEVICE, DTYPE) for widths in WIDTHS]
    before = [_seconds(linear, (TOKENS, linear.in_features)) for linear in linears]
    replace_products(DEVICE)
    for linear, cublas in zip(linears, before, strict=True):
        ratio = _seconds(linear, (TOKENS, linear.in_features)) / cublas
        wanted, holds = (f"<= {MOST} x", ratio <= MOST) if HAS_GPU else ("", None)
        what = f"linear {linear.in_features} to {linear.out_features}, forward + backward"
        yield Row(what, f"{ratio:.2f} x cuBLAS's", wanted, holds)
    with tempfile.TemporaryDirectory() as folder:
        found = figures_of(_differing, 1, save_qwen3_moe(Path(folder)), backend="gloo")
    yield Row("first module whose bits differ", found or "none", "none", found is None)


def _differing(folder: Path) -> str | None:
    settings: dict[str, Any] = {"param_dtype": DTYPE, "experts_backend": "triton", "batch_invariant": True}
    model, _ = sharded_model(folder, 1, device=DEVICE, before=PackedSequences, **settings)
    return first_difference(model, DEVICE)
