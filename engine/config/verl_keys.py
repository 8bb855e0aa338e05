"""verl's keys for the engine and its roles, and how the settings of a role are merged with ``engine.*``.

A role (actor, reference policy, critic) may have settings under verl's names (``fsdp_config``, ``fsdp``,
``ulysses_sequence_parallel_size`` beside them) and under ours (``<role>.engine``). They override ``engine.*``, which
overrides the default. Two of them that contradict each other are refused.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import SettingError, nearest
from .settings import SETTINGS
from .values import STRATEGY

__all__ = ["ROLES", "VERL_KEYS", "Role", "RoleEngine", "check_role_keys", "engine_of_role", "known_settings", "renamed"]

_STRATEGIES = (STRATEGY, "fsdp", "fsdp2", "fsdp_turbo")
_MERGED = ("mixed_precision", "router_replay")  # mappings whose keys are merged one by one


@dataclass(frozen=True)
class Key:
    """The engine's use of a key of verl's.

    Args:
        use: ``taken`` with verl's meaning, ``verl's`` own (verl reads or sets it), ``ignored`` with a line of log, or
            ``refused``.
        why: the reason for the log, or the rule of the error.
        default: the value of an ignored key that logs nothing.
        works: a value that works in place of a refused one; ``{}`` is the key's name.
    """

    use: str
    why: str = ""
    default: Any = None
    works: str = ""


def _each(keys: str, key: Key) -> dict[str, Key]:
    return dict.fromkeys(keys.split(), key)


_QAT = Key("refused", "quantisation-aware training is not done by this engine.", works="{}.enable=False")
_NOWHERE = "verl 0.9 reads it nowhere; ppo_infer_micro_batch_size_per_gpu and log_prob_* are what counts"
# Every key of verl's FSDP engine config ("engine"); of its roles' configs, those that our dataclasses lack or refuse.
VERL_KEYS: dict[str, dict[str, Key]] = {
    "engine": {
        **_each(
            """
            dtype entropy_checkpointing entropy_from_logits_chunk_size entropy_from_logits_with_chunking forward_only
            fsdp_size full_determinism mixed_precision model_dtype offload_policy optimizer_offload pad_to_length
            pad_to_length_bucket param_offload reshard_after_forward router_replay seed strategy
            ulysses_sequence_parallel_size use_no_sync_for_gradient_accumulation use_torch_compile
            """,
            Key("taken"),
        ),
        **_each(
            """
            infer_max_token_len_per_gpu infer_micro_batch_size_per_gpu max_token_len_per_gpu micro_batch_size_per_gpu
            use_dynamic_bsz use_fused_kernels use_remove_padding
            """,
            Key("verl's", "verl's trainer sets it from the role's and the model's settings, for every engine"),
        ),
        "wrap_policy": Key(
            "ignored", "FSDP2 shards each decoder layer here, the embeddings and the head", {"min_num_params": 0}
        ),
        "forward_prefetch": Key("ignored", "layers are gathered ahead as engine.prefetch_depth says", False),
        "use_orig_params": Key("ignored", "FSDP2 always keeps the original parameters", False),
        "qat": _QAT,
        "turbo_config": Key(
            "refused",
            "these are settings of verl's strategy fsdp_turbo, which this engine is not.",
            works="leave it out; engine.ep_size and engine.fsdp_size say how experts and parameters are sharded",
        ),
    },
    "role": {
        **_each(
            """
            entropy_checkpointing entropy_from_logits_chunk_size entropy_from_logits_with_chunking freeze_vision_tower
            pad_to_length ulysses_sequence_parallel_size
            """,
            Key("taken"),
        ),
        "use_prefix_grouper": Key(
            "ignored",
            "no engine of verl 0.9 computes a prompt once for its group; verl's older trainer sorts by it",
            False,
        ),
        "use_rollout_log_probs": Key(
            "ignored", "verl 0.9 reads it nowhere; algorithm.rollout_correction.bypass_mode takes the rollout's", False
        ),
        "forward_micro_batch_size": Key("ignored", _NOWHERE),
        "forward_micro_batch_size_per_gpu": Key("ignored", _NOWHERE),
        "qat": _QAT,
    },
}
_BESIDE_THE_NODES = [key for key, verls in VERL_KEYS["role"].items() if verls.use == "taken"]


@dataclass(frozen=True)
class Role:
    """The config node of a role, and the nodes below it that have the keys of verl's FSDP engine config."""

    name: str
    nodes: tuple[str, ...]
    forward_only: bool = False


ROLES = {
    "actor": Role("actor_rollout_ref.actor", ("fsdp_config",)),
    "ref": Role("actor_rollout_ref.ref", ("fsdp_config",), forward_only=True),
    "critic": Role("critic", ("fsdp", "model.fsdp_config")),
}


@dataclass(frozen=True)
class RoleEngine:
    """The engine's settings of one role: ``values`` by name, and lines of log on ignored settings.

    ``names`` has the user's spelling of the settings given for this role, dotted keys of mappings included.
    """

    values: dict[str, Any]
    names: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def engine_of_role(role: Role, settings: dict[str, Any]) -> RoleEngine:
    """Merge the engine's settings of a role, and remove their keys from ``settings``.

    Args:
        settings: the role's node. Its ``shared_engine`` is the node ``engine``; its ``follows_actor`` has the values
            of a reference policy without settings of its own, as in verl's ``dp_ref.yaml``.

    Raises:
        SettingError: for an unknown key, a refused one, or two that contradict each other.
    """
    notes: list[str] = []
    values = known_settings("engine", settings.pop("shared_engine", None), notes)
    values |= {key: value for key, value in (settings.pop("follows_actor", None) or {}).items() if value is not None}
    if settings.get("use_torch_compile") is False:
        values["use_torch_compile"] = False
    given: dict[str, tuple[str, Any]] = {}
    for node in ("engine", *role.nodes):
        name = f"{role.name}.{node}"
        for key, value in known_settings(name, _pop(settings, node), notes, fsdp=node != "engine").items():
            _record(given, key, f"{name}.{key}", value)
    for key in _BESIDE_THE_NODES:
        if (value := settings.pop(key, None)) is not None:
            _record(given, key, f"{role.name}.{key}", value)
    if "forward_only" in given and given["forward_only"][1] != role.forward_only:
        spelled, value = given["forward_only"]
        rule = "the reference policy is never trained." if role.forward_only else "this role is trained."
        raise SettingError(spelled, value, rule, "leave it out")
    for dotted, (_, value) in given.items():
        key, _, inner = dotted.partition(".")
        if inner:
            old = values.get(key)
            value = {**(old if isinstance(old, Mapping) else {}), inner: value}
        values[key] = value
    values["forward_only"] = role.forward_only
    name, rule = f"{role.name}.strategy", f"asks for another engine than engine={STRATEGY}."
    notes += _strategy(name, settings.pop("strategy", STRATEGY), rule, f"{name}={STRATEGY}, or leave it out")
    return RoleEngine(values, {key: spelled for key, (spelled, _) in given.items()}, tuple(notes))


def known_settings(node: str, settings: Any, notes: list[str], *, fsdp: bool = False) -> dict[str, Any]:
    """Return the engine's settings in a node, without keys that the engine ignores.

    Args:
        notes: gets a line of log for each ignored setting.
        fsdp: whether the node is verl's, which has verl's keys alone.

    Raises:
        SettingError: for an unknown key, with the nearest known one, or a refused key.
    """
    if not isinstance(settings, Mapping | None):
        raise SettingError(node, settings, "is a mapping of settings.", f"{node}.param_offload=False")
    taken, keys = {}, VERL_KEYS["engine"]
    for key, value in (settings or {}).items():
        name, verls = f"{node}.{key}", keys.get(key)
        if key == "strategy":
            notes += _strategy(name, value, "this engine has one strategy.", STRATEGY)
        elif verls and (verls.use in ("ignored", "refused") or (fsdp and verls.use == "verl's")):
            notes += _unused(name, value, verls)
        elif key in SETTINGS and (verls or not fsdp):
            taken[key] = value
        elif fsdp and key in SETTINGS:
            ours = f"{node.partition('.fsdp')[0].removesuffix('.model')}.engine.{key}"
            raise SettingError(name, value, "verl's FSDP engine has no such setting.", ours)
        elif key != "_target_":
            known, whose = (keys, "verl's FSDP engine") if fsdp else (SETTINGS, "the engine")
            works = nearest(node, str(key), known) or f"one of: {', '.join(sorted(known))}"
            raise SettingError(name, value, f"{whose} has no such setting.", works)
    return taken


def check_role_keys(role: Role, settings: dict[str, Any], known: Collection[str]) -> list[str]:
    """Remove ignored keys from a role's node, and return lines of log on them.

    Raises:
        SettingError: for the first refused key, or the first that is not ``known``.
    """
    notes = []
    for key in list(settings):
        name, verls = f"{role.name}.{key}", VERL_KEYS["role"].get(key)
        if verls and verls.use in ("ignored", "refused"):
            notes += _unused(name, settings[key], verls)
            if verls.use == "ignored":
                del settings[key]
        elif key not in known:
            works = nearest(role.name, key, [*known, *_BESIDE_THE_NODES]) or "leave it out"
            raise SettingError(name, settings[key], "verl has no such setting.", works)
    return notes


def renamed(error: SettingError, names: Mapping[str, str]) -> SettingError:
    """Return the error with the user's spelling of a setting that was given for one role."""
    node, _, dotted = error.setting.partition(".")
    key = dotted if dotted in names else dotted.partition(".")[0]
    if node != "engine" or key not in names:
        return error
    ours, theirs = f"engine.{key}", names[key]
    works = error.works.replace(f"{ours}=", f"{theirs}=").replace(f"{ours}.", f"{theirs}.")
    return SettingError(theirs + error.setting.removeprefix(ours), error.value, error.rule, works)


def _pop(settings: dict[str, Any], dotted: str) -> Any:
    first, _, rest = dotted.partition(".")
    if not rest:
        return settings.pop(first, None)
    if not isinstance(settings.get(first), Mapping):
        return None
    settings[first] = inner = dict(settings[first])
    return _pop(inner, rest)


def _record(given: dict[str, tuple[str, Any]], key: str, spelled: str, value: Any) -> None:
    """Add a setting to those given for a role; refuse one that has another value there."""
    if key in _MERGED and isinstance(value, Mapping):
        for inner, entry in value.items():
            _record(given, f"{key}.{inner}", f"{spelled}.{inner}", entry)
        return
    if key in given and given[key][1] != value:
        other, before = given[key]
        rule = f"contradicts {other}={before}, which is the same setting of the same role."
        raise SettingError(spelled, value, rule, f"one of the two, or {spelled}={before}")
    given.setdefault(key, (spelled, value))


def _strategy(name: str, value: Any, rule: str, works: str) -> list[str]:
    if not (isinstance(value, str) and value in _STRATEGIES):
        raise SettingError(name, value, rule, works)
    return [] if value == STRATEGY else [f"{name}={value}: engine={STRATEGY} was asked for, and is the one that runs"]


def _unused(name: str, value: Any, key: Key) -> list[str]:
    """Return the line of log for an ignored key; raise for a refused key whose value asks for something."""
    if key.use != "refused":
        return [] if value in (key.default, None, {}) else [f"{name}={value} has no use here: {key.why}"]
    if value.get("enable", "distributed" in value) if isinstance(value, Mapping) else value:
        text = str(value)  # a whole model's plan may be in it
        raise SettingError(name, text if len(text) < 80 else f"{text[:80]}...", key.why, key.works.format(name))
    return []
