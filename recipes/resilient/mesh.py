"""The largest mesh that a run can go on with: the plan says that it fits, and the batch and the experts divide."""

from collections.abc import Iterator
from typing import Any

from ...engine.config.settings import PLANNED, planned_settings
from ...engine.errors import SettingError
from ..plan.cards import config_of
from ..plan.cli import parse, request_of
from ..plan.meshes import Choice, Request, choices, smallest
from ..plan.roofline import Cluster
from .command import Command

__all__ = ["divides", "largest_mesh"]

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def largest_mesh(command: Command, nodes: int, gib: float) -> list[str]:
    """Return the settings of the largest mesh on at most so many nodes.

    Of the meshes of one size, that with the run's own ``ep_size`` and sequence parallelism comes first, then the plan's
    order, which is by time.

    Args:
        gib: memory of a GPU.

    Raises:
        SettingError: none fits.
    """
    of_node = int(command.setting("trainer.n_gpus_per_node", 8))
    request = _request(command, gib)
    for count in range(nodes, 0, -1):
        if divides(command, count * of_node):
            for choice in _in_order(command, choices(request, Cluster(nodes=count, gpus=of_node, gib=gib))):
                if choice.fits:
                    return [f"trainer.nnodes={count}", *choice.settings]
    cluster = Cluster(nodes=max(nodes, 1), gpus=of_node, gib=gib)
    larger = smallest(request, cluster)
    works = f"at least {larger[0].nodes} such nodes" if larger else "another model, or smaller micro-batches"
    left = f"such nodes of {of_node} GPUs with {gib:g} GiB are left"
    rule = f"{left}; on no mesh of them the model fits and the ranks divide {_batch(command)}."
    raise SettingError("trainer.nnodes", nodes, rule, works)


def divides(command: Command, world: int) -> bool:
    """Return whether so many ranks share the sequences of a step and of a mini-batch, and hold whole replicas."""
    answers = int(command.setting(f"{_ROLLOUT}.n", 1))
    sizes = [int(command.setting(name, 0)) for name in ("data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size")]
    replica = 1
    if not int(command.setting(f"{_ROLLOUT}.nnodes", 0)):
        parts = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size")
        for name in parts:
            replica *= int(command.setting(f"{_ROLLOUT}.{name}", 1))
    return world % replica == 0 and all(size * answers % world == 0 for size in sizes)


def _batch(command: Command) -> str:
    names = ("data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size", f"{_ROLLOUT}.n")
    size, mini, answers = (command.setting(name, 1) for name in names)
    return f"train_batch_size={size} and ppo_mini_batch_size={mini}, each x rollout.n={answers}"


def _in_order(command: Command, found: list[Choice]) -> Iterator[Choice]:
    own = command.setting("engine.ep_size", 1), command.setting("engine.ulysses_sequence_parallel_size", 1)
    return iter(sorted(found, key=lambda choice: ((choice.topology.ep, choice.sp) != own, choice.sp != own[1])))


def _request(command: Command, gib: float) -> Request:
    length = int(command.setting("data.max_prompt_length", 512)) + int(command.setting("data.max_response_length", 512))
    sequences = int(command.setting(f"{_ACTOR}.ppo_micro_batch_size_per_gpu") or 1)
    tokens = length * sequences
    if command.setting(f"{_ACTOR}.use_dynamic_bsz"):
        tokens, sequences = int(command.setting(f"{_ACTOR}.ppo_max_token_len_per_gpu", 16384)), 1
    model = str(command.setting("actor_rollout_ref.model.path"))
    words = ["--model", model, "--tokens", str(tokens), "--sequences", str(sequences), "--gib", str(gib)]
    options: Any = parse(words)
    options.fused_kernels = bool(command.setting("actor_rollout_ref.model.use_fused_kernels"))
    given = {name: command.setting(f"engine.{name}") for name in PLANNED}
    options.engine = planned_settings({name: value for name, value in given.items() if value is not None})
    options.lora_rank = int(command.setting("actor_rollout_ref.model.lora_rank", 0))
    if command.setting("trainer.device") == "cpu":
        options.reserve = 0.0
    return request_of(options, config_of(model))
