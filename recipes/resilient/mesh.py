"""The largest mesh that a run can continue on."""

import math

from ...engine.config.settings import PLANNED, planned_settings
from ...engine.errors import SettingError
from ..plan.cards import config_of
from ..plan.cli import parse, request_of
from ..plan.meshes import Request, choices
from ..plan.roofline import Cluster
from .command import Command

__all__ = ["divides", "largest_mesh"]

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def largest_mesh(command: Command, nodes: int, gib: float) -> tuple[int, list[str]]:
    """Return nodes and settings of the largest mesh on at most these nodes: it divides the batches and fits the plan.

    Meshes of one size: the run's own ``ep_size`` comes first, then the fastest. Raises ``SettingError`` if none fits.
    """
    gpus = command.setting("trainer.n_gpus_per_node", 8)
    own = command.setting("engine.ep_size", 1), command.setting("engine.ulysses_sequence_parallel_size", 1)
    request = _request(command, gib)
    for count in range(nodes, 0, -1):
        found = choices(request, Cluster(nodes=count, gpus=gpus, gib=gib)) if divides(command, count * gpus) else []
        if fitting := [choice for choice in found if choice.fits]:
            best = min(fitting, key=lambda choice: ((choice.topology.ep, choice.sp) != own, choice.sp != own[1]))
            return count, [f"trainer.nnodes={count}", *best.settings]
    rule = (
        f"on no mesh of such nodes, {gpus} GPUs of {gib:g} GiB each, the model fits and the ranks divide the batches."
    )
    raise SettingError("trainer.nnodes", nodes, rule, "more nodes, --gib of larger GPUs, or smaller micro-batches")


def divides(command: Command, world: int) -> bool:
    """Whether the ranks divide the sequences of a step and of a mini-batch, and hold whole rollout replicas."""
    answers, replica = command.setting(f"{_ROLLOUT}.n", 1), 1
    if not command.setting(f"{_ROLLOUT}.nnodes", 0):
        parts = ("tensor_model", "pipeline_model", "data")
        replica = math.prod(command.setting(f"{_ROLLOUT}.{part}_parallel_size", 1) for part in parts)
    sizes = "data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size"
    return world % replica == 0 and all(command.setting(name, 0) * answers % world == 0 for name in sizes)


def _request(command: Command, gib: float) -> Request:
    sequences = command.setting(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", 1)
    tokens = sequences * sum(command.setting(f"data.max_{part}_length", 512) for part in ("prompt", "response"))
    if command.setting(f"{_ACTOR}.use_dynamic_bsz"):
        tokens, sequences = command.setting(f"{_ACTOR}.ppo_max_token_len_per_gpu", 16384), 1
    model = command.setting("actor_rollout_ref.model.path")
    options = parse([f"--model={model}", f"--tokens={tokens}", f"--sequences={sequences}", f"--gib={gib}"])
    options.fused_kernels = bool(command.setting("actor_rollout_ref.model.use_fused_kernels"))
    options.lora_rank = command.setting("actor_rollout_ref.model.lora_rank", 0)
    given = {name: command.setting(f"engine.{name}") for name in PLANNED}
    options.engine = planned_settings({name: value for name, value in given.items() if value is not None})
    return request_of(options, config_of(model))
