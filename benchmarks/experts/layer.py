"""One experts layer: its sizes, its inputs from a seed, and one measurement of it.

Imports torch alone, so that the peers (``peers.py``) are measured by the same code in an environment of their own.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["Geometry", "Layer", "kept_bytes", "passes", "seconds_of"]

Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Hidden states ``(T, D)``, experts ``(T, K)`` and their weights ``(T, K)`` to ``(T, D)``."""


@dataclass(frozen=True)
class Geometry:
    """``tokens`` T, ``experts`` E, ``top_k`` K, ``hidden`` D, ``intermediate`` I."""

    name: str
    tokens: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def flops(self) -> float:
        """FLOP of matrix products, forward and backward."""
        return 3 * 2 * self.tokens * self.top_k * 3 * self.hidden * self.intermediate

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden states, experts, weights. A token's experts differ; over tokens they are uniform."""
        generator = torch.Generator(self.device).manual_seed(1)
        options: dict[str, Any] = {"generator": generator, "device": self.device}
        hidden = torch.randn(self.tokens, self.hidden, **options).to(self.torch_dtype)
        scores, index = torch.rand(self.tokens, self.experts, **options).topk(self.top_k, dim=-1)
        weights = (scores / scores.sum(-1, keepdim=True)).to(self.torch_dtype)
        return hidden.requires_grad_(), index, weights.requires_grad_()

    def fill(self, gate_up_E2ID: torch.Tensor, down_EDI: torch.Tensor) -> None:
        """Draw the weights in place."""
        generator = torch.Generator(self.device).manual_seed(0)
        with torch.no_grad():
            gate_up_E2ID.normal_(std=0.02, generator=generator)
            down_EDI.normal_(std=0.02, generator=generator)


def passes(layer: Layer, inputs: tuple[torch.Tensor, ...], parameters: Iterable[nn.Parameter], times: int) -> dict:
    """Mean seconds of a forward, and of a forward and backward; and the norm of what came out."""
    leaves = [*parameters, *(tensor for tensor in inputs if tensor.requires_grad)]
    gradient, marks = torch.ones_like(inputs[0]), []
    for _ in range(times):
        for leaf in leaves:
            leaf.grad = None
        began = _mark(inputs[0])
        out = layer(*inputs)
        between = _mark(inputs[0])
        out.backward(gradient)
        marks.append((began, between, _mark(inputs[0])))
    forward = sum(_seconds(began, between) for began, between, _ in marks)
    total = sum(_seconds(between, ended) for _, between, ended in marks)
    return {"forward": forward / times, "total": (forward + total) / times, "norm": out.detach().float().norm().item()}


def kept_bytes(layer: Layer, inputs: tuple[torch.Tensor, ...], parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of storage that a forward keeps for its backward, besides parameters and inputs."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*parameters, *inputs)}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer(*inputs)
    del out  # until here nothing of it was released, so that no address stands for two
    return sum(kept.values())


def seconds_of(call: Callable[[], object], device: str, repeats: int = 5) -> float:
    """Median of some calls, after one that does not count."""
    like = torch.empty(0, device=device)
    marks = [_mark(like)]
    for _ in range(repeats + 1):
        call()
        marks.append(_mark(like))
    return statistics.median(itertools.starmap(_seconds, itertools.pairwise(marks[1:])))


def _mark(like: torch.Tensor) -> Any:
    """Note the time; on a GPU, where the host is ahead as in a model's step, that of the device."""
    if not like.is_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(began: Any, ended: Any) -> float:
    if isinstance(began, float):
        return ended - began
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3
