"""Let Hydra find ``engine=epfsdp2`` in verl's configs.

A ``SearchPathPlugin`` adds this package's folder to verl's search path. The defaults list of ``ppo_trainer.yaml`` has
``model_engine`` but no ``engine``, so that Hydra refuses ``engine=...``. Therefore a ``ConfigSource`` serves verl's
folder and adds that entry to the list, which then overrides ``model_engine``. It adds a second entry after verl's
rollout, because that sets keys to null which this engine sets. Every stock choice composes as without this package.

Imports Hydra alone, because every process runs this at ``import verl``.
"""

import importlib.util
import os
import sys
from typing import Any

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, ListConfig, OmegaConf

__all__ = ["EPFSDP2ConfigSource", "EPFSDP2SearchPath", "install", "with_engine_entry"]

ENGINE = "epfsdp2"  # also the scheme of the folders that the config source serves
_RESOLVER = "epfsdp2.model_engine"
_OF_EXPERTS = {"gate_up_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
_OPEN_NODES = ("engine", "fsdp_config", "fsdp", "model.fsdp_config")
_HERE = os.path.dirname(os.path.realpath(__file__))


def install() -> None:
    """Register the resolvers, the config source and the search path plug-in; a second call changes nothing."""
    OmegaConf.register_new_resolver(_RESOLVER, _model_engine, replace=True)
    OmegaConf.register_new_resolver("epfsdp2.lora_modules", _lora_modules, replace=True)
    OmegaConf.register_new_resolver("epfsdp2.bitwise", _bitwise, replace=True)
    Plugins.instance().register(EPFSDP2ConfigSource)
    Plugins.instance().register(EPFSDP2SearchPath)


class EPFSDP2SearchPath(SearchPathPlugin):
    """Appends this folder, and serves verl's folder by ``EPFSDP2ConfigSource``.

    verl's one-step-off and fully-async trainers have primary configs in ``verl.experimental``, which look for
    ``ppo_trainer`` in a checkout (``file://verl/trainer/config``). For them verl's folder is appended, so that they
    need no checkout.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        verl_folder = _verl_config_folder()
        others = os.path.join(os.path.dirname(os.path.dirname(verl_folder)), "experimental", "")
        for element in list(search_path.get_path()):
            folder = _folder(element.path) if element.provider == "main" and element.path else ""
            if folder == verl_folder:
                element.path = f"{ENGINE}://{verl_folder}"
            elif folder.startswith(others):
                search_path.append(ENGINE, f"{ENGINE}://{verl_folder}")
        search_path.append(ENGINE, f"{ENGINE}://{_HERE}")


class EPFSDP2ConfigSource(FileConfigSource):
    """Hydra's file source, with verl's ``engine`` entry, and with open nodes for the engine's settings.

    Hydra would refuse an unknown key of a closed node with "Key 'epsize' is not in struct". ``engine_config`` and
    ``actor_config`` refuse it with the nearest known key.
    """

    @staticmethod
    def scheme() -> str:
        return ENGINE

    def load_config(self, config_path: str) -> ConfigResult:
        result = super().load_config(config_path)
        name = self._normalize_file_name(config_path)
        if self.path != _HERE:
            if "/" not in name:
                _add_engine_entry(result.config, name)
        elif name == f"engine/{ENGINE}.yaml":
            result.config._set_flag("struct", False)
        else:
            for node in _OPEN_NODES:
                opened = OmegaConf.select(result.config, node)
                if opened is not None:
                    opened._set_flag("struct", False)
        return result


def with_engine_entry(defaults: list[Any]) -> list[Any] | None:
    """Return verl's defaults list with ``engine: null``, which decides before ``model_engine``.

    None if the list has no ``model_engine``, has an ``engine``, or no other entry depends on ``model_engine``.
    """
    keys = [key for entry in defaults if isinstance(entry, dict) for key in entry]
    if "model_engine" not in keys or any(key.partition("@")[0] == "engine" for key in keys):
        return None
    choice = f"${{{_RESOLVER}:${{engine}},${{model_engine}}}}"
    new: list[Any] = []
    for entry in defaults:
        if isinstance(entry, dict):
            entry = {k: v.replace("${model_engine}", choice) if isinstance(v, str) else v for k, v in entry.items()}
        new.append(entry)
        if isinstance(entry, dict) and "model_engine" in entry:
            new.append({"engine": None})
        if isinstance(entry, dict) and any(key.startswith("rollout@") for key in entry):
            new.append({"optional after_rollout": choice})
    return new if any(choice in str(entry) for entry in new) else None


def _add_engine_entry(config: Any, name: str) -> None:
    if not isinstance(config, DictConfig) or "defaults" not in config:
        return
    plain: Any = OmegaConf.to_container(config, resolve=False)
    extended = with_engine_entry(plain["defaults"])
    if extended is not None:
        config["defaults"] = extended
    elif name == "ppo_trainer.yaml" and f"engine={ENGINE}" in sys.argv:
        print(
            f"epfsdp2: engine={ENGINE} can't be offered, since {name} of the installed verl does not choose its actor, "
            f"ref and critic by model_engine as verl 0.9 does. What works: verl 0.9.1, or model_engine={ENGINE}.",
            file=sys.stderr,
        )


def _model_engine(engine: str | None, model_engine: str) -> str:
    """Return the prefix of the actor, ref and critic configs, which Hydra shows when no such config exists."""
    if engine is None or engine == ENGINE:
        return engine or model_engine
    # Stock verl has no engine group here. Accepting `engine=veomni` would add an `engine` node that nothing reads.
    return f"(engine={engine} is for sft_trainer; here say model_engine={engine} or engine={ENGINE})"


def _lora_modules(_root_: DictConfig) -> ListConfig | None:
    """Return suffixes of the layers with adapters, because vLLM reserves memory for these alone; None for all."""
    model = OmegaConf.select(_root_, "actor_rollout_ref.model") or {}
    targets, is_merged = model.get("target_modules"), (model.get("lora") or {}).get("merge")
    if not model.get("lora_rank") or is_merged or not isinstance(targets, ListConfig):
        return None
    names = {str(name).rpartition(".")[2] for name in targets}
    if names & _OF_EXPERTS or model.get("target_parameters"):
        names.add("experts")
    return OmegaConf.create(sorted(names))  # OmegaConf refuses a plain list as the value of an interpolation


def _bitwise(_root_: DictConfig) -> DictConfig | None:
    """Return what tells vLLM's workers of ``engine.rollout_bitwise`` (``rollout/bitwise/settings.py``)."""
    is_on = OmegaConf.select(_root_, "engine.rollout_bitwise")
    return OmegaConf.create({"epfsdp2_bitwise": True}) if is_on is True else None


def _verl_folder() -> str:
    spec = importlib.util.find_spec("verl")
    return os.path.realpath(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else ""


def _verl_config_folder() -> str:
    return os.path.join(_verl_folder(), "trainer", "config")


def _folder(path: str) -> str:
    """Return the folder of a search path element: a path, ``file://...`` or, from an imported main, ``pkg://verl...``."""
    scheme, separator, rest = path.partition("://")
    if separator and scheme == "pkg":
        package = rest.replace("/", ".").split(".")
        return os.path.join(_verl_folder(), *package[1:]) if package[0] == "verl" else ""
    return os.path.realpath(rest or path) if not separator or scheme == "file" else ""
