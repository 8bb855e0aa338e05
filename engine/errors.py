"""The one way in which a wrong setting is reported, and offenders are listed."""

from collections.abc import Sequence

__all__ = ["SettingError", "listed"]


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
    """The first of them and how many there are besides, for an error."""
    more = f"; and {len(offenders) - most} more" if len(offenders) > most else ""
    return "; ".join(offenders[:most]) + more
