"""Replace a model's norms and rotary embeddings by fused kernels."""

import contextlib
import logging
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from .norms import RmsNorm, fuse_norms
from .rotary import Rotation, fuse_rotary, replacements, rotate

__all__ = ["fuse_dense", "fused_on_meta"]

logger = logging.getLogger("epfsdp2")


def fuse_dense(model: nn.Module, device: str) -> None:
    """Replace the norms and rotary embeddings that the kernels compute, if they are right on the device, and log it."""
    if why := _why_not_on(device):
        logger.warning("epfsdp2: norms and rotary embeddings are not fused: %s", why)
        return
    norms, rotary = fuse_norms(model), fuse_rotary(model)
    if dist.get_rank() == 0:
        names = [f"{count} {name}" for name, count in sorted(norms.items())]
        names += [name for name, fused in rotary.items() if fused]
        logger.info("epfsdp2: fused: %s", ", ".join(names) or "nothing")
        if left := [name for name, fused in rotary.items() if not fused]:
            logger.info("epfsdp2: rotate in their own way and run as they are: %s", ", ".join(left))


def _why_not_on(device: str) -> str | None:
    """Return why the kernels can't run on a device; None if a small call of each equals torch's operators."""
    x, grad = (torch.randn(2, 4, 16, 64, device=device).bfloat16() for _ in range(2))
    cos, sin = (torch.randn(2, 16, 64, device=device).bfloat16() for _ in range(2))
    norm, rotation, weight = RmsNorm(1e-6), Rotation(), cos[0, 0]

    def with_gradient(call: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        out = call(leaf)
        return [out.detach(), *torch.autograd.grad(out, leaf, grad)]

    try:
        found = with_gradient(lambda x: rotate(norm.fused(x, weight), cos, sin, rotation))
    except Exception as error:  # Triton's errors of compilation have no common class
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    wanted = with_gradient(lambda x: rotation.plain(norm.plain(x, weight), cos, sin))
    close = (torch.allclose(a.float(), b.float(), rtol=0.05, atol=0.05) for a, b in zip(found, wanted, strict=True))
    return None if all(close) else "the kernels compute something else on this GPU"


@contextlib.contextmanager
def fused_on_meta(model: nn.Module) -> Iterator[None]:
    """Fuse a model on the meta device for the planner: norms for good, rotary functions inside the context.

    On meta each kernel is one operator that reads and writes as many bytes.
    """
    fuse_norms(model)
    replaced = list(replacements(model))
    for file, name, _, fused in replaced:
        if fused is not None:
            fused.device = "meta"
            setattr(file, name, fused)
    try:
        yield
    finally:
        for file, name, before, _ in replaced:
            setattr(file, name, before)
