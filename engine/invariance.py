"""Find the first module of a sharded model whose output for a sequence depends on the rest of its row.

Two forwards compute one sequence, alone in a padded row, and among others, which route more tokens to its experts. The
outputs of all modules are compared bit by bit in the order of the forward, so the first name is the cause's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from .errors import SettingError
from .fsdp.after_gather import reshard_all
from .fsdp.ulysses import own_part
from .moe.gemm.backends import ROWS
from .topology.rank_consistency import raise_on_all_ranks

__all__ = ["check_invariance", "first_difference"]

_LENGTH = 11  # of the sequence that is compared
_ALONE, _AMONG = (_LENGTH, 21), (13, _LENGTH, 5, 37, 70, 24)  # lengths in a row; both sums are multiples of ``ROWS``
_IDS = 1000  # random ids are below this number

Outputs = dict[str, tuple[str, list[torch.Tensor]]]
"""FQN of a module to the name of its class and its outputs for the compared sequence, in the order of the calls."""


def check_invariance(model: nn.Module, device: str, sp_group: dist.ProcessGroup | None = None) -> None:
    """Check that a sequence has the same bits in two rows; collective, with two forwards and no gradient.

    Args:
        sp_group: ranks that share rows; None where none do.

    Raises:
        SettingError: ``engine.batch_invariant``, with the module that can't, or on all ranks if some differ.
    """
    found = first_difference(model, device, sp_group)
    with raise_on_all_ranks(device):
        if found is not None:
            rule = f"{found} computes other bits for a sequence when others share its row."
            raise SettingError("engine.batch_invariant", True, rule, "engine.batch_invariant=False")


def first_difference(model: nn.Module, device: str, sp_group: dist.ProcessGroup | None = None) -> str | None:
    """Return the name and class of the first module whose bits differ, None if all are equal; collective."""
    was_training = model.training
    model.eval()
    alone, among = (_outputs(model, lengths, device, sp_group) for lengths in (_ALONE, _AMONG))
    model.train(was_training)
    for name, (kind, tensors) in alone.items():
        others = among[name][1] if name in among else []
        if any(a.shape == b.shape and not torch.equal(a, b) for a, b in zip(tensors, others, strict=False)):
            return f"{name or 'the model'} ({kind})"
    return None


def _outputs(model: Any, lengths: tuple[int, ...], device: str, sp_group: dist.ProcessGroup | None) -> Outputs:
    """Run a row in which the sequence of ``_LENGTH`` tokens has always the same ids.

    In a row that ranks share it is in the slice of the first one, so only that rank compares.
    """
    size, rank = (1, 0) if sp_group is None else (dist.get_world_size(sp_group), dist.get_rank(sp_group))
    tokens, start = sum(lengths), sum(lengths[: lengths.index(_LENGTH)])
    assert tokens % ROWS == 0
    generator = torch.Generator().manual_seed(0)
    compared = _random_ids(model.config, _LENGTH, generator)
    others = _random_ids(model.config, size * tokens - _LENGTH, generator)
    if lengths is _ALONE:
        others.fill_(others[0])  # padding, which goes to few experts
    row = torch.cat((others[:start], compared, others[start:]))[None].to(device)
    lengths = (*lengths, tokens * (size - 1))
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
    found: Outputs = {}
    with _recording(model, found, tokens, slice(start, start + _LENGTH)), torch.no_grad():
        has_tower = hasattr(model.config, "vision_config")
        given = row if has_tower else own_part(row, 1, sp_group)
        model(input_ids=given, position_ids=positions, attention_mask=None, use_cache=False)
    reshard_all(model)
    return found if rank == 0 else {}


def _random_ids(config: Any, count: int, generator: torch.Generator) -> torch.Tensor:
    """Return random ids of plain tokens: special ones stand for images."""
    text = config.get_text_config()
    special = {value for key, value in {**vars(config), **vars(text)}.items() if key.endswith(("_id", "_index"))}
    plain = torch.tensor([token for token in range(min(text.vocab_size, _IDS)) if token not in special])
    return plain[torch.randint(len(plain), (count,), generator=generator)]


@contextmanager
def _recording(model: nn.Module, found: Outputs, tokens: int, compared: slice) -> Iterator[None]:
    """Record the compared rows of outputs that have a dim of ``tokens``, of modules that are called once."""

    def record(name: str, module: nn.Module, output: Any) -> None:
        tensors = []
        for value in tree_leaves(output):
            dim = next((d for d, size in enumerate(getattr(value, "shape", ())) if size == tokens), None)
            if dim is not None:
                tensors.append(value.narrow(dim, compared.start, compared.stop - compared.start).clone())
        kind = type(module).__name__.removeprefix("FSDP")
        found[name] = (kind, [] if name in found else tensors)  # of several calls none is compared

    hooks = [
        module.register_forward_hook(lambda module, _, output, name=name: record(name, module, output))
        for name, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
