"""Let Hydra find ``engine=epfsdp2`` in verl's configs.

Two things are missing in stock verl. Its search path does not know this package's folder, which a
``SearchPathPlugin`` adds. And ``ppo_trainer.yaml`` has no ``engine`` in its defaults list (only ``model_engine``), so
that Hydra refuses ``engine=...``; therefore verl's folder is served by a ``ConfigSource`` of ours, which adds that one
entry to the list as it is read and lets it decide over ``model_engine``. A second entry, after verl's rollout, is there
for an engine of ours alone: what verl's rollout sets to null can't be set before it. Nothing else of what verl ships is
changed: every stock choice composes to what it was.

Imports Hydra alone: this runs at ``import verl`` in every process.
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

ENGINE = "epfsdp2"
_SCHEME = "epfsdp2"
_RESOLVER = "epfsdp2.model_engine"
_LORA_MODULES = "epfsdp2.lora_modules"
_OF_EXPERTS = {"gate_up_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
_AFTER_ROLLOUT = "after_rollout"
_OPEN_NODES = ("engine", "fsdp_config", "fsdp", "model.fsdp_config")
_HERE = os.path.dirname(os.path.realpath(__file__))
_VERL_MODULE = "verl.trainer.config"
_OTHER_TRAINERS = "verl.experimental."


def install() -> None:
    """Register the resolver, the config source and the search path plug-in; a second call changes nothing."""
    OmegaConf.register_new_resolver(_RESOLVER, _model_engine, replace=True)
    OmegaConf.register_new_resolver(_LORA_MODULES, _lora_modules, replace=True)
    Plugins.instance().register(EPFSDP2ConfigSource)
    Plugins.instance().register(EPFSDP2SearchPath)


class EPFSDP2SearchPath(SearchPathPlugin):
    """Appends this folder, and has verl's folder served by ``EPFSDP2ConfigSource``.

    verl's one-step-off and fully-async trainers have primary configs elsewhere, made of a ``ppo_trainer`` that they
    look for in a checkout (``file://verl/trainer/config``). For them verl's folder is appended: it is found first, and
    without a checkout.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        verl_folder = _verl_config_folder()
        for element in list(search_path.get_path()):
            if element.provider != "main" or element.path is None:
                continue
            if _is_verl(element.path, verl_folder):
                element.path = f"{_SCHEME}://{verl_folder}"
            elif _is_other_trainer(element.path, verl_folder):
                search_path.append("epfsdp2", f"{_SCHEME}://{verl_folder}")
        search_path.append("epfsdp2", f"{_SCHEME}://{_HERE}")


class EPFSDP2ConfigSource(FileConfigSource):
    """Hydra's file source, with two additions: verl's ``engine`` entry, and open nodes for the engine's settings."""

    @staticmethod
    def scheme() -> str:
        return _SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        result = super().load_config(config_path)
        name = self._normalize_file_name(config_path)
        if self.path != _HERE:
            if "/" not in name:
                _add_engine_entry(result.config, name)
        elif name == f"engine/{ENGINE}.yaml":
            # Hydra would answer an unknown key with "Key 'epsize' is not in struct". Let it through: `engine_config`
            # refuses it with the key that was probably meant.
            result.config._set_flag("struct", False)
        else:
            # A role's own settings of the engine: any key of ours or of verl's FSDP engine, checked by `actor_config`.
            for node in _OPEN_NODES:
                opened = OmegaConf.select(result.config, node)
                if opened is not None:
                    opened._set_flag("struct", False)
        return result


def with_engine_entry(defaults: list[Any]) -> list[Any] | None:
    """verl's defaults list with ``engine: null`` in it, and its choices made by ``engine`` before ``model_engine``.

    Returns:
        The new list; or None if the list is not one that can be extended: it knows no ``model_engine``, has an
        ``engine`` already, or no other entry depends on ``model_engine``.
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
            new.append({f"optional {_AFTER_ROLLOUT}": choice})
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
    """Suffixes of the layers that vLLM may adapt; None for all that it can.

    It keeps memory for adapters of each of these, of experts as well, whatever adapters it is given.
    """
    model = OmegaConf.select(_root_, "actor_rollout_ref.model") or {}
    targets, is_merged = model.get("target_modules"), (model.get("lora") or {}).get("merge")
    if not model.get("lora_rank") or is_merged or not isinstance(targets, ListConfig):
        return None
    names = {str(name).rpartition(".")[2] for name in targets}
    if names & _OF_EXPERTS or model.get("target_parameters"):
        names.add("experts")
    return OmegaConf.create(sorted(names))  # a plain list can't take the interpolation's place


def _verl_config_folder() -> str:
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        return ""
    return os.path.realpath(os.path.join(next(iter(spec.submodule_search_locations)), "trainer", "config"))


def _is_verl(path: str, verl_folder: str) -> bool:
    """Whether a search path element is verl's folder: a path, a ``file://`` or, from an imported main, ``pkg://``."""
    scheme, separator, rest = path.partition("://")
    if separator and scheme == "pkg":
        return bool(verl_folder) and rest.replace("/", ".") == _VERL_MODULE
    return bool(verl_folder) and (not separator or scheme == "file") and os.path.realpath(rest or path) == verl_folder


def _is_other_trainer(path: str, verl_folder: str) -> bool:
    """Tell whether a search path element has the primary config of one of verl's trainers outside ``verl.trainer``."""
    scheme, separator, rest = path.partition("://")
    if separator and scheme == "pkg":
        return rest.replace("/", ".").startswith(_OTHER_TRAINERS)
    others = os.path.join(os.path.dirname(os.path.dirname(verl_folder)), *_OTHER_TRAINERS.split(".")[1:])
    here = os.path.realpath(rest or path)
    return bool(verl_folder) and (not separator or scheme == "file") and here.startswith(others)
