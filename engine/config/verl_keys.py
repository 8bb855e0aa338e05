"""The settings of one role: verl's names for them, and how they are merged with ``engine.*``.

A role (actor, reference policy, critic) may be given settings under verl's own names (``fsdp_config``, ``fsdp``,
``ulysses_sequence_parallel_size`` beside them) and under ours (``<role>.engine``). They override ``engine.*``, which
overrides the default. Two of them that contradict each other are refused.

Every key of verl's FSDP engine, actor, reference and critic configs is in one of three tables: taken with its meaning,
without use here (one line says why), or refused because its meaning can't be kept.
``test_role_settings.py`` walks over verl's configs and finds each key in one of them.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ..errors import SettingError, close_matches
from .values import STRATEGY

__all__ = [
    "ENGINE_NO_USE",
    "ENGINE_REFUSED",
    "ENGINE_TAKEN",
    "ROLES",
    "ROLE_NO_USE",
    "ROLE_REFUSED",
    "ROLE_TAKEN",
    "SET_BY_VERL",
    "VERLS_OWN",
    "Role",
    "RoleEngine",
    "check_role_keys",
    "engine_of_role",
    "renamed",
    "tell",
    "without_verls_keys",
]

logger = logging.getLogger("epfsdp2")

_FSDP_STRATEGIES = ("fsdp", "fsdp2", "fsdp_turbo")

# Keys of verl's FSDPEngineConfig that mean the same here.
ENGINE_TAKEN = frozenset(
    {
        "dtype",
        "entropy_checkpointing",
        "entropy_from_logits_chunk_size",
        "entropy_from_logits_with_chunking",
        "forward_only",
        "fsdp_size",
        "full_determinism",
        "mixed_precision",
        "model_dtype",
        "offload_policy",
        "optimizer_offload",
        "pad_to_length",
        "pad_to_length_bucket",
        "param_offload",
        "reshard_after_forward",
        "router_replay",
        "seed",
        "strategy",
        "ulysses_sequence_parallel_size",
        "use_no_sync_for_gradient_accumulation",
        "use_torch_compile",
    }
)
# Keys that this engine has no use for: verl's default, and what happens here.
ENGINE_NO_USE: dict[str, tuple[Any, str]] = {
    "wrap_policy": ({"min_num_params": 0}, "FSDP2 shards each decoder layer here, the embeddings and the head"),
    "forward_prefetch": (False, "layers are gathered ahead as engine.prefetch_depth says"),
    "use_orig_params": (False, "FSDP2 always keeps the original parameters"),
}
# Fields of verl's EngineConfig that its trainer fills in from the role's and the model's settings: no user's under
# engine, and without use in a node of verl's.
SET_BY_VERL = frozenset(
    {
        "use_dynamic_bsz",
        "max_token_len_per_gpu",
        "micro_batch_size_per_gpu",
        "infer_max_token_len_per_gpu",
        "infer_micro_batch_size_per_gpu",
        "use_fused_kernels",
        "use_remove_padding",
    }
)
_BY_VERL = "verl's trainer sets it from the role's and the model's settings, for every engine"
_QAT = "quantisation-aware training is not done by this engine."
# Keys whose meaning can't be kept: the rule, and what works. A value that asks for nothing is taken.
ENGINE_REFUSED: dict[str, tuple[str, str]] = {
    "qat": (_QAT, "{}.enable=False"),
    "turbo_config": (
        "these are settings of verl's strategy fsdp_turbo, which this engine is not.",
        "leave it out; engine.ep_size and engine.fsdp_size say how experts and parameters are sharded",
    ),
}

# Keys beside the engine's node that mean what the engine's setting of this name means.
ROLE_TAKEN = frozenset(
    {
        "entropy_checkpointing",
        "entropy_from_logits_chunk_size",
        "entropy_from_logits_with_chunking",
        "freeze_vision_tower",
        "pad_to_length",
        "ulysses_sequence_parallel_size",
    }
)
_NOWHERE = "verl 0.9 reads it nowhere; ppo_infer_micro_batch_size_per_gpu and log_prob_* are what counts"
ROLE_NO_USE: dict[str, tuple[Any, str]] = {
    "forward_micro_batch_size": (None, _NOWHERE),
    "forward_micro_batch_size_per_gpu": (None, _NOWHERE),
}
ROLE_REFUSED: dict[str, tuple[str, str]] = {
    "qat": (_QAT, "{}.enable=False"),
}
# Keys that verl's trainers, workers and losses read themselves, whatever the engine is.
_VERLS_OWN = """
    calculate_entropy calculate_sum_pi_squared checkpoint clip_ratio clip_ratio_c clip_ratio_high clip_ratio_low
    cliprange_value data_loader_seed enable engine entropy_coeff forward_max_token_len_per_gpu fsdp fsdp_config
    global_batch_info grad_clip kl_loss_coef kl_loss_type log_prob_max_token_len_per_gpu log_prob_micro_batch_size
    log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz loss_agg_mode loss_scale_factor model model_config optim
    policy_loss ppo_epochs ppo_infer_max_token_len_per_gpu ppo_infer_micro_batch_size_per_gpu ppo_max_token_len_per_gpu
    ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_mini_batch_size profiler rollout_n shuffle strategy tau_neg
    tau_pos use_dynamic_bsz use_fused_kernels use_kl_loss use_prefix_grouper use_remove_padding use_rollout_log_probs
    use_torch_compile
"""
VERLS_OWN = frozenset(_VERLS_OWN.split())

# Mappings whose keys count one by one.
_MERGED = ("mixed_precision", "router_replay")


@dataclass(frozen=True)
class Role:
    """The config nodes of a role.

    Args:
        name: the node of its config.
        nodes: the nodes below it that are written as verl's FSDP engine config is.
        forward_only: whether it is never trained.
    """

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
    """The engine's settings of one role.

    Args:
        values: by the name of the engine's setting; what is not in it has its default.
        names: how the user spelled those that were given for the role alone, dotted keys of mappings included.
        notes: lines on what was taken and has no use.
    """

    values: dict[str, Any]
    names: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def engine_of_role(role: Role, settings: dict[str, Any], known: Collection[str]) -> RoleEngine:
    """Merge the engine's settings of a role, and take the keys that name them out of ``settings``.

    Args:
        settings: the role's node. ``shared_engine`` in it is the node ``engine``; ``follows_actor`` what counts for the
            reference policy where it has no setting of its own, as in verl's ``dp_ref.yaml``.
        known: the settings that the engine has.

    Raises:
        SettingError: for an unknown key, one whose meaning can't be kept, or two that contradict each other.
    """
    notes: list[str] = []
    values = without_verls_keys("engine", _mapping("engine", settings.pop("shared_engine", None)), known, notes)
    compiles = settings.get("use_torch_compile") is not False
    weak = {k: v for k, v in (settings.pop("follows_actor", None) or {}).items() if v is not None}
    given: dict[str, tuple[str, Any]] = {}
    for node in ("engine", *role.nodes):
        name = f"{role.name}.{node}"
        entries = without_verls_keys(name, _mapping(name, _pop(settings, node)), known, notes, fsdp=node != "engine")
        for key, value in entries.items():
            _give(given, key, f"{name}.{key}", value)
    for key in sorted(ROLE_TAKEN & set(settings)):
        value = settings.pop(key)
        if value is not None:
            _give(given, key, f"{role.name}.{key}", value)
    if "forward_only" in given and given["forward_only"][1] != role.forward_only:
        spelled, value = given["forward_only"]
        rule = "the reference policy is never trained." if role.forward_only else "this role is trained."
        raise SettingError(spelled, value, rule, "leave it out")
    values.update(weak)
    if not compiles:
        values["use_torch_compile"] = False
    for dotted, (_, value) in given.items():
        key, _, inner = dotted.partition(".")
        if inner:
            old = values.get(key)
            value = {**(old if isinstance(old, Mapping) else {}), inner: value}
        values[key] = value
    values["forward_only"] = role.forward_only
    names = {key: spelled for key, (spelled, _) in given.items()}
    return RoleEngine(values, names, (*notes, *_strategy_of(role, settings)))


def without_verls_keys(
    node: str, settings: Mapping[str, Any], known: Collection[str], notes: list[str], *, fsdp: bool = False
) -> dict[str, Any]:
    """Return the settings of a node that this engine has; note or refuse those that only verl's FSDP engine has.

    Args:
        fsdp: whether the node is verl's, which has no keys of ours.
        notes: gets a line for each setting that is accepted and has no use.

    Raises:
        SettingError: for an unknown key, with the nearest known one; or for one whose meaning can't be kept.
    """
    allowed = ENGINE_TAKEN if fsdp else known
    taken = {}
    for key, value in settings.items():
        name = f"{node}.{key}"
        if key == "_target_":
            continue
        if key == "strategy":
            notes += _strategy(name, value)
        elif key in ENGINE_REFUSED:
            _refuse(name, value, *ENGINE_REFUSED[key])
        elif key in ENGINE_NO_USE:
            notes += _no_use(name, value, *ENGINE_NO_USE[key])
        elif fsdp and key in SET_BY_VERL:
            notes += _no_use(name, value, None, _BY_VERL)
        elif key in allowed:
            taken[key] = value
        else:
            raise _unknown(node, key, value, known, fsdp)
    return taken


def check_role_keys(role: Role, settings: dict[str, Any], known: Collection[str]) -> list[str]:
    """Remove keys without use from a role's node, and refuse unknown ones and those whose meaning can't be kept.

    Returns:
        Lines on what has no use.

    Raises:
        SettingError: for the first wrong key.
    """
    notes = []
    for key in list(settings):
        name = f"{role.name}.{key}"
        if key in ROLE_NO_USE:
            notes += _no_use(name, settings.pop(key), *ROLE_NO_USE[key])
        elif key in ROLE_REFUSED:
            _refuse(name, settings[key], *ROLE_REFUSED[key])
        elif key not in known:
            near = close_matches(key, [*known, *ROLE_TAKEN], most=1, cutoff=0.6)
            works = f"{role.name}.{near[0]}" if near else "leave it out"
            raise SettingError(name, settings[key], "verl has no such setting.", works)
    return notes


def renamed(error: SettingError, names: Mapping[str, str]) -> SettingError:
    """Return the error under the name that the user typed, if the setting was given for one role."""
    node, _, dotted = error.setting.partition(".")
    key = dotted if dotted in names else dotted.partition(".")[0]
    if node != "engine" or key not in names:
        return error
    ours, theirs = f"engine.{key}", names[key]
    works = error.works.replace(f"{ours}=", f"{theirs}=").replace(f"{ours}.", f"{theirs}.")
    return SettingError(theirs + error.setting.removeprefix(ours), error.value, error.rule, works)


@cache
def _told(line: str) -> None:
    logger.warning("epfsdp2: %s", line)


def tell(notes: Collection[str]) -> None:
    """Log each line, once in a process."""
    for line in notes:
        _told(line)


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise SettingError(name, value, "is a mapping of settings.", f"{name}.param_offload=False")
    return value


def _pop(settings: dict[str, Any], dotted: str) -> Any:
    first, _, rest = dotted.partition(".")
    if not rest:
        return settings.pop(first, None)
    if not isinstance(settings.get(first), Mapping):
        return None
    settings[first] = inner = dict(settings[first])
    return _pop(inner, rest)


def _give(given: dict[str, tuple[str, Any]], key: str, spelled: str, value: Any) -> None:
    """Record a setting; refuse one that was given before with another value."""
    if key in _MERGED and isinstance(value, Mapping):
        for inner, entry in value.items():
            _give(given, f"{key}.{inner}", f"{spelled}.{inner}", entry)
        return
    if key in given and given[key][1] != value:
        other, before = given[key]
        rule = f"contradicts {other}={before}, which is the same setting of the same role."
        raise SettingError(spelled, value, rule, f"one of the two, or {spelled}={before}")
    given.setdefault(key, (spelled, value))


def _strategy_of(role: Role, settings: dict[str, Any]) -> list[str]:
    """Check the role's strategy, by which verl chooses the config nodes that it reads itself."""
    value = settings.pop("strategy", STRATEGY)
    if not (isinstance(value, str) and value in (STRATEGY, *_FSDP_STRATEGIES)):
        rule = f"asks for another engine than engine={STRATEGY}."
        raise SettingError(f"{role.name}.strategy", value, rule, f"{role.name}.strategy={STRATEGY}, or leave it out")
    return _strategy(f"{role.name}.strategy", value)


def _strategy(name: str, value: Any) -> list[str]:
    if not (isinstance(value, str) and value in (STRATEGY, *_FSDP_STRATEGIES)):
        raise SettingError(name, value, "this engine has one strategy.", STRATEGY)
    return [] if value == STRATEGY else [f"{name}={value}: engine={STRATEGY} was asked for, and is the one that runs"]


def _no_use(name: str, value: Any, default: Any, means: str) -> list[str]:
    return [] if value in (default, None, {}) else [f"{name}={value} has no use here: {means}"]


def _refuse(name: str, value: Any, rule: str, works: str) -> None:
    asks = value.get("enable", "distributed" in value) if isinstance(value, Mapping) else bool(value)
    if asks:
        text = str(value)  # a plan of a whole model may be in it
        raise SettingError(name, text if len(text) < 80 else f"{text[:80]}...", rule, works.format(name))


def _unknown(node: str, key: str, value: Any, known: Collection[str], fsdp: bool) -> SettingError:
    name, rule = f"{node}.{key}", "the engine has no such setting."
    if fsdp:
        rule = "verl's FSDP engine has no such setting."
        if key in known:
            return SettingError(name, value, rule, f"{node.partition('.fsdp')[0].removesuffix('.model')}.engine.{key}")
        known = {*ENGINE_TAKEN, *ENGINE_NO_USE, *ENGINE_REFUSED, *SET_BY_VERL}
    near = close_matches(str(key), known, most=1, cutoff=0.6)
    return SettingError(name, value, rule, f"{node}.{near[0]}" if near else f"one of: {', '.join(sorted(known))}")
