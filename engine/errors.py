"""Errors of settings, lists of offenders, and similar names."""

import difflib
from collections.abc import Iterable, Sequence

__all__ = ["SettingError", "close_matches", "first_of", "listed", "nearest"]


class SettingError(ValueError):
    """A setting, by the user's name and value, that breaks a rule, with the numbers; and what would work."""

    def __init__(self, setting: str, value: object, rule: str, works: str):
        self.setting, self.value, self.rule, self.works = setting, value, rule, works
        super().__init__(f"{setting}={value}: {rule} What works: {works}")

    def __reduce__(self):
        # Ray pickles exceptions by their args, here the message alone.
        return type(self), (self.setting, self.value, self.rule, self.works)


def listed(offenders: Sequence[str], most: int = 5) -> str:
    """Format the first offenders and the number of the others, for an error."""
    return "; ".join(first_of(offenders, most))


def first_of(offenders: Sequence[str], most: int = 5) -> list[str]:
    """Return the first offenders, and the number of the others as one more entry."""
    more = [f"and {len(offenders) - most} more"] if len(offenders) > most else []
    return [*offenders[:most], *more]


def close_matches(wanted: str, known: Iterable[str], most: int = 3, cutoff: float = 0.3) -> list[str]:
    """Return the known names that are most similar to ``wanted`` (``difflib``), the best first, ignoring case."""
    by_lower = {name.lower(): name for name in known}
    return [by_lower[name] for name in difflib.get_close_matches(wanted.lower(), by_lower, n=most, cutoff=cutoff)]


def nearest(node: str, key: str, known: Iterable[str]) -> str:
    """Return the dotted name of the known setting of a node that is most similar to ``key``; empty if none is."""
    near = close_matches(key, known, most=1, cutoff=0.6)
    return f"{node}.{near[0]}" if near else ""
