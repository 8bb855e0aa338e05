"""Try an optimizer on a small weight, because many optimizers can't step the shards of a weight."""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from ..compat.lone_mesh import lone_mesh

__all__ = ["why_not_sharded"]

_SHAPE = (64, 256)  # halves of 8,192 elements, because 8-bit optimizers don't quantise states of less than 4,096
_STEPS = 3


def why_not_sharded(build: Callable[[list[nn.Parameter]], Optimizer]) -> str | None:
    """Return why an optimizer can't step a sharded weight or resume, as the end of a sentence; None if it can.

    Step a weight whole, and a half of it alone. If the halves differ, the step of an element depends on elements of
    other ranks. Step the half as a DTensor too, because DTensor lacks rules for some operators. The learning rate has
    to change weights near 1 visibly.

    Raises:
        Exception: any exception of the optimizer on the whole weight.
    """
    weight, *gradients = torch.randn(1 + _STEPS, *_SHAPE, generator=torch.Generator().manual_seed(0))
    gradients = [10**i * gradient for i, gradient in enumerate(gradients)]  # some clip growing gradients
    whole, state = _stepped(build, weight, gradients)
    mesh = lone_mesh(2)
    for dim in range(weight.dim()):
        halves = [tensor.chunk(2, dim)[0].clone() for tensor in (weight, *gradients)]
        half, _ = _stepped(build, halves[0], halves[1:])
        if not torch.allclose(half, whole.chunk(2, dim)[0], rtol=1e-4, atol=1e-5):
            return "its step of an element depends on other elements of the weight, which other ranks hold"
        if mesh is not None:
            shards = [DTensor.from_local(tensor, mesh, [Shard(dim)], run_check=False) for tensor in halves]
            try:
                _stepped(build, shards[0], shards[1:])
            except Exception as error:
                return f"torch lacks an operator of it for sharded tensors: {' '.join(str(error).split())}"
    for name, value in state.items():
        if type(value) is not torch.Tensor or value.shape != weight.shape and value.numel() != 1:
            return f"its state {name!r} can't be saved, being no plain tensor of the weight's shape or of one element"
    return None


def _stepped(
    build: Callable[[list[nn.Parameter]], Optimizer], weight: torch.Tensor, gradients: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, object]]:
    """Return a copy of the weight after a step on each gradient, and its state."""
    param = nn.Parameter(weight.clone())
    optimizer = build([param])
    with torch.compiler.set_stance("force_eager"):  # torchao's compilation takes longer than all checks
        for gradient in gradients:
            param.grad = gradient.clone()
            optimizer.step()
    return param.detach(), dict(optimizer.state[param])
