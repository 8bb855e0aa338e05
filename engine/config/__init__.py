"""The engine's settings: the list, their rules, verl's names for them, and the dataclasses that verl builds."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Return a config class of ``roles``, or a builder, which ``conf/`` and users' configs name as ``_target_``.

    They are imported here when first used, because ``roles`` imports verl and rooms that import the settings.
    """
    if not name.startswith("EPFSDP2") and not name.endswith("_config"):
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(".roles", __name__), name)
