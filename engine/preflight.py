"""What can be known to be wrong before a worker is started.

``check_run`` is called on the driver, before Ray starts; ``check_training`` is the part of it that ``sft_trainer``,
which has no driver, can call on each rank before a byte of weights is read. Everything is computed from the model's
``config.json``: it is built on the meta device, which takes a second and no memory.
"""

import importlib.metadata
import logging
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from transformers.initialization import no_init_weights

from .errors import SettingError
from .experts.find import UnsupportedModelError, find_experts
from .loading import open_checkpoint
from .mesh import Topology

__all__ = [
    "ModelFacts",
    "check_attention",
    "check_experts",
    "check_rollout",
    "check_run",
    "check_training",
    "check_versions",
    "inspect_model",
]

logger = logging.getLogger("epfsdp2")

ACTOR_MODEL = "actor_rollout_ref.model"
_BUCKET = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
_SHM = Path("/dev/shm")
# Left free in /dev/shm besides the buckets: verl's and gloo's own segments are small.
_SHM_MARGIN = 64 << 20
# verl's lower bound; our tests run with 2.60. The other ranges are those that our distribution declares.
_RAY = ">=2.41,<3"
_DEFAULT_ATTENTION = "flash_attention_2"  # verl 0.9.1, workers/config/model.py
_DTYPES = {"fp32": torch.float32, "float32": torch.float32, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}
_DTYPES |= {"fp16": torch.float16, "float16": torch.float16}


@dataclass(frozen=True)
class ModelFacts:
    """What the checks need to know of a model.

    Args:
        name: its class.
        experts: number of experts of each experts module, in the model's order.
        largest: name and number of elements of its largest parameter; a fused expert stack counts whole.
        sdpa, flash, flex: attention implementations of transformers that its class supports.
    """

    name: str
    experts: tuple[int, ...]
    largest: tuple[str, int]
    sdpa: bool
    flash: bool
    flex: bool


def check_run(
    engine: Any,
    n_gpus: int,
    model: Mapping[str, Any],
    rollout: Mapping[str, Any],
    *,
    device: str = "cuda",
    ipc: bool = True,
) -> None:
    """All checks of a run of verl's RL trainer.

    Args:
        engine: the engine's settings (``EPFSDP2EngineConfig`` or anything with its fields).
        n_gpus: ranks of the trainer.
        model: verl's model settings.
        rollout: ``name``, ``n_gpus_per_node``, ``backend`` and ``update_weights_bucket_megabytes``.
        device: verl's device name; ``cpu`` where there is no accelerator.
        ipc: whether weights reach vLLM through device memory; through /dev/shm otherwise.

    Raises:
        SettingError: for the first setting that can't work.
    """
    check_versions(rollout.get("name"))
    facts = check_training(engine, n_gpus, model, device=device)
    if not ipc and rollout.get("name") and rollout.get("backend", "naive") == "naive":
        check_rollout(engine, n_gpus, rollout, facts)


def check_training(
    engine: Any, world: int, model: Mapping[str, Any], *, device: str = "cuda", setting: str = ACTOR_MODEL
) -> ModelFacts | None:
    """Checks of the engine and the model, without a rollout.

    Args:
        world: number of ranks.
        setting: how the user calls the model's node: ``model`` in ``sft_trainer``.

    Returns:
        What is known of the model; None if it is not on this machine yet.

    Raises:
        SettingError: for the first setting that can't work.
    """
    topology = Topology.plan(world, engine.ep_size, engine.fsdp_size)
    facts = inspect_model(model, setting)
    if facts is not None:
        check_experts(topology, facts)
        check_attention(model, facts, device=device, setting=setting)
    return facts


def check_versions(rollout_name: str | None) -> None:
    """Refuse a missing verl, Ray or vLLM; warn of versions that nobody tried.

    Raises:
        SettingError: for the first distribution that is missing.
    """
    tested = {"ray": SpecifierSet(_RAY)}
    for line in importlib.metadata.requires("epfsdp2") or []:
        requirement = Requirement(line)
        tested.setdefault(requirement.name, requirement.specifier)
    for name in ("verl", "ray", "torch", "transformers", "vllm"):
        if name == "vllm" and rollout_name != "vllm":
            continue
        version = _version(name)
        if version is None and name == "vllm":
            works = "pip install 'epfsdp2[gpu]', or on a machine without a GPU 'epfsdp2[cpu]'"
            raise SettingError("actor_rollout_ref.rollout.name", "vllm", "vLLM is not installed.", works)
        if version is None:
            raise SettingError(name, None, f"{name} is not installed.", f"pip install '{name}{tested[name]}'")
        if not tested[name].contains(version, prereleases=True):
            logger.warning("epfsdp2: %s %s is untested; tested: %s", name, version, tested[name])


def inspect_model(model: Mapping[str, Any], setting: str = ACTOR_MODEL) -> ModelFacts | None:
    """Read the model's config, build it without weights and count.

    Returns:
        None, with one line of log, if it is not on this machine: a hub id outside the cache, or a remote path.

    Raises:
        SettingError: if there is no such folder, it has no safetensors, the config is wrong, the model is dense, or its
            experts are not on transformers' experts interface.
    """
    path = str(model.get("path"))
    folder = _model_folder(path, f"{setting}.path")
    if folder is None:
        logger.warning("epfsdp2: %s.path=%s is not on this machine yet, so it is not checked", setting, path)
        return None
    built = _build(model, str(model.get("hf_config_path") or folder), setting)
    try:
        experts = find_experts(built)
    except UnsupportedModelError as error:
        works = "a Mixture-of-Experts whose experts are on that interface, e.g. Qwen3-MoE, Mixtral, GLM-4.5 or gpt-oss"
        raise SettingError(f"{setting}.path", path, str(error), works) from None
    return _facts(built, tuple(info.num_experts for info in experts))


def check_experts(topology: Topology, facts: ModelFacts) -> None:
    """``ep_size`` has to divide the number of experts of every layer.

    Raises:
        SettingError: with the values that divide the ranks too.
    """
    for count in sorted(set(facts.experts)):
        if count % topology.ep:
            fits = _divisors(math.gcd(topology.fsdp, *facts.experts))
            raise SettingError(
                "engine.ep_size",
                topology.ep,
                f"has to divide the number of experts of a layer, which is {count} in {facts.name}.",
                f"engine.ep_size= one of {fits}",
            )


def check_attention(
    model: Mapping[str, Any], facts: ModelFacts, *, device: str = "cuda", setting: str = ACTOR_MODEL
) -> None:
    """The attention has to exist for this model on this device, and to keep packed sequences apart.

    Eager attention gets no mask between the sequences of a packed row: they see each other, silently (gpt-oss, packed
    in pairs: log-probs off by 0.95).

    Raises:
        SettingError: with an implementation that works.
    """
    name = f"{setting}.override_config.attn_implementation"
    wanted = str(_overrides(model).get("attn_implementation", _DEFAULT_ATTENTION))
    accelerator = device != "cpu"
    supported = {
        _DEFAULT_ATTENTION: facts.flash and accelerator,
        "sdpa": facts.sdpa,
        "flex_attention": facts.flex and accelerator,
    }
    packs = [option for option, works in supported.items() if works]
    works = f"+{name}={packs[0]}" if packs else f"+{name}=eager with {setting}.use_remove_padding=False"
    kind = _DEFAULT_ATTENTION if "flash" in wanted else wanted.rpartition("|")[2]
    if kind == _DEFAULT_ATTENTION and not accelerator:
        raise SettingError(name, wanted, "flash attention (verl's default) needs an accelerator; here is none.", works)
    if not supported.get(kind, True):
        raise SettingError(name, wanted, f"{facts.name} does not support it in transformers.", works)
    if kind == "eager" and model.get("use_remove_padding", True):
        rule = (
            f"eager attention does not keep packed sequences apart, and {setting}.use_remove_padding=True packs them."
        )
        raise SettingError(name, wanted, rule, works)


def check_rollout(engine: Any, n_gpus: int, rollout: Mapping[str, Any], facts: ModelFacts | None) -> None:
    """Where weights travel through shared memory: the bucket has to hold the largest tensor, and /dev/shm the buckets.

    Each local rank has one bucket. Only this node's /dev/shm can be looked at; the others are taken to be alike.

    Raises:
        SettingError: with a size that works.
    """
    megabytes = int(rollout["update_weights_bucket_megabytes"])
    needed = 1
    if facts is not None:
        name, elements = facts.largest
        nbytes = elements * _DTYPES[engine.model_dtype].itemsize
        needed = -(-nbytes >> 20)
        if nbytes > megabytes << 20:
            raise SettingError(
                _BUCKET,
                megabytes,
                f"the largest tensor, {name}, is {nbytes} bytes in {engine.model_dtype}, and goes through shared "
                "memory in one piece.",
                f"{_BUCKET}={needed}",
            )
    if not _SHM.is_dir():
        return
    ranks = min(n_gpus, int(rollout.get("n_gpus_per_node") or n_gpus))
    free = shutil.disk_usage(_SHM).free
    if ranks * (megabytes << 20) + _SHM_MARGIN > free:
        fits = max(0, free - _SHM_MARGIN) // ranks >> 20
        more = f"a /dev/shm of {-(-(ranks * (needed << 20) + _SHM_MARGIN) >> 20)} MB or more (docker run --shm-size)"
        raise SettingError(
            _BUCKET,
            megabytes,
            f"each of the {ranks} ranks of a node keeps one bucket in {_SHM}, where {free >> 20} MB are free "
            f"({_SHM_MARGIN >> 20} MB of them are kept for others).",
            f"{_BUCKET}={fits}, or less down to {needed}" if fits >= needed else more,
        )


def _version(name: str) -> str | None:
    # The CPU build of vLLM is a distribution of its own.
    for distribution in (name, f"{name}-cpu") if name == "vllm" else (name,):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _model_folder(path: str, setting: str) -> str | None:
    """The local folder with the model's config, or None if there is none yet but may be later."""
    local = os.path.expanduser(path)
    if os.path.isdir(local):
        try:
            checkpoint = open_checkpoint(local)
        except SettingError as error:
            raise SettingError(setting, path, error.rule, error.works) from None
        missing = sorted({file for file in checkpoint.file_of.values() if not (checkpoint.folder / file).is_file()})
        if missing:
            rule = f"its index names {', '.join(missing[:3])}, which {'is' if len(missing) == 1 else 'are'} not there."
            raise SettingError(setting, path, rule, "a complete checkpoint")
        return local
    if "://" in path:
        return None
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", path):
        raise SettingError(
            setting, path, "there is no such folder.", "an existing folder with config.json and *.safetensors"
        )
    cached = try_to_load_from_cache(path, "config.json")
    return os.path.dirname(cached) if isinstance(cached, str) else None


def _build(model: Mapping[str, Any], config_path: str, setting: str) -> nn.Module:
    """The model on the meta device, from its config with the user's overrides."""
    trust = bool(model.get("trust_remote_code", False))
    overrides = _overrides(model)
    # Built with eager attention, which every class has; what it supports is read from the class.
    overrides.pop("attn_implementation", None)
    try:
        config = AutoConfig.from_pretrained(config_path, trust_remote_code=trust, attn_implementation="eager")
        _override(config, overrides)
        # All of it on meta, buffers too: nothing is computed, and a fused stack can be larger than the driver's memory.
        with torch.device("meta"), no_init_weights():
            return _auto_class(config, trust).from_config(config, dtype=torch.float32, trust_remote_code=trust)
    except (OSError, ValueError, TypeError, AttributeError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        rule = f"transformers can't build a model from its config: {type(error).__name__}: {reason}."
        works = f"a config.json of a causal language model; and look at {setting}.override_config"
        raise SettingError(f"{setting}.path", model.get("path"), rule, works) from error


def _auto_class(config: PretrainedConfig, trust: bool) -> Any:
    # As verl's get_hf_auto_model_class chooses.
    remote = getattr(config, "auto_map", None) or {}
    for auto in (AutoModelForImageTextToText, AutoModelForCausalLM):
        if (trust and auto.__name__ in remote) or type(config) in auto._model_mapping:
            return auto
    return AutoModelForCausalLM


def _facts(model: nn.Module, experts: tuple[int, ...]) -> ModelFacts:
    return ModelFacts(
        name=type(model).__name__,
        experts=experts,
        largest=max(((n, p.numel()) for n, p in model.named_parameters()), key=lambda item: item[1]),
        sdpa=bool(getattr(model, "_supports_sdpa", False)),
        flash=bool(getattr(model, "_supports_flash_attn", False)),
        flex=bool(getattr(model, "_supports_flex_attn", False)),
    )


def _overrides(model: Mapping[str, Any]) -> dict[str, Any]:
    overrides = _plain(model.get("override_config") or {})
    return overrides.get("model_config", overrides)


def _override(config: Any, overrides: Mapping[str, Any]) -> None:
    for key, value in overrides.items():
        if isinstance(value, dict):
            _override(getattr(config, key), value)
        else:
            setattr(config, key, value)


def _plain(value: Any) -> Any:
    """omegaconf containers as dicts and lists, without importing omegaconf."""
    if isinstance(value, Mapping):
        return {key: _plain(value[key]) for key in value}
    if hasattr(value, "__iter__") and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
