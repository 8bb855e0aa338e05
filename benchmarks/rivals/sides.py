"""Two ways to train the same model on the same ranks: this engine's core, and transformers' own expert parallelism.

Both start from one checkpoint and step AdamW by torch's fused kernels, with activation checkpointing of whole layers
and gradients clipped by one norm. Neither needs verl, so that both run with the newest transformers.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from epfsdp2.engine.head.causal_head import CausalHead, Wanted
from epfsdp2.engine.optim.clip import ClippedStep
from epfsdp2.engine.optim.multi_optimizer import build_multi_optimizer
from epfsdp2.engine.packing.sequences import PackedSequences
from tests.support.engine.sharded import sharded_model

__all__ = ["OURS", "THEIRS", "Batch", "Ours", "Side", "Theirs", "log_probs_and_entropies", "loss_of"]

OURS, THEIRS = "epfsdp2", "transformers"
LEARNING_RATE, MAX_NORM, ENTROPY = 1e-4, 1.0, 0.01


@dataclass(frozen=True)
class Batch:
    """Sequences of one rank. The loss is of each next token: its log-prob times its advantage, and its entropy.

    Args:
        ids: of each sequence, int64.
        advantages: of each sequence, one less than ids; None for the plain loss of next tokens.
        tokens: of which the loss is a mean, on each rank alike.
    """

    ids: Sequence[torch.Tensor]
    advantages: Sequence[torch.Tensor] | None
    tokens: int


def loss_of(batch: Batch, log_probs: torch.Tensor, entropies: torch.Tensor | None) -> torch.Tensor:
    """The loss of a batch.

    Args:
        log_probs: of each sequence's tokens but the first, one sequence after the other.
        entropies: of the same positions; None where there are no advantages.
    """
    if batch.advantages is None or entropies is None:
        return -log_probs.sum() / batch.tokens
    return -(log_probs * torch.cat([*batch.advantages]) + ENTROPY * entropies).sum() / batch.tokens


def log_probs_and_entropies(logits_TV: torch.Tensor, labels_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the labels' log-probs and the entropies of whole logits, each ``[T]``."""
    log_probs_TV = logits_TV.log_softmax(-1)
    log_probs_T = log_probs_TV.gather(-1, labels_T[:, None])[:, 0]
    return log_probs_T, -(log_probs_TV.exp() * log_probs_TV).sum(-1)


class Side(ABC):
    """A model on this rank, of which one batch after the other is trained on."""

    model: nn.Module

    @abstractmethod
    def loss(self, batch: Batch) -> torch.Tensor:
        """The loss of this rank's sequences; gradients are of its mean over the ranks."""

    @abstractmethod
    def step(self) -> None:
        """Clip the gradients and step the optimizer."""

    def update(self, batch: Batch) -> None:
        self.loss(batch).backward()
        self.step()
        self.model.zero_grad()


class Ours(Side):
    """The model of ``integration/engine.py`` without verl around it: packed rows, and log-probs from the head."""

    def __init__(self, folder: Path, world: int, ep: int):
        self.model, meshes = sharded_model(folder, world, ep, before=self._prepare, checkpointing="full")
        self.model.train()
        self._optimizer = build_multi_optimizer(self.model, _adamw)
        self._clipped = ClippedStep(MAX_NORM, meshes)

    def _prepare(self, model: nn.Module) -> None:
        PackedSequences(model)
        self._head = CausalHead(model)

    def loss(self, batch: Batch) -> torch.Tensor:
        ids = torch.cat([*batch.ids])[None]
        positions = torch.cat([torch.arange(len(each)) for each in batch.ids])[None]
        with_entropy = batch.advantages is not None
        self._head.wanted = Wanted(ids.roll(-1), torch.ones(ids.shape), with_entropy)
        found = self._head.take(self.model(input_ids=ids, position_ids=positions, use_cache=False).logits)
        has_next = torch.cat([torch.arange(len(each)) < len(each) - 1 for each in batch.ids])
        log_probs, entropies = (None if each is None else each[0][has_next] for each in found)
        assert log_probs is not None
        return loss_of(batch, log_probs, entropies)

    def step(self) -> None:
        self._clipped(self._optimizer)


class Theirs(Side):
    """transformers' ``DistributedConfig``, tokens by all-to-all, in a loop of torch's alone.

    Rows are padded at their end, which needs no mask with causal attention: of a packed row transformers' sdpa computes
    all pairs. An optimizer for each mesh can be fused, and so can torch's norm be had of each.
    """

    def __init__(self, folder: Path, world: int, ep: int):
        from transformers.distributed import DistributedConfig

        self.model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="sdpa",
            experts_implementation="grouped_mm",
            distributed_config=DistributedConfig(fsdp_size=world, ep_size=ep, ep_implementation="all_to_all"),
        )
        self.model.train()
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        by_mesh: dict[Any, list[nn.Parameter]] = {}
        for param in self.model.parameters():
            assert isinstance(param, DTensor)
            by_mesh.setdefault(param.device_mesh, []).append(param)
        self._optimizers = [_adamw(params, fused=True) for params in by_mesh.values()]
        self._params = [*by_mesh.values()]

    def loss(self, batch: Batch) -> torch.Tensor:
        rows = nn.utils.rnn.pad_sequence([*batch.ids], batch_first=True)
        lengths = torch.tensor([len(each) for each in batch.ids])
        is_token = torch.arange(rows.shape[1]) < lengths[:, None]
        if batch.advantages is None:
            labels = torch.where(is_token, rows, -100)
            out = self.model(input_ids=rows, labels=labels, use_cache=False, num_items_in_batch=batch.tokens)
            return out.loss  # its sum over as many
        logits = self.model(input_ids=rows, use_cache=False).logits[:, :-1][is_token[:, 1:]]
        return loss_of(batch, *log_probs_and_entropies(logits, rows[:, 1:][is_token[:, 1:]]))

    def step(self) -> None:
        norms = [nn.utils.get_total_norm([p.grad for p in params if p.grad is not None]) for params in self._params]
        norm = torch.stack([each.full_tensor() if isinstance(each, DTensor) else each for each in norms]).norm()
        for params in self._params:
            nn.utils.clip_grads_with_norm_(params, MAX_NORM, norm)
        for optimizer in self._optimizers:
            optimizer.step()


def _adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LEARNING_RATE, **options)
