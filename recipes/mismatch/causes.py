"""Possible causes of a difference, the search for those at work, and the share that each explains.

A cause replaces one thing in the trainer's setup by the rollout's. The search adds the cause that removes most of the
difference, then the one that removes most of the rest, up to three. Their shares are Shapley values, means over all
orders of replacing them. So they sum to the explained part, and equal causes get equal shares.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from .model import ROUNDINGS, ROWS, Setup, TrainerModel
from .sampling import Sampling

__all__ = ["Cause", "Gap", "Report", "causes_of", "explain"]

_MOST, _LEAST = 3, 0.03  # causes found, and the smallest share of the difference that one has to remove
_OTHER_DTYPES = {"float32": ("bfloat16", "float16"), "bfloat16": ("float32", "float16"), "float16": ("float32",)}
_VERL = {"temperature": "1.0", "top_p": "1.0", "top_k": "-1"}  # verl's settings of sampling, and the values to use


@dataclass(frozen=True)
class Cause:
    name: str
    changes: tuple[tuple[str, Any], ...]
    """Fields of ``Setup`` or ``Sampling``, with the rollout's values"""
    setting: str
    """The setting that removes the difference"""

    @property
    def keys(self) -> set[str]:
        return {key for key, _ in self.changes}

    def apply(self, setup: Setup) -> Setup:
        own = {field.name for field in fields(Setup)}
        of_setup = {key: value for key, value in self.changes if key in own}
        of_sampling = {key: value for key, value in self.changes if key not in own}
        return replace(setup, sampling=replace(setup.sampling, **of_sampling), **of_setup)


@dataclass(frozen=True)
class Gap:
    """A difference of log-probs: mean absolute difference, and largest difference of probabilities."""

    mean: float
    largest: float


@dataclass(frozen=True)
class Report:
    gap: Gap
    rest: Gap
    """With all found causes replaced"""
    shares: Mapping[Cause, float]
    """Found causes, largest share first"""
    alone: Mapping[Cause, Gap]
    """Every cause, replaced alone"""


def causes_of(
    model: TrainerModel,
    base: Setup,
    *,
    has_routes: bool,
    has_previous: bool,
    ranks: int,
    sampled: Mapping[str, Iterable[float]],
) -> list[Cause]:
    """List the causes that can be replaced.

    Args:
        ranks: expert-parallel ranks, whose slices are tried one by one.
        sampled: values of the rollout's sampling to try, by field of ``Sampling``.
    """
    found: list[Cause] = []

    def add(name: str, setting: str, **changes: Any) -> None:
        cause = Cause(name, tuple(changes.items()), setting)
        if cause.apply(base) != base:
            found.append(cause)

    if has_routes and model.experts:
        replay = "engine.router_replay.mode=R3 actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
        if base.replay:
            add("routes: the trainer's own choice", "engine.router_replay.mode=disabled", replay=False)
        else:
            add("routes: the rollout's, replayed", replay, replay=True)
    head, router = base.head or base.dtype, base.router or base.dtype
    narrow = base.dtype if base.dtype != "float32" else "bfloat16"
    other = "float32" if head != "float32" else narrow
    setting = "engine.fp32_modules=['lm_head']" if other == "float32" else "engine.fp32_modules without lm_head"
    add(f"dtype of the head: {other}", setting, head=other)
    if model.experts:
        other = "float32" if router != "float32" else narrow
        setting = "engine.fp32_modules=['*.mlp.gate']" if other == "float32" else "engine.fp32_modules without routers"
        add(f"dtype of the routers: {other}", setting, router=other)
    for other in _OTHER_DTYPES[base.dtype]:
        add(
            f"dtype of everything: {other}",
            f"engine.dtype={other}, or actor_rollout_ref.rollout.dtype={base.dtype}",
            **{"dtype": other, "head": "", "router": ""},
        )
    if base.dtype == "float32" and model.has_wide_weights:
        add("weights rounded to bfloat16", "actor_rollout_ref.rollout.dtype=float32", rounding="bfloat16")
    for kind in ROUNDINGS if model.is_quantised else ():
        add(f"weights rounded as in {kind}", "engine.rollout_quantization_aware=True", rounding=kind)
    for key, values in sampled.items():
        for value in values:
            add(f"{key.replace('_', ' ')} {value:g}", _of_sampling(key, base.sampling), **{key: value})
    if has_previous:
        of_step = "trainer.v1.trainer_mode=sync, or algorithm.rollout_correction.rollout_is=token"
        add("weights of the step before", of_step, weights="previous")
        for rank in range(ranks) if model.experts and ranks > 1 else ():
            name = f"experts of rank {rank} of {ranks} not synced"
            add(name, "engine.rollout_sync_verify=-1 names the weight", weights=f"previous {rank}/{ranks}")
    for rows in ROWS:
        setting = f"actor_rollout_ref.model.use_remove_padding={rows == 'packed'}"
        shape = {"packed": "packed rows", "padded": "padded rows", "alone": "each sequence alone"}[rows]
        alone = "engine.batch_invariant=True"
        add(f"micro-batch: {shape}", alone if rows == "alone" else setting, rows=rows)
    return found


def _of_sampling(key: str, trainer: Sampling) -> str:
    if key == "temperature" and trainer.temperature != 1:
        return "actor_rollout_ref.rollout.logprobs_mode=processed_logprobs"
    if key in _VERL:
        return f"actor_rollout_ref.rollout.{key}={_VERL[key]}"
    return f"{key}={getattr(Sampling(), key):g} in the agent's sampling parameters"


def explain(
    measure: Callable[[Sequence[Setup]], Sequence[Gap]],
    base: Setup,
    causes: Sequence[Cause],
    total: Callable[[int], object] = lambda forwards: None,
) -> Report:
    """Find the causes at work.

    Args:
        measure: returns the gap of each setup.
        total: called before each measurement with the number of setups so far.
    """
    known: dict[Setup, Gap] = {}

    def gaps(combinations: Iterable[Sequence[Cause]]) -> list[Gap]:
        setups = []
        for combination in combinations:
            setup = base
            for cause in combination:
                setup = cause.apply(setup)
            setups.append(setup)
        missing = [setup for setup in dict.fromkeys(setups) if setup not in known]
        total(len(known) + len(missing))
        known.update(zip(missing, measure(missing), strict=True))
        return [known[setup] for setup in setups]

    gap, *singles = gaps([(), *((cause,) for cause in causes)])
    alone = dict(zip(causes, singles, strict=True))
    found: list[Cause] = []
    rest = gap
    while len(found) < _MOST and rest.mean > 0:
        taken = {key for cause in found for key in cause.keys}
        left = [cause for cause in causes if not taken & cause.keys]
        after = dict(zip(left, gaps([(*found, cause) for cause in left]), strict=True))
        best = min(after, key=lambda cause: after[cause].mean, default=None)
        if best is None or rest.mean - after[best].mean < _LEAST * gap.mean:
            break
        found, rest = [*found, best], after[best]
    shares = dict.fromkeys(found, 0.0)
    for order in itertools.permutations(found):
        steps = [g.mean for g in gaps([order[:n] for n in range(len(order) + 1)])]
        for cause, before, after_it in zip(order, steps, steps[1:], strict=False):
            shares[cause] += (before - after_it) / gap.mean / math.factorial(len(found))
    largest_first = sorted(shares.items(), key=lambda entry: -entry[1])
    return Report(gap, rest, dict(largest_first), dict(sorted(alone.items(), key=lambda entry: entry[1].mean)))
