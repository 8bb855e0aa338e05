"""A causal language model whose head returns log-probs and entropies of given labels, in place of logits.

The forward of the head's module computes them, so FSDP gathers its weights once per micro-batch as for any forward. If
the family's code changes logits after the head, the head keeps returning whole logits (``why_whole_logits``), because
the code would change log-probs instead. Where it leaves the last logits out (Inkling's vocabulary is padded), the head
leaves out the rows of its weight.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..wrap_forward import wrap_forward
from .log_probs import log_probs_and_entropy

__all__ = ["CausalHead", "Wanted", "why_more_than_the_head", "why_whole_logits"]


@dataclass(frozen=True)
class Wanted:
    """Labels (int64) and positive temperatures, for each position of the head's input, of the log-probs to return."""

    labels: torch.Tensor
    temperature: torch.Tensor
    with_entropy: bool


class CausalHead:
    """Wraps the head of a model for which ``why_whole_logits`` is empty, before the model has hooks or is sharded."""

    def __init__(self, model: Any):
        self.wanted: Wanted | None = None  # of the next forward; None for logits
        self._found: torch.Tensor | None = None
        self._head: nn.Linear = model.get_output_embeddings()
        self._rows = _followed(model)[1].shape[-1]
        wrap_forward(self._head, "log_probs", self._forward)

    def parameters(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weight ``[V, D]`` and the bias ``[V]`` of the model's logits, as they are in a forward."""
        weight, bias = self._head.weight, self._head.bias
        if self._rows == self._head.out_features:
            return weight, bias
        return weight[: self._rows], None if bias is None else bias[: self._rows]

    def _forward(self, forward: Callable[..., Any], hidden: torch.Tensor) -> torch.Tensor:
        wanted = self.wanted
        if wanted is None:
            return forward(hidden)
        if wanted.labels.numel() != hidden.shape[:-1].numel():
            raise RuntimeError(
                f"the head got hidden states {tuple(hidden.shape)} for {wanted.labels.numel()} labels: the model's "
                f"forward leaves positions out. What works: engine.chunked_logits=False."
            )
        labels, temperature = wanted.labels.reshape(-1), wanted.temperature.reshape(-1)
        found = log_probs_and_entropy(
            hidden.flatten(0, -2), *self.parameters(), labels, temperature, wanted.with_entropy
        )
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

    The model's logits have to be what its head returned, or their first columns.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"its head is a {type(head).__name__}"
    if set(dict(head.named_parameters())) - {"weight", "bias"}:
        return "its head has parameters besides weight and bias"
    try:
        _, logits, returned = _followed(model)
    except Exception as error:  # any family's code
        return f"its forward can't be followed: {type(error).__name__}: {error}"
    is_first = logits is returned or (logits._base is returned and logits.storage_offset() == 0)
    if not is_first or logits.stride() != returned.stride() or logits.shape[:-1] != returned.shape[:-1]:
        return f"{type(model).__name__} changes what its head returns"
    return ""


def why_more_than_the_head(model: Any) -> str:
    """Return what a model on the meta device computes logits with besides its head's weight; empty if nothing."""
    if why := why_whole_logits(model):
        return why
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        return "its head has a bias"
    (given, hidden), logits, returned = _followed(model)
    if given is not hidden and given._base is not hidden:
        return f"{type(model).__name__} changes what its head gets"
    return "" if logits is returned else f"{type(model).__name__} leaves out some of what its head returns"


def _followed(model: Any) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Run a model's own forward with stubs in place of the base model and the head, on the meta device.

    Return what the head got and the hidden states ``[1, 2, D]`` that it was computed from, the model's logits, and
    what the head returned, ``[1, 2, V]``.
    """
    head, base = model.get_output_embeddings(), model.base_model
    base = model.get_decoder() if base is model else base
    hidden = torch.empty(1, 2, head.in_features, dtype=head.weight.dtype, device="meta")
    returned = torch.empty(1, 2, head.out_features, device="meta")  # float32, as log-probs are
    given: list[torch.Tensor] = []

    def returns(states: torch.Tensor) -> torch.Tensor:
        given.append(states)
        return returned

    ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    with _in_place_of(base, lambda *_, **__: _Outputs(hidden)), _in_place_of(head, returns), torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    (states,) = given
    if states.shape != hidden.shape:
        raise ValueError(f"the head got {tuple(states.shape)}, of hidden states {tuple(hidden.shape)}")
    return (states, hidden), logits, returned


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
