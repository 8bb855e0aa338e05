"""The trainer's side: one Hugging Face model whose dtypes, weights, routes and rows can be changed between forwards."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM

from ...engine.config.values import DTYPES
from ...engine.model.meta import kept_in_float32
from ...engine.moe.find import find_experts
from ...engine.moe.router.replay import RouterReplay
from ...engine.quantise.schemes import scheme_of
from ...rollout.layout.rollout_config import BLOCK
from ...rollout.servers import is_quantised
from .rollouts import Response, RolloutError
from .sampling import PLAIN, Sampling, processed_log_probs

__all__ = ["ROUNDINGS", "ROWS", "Setup", "TrainerModel"]

ROWS = ("packed", "padded", "alone")
ROUNDINGS: dict[str, Any] = {"fp8": "", "fp8 by rows": "fp8", "int8 by rows": "int8"}
"""Kinds of quantised rollouts, with the scale of ``scheme_of``."""


@dataclass(frozen=True)
class Setup:
    """One way to compute the log-probs of responses."""

    dtype: str = "bfloat16"
    head: str = ""
    """dtype of the head; empty for ``dtype``"""
    router: str = ""
    weights: str = ""
    """``previous``, ``previous 3/8`` for the experts of expert-parallel rank 3 of 8, or empty for the checkpoint's"""
    rounding: str = ""
    """A key of ``ROUNDINGS``, ``bfloat16``, or empty"""
    replay: bool = False
    rows: str = "packed"
    sampling: Sampling = field(default=PLAIN)

    @property
    def forward(self) -> tuple[Any, ...]:
        """Everything that logits depend on, weights first, so that sorted forwards change weights rarely."""
        return self.weights, self.rounding, self.dtype, self.head, self.router, self.replay, self.rows


class TrainerModel:
    """A model on one device, and its weights and those of an earlier step on the CPU.

    Args:
        folder, previous: Hugging Face models in safetensors.
        tokens: of a row, or of a padded micro-batch.
        server: verl's name of the rollout, which decides the weights that it quantises.

    Raises:
        RolloutError: the two models differ in a shape.
        UnsupportedModelError: the experts are not known (``find_experts``).
    """

    def __init__(self, folder: Path, previous: Path | None, device: str, tokens: int, server: str = "vllm"):
        self.model = model = _loaded(folder, device)
        self._device, self._tokens, self._server = torch.device(device), tokens, server
        self._trained = _weights(model)
        self._previous = None if previous is None else _weights(_loaded(previous, "cpu"))
        for name, value in (self._previous or {}).items():
            if name not in self._trained or self._trained[name].shape != value.shape:
                raise RolloutError(f"{previous} holds another model than {folder}: {name} is {tuple(value.shape)}.")
        for module in model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to(self._device))
        config = model.config.get_text_config()
        self.family, self.vocabulary = model.config.model_type, model.get_input_embeddings().weight.shape[0]
        self.experts = find_experts(model)
        layers = config.num_hidden_layers
        self._replay = RouterReplay(model, self.experts, layers) if self.experts else None
        self._head, self._kept = model.get_output_embeddings(), kept_in_float32(model)
        self._routers = [
            child
            for info in self.experts
            for child in model.get_submodule(info.block).children()
            if any(p.dim() == 2 and p.shape[0] == info.num_experts for p in child.parameters(recurse=False))
        ]
        for module in (self._head, *self._routers):
            module.register_forward_pre_hook(_cast_input)
        self._weights_now: tuple[str, ...] | None = None

    @property
    def has_wide_weights(self) -> bool:
        """Whether the checkpoint's weights are float32, and not values of bfloat16."""
        return any(w.dtype == torch.float32 and bool((w != w.bfloat16()).any()) for w in self._trained.values())

    @property
    def is_quantised(self) -> bool:
        """Whether it is known which weights a quantised rollout of this family quantises."""
        return any(is_quantised(self.family, name, self._server) for name in self._trained)

    def expert_ranks(self, wanted: int) -> int:
        """Return the largest number of expert-parallel ranks, at most ``wanted``, that divides each layer's experts."""
        fits = (n for n in range(max(wanted, 1), 0, -1) if all(info.num_experts % n == 0 for info in self.experts))
        return next(fits) if self.experts else 1

    @torch.no_grad()
    def log_probs(self, setups: Sequence[Setup], responses: Sequence[Response]) -> list[list[torch.Tensor]]:
        """Return float32 log-probs ``[R]`` of each response on the CPU, for setups that share their ``forward``."""
        first = setups[0]
        self._fill(first)
        found: dict[int, list[torch.Tensor]] = {}
        for batch in self._batches(first.rows, responses):
            members = [responses[i] for i in batch]
            for i, logits in zip(batch, self._logits(first, members), strict=True):
                prompt, response = (ids.to(self._device) for ids in (responses[i].prompt, responses[i].response))
                found[i] = [processed_log_probs(logits, prompt, response, s.sampling).cpu() for s in setups]
        return [[found[i][place] for i in range(len(responses))] for place in range(len(setups))]

    def _batches(self, rows: str, responses: Sequence[Response]) -> Iterator[list[int]]:
        """Yield the responses of each micro-batch by number, in order."""
        batch: list[int] = []
        for i in range(len(responses)):
            lengths = [len(responses[j].prompt) + len(responses[j].response) for j in (*batch, i)]
            size = sum(lengths) if rows == "packed" else max(lengths) * len(lengths)
            if batch and (rows == "alone" or size > self._tokens):
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def _logits(self, setup: Setup, members: Sequence[Response]) -> Iterator[torch.Tensor]:
        """Yield the logits ``[R, V]`` that each response of a micro-batch is sampled from."""
        ids, is_padded = [torch.cat([r.prompt, r.response]) for r in members], setup.rows == "padded"

        def together(parts: Any) -> torch.Tensor:
            parts = list(parts)
            joined = pad_sequence(parts, batch_first=True) if is_padded else torch.cat(parts)[None]
            return joined.to(self._device)

        if setup.replay and self._replay is not None:
            self._replay.replay(together(r.routes for r in members).flatten(0, 1))
        elif self._replay is not None:
            self._replay.stop()
        ranges = {"attention_mask": map(torch.ones_like, ids)} if is_padded else {"position_ids": map(_positions, ids)}
        inputs = {"input_ids": together(ids)} | {name: together(parts) for name, parts in ranges.items()}
        logits = self.model(**inputs, use_cache=False).logits
        before = 0
        for row, (own, r) in enumerate(zip(ids, members, strict=True)):
            first = before + len(r.prompt) - 1
            yield logits[row if is_padded else 0, first : first + len(r.response)]
            before += 0 if is_padded else len(own)

    def _fill(self, setup: Setup) -> None:
        """Give the model the weights of a setup, in its dtypes."""
        wanted = (setup.weights, setup.rounding, setup.dtype, setup.head, setup.router)
        if wanted == self._weights_now:
            return
        slices = self._slices_before(setup.weights)
        dtypes = dict.fromkeys(self._routers, setup.router) | {self._head: setup.head}
        for fqn, module in self.model.named_modules():
            for name, _ in list(module.named_parameters(recurse=False)):
                whole = f"{fqn}.{name}" if fqn else name
                dtype = torch.float32 if self._kept.search(whole) else DTYPES[dtypes.get(module) or setup.dtype]
                value = self._rounded(whole, slices.get(whole, self._trained[whole]), setup.rounding)
                setattr(module, name, nn.Parameter(value.to(self._device, dtype), requires_grad=False))
        self._weights_now = wanted

    def _slices_before(self, weights: str) -> dict[str, torch.Tensor]:
        """Return the weights that the earlier step replaces, by name."""
        if not weights:
            return {}
        assert self._previous is not None, "without the earlier step there is no such cause"
        if weights == "previous":
            return self._previous
        rank, ranks = map(int, weights.removeprefix("previous ").split("/"))
        mixed = {}
        for info in self.experts:
            each = info.num_experts // ranks
            for name, dim in info.ep_dims.items():
                whole = f"{info.fqn}.{name}"
                mixed[whole] = value = self._trained[whole].clone()
                value.narrow(dim, rank * each, each).copy_(self._previous[whole].narrow(dim, rank * each, each))
        return mixed

    def _rounded(self, name: str, value: torch.Tensor, rounding: str) -> torch.Tensor:
        if rounding == "bfloat16" and value.is_floating_point():
            return value.bfloat16()
        if rounding in ROUNDINGS and is_quantised(self.family, name, self._server):
            value = value.to(self._device, torch.bfloat16, copy=True)
            scheme_of(BLOCK, ROUNDINGS[rounding]).round_in_place(value)
        return value


def _positions(ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(ids))


def _cast_input(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (args[0].to(next(module.parameters()).dtype), *args[1:])


def _loaded(folder: Path, device: str) -> Any:
    """Load a model on the CPU in the widest dtype that is stored, which its config may not have."""
    stored = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            stored |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118, it is no mapping
    dtype = torch.bfloat16 if stored <= {"BF16"} else torch.float32
    config = AutoConfig.from_pretrained(folder, attn_implementation="sdpa")
    load = functools.partial(AutoModelForCausalLM.from_pretrained, folder, config=config, dtype=dtype)
    # grouped_mm needs sizes that are multiples of 16 bytes, and a GPU to be faster.
    return (load(experts_implementation="eager") if device == "cpu" else load()).eval()


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in model.named_parameters(remove_duplicate=False)}
