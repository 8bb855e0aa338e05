"""Check that all ranks have the same settings and model, and raise errors on all ranks together.

Ranks with different models or settings don't fail, they hang in the first collective that differs. So the ranks compare
digests, and exchange the rest only if these differ.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import first_of

__all__ = ["RankMismatchError", "check_agreement", "gathered", "model_facts", "raise_on_all_ranks", "without_paths"]

_SHOWN = 120  # characters of a value


class RankMismatchError(RuntimeError):
    """Ranks have different models or settings, or some failed; raised on all ranks."""


def check_agreement(
    facts: Mapping[str, Mapping[str, Any]],
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    failure: Exception | None = None,
) -> None:
    """Compare facts, section -> entry -> value, by ``str`` over the ranks of ``group``; collective.

    ``failure`` is the error of this rank's own checks; if it raised alone, the other ranks would hang.

    Raises:
        RankMismatchError: on every rank, with the first differences, or the failures and their ranks.
        Exception: ``failure``, if it is the same on all ranks.
    """
    failed = "" if failure is None else f"{type(failure).__name__}: {failure}"
    mine = {f"{section}: {entry}": str(value) for section in facts for entry, value in facts[section].items()}
    digest = hashlib.sha256(json.dumps([failed, mine], sort_keys=True).encode()).digest()
    sent = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, sent, group=group)
    if all(torch.equal(other, received[0]) for other in received):
        if failure is not None:
            raise failure
        return
    everyone = gathered((failed, mine), group)
    failures: dict[str, list[int]] = {}
    for rank, (text, _) in enumerate(everyone):
        if text:
            failures.setdefault(text, []).append(rank)
    if failures:
        lines = [f"  {_ranks(ranks)}: {text}" for text, ranks in failures.items()]
        raise RankMismatchError("\n".join(["Some ranks failed:", *lines])) from failure
    differences = first_of(_differences([held for _, held in everyone]))
    raise RankMismatchError("\n  ".join(["The ranks do not agree:", *differences]))


@contextlib.contextmanager
def raise_on_all_ranks(device: torch.device | str = "cpu", group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise on every rank of ``group`` if any rank raises inside the block; collective.

    The block must not contain collectives, because other ranks would wait in them for a rank that failed.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    check_agreement({}, group, device, failure)


def gathered(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the objects of all ranks of ``group``, in the order of the ranks; collective."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group)
    return everyone


def model_facts(model: nn.Module) -> dict[str, str]:
    """Return all that a model's collectives depend on: class, and shape, dtype and trainability of its tensors."""
    facts = {"class": type(model).__name__}
    for name, param in model.named_parameters():
        facts[name] = f"{tuple(param.shape)} {param.dtype} {'trained' if param.requires_grad else 'frozen'}"
    for name, buffer in model.named_buffers():
        facts[name] = f"{tuple(buffer.shape)} {buffer.dtype} buffer"
    return facts


def without_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model config without the folders it was read from, which differ among nodes."""
    kept = {key: value for key, value in config.items() if key != "_name_or_path"}
    return {key: without_paths(value) if isinstance(value, Mapping) else value for key, value in kept.items()}


def _differences(everyone: list[dict[str, str]]) -> list[str]:
    """Format a line for each entry that differs, with each value's ranks."""
    lines = []
    for entry in sorted({entry for held in everyone for entry in held}):
        holders: dict[str, list[int]] = {}
        for rank, held in enumerate(everyone):
            holders.setdefault(held.get(entry, "(not there)"), []).append(rank)
        if len(holders) > 1:
            values = "; ".join(f"{value[:_SHOWN]} on {_ranks(ranks)}" for value, ranks in holders.items())
            lines.append(f"{entry}: {values}")
    return lines


def _ranks(ranks: list[int]) -> str:
    """Format ranks as ``ranks 0, 1, 2, 3, ... (62)``."""
    named = ", ".join(map(str, ranks[:4])) + (f", ... ({len(ranks)})" if len(ranks) > 4 else "")
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"
