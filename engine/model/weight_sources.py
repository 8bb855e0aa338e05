"""Find which tensors of a Hugging Face checkpoint make each tensor of a model, by their names alone.

Names and layouts come from transformers' own weight converters (``core_model_loading.py``).
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn

from ..compat.transformers_names import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    get_model_conversion_mapping,
    renamed,
)
from .hf_convert import converter_targets

__all__ = ["Source", "list_numbers", "match_sources", "tied_names"]

_NUMBERS = re.compile(r"(\d+)")


@dataclass
class Source:
    """The tensors of a checkpoint that one tensor of the model is made of: one, or the lists that a converter joins.

    Args:
        part: the index of the tensor among the converter's targets.
        keys: (source pattern of the converter, checkpoint key), in natural order.
    """

    converter: WeightConverter | None = None
    part: int = 0
    keys: list[tuple[str | None, str]] = field(default_factory=list)

    def by_pattern(self) -> dict[str | None, list[str]]:
        found: dict[str | None, list[str]] = {}
        for pattern, key in self.keys:
            found.setdefault(pattern, []).append(key)
        return found

    def rivals(self) -> tuple[str, str] | None:
        """Return two keys of which one would be dropped, such as an older and a newer name of one tensor."""
        of_converter = [None] if self.converter is None else self.converter.source_patterns
        for pattern, keys in self.by_pattern().items():
            if pattern not in of_converter:
                return self.keys[0][1], keys[0]
            if len(keys) > 1 and (pattern is None or list_numbers(keys) is None):
                same: dict[tuple[str, ...], list[str]] = {}
                for key in keys:
                    same.setdefault(tuple(_NUMBERS.findall(key)), []).append(key)
                first, second, *_ = max(same.values(), key=len) if len(same) < len(keys) else keys
                return first, second
        return None


def list_numbers(keys: Sequence[str]) -> list[int] | None:
    """Return the number of each key, which is all that differs among them; None where anything else does."""
    parts = [_NUMBERS.split(key) for key in keys]
    if len({len(of_key) for of_key in parts}) > 1:
        return None
    varying = [column for column in zip(*parts, strict=True) if len(set(column)) > 1]
    if len(varying) != 1 or not all(part.isdigit() for part in varying[0]):
        return None
    return [int(part) for part in varying[0]]


def match_sources(model: nn.Module, keys: Iterable[str]) -> dict[str, Source]:
    """Map each of a model's names, and each name that it does not have, to the checkpoint's tensors of that name.

    A checkpoint may have any one of tied weights; all of them load it, as in ``from_pretrained``.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    prefix, known = str(model.base_model_prefix), model.state_dict()

    sources: dict[str, Source] = {}
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = renamed(key, renamings, converters, prefix, known)
        if name not in known and key in known:
            name, pattern = key, None
        converter = by_pattern[pattern] if pattern is not None else None
        for part, target in enumerate(converter_targets(name, converter)):
            sources.setdefault(target, Source(converter, part)).keys.append((pattern, key))
    for first, *others in tied_names(model):
        stored = [name for name in others if name in sources]
        if first not in sources and stored:
            sources[first] = sources.pop(stored[0])
    return sources


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return the names of each group of tied parameters, first the name that ``named_parameters`` yields.

    On the meta device they may be not tied yet: then ``all_tied_weights_keys`` of transformers has the groups.
    """
    tied_to = getattr(model, "all_tied_weights_keys", {})
    groups: dict[str, list[str]] = {}
    group_of: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        group = group_of.setdefault(id(param), tied_to.get(name, name))
        groups.setdefault(group, []).append(name)
    return [names for names in groups.values() if len(names) > 1]
