"""What a weight sync costs on a cluster, without touching one.

    python -m epfsdp2.recipes.plan_sync --model Qwen3-30B-A3B --world 16 --ep 8 --rollout-tp 4

prints, for each way to hand weights to vLLM, the bytes that a rank needs, receives and gets from other nodes, the
rounds, the memory, and the time that the network takes at least. Only the model's config is read.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from ...engine.errors import SettingError
from ...engine.model.layers import layer_names
from ...engine.model.meta import build_on_meta
from ...engine.moe.find import UnsupportedModelError
from ...engine.preflight.rollout import tensors_before_sharding
from ...engine.topology.expert_placement import check_experts_divide
from ...engine.topology.index_ranges import IndexRange
from ...engine.topology.mesh import Topology
from ...rollout.layout.rollout_config import BLOCK
from ...rollout.layout.specs import SYNC_MODES, Heads, Rollout, SyncMode, TensorSpec
from ...rollout.plan.transfer_plan import Targets, make_transfer_plan
from ...rollout.quantise.channels import CHANNEL_DTYPES
from ...rollout.quantise.schemes import Blocks, Channels, Scheme
from ...rollout.servers import is_quantised, target_slices
from ...rollout.vllm.layout import FP8_FAMILIES, known_families
from .cards import MODEL_HELP, config_of

__all__ = ["main", "parse"]

_GB = 1e9
_MEGABYTE = 1 << 20
_BUCKETS = 4  # two being filled or sent, two being received or loaded
_WIDTH = 100  # what the table takes
_COLUMNS = ("mode", "needed", "there", "received", "from nodes", "rounds", "buffers", "floor")
_LEGEND = (
    "GB, the largest of any rank. Floor: seconds for the bytes from other nodes over one network interface, or, where "
    "there are none, for all received bytes at the same rate. Buffers: MB, two to send and two to receive."
)
_ITEMSIZE = {"bf16": 2, "fp32": 4}
_QUANTISED: dict[str, Scheme] = {
    "fp8": Blocks(BLOCK),
    "fp8-rows": Channels(CHANNEL_DTYPES["fp8"]),
    "int8-rows": Channels(CHANNEL_DTYPES["int8"]),
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m epfsdp2.recipes.plan_sync",
        description="Bytes, rounds, memory and least time of a weight sync, from a model's config and sizes alone.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help=MODEL_HELP)
    add("--world", type=int, required=True, help="ranks of the trainer")
    add("--ep", type=int, default=1, help="engine.ep_size")
    add("--etp", type=int, default=1, help="engine.etp_size")
    add("--fsdp-size", type=int, default=-1, help="engine.fsdp_size")
    add("--expert-shard-dim", default="auto", choices=["auto", "0", "1"], help="engine.expert_shard_dim")
    add("--rollout-tp", type=int, default=1, help="tensor parallel size of a vLLM replica")
    add("--rollout-dp", type=int, default=1, help="data parallel size of a vLLM replica")
    add("--rollout-ep", action="store_true", help="vLLM with enable_expert_parallel")
    add("--standalone", type=int, default=0, help="vLLM workers of their own; 0: on the trainer's ranks")
    kinds = "fp8: rollout.quantization=fp8; -rows: compressed-tensors with a scale for each row"
    add("--dtype", default="bf16", choices=[*_ITEMSIZE, *_QUANTISED], help=f"in which weights are sent; {kinds}")
    add("--round-megabytes", type=int, default=512, help="what a rank sends or receives in one round")
    add("--gpus-per-node", type=int, default=8, help="ranks on a node")
    add("--bandwidth", type=float, default=45.0, help="GB/s of a rank's network interface")
    options = parser.parse_args(arguments)
    for name in ("world", "ep", "etp", "rollout_tp", "rollout_dp", "round_megabytes", "gpus_per_node"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it has to be at least 1")
    if options.standalone and options.dtype in _QUANTISED:
        parser.error("--standalone workers are sent bfloat16: ranks quantise for the workers beside them alone")
    if options.bandwidth <= 0:
        parser.error(f"--bandwidth is {options.bandwidth}; it has to be positive")
    workers = options.standalone or options.world
    if workers % (options.rollout_tp * options.rollout_dp):
        whose = "--standalone" if options.standalone else "--world"
        parser.error(f"{whose} is {workers}, which a replica of --rollout-tp x --rollout-dp workers does not divide")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    scheme = _QUANTISED.get(options.dtype)
    console = Console(highlight=False, soft_wrap=True, width=max(_WIDTH, Console().width))
    try:
        topology = Topology.arrange(options.world, options.ep, options.fsdp_size, options.etp)
        config = config_of(options.model)
        model = build_on_meta(AutoModelForCausalLM, config, torch.bfloat16)
        shard_dim = options.expert_shard_dim if options.expert_shard_dim == "auto" else int(options.expert_shard_dim)
        itemsize: dict[str, int] | int = _ITEMSIZE.get(options.dtype, 2)
        if scheme is not None:
            itemsize = {name: 1 for name, _ in model.named_parameters() if is_quantised(config.model_type, name)}
        tensors = tensors_before_sharding(model, topology, shard_dim, itemsize=itemsize)
        check_experts_divide(
            [t.shape[0] for t in tensors if t.cuts and t.cuts[0].axis == "ep"], topology, options.model
        )
    except (SettingError, UnsupportedModelError, OSError, ValueError) as error:
        console.print(str(error), style="red", markup=False)
        return 1
    family = config.model_type
    is_known = family in known_families()
    console.print(
        f"{options.model}: {sum(t.nbytes for t in tensors) / _GB:.2f} GB in {options.dtype}, {len(tensors)} tensors; "
        f"trainer {topology.dp_replicate} x {topology.ep_fsdp} x {topology.ep} x {topology.etp} "
        "(dp_replicate x ep_fsdp x ep x etp)"
    )
    if not is_known:
        known = ", ".join(sorted(known_families()))
        console.print(f"How vLLM cuts a {family} is not known here (only {known}): mode full alone.")
    modes = SYNC_MODES if is_known else SYNC_MODES[:1]
    if scheme is not None:
        if family not in FP8_FAMILIES:
            known = ", ".join(sorted(FP8_FAMILIES))
            console.print(f"Which weights of a {family} vLLM quantises is not known here (only {known}).", style="red")
            return 1
        modes = ("sliced",)
        scales = sum(scheme.sharing(IndexRange.of(t.shape)).numel for t in tensors if is_quantised(family, t.name))
        console.print(f"Besides, {4 * scales / _GB:.3f} GB of scales are reduced over all ranks.")
    table = Table(*_COLUMNS)
    for mode in modes:
        try:
            table.add_row(*_row(mode, tensors, model, topology, options))
        except ValueError as error:
            table.add_row(mode, str(error))
    console.print(table)
    console.print(_LEGEND)
    return 0


def _row(
    mode: SyncMode, tensors: Sequence[TensorSpec], model: Any, topology: Topology, options: argparse.Namespace
) -> list[str]:
    heads = Heads.of(model.config)
    rollout = Rollout(options.rollout_tp, options.rollout_dp, options.rollout_ep)
    targets = Targets(options.standalone or options.world, colocated=not options.standalone)

    def slices_of(tensor: TensorSpec, worker: int):
        return target_slices(tensor, rollout, worker % rollout.workers, heads, mode)

    plan = make_transfer_plan(
        tensors, layer_names(model), topology, targets, slices_of, options.round_megabytes * _MEGABYTE
    )
    shift, node = 0 if targets.colocated else topology.world, options.gpus_per_node
    other_nodes = plan.between_nodes(lambda rank: rank // node, lambda worker: (worker + shift) // node)
    needed, received, nic = (max(m.values(), default=0) for m in (plan.needed, plan.received, other_nodes))
    local = max((plan.needed[w] - plan.received.get(w, 0) for w in plan.needed), default=0)
    sizes = [f"{n / _GB:.2f}" for n in (needed, local, received, nic)]
    seconds = (nic or received) / _GB / options.bandwidth
    return [mode, *sizes, str(len(plan.rounds)), str(_BUCKETS * options.round_megabytes), f"{seconds:.2f}"]
