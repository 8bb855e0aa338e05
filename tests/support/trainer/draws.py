"""Random combinations of settings, each made of one number."""

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from tests.parity.families import ALL, EVERY, save
from tests.support.models.tiny import save_glm4_moe, save_qwen3_moe
from tests.support.trainer.ppo import PADDED, SAMPLES

__all__ = ["FOUR_RANKS", "Draw", "drawn", "ranks_of", "save_family"]

FOUR_RANKS = 1000
"""Numbers from here on are for four ranks, those below for two."""
_LEAST = 4
_OWN = {"qwen3_moe": save_qwen3_moe, "glm4_moe": save_glm4_moe}
_TIED = "qwen3_moe tied"
_CRITICS = ("qwen3_moe", "mixtral", "qwen2_moe")  # with a class for token classification
_ROUTED_BY_GATE = {"qwen3_moe": False, _TIED: False, "qwen2_moe": False, "glm4_moe": True}
_SHARED = ("glm4_moe", "deepseek_v3")  # experts, called after the others
_FAMILIES = (*_OWN, _TIED, "gemma4", "mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss", "lfm2_moe", "olmoe")
# ep, etp and the ranks of a copy of the model.
_MESHES = {
    2: [(1, 1, -1), (2, 1, -1), (1, 2, -1), (1, 1, 1)],
    4: [(1, 1, 2), (2, 1, -1), (4, 1, -1), (2, 2, -1), (1, 2, -1), (1, 2, 2), (2, 1, 2), (1, 4, -1)],
}
_AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
_LOSSES = ("vanilla", "sapo", "cispo", "dppo_tv", "dppo_kl", "dro", "gpg")


@dataclass(frozen=True)
class Draw:
    """Settings of an update, and what is done with it.

    Args:
        chosen: by name, what is not as the tests have it by default.
        engine, model, optimizer: arguments of ``ppo_worker``, without the mesh.
        actor: of verl's ``ActorConfig``.
        meshes: of each update; where a second one follows, it goes on from a checkpoint.
    """

    number: int
    family: str
    chosen: dict[str, Any]
    engine: dict[str, Any]
    model: dict[str, Any]
    optimizer: dict[str, Any]
    actor: dict[str, Any]
    meshes: list[dict[str, Any]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"draw {self.number}, {self.family}: {self.chosen}"

    @property
    def is_critic(self) -> bool:
        return "critic" in self.chosen

    @property
    def replay(self) -> str:
        return self.chosen.get("router_replay", "")

    @property
    def router_coefs(self) -> tuple[float, float]:
        return self.engine.get("router_aux_loss_coef", 0.0), self.engine.get("router_z_loss_coef", 0.0)

    @property
    def by_sigmoid(self) -> bool:
        return _ROUTED_BY_GATE[self.family]

    @property
    def attention(self) -> str:
        return EVERY[self.family].attention if self.family in EVERY else "sdpa"


def ranks_of(number: int) -> int:
    return 4 if number >= FOUR_RANKS else 2


def save_family(family: str, folder: Path) -> Path:
    """Save the model of a draw, if it is not there yet."""
    if not folder.exists():
        if family == _TIED:
            save_qwen3_moe(folder, tie_word_embeddings=True)
        elif family == "qwen2_moe":  # a key's bias hardly changes attention, so its gradient is rounding errors
            without_bias = replace(ALL[family], sizes={**ALL[family].sizes, "qkv_bias": False})
            with mock.patch.dict(ALL, {family: without_bias}):
                save(family, folder)
        else:
            _OWN[family](folder) if family in _OWN else save(family, folder)
    return folder


def drawn(number: int) -> Draw:
    """Return the draw of a number: at least four settings beside the family, which may be refused together."""
    rng = random.Random(number)
    while True:
        draw = _draw(number, rng)
        if len(draw.chosen) >= _LEAST:
            return draw


def _draw(number: int, rng: random.Random) -> Draw:
    world, family = ranks_of(number), rng.choice(_FAMILIES)
    engine: dict[str, Any] = {}
    model: dict[str, Any] = {}
    optimizer: dict[str, Any] = {"eps": 1e-4}
    actor: dict[str, Any] = {}
    chosen: dict[str, Any] = {}

    def chance(one_in: int) -> bool:
        return rng.randrange(one_in) == 0

    def take(into: dict[str, Any], **values: Any) -> None:
        into.update(values), chosen.update(values)

    ep, etp, replica = rng.choice(_MESHES[world])
    meshes = [{"ep": ep, "etp_size": etp, "fsdp_size": replica}]
    chosen |= {} if (ep, etp, replica) == (1, 1, -1) else meshes[0]
    sp = 1
    if chance(5):
        sp = 2
        take(engine, ulysses_sequence_parallel_size=sp)
    if ep > 1 and chance(2):
        take(engine, dispatch_chunks=rng.choice([2, 3]))
    if ep > 1 and family in _SHARED and chance(2):
        take(engine, overlap_shared_experts=True)
    if family in _CRITICS and chance(3):
        chosen["critic"] = True
    else:
        mode = rng.choice([*[""] * 3, "R2", "R3"])
        if mode:
            chosen["router_replay"] = mode
            engine["router_replay"] = {"mode": mode, "record_file": None, "replay_file": None}
        if chance(2):
            take(actor, loss_agg_mode=rng.choice(_AGGREGATIONS))
        if chance(2):
            take(actor, policy_loss={"loss_mode": rng.choice(_LOSSES), "dro_beta": 0.5})
        if chance(4):
            take(actor, use_kl_loss=True, kl_loss_coef=0.5)
        if chance(3):
            take(actor, entropy_coeff=0.05)
        if chance(3):
            take(engine, chunked_logits=False, **rng.choice([{}, {"entropy_checkpointing": True}]))
            if chance(2):
                take(engine, entropy_from_logits_with_chunking=True, entropy_from_logits_chunk_size=8)
    recomputed = rng.choice(["none", "selective", "full"])
    if recomputed != "none":
        take(engine, activation_checkpointing=recomputed)
        if recomputed == "full" and chance(4):
            take(model, enable_activation_offload=True)
    offload = rng.choice([*[{}] * 3, {"param_offload": True}, {"optimizer_offload": True}, {"offload_policy": True}])
    take(engine, **offload)
    if chance(5):
        take(engine, compile_dense=True)
    if "router_replay" not in chosen and chance(5):
        take(model, **PADDED)
    if chance(5):
        take(engine, pad_to_length=True, pad_to_length_bucket=32)
    if chance(6):
        take(engine, use_no_sync_for_gradient_accumulation=True)
    if chance(4):
        take(engine, reshard_after_forward=False)
    if chance(6):
        take(engine, reshard_experts_after_forward=rng.random() < 0.5)
    if chance(4):
        take(engine, prefetch_depth=rng.choice([0, 2]))
    if chance(6):
        take(engine, expert_shard_dim=1)
    if chance(5):
        take(engine, experts_backend="reference")
    if chance(6):
        take(engine, mixed_precision=None, dtype="fp32")
    if chance(4):
        modules = rng.choice(["all-linear", ["q_proj", "v_proj", "o_proj"], ["gate_up_proj", "down_proj"]])
        take(model, lora_rank=rng.choice([2, 4]), lora_alpha=8, target_modules=modules)
    kind = rng.choice([*["AdamW"] * 3, "SGD", "RMSprop"])
    if kind != "AdamW":
        chosen["optimizer"] = optimizer["optimizer"] = kind
        if kind == "SGD":
            optimizer = {"optimizer": kind, "momentum": 0.5}
    if chance(4):
        chosen["clip_grad"] = optimizer["clip_grad"] = 0.05
    if family in _ROUTED_BY_GATE and chance(3):
        take(engine, router_aux_loss_coef=0.3, router_z_loss_coef=0.05)
        engine["micro_batch"] = SAMPLES * sp // world  # the formula is that of one micro-batch
    elif chance(3):
        take(engine, dynamic=True)
    if chance(3):
        ep, etp, replica = rng.choice(_MESHES[world])
        if "dispatch_chunks" not in engine and "overlap_shared_experts" not in engine or ep > 1:
            meshes.append({"ep": ep, "etp_size": etp, "fsdp_size": replica})
            chosen["resumed on"] = meshes[-1]
    return Draw(number, family, chosen, engine, model, optimizer, actor, meshes)
