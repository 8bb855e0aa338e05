"""How a wrong setting is refused, offenders are listed, and a similar name is suggested."""

import difflib
from collections.abc import Iterable, Sequence

__all__ = ["SettingError", "close_matches", "first_of", "listed"]


class SettingError(ValueError):
    """A setting that can't work, in one paragraph: its name, its value, the rule, and what would work.

    Args:
        setting: the name a user types, e.g. ``engine.ep_size``.
        value: what they gave.
        rule: what has to hold, with the numbers that broke it.
        works: a value, or a change, that would work.
    """

    def __init__(self, setting: str, value: object, rule: str, works: str):
        self.setting, self.value, self.rule, self.works = setting, value, rule, works
        super().__init__(f"{setting}={value}: {rule} What works: {works}")

    def __reduce__(self):
        # Ray pickles exceptions by their args; ours has four.
        return type(self), (self.setting, self.value, self.rule, self.works)


def listed(offenders: Sequence[str], most: int = 5) -> str:
    """Format the first offenders and the number of the others, for an error."""
    return "; ".join(first_of(offenders, most))


def first_of(offenders: Sequence[str], most: int = 5) -> list[str]:
    """Return the first offenders, and in an entry of its own the number of the others."""
    more = [f"and {len(offenders) - most} more"] if len(offenders) > most else []
    return [*offenders[:most], *more]


def close_matches(wanted: str, known: Iterable[str], most: int = 3, cutoff: float = 0.3) -> list[str]:
    """Return the known names that are most like ``wanted``, the best first, whatever their case.

    Args:
        cutoff: similarity between 0 and 1 that a name needs (``difflib``).
    """
    by_lower = {name.lower(): name for name in known}
    return [by_lower[name] for name in difflib.get_close_matches(wanted.lower(), by_lower, n=most, cutoff=cutoff)]
