"""A causal language model whose head returns log-probs and entropies where it is told the labels, in place of logits.

The forward of the head's module does it, so that FSDP gathers its weights as for any forward, once for each
micro-batch, and what the family's own code does before the head stays. What that code does with logits after the head
would be done to log-probs: where it does anything at all (``why_whole_logits``), logits stay whole.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..wrap_forward import wrap_forward
from .log_probs import log_probs_and_entropy

__all__ = ["CausalHead", "Wanted", "why_whole_logits"]


@dataclass(frozen=True)
class Wanted:
    """What is asked of the head in the place of logits.

    Args:
        labels: a token for each position of the head's input, int64.
        temperature: of each of them, positive.
        with_entropy: whether entropies are wanted too.
    """

    labels: torch.Tensor
    temperature: torch.Tensor
    with_entropy: bool


class CausalHead:
    """The head of a model for which ``why_whole_logits`` is empty, wrapped; before the model is sharded.

    Attributes:
        wanted: of the next forward; None where it is to return logits.
    """

    def __init__(self, model: Any):
        self.wanted: Wanted | None = None
        self._found: torch.Tensor | None = None
        head = model.get_output_embeddings()
        wrap_forward(head, "log_probs", functools.partial(self._forward, head))

    def _forward(self, head: nn.Linear, forward: Callable[..., Any], hidden: torch.Tensor) -> torch.Tensor:
        wanted = self.wanted
        if wanted is None:
            return forward(hidden)
        if wanted.labels.numel() != hidden.shape[:-1].numel():
            raise RuntimeError(
                f"the head got hidden states {tuple(hidden.shape)} for {wanted.labels.numel()} labels: the model's "
                f"forward leaves positions out, which engine.chunked_logits=False allows."
            )
        found = log_probs_and_entropy(
            hidden.flatten(0, -2),
            head.weight,
            head.bias,
            wanted.labels.reshape(-1),
            wanted.temperature.reshape(-1),
            wanted.with_entropy,
        )
        self._found = found.view(*hidden.shape[:-1], -1)
        return self._found

    def take(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs and entropies of the last forward, float32, of the shape of the labels' positions.

        Args:
            logits: what the model returned as such.

        Raises:
            RuntimeError: it is not what its head returned.
        """
        wanted, found, self.wanted, self._found = self.wanted, self._found, None, None
        if wanted is None or found is None or logits is not found:
            raise RuntimeError(
                "the model's forward changed what its head returned, which can't be log-probs then: "
                "engine.chunked_logits=False has it return logits."
            )
        return found[..., 0], found[..., 1] if wanted.with_entropy else None


def why_whole_logits(model: Any) -> str:
    """Return why a head can't return log-probs; empty if it can.

    The model's own forward is run on the meta device with a base model that returns hidden states at once. Its logits
    have to be what the head returned, the same tensor.

    Args:
        model: on the meta device, not sharded.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"its head is a {type(head).__name__}"
    if set(dict(head.named_parameters())) - {"weight", "bias"}:
        return "its head has parameters besides weight and bias"
    base = model.base_model
    base = model.get_decoder() if base is model else base
    hidden = torch.empty(1, 2, head.in_features, dtype=head.weight.dtype, device="meta")
    found = torch.empty(1, 2, 2, device="meta")  # float32, as log-probs are
    calls: list[torch.Size] = []

    def returns_found(states: torch.Tensor) -> torch.Tensor:
        calls.append(states.shape)
        return found

    ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    try:
        with _in_place_of(base, lambda *_, **__: _Outputs(hidden)), _in_place_of(head, returns_found), torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits
    except Exception as error:  # any family's code
        return f"its forward can't be followed: {type(error).__name__}: {error}"
    if logits is not found or calls != [hidden.shape]:
        return f"{type(model).__name__} changes what its head returns"
    return ""


class _Outputs:
    """What a base model returns: hidden states, and nothing of all else."""

    def __init__(self, hidden: torch.Tensor):
        self.last_hidden_state = hidden

    def __getitem__(self, key: int | str) -> torch.Tensor | None:
        return self.last_hidden_state if key in (0, "last_hidden_state") else None

    def __getattr__(self, name: str) -> None:
        return None


@contextmanager
def _in_place_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Give a module another forward for the block; hooks still run."""
    before = vars(module).get("forward")
    module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before  # type: ignore[method-assign]
