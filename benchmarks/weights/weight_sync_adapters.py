"""Adapters alone into vLLM: a sync of the base, then syncs of adapters of rank 32, on the models of ``weight_sync.py``.

Two trainer ranks with ``ep_size=2`` have adapters on the linears of attention, for which vLLM's CPU build has kernels.
``lora.merge=False``: vLLM computes with the adapters. Bytes are counted at one worker.
"""

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.tables import markdown
from benchmarks.weights.into_vllm import WORLD, seconds_of_syncs, send_together
from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.fsdp.wrap_plan import compute_dtypes
from epfsdp2.engine.lora.adapters import A, B, Lora, lora_of
from epfsdp2.engine.lora.peft_files import adapter_config
from epfsdp2.engine.lora.rollout_names import RolloutNames
from epfsdp2.engine.lora.settings import LoraSettings
from epfsdp2.engine.model.layers import layer_names
from epfsdp2.engine.model.meta import build_on_meta
from epfsdp2.engine.topology.dtensor import is_adapter
from epfsdp2.recipes.plan.cards import config_of
from epfsdp2.rollout.layout.specs import Rollout
from epfsdp2.rollout.sync import RolloutSync, SyncSettings
from epfsdp2.rollout.vllm.names import ADAPTED_AS_STACKS
from tests.support.engine.sharded import sharded_model

__all__ = ["MOST_OF_BASE", "RANK", "holds", "run", "section", "share"]

RANK = 32
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
MOST_OF_BASE = 0.02  # bytes of the adapters over those of the base
LARGE = "Qwen3-30B-A3B"  # of which shares are computed
COLUMNS = ["rollout", "sync", "MB", "of the base", "end to end s", "of the base"]


def _settings(targets: str | tuple[str, ...] = TARGETS) -> LoraSettings:
    return LoraSettings("model", RANK, RANK, targets)


def ranks(tp: int, handles: list[str], folder: Path, turns: int, megabytes: int, out: Path) -> None:
    """Send the base and then the adapters so many times; write when each sync began, and its bytes."""
    options = {"param_dtype": torch.bfloat16}
    model, meshes = sharded_model(
        folder,
        WORLD,
        2,
        before=lambda model: Lora(model, _settings()),
        initialize=lambda name, tensor, fits: is_adapter(name),
        finish=lambda model: lora_of(model).initialize(model, 0),
        **options,
    )
    dtypes = compute_dtypes(model, ShardingOptions(**options))
    sync = RolloutSync(model, meshes, layer_names(model), dtypes, SyncSettings("auto", megabytes << 20))
    base = sync.weights("left out").for_worker("sliced", Rollout(tp))
    began, sent = [], []
    for weights in (base, *(sync.weights("alone").for_worker("full", Rollout()) for _ in range(turns))):
        at, stats = send_together(weights.tensors(), handles, megabytes)
        began.append(at)
        sent.append(stats.nbytes)
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"began": began, "sent": sent}))


def run(model: dict[str, Any], tp: int, repeats: int, megabytes: int) -> list[dict]:
    """Rows of the base and of the adapters at one rollout TP; the first sync of adapters warms up."""
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name) / "model", Path(name) / "figures.json"
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**model)).float().save_pretrained(folder)
        meta = build_on_meta(AutoModelForCausalLM, AutoConfig.from_pretrained(folder), torch.float32)
        config = adapter_config(Lora(meta, _settings()), str(folder))
        lora = {"enable_lora": True, "max_lora_rank": RANK, "lora_target_modules": list(TARGETS)}
        stages = [False, *[True] * (repeats + 1)]
        syncs = [{"peft_config": config, "base_sync_done": done} for done in stages]
        figures, took = seconds_of_syncs(folder, tp, syncs, ranks, folder, repeats + 1, megabytes, out=out, **lora)
    found = {"base": (figures["sent"][0], took[0]), "adapters": (figures["sent"][-1], statistics.median(took[2:]))}
    return [
        {
            "tp": tp,
            "sync": sync,
            "bytes": nbytes,
            "of_bytes": nbytes / found["base"][0],
            "seconds": seconds,
            "of_seconds": seconds / found["base"][1],
        }
        for sync, (nbytes, seconds) in found.items()
    ]


def share(targets: str | tuple[str, ...]) -> float:
    """Return the bytes of a model's adapters, in vLLM's layout, over the model's, from its sizes alone."""
    model: Any = build_on_meta(AutoModelForCausalLM, config_of(LARGE), torch.bfloat16)
    base = sum(p.numel() for p in model.parameters())
    lora = Lora(model, _settings(targets))
    names = RolloutNames(model, lora, ADAPTED_AS_STACKS)
    halves = ((name, model.get_parameter(name + A), model.get_parameter(name + B)) for name in lora.targets)
    return sum(tensor.numel() for each in halves for _, tensor in names.tensors(*each)) / base


def holds(row: dict) -> bool:
    """Whether adapters are as few bytes as they are held to."""
    return row["sync"] == "base" or row["of_bytes"] <= MOST_OF_BASE


def section(rows: list[dict]) -> list[str]:
    """The lines of the table; none where nothing was measured."""
    if not rows:
        return []
    cells = [
        [
            f"TP {row['tp']}",
            row["sync"],
            f"{row['bytes'] / 1e6:.2f}",
            f"{row['of_bytes']:.2%}",
            f"{row['seconds']:.2f}",
            f"{row['of_seconds']:.2f} x",
        ]
        for row in rows
    ]
    return [
        "",
        "## Adapters alone",
        "",
        f"The same model with adapters of rank {RANK} on the linears of attention, which vLLM computes with: the base",
        "once, in slices, then the adapters in every sync, whole to each worker. MB: handed to one worker.",
        "",
        f"Bound: adapters are at most {MOST_OF_BASE:.0%} of the base's bytes. Of {LARGE}, from its sizes, they are",
        f"{share(TARGETS):.2%} on the linears of attention, and {share('all-linear'):.1%} on all linears and experts:",
        f"rank {RANK} is {RANK} `(in + out) / (in out)` of a matrix `[out, in]`, much of an expert's small ones, and",
        "vLLM takes an `A` for gate and another for up. So the bound holds for attention, and not for experts.",
        "",
        *markdown(COLUMNS, cells),
    ]
