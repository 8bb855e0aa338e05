"""Do all ranks mean the same run? Compared once at the start, before anything hangs on it.

Ranks that disagree about the model or the settings don't fail, they hang: in the first collective whose sizes differ,
or that one of them never issues. So each rank sends digests of what it was given; only where they differ is the rest
sent.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["RankMismatchError", "raise_on_all_ranks", "check_agreement", "model_facts", "without_paths"]

_FIRST = 5  # how many differences an error lists
_SHOWN = 120  # characters of a value


class RankMismatchError(RuntimeError):
    """Ranks were given different models or settings; raised on all of them, with the first differences."""


def check_agreement(
    facts: Mapping[str, Mapping[str, Any]],
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    failure: Exception | None = None,
) -> None:
    """Compare named sections of facts over the ranks of ``group``; collective.

    Args:
        facts: section -> entry -> value; values as ``str`` shows them.
        device: where the group's backend takes tensors from.
        failure: what this rank's own checks raised: a rank that raised it alone would leave the others waiting.

    Raises:
        RankMismatchError: on every rank alike, naming sections, entries, ranks and their values, or what failed where.
        Exception: ``failure``, where all ranks have the same.
    """
    failed = "" if failure is None else f"{type(failure).__name__}: {failure}"
    mine = {section: {str(k): str(v) for k, v in entries.items()} for section, entries in facts.items()}
    digest = hashlib.sha256(json.dumps([failed, mine], sort_keys=True).encode()).digest()
    sent = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, sent, group=group)
    if all(torch.equal(other, received[0]) for other in received):
        if failure is not None:
            raise failure
        return
    everyone: list[Any] = [None] * len(received)
    dist.all_gather_object(everyone, (failed, mine), group=group)
    failures: dict[str, list[int]] = {}
    for rank, (text, _) in enumerate(everyone):
        if text:
            failures.setdefault(text, []).append(rank)
    if failures:
        lines = [f"  {_ranks(ranks)}: {text}" for text, ranks in failures.items()]
        raise RankMismatchError("\n".join(["Some ranks can't run what they are to run:", *lines])) from failure
    differences = _differences([facts for _, facts in everyone])
    raise RankMismatchError("\n".join(["The ranks do not agree on what to run:", *differences]))


@contextlib.contextmanager
def raise_on_all_ranks(device: torch.device | str = "cpu", group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Have all ranks of ``group`` leave the block alike: if one of them fails in it, all raise; collective.

    The block itself must hold no collective, which a rank that fails before it would not take part in.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    check_agreement({}, group, device, failure)


def model_facts(model: nn.Module) -> dict[str, str]:
    """What decides the collectives of a model: class, and shape, dtype and trainability of parameters and buffers.

    The model may be on the meta device.
    """
    facts = {"class": type(model).__name__}
    for name, param in model.named_parameters():
        facts[name] = f"{tuple(param.shape)} {param.dtype} {'trained' if param.requires_grad else 'frozen'}"
    for name, buffer in model.named_buffers():
        facts[name] = f"{tuple(buffer.shape)} {buffer.dtype} buffer"
    return facts


def without_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    """A model config as a mapping, without the folders that it and its parts were read from: nodes differ in them."""
    return {
        key: without_paths(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key != "_name_or_path"
    }


def _differences(everyone: list[dict[str, dict[str, str]]]) -> list[str]:
    """A line for each of the first entries that differ, with the ranks that hold each value."""
    lines = []
    for section in sorted({s for facts in everyone for s in facts}):
        entries = [facts.get(section, {}) for facts in everyone]
        for entry in sorted({e for held in entries for e in held}):
            holders: dict[str, list[int]] = {}
            for rank, held in enumerate(entries):
                holders.setdefault(held.get(entry, "(not there)"), []).append(rank)
            if len(holders) > 1:
                said = "; ".join(f"{value[:_SHOWN]} on {_ranks(ranks)}" for value, ranks in holders.items())
                lines.append(f"  {section}: {entry}: {said}")
    rest = [f"  and {len(lines) - _FIRST} more"] if len(lines) > _FIRST else []
    return lines[:_FIRST] + rest


def _ranks(ranks: list[int]) -> str:
    """``ranks 0, 1, 2, ... (62)``."""
    named = ", ".join(map(str, ranks[:4]))
    return (
        f"rank {named}" if len(ranks) == 1 else f"ranks {named}" + (f", ... ({len(ranks)})" if len(ranks) > 4 else "")
    )
