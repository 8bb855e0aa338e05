"""The engine's settings: the list, their rules, verl's names for them, and the dataclasses that verl builds.

Hydra finds the targets of ``conf/`` here. They are imported when first asked for, because ``roles`` imports verl and
rooms above the list of settings.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .roles import (
        DriverError,
        EPFSDP2ActorConfig,
        EPFSDP2CriticConfig,
        EPFSDP2EngineConfig,
        actor_config,
        critic_config,
        engine_config,
        engine_settings,
    )

__all__ = [
    "DriverError",
    "EPFSDP2ActorConfig",
    "EPFSDP2CriticConfig",
    "EPFSDP2EngineConfig",
    "actor_config",
    "critic_config",
    "engine_config",
    "engine_settings",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(".roles", __name__), name)
