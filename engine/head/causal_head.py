"""A causal language model whose head returns log-probs and entropies of given labels, in place of logits.

The forward of the head's module computes them, so FSDP gathers its weights once per micro-batch as for any forward. If
the family's code changes logits after the head, the head keeps returning whole logits (``why_whole_logits``), because
the code would change log-probs instead.
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
    """Labels (int64) and positive temperatures, for each position of the head's input, of the log-probs to return."""

    labels: torch.Tensor
    temperature: torch.Tensor
    with_entropy: bool


class CausalHead:
    """Wraps the head of a model for which ``why_whole_logits`` is empty, before the model is sharded."""

    def __init__(self, model: Any):
        self.wanted: Wanted | None = None  # of the next forward; None for logits
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
                f"forward leaves positions out. What works: engine.chunked_logits=False."
            )
        labels, temperature = wanted.labels.reshape(-1), wanted.temperature.reshape(-1)
        parameters = head.weight, head.bias
        found = log_probs_and_entropy(hidden.flatten(0, -2), *parameters, labels, temperature, wanted.with_entropy)
        self._found = found.view(*hidden.shape[:-1], -1)
        return self._found

    def take(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return log-probs and entropies of the last forward, float32, in the shape of the positions.

        Raises:
            RuntimeError: ``logits`` are not the head's output.
        """
        wanted, found, self.wanted, self._found = self.wanted, self._found, None, None
        if wanted is None or found is None or logits is not found:
            raise RuntimeError(
                "the model's forward changed what its head returned, so the head can't return log-probs. What works: "
                "engine.chunked_logits=False."
            )
        return found[..., 0], found[..., 1] if wanted.with_entropy else None


def why_whole_logits(model: Any) -> str:
    """Return why the head of a model on the meta device can't return log-probs; empty if it can.

    Run the model's own forward with a stub in place of the base model. Its logits have to be the same tensor that the
    head returned.
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


@dataclass
class _Outputs:
    """The output of a base model: hidden states; any other field is None."""

    last_hidden_state: torch.Tensor

    def __getitem__(self, key: int | str) -> torch.Tensor | None:
        return self.last_hidden_state if key in (0, "last_hidden_state") else None

    def __getattr__(self, name: str) -> None:
        return None


@contextmanager
def _in_place_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a module's forward inside the context; hooks still run."""
    before = vars(module).get("forward")
    module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before  # type: ignore[method-assign]
