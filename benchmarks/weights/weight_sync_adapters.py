"""Adapters alone into vLLM: a sync of the base, then syncs of adapters of rank 32, on the models of ``weight_sync.py``.

Two trainer ranks with ``ep_size=2`` have adapters on the linears of attention, for which vLLM's CPU build has kernels.
``lora.merge=False``: vLLM computes with the adapters. Bytes are counted at one worker.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.measure import random_checkpoint
from benchmarks.tables import judged, markdown
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

__all__ = ["run", "section", "share"]

RANK = 32
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
MOST_OF_BASE = 0.02  # bytes of the adapters over those of the base
LARGE = "Qwen3-30B-A3B"  # of which shares are computed


def _settings(targets: str | tuple[str, ...] = TARGETS) -> LoraSettings:
    return LoraSettings("model", RANK, RANK, targets)


def _ranks(handles: list[str], folder: Path, tp: int, megabytes: int, turns: list[str]) -> dict[str, Any]:
    """Send the base or the adapters in each turn; returns when each sync began, and its bytes."""
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
    began, sent = [], {}
    for turn in turns:
        if turn == "base":
            weights = sync.weights("left out").for_worker("sliced", Rollout(tp))
        else:
            weights = sync.weights("alone").for_worker("full", Rollout())
        at, stats = send_together(weights.tensors(), handles, megabytes)
        began.append(at)
        sent[turn] = stats.nbytes
    return {"began": began, "sent": sent}


def run(model: dict[str, Any], sizes: Sequence[int], repeats: int, megabytes: int) -> list[dict[str, str]]:
    """Return rows of the base and of the adapters at each rollout TP; the first sync of each warms up."""
    turns = ["base"] * 2 + ["adapters"] * (repeats + 1)
    lora = {"enable_lora": True, "max_lora_rank": RANK, "lora_target_modules": list(TARGETS)}
    rows = []
    with random_checkpoint("qwen3_moe", model) as folder:
        meta = build_on_meta(AutoModelForCausalLM, AutoConfig.from_pretrained(folder), torch.float32)
        config = adapter_config(Lora(meta, _settings()), str(folder))
        arguments = {side: {"peft_config": config, "base_sync_done": side == "adapters"} for side in turns}
        for tp in sizes:
            figures, took = seconds_of_syncs(
                folder, tp, turns, _ranks, folder, tp, megabytes, arguments=arguments, **lora
            )
            for side in ("base", "adapters"):
                nbytes, of_base = figures["sent"][side], figures["sent"][side] / figures["sent"]["base"]
                row = {"rollout": f"TP {tp}", "sync": side, "MB": f"{nbytes / 1e6:.2f}", "share": f"{of_base:.2%}"}
                row["end to end s"] = f"{median(took[side]):.2f}"
                rows.append(row | judged(of_base <= MOST_OF_BASE if side == "adapters" else None))
    return rows


def share(targets: str | tuple[str, ...]) -> float:
    """Return the bytes of a model's adapters, in vLLM's layout, over the model's, from its sizes alone."""
    model: Any = build_on_meta(AutoModelForCausalLM, config_of(LARGE), torch.bfloat16)
    base = sum(p.numel() for p in model.parameters())
    lora = Lora(model, _settings(targets))
    names = RolloutNames(model, lora, ADAPTED_AS_STACKS)
    halves = ((name, model.get_parameter(name + A), model.get_parameter(name + B)) for name in lora.targets)
    return sum(tensor.numel() for each in halves for _, tensor in names.tensors(*each)) / base


def section(rows: list[dict[str, str]]) -> list[str]:
    """Return the lines of the table."""
    return [
        "",
        "## Adapters alone",
        "",
        f"The same model with adapters of rank {RANK} on the linears of attention, which vLLM computes with: the base",
        "in slices, then the adapters in every sync, whole to each worker. MB: sent to one worker.",
        "",
        f"Bound: adapters are at most {MOST_OF_BASE:.0%} of the base's bytes. Of {LARGE}, from its sizes, they are",
        f"{share(TARGETS):.2%} on the linears of attention, and {share('all-linear'):.1%} on all linears and experts:",
        f"rank {RANK} is {RANK} `(in + out) / (in out)` of a matrix `[out, in]`, much of an expert's small ones, and",
        "vLLM takes an `A` for gate and another for up. So the bound holds for attention, and not for experts.",
        "",
        *markdown(rows),
    ]
