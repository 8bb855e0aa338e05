"""Compare a small model's gradients on every mesh with one process's, and its weights after a sync."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ...engine.build import shard_and_load
from ...engine.checkpoint.safetensors_reader import open_checkpoint
from ...engine.fsdp.options import ShardingOptions
from ...engine.model.layers import layer_names
from ...engine.model.meta import build_on_meta
from ...engine.optim.clip import clip_grad_norm_
from ...engine.topology.dtensor import local_pieces
from ...engine.topology.mesh import Meshes, Topology, build_meshes, divisors
from ...rollout.layout.specs import Rollout
from ...rollout.sync import RolloutSync, SyncSettings
from ...rollout.transport.report import Traffic
from ..quickstart.model import build_model, build_tokenizer
from .check import Ranks, Row, verdict_of

__all__ = ["judge_gradients", "judge_sync", "measure_gradients", "measure_sync", "topologies"]

_RELATIVE = 1e-5  # largest relative error of a float32 gradient
_MOST_MESHES = 12  # each creates up to four communicators, which hold GPU memory
_TOKENS = 16  # per sequence
_QWEN3_30B = 435  # parameters that a worker of Qwen3-30B-A3B receives (benchmarks/results/scale.md)
_MILLISECONDS = 0.5  # per parameter in a sync; a server's core needs 0.12


def topologies(world: int) -> list[Topology]:
    """Return meshes with every ``ep``: plain, with two replicas, with ``etp`` = 2, with both; at most 12."""
    found = [
        Topology.arrange(world, ep, world // replicas, etp)
        for etp, replicas in ((1, 1), (1, 2), (2, 1), (2, 2))
        if world % replicas == 0
        for ep in divisors(world // replicas)
        if world // replicas // ep % etp == 0
    ]
    return found[:_MOST_MESHES]


def _save_model(folder: Path, world: int, layers: int) -> nn.Module:
    """Save a Qwen3-MoE whose number of experts ``world`` divides; return transformers' own model of it.

    Every rank saves one. transformers 5.19's ``save_pretrained`` writes weights on rank 0 alone.
    """
    experts = world * -(-8 // world)
    sizes = {"num_experts": experts, "moe_intermediate_size": 32, "num_hidden_layers": layers}
    model = build_model(build_tokenizer(), seed=0, **sizes)
    model.config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", experts_implementation="eager"
    )


def _sharded(folder: Path, topology: Topology, device: str) -> tuple[nn.Module, Meshes]:
    meshes = build_meshes(device, topology)
    config = AutoConfig.from_pretrained(folder, attn_implementation="sdpa")
    model = build_on_meta(AutoModelForCausalLM, config, torch.float32)
    options = ShardingOptions(param_dtype=torch.float32)
    shard_and_load(model, open_checkpoint(folder), meshes, options, device=device, device_id=device)
    return model, meshes


def _loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits.float()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def measure_gradients(ranks: Ranks) -> dict[str, float]:
    """Return, by mesh, the largest relative error of this rank's gradient shards and of the gradient norm."""
    ids = torch.randint(32, (2 * ranks.world, _TOKENS), generator=torch.Generator().manual_seed(1)).to(ranks.device)
    ids[:2] = 1  # all tokens of rank 0 choose the same experts, so some experts get no rows
    own, errors = ids[2 * ranks.rank : 2 * ranks.rank + 2], {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = _save_model(folder, ranks.world, layers=2).to(ranks.device).train()
        _loss(plain, ids).backward()
        wanted: dict[str, Any] = {name: param.grad for name, param in plain.named_parameters()}
        norm = nn.utils.get_total_norm(wanted.values())
        for topology in topologies(ranks.world):
            axes = [f"{axis} {size}" for axis, size in topology.expert_axes.items() if size > 1 or axis == "ep"]
            mesh = " x ".join(axes)
            ranks.note(mesh)
            model, meshes = _sharded(folder, topology, ranks.device)
            _loss(model.train(), own).backward()
            found = [
                (values - wanted[name][held.slices]).norm() / wanted[name].norm()
                for name, param in model.named_parameters()
                for held, values in local_pieces(cast(torch.Tensor, param.grad))
            ]
            found.append((clip_grad_norm_(model.parameters(), None, meshes) / norm - 1).abs().to(norm.device))
            errors[mesh] = torch.stack(found).max().item()  # NaN if any error is
    return errors


def judge_gradients(found: list[dict[str, float]], ranks: Ranks) -> Iterator[Row]:
    worst = {mesh: torch.tensor([errors[mesh] for errors in found]).max().item() for mesh in found[0]}
    wrong = {mesh: error for mesh, error in worst.items() if not error < _RELATIVE}
    value = f"{len(worst)} meshes of {ranks.world} ranks, errors up to {max(worst.values()):.0e}"
    if wrong:
        named = [f"{mesh}: {error:.0e}" for mesh, error in list(wrong.items())[:3]]
        value = f"{len(wrong)} of {len(worst)} meshes are wrong: {'; '.join(named)}"
    yield Row("gradients beside one process's", value, f"< {_RELATIVE:.0e}", "wrong" if wrong else "right")


def measure_sync(ranks: Ranks) -> dict[str, Any]:
    """Compare the weights of a full sync with the model's, and time a sync of the workers' parameters."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = _save_model(folder, ranks.world, layers=12 if ranks.has_gpus else 2)
        model, meshes = _sharded(folder, Topology.arrange(ranks.world, ranks.per_node), ranks.device)
    sync = RolloutSync(model, meshes, layer_names(model), {}, SyncSettings("auto", 256 << 20, server="vllm"))
    wanted, differ = plain.state_dict(), []
    for parameter, *_, values in sync.gathered(Traffic(), "merged"):
        if not torch.equal(values.cpu(), wanted.pop(parameter)):
            differ.append(parameter)
    exchange, parameters = sync.exchange(Rollout(1 + (ranks.world % 2 == 0))), []
    seconds = ranks.seconds_of(lambda: parameters.append(sum(1 for _ in exchange.run(sync.values()))))
    return {"differ": [*differ, *wanted], "parameters": parameters[0], "seconds": seconds}


def judge_sync(found: list[dict[str, Any]], ranks: Ranks) -> Iterator[Row]:
    differ = sorted({name for each in found for name in each["differ"]})
    yield Row("weights of a sync", ", ".join(differ[:3]) or "equal", "equal", "wrong" if differ else "right")
    each = max(1e3 * rank["seconds"] / rank["parameters"] for rank in found)
    wanted = _MILLISECONDS if ranks.has_gpus else None
    value = f"{each:.2f} ms a parameter, {each * _QWEN3_30B / 1e3:.2f} s for Qwen3-30B-A3B"
    verdict = verdict_of(-each, wanted and -wanted)
    yield Row("host's part of a sync", value, f"<= {wanted} ms" if wanted else "", verdict)
