"""Predict the cost of a weight sync on a cluster, and its bottleneck.

    python -m epfsdp2.recipes.plan_sync --model Qwen3-30B-A3B --world 16 --ep 8 --rollout-tp 4

prints a row for each sync mode: bytes that a rank needs, receives, and receives from other nodes. Rounds, tensors that
the worker loads, memory, and the least times of network and host follow. Only the model's config is read.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from ..engine.errors import SettingError
from ..engine.model.hf_names import as_checkpoint, is_by_expert
from ..engine.model.layers import layer_names
from ..engine.model.meta import build_on_meta
from ..engine.moe.find import UnsupportedModelError
from ..engine.preflight.rollout import tensors_before_sharding
from ..engine.topology.expert_placement import check_experts_divide
from ..engine.topology.mesh import Topology
from ..rollout.layout.rollout_config import BLOCK
from ..rollout.layout.rules import whole_slice
from ..rollout.layout.specs import SYNC_MODES, Heads, Rollout, SyncMode
from ..rollout.plan.senders import Ints
from ..rollout.plan.transfer_plan import Targets, Template, TransferPlan, make_transfer_plan, round_bytes
from ..rollout.sent_tensors import SCALES, slices_of_workers, with_scales
from ..rollout.servers import DEFAULT
from .plan.cards import MODEL_HELP, config_of

__all__ = ["from_other_nodes", "main", "parse"]

_GB = 1e9
_WIDTH = 110  # of the table
_COLUMNS = ("mode", "needed", "there", "received", "from nodes", "rounds", "tensors", "buffers", "wire", "host")
_LEGEND = (
    "GB, the largest of any rank. Tensors: what a worker loads. Buffers: MB. Wire: seconds for the bytes from other "
    "nodes over one network interface, or, where there are none, for all received bytes at the same rate. Host: "
    "seconds of Python of a rank and its worker, as measured on one core (benchmarks/results/scale.md)."
)
# Seconds of one core (``make bench-scale``): of a trainer rank per round, and per tensor of a trainer rank and
# a worker. In a full sync, vLLM's own loaders load (``--rollout vllm-names`` of bench-sync).
_ROUND_SECONDS = 2.5e-4
_TENSOR_SECONDS = {"sliced": 4e-5 + 1.2e-4, "full": 2e-5 + 4e-4}
_ITEMSIZE = {"bf16": 2, "fp32": 4}
# Fields of ``Rollout`` by --dtype.
_QUANTISED: dict[str, dict[str, Any]] = {
    "fp8": {"block": BLOCK},
    "fp8-rows": {"channels": "fp8"},
    "int8-rows": {"channels": "int8"},
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
    add("--standalone", type=int, default=0, help="vLLM workers on their own GPUs; 0: on the trainer's ranks")
    kinds = "fp8: rollout.quantization=fp8; -rows: compressed-tensors with a scale for each row"
    add("--dtype", default="bf16", choices=[*_ITEMSIZE, *_QUANTISED], help=f"dtype of the sent weights; {kinds}")
    add("--sync-megabytes", type=int, default=2048, help="engine.sync_megabytes")
    add("--gpus-per-node", type=int, default=8, help="ranks on a node")
    add("--bandwidth", type=float, default=45.0, help="GB/s of a rank's network interface")
    options = parser.parse_args(arguments)
    for name in ("world", "ep", "etp", "rollout_tp", "rollout_dp", "sync_megabytes", "gpus_per_node"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it has to be at least 1")
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
        tensors = tensors_before_sharding(model, topology, shard_dim, itemsize=itemsize)
        experts = [t.shape[0] for t in tensors if t.cuts and t.cuts[0].axis == "ep"]
        check_experts_divide(experts, topology, options.model)
    except (SettingError, UnsupportedModelError, OSError, ValueError) as error:
        console.print(str(error), style="red", markup=False)
        return 1
    family, known = config.model_type, DEFAULT.known_families()
    rollout = Rollout(options.rollout_tp, options.rollout_dp, options.rollout_ep)
    modes, scales = SYNC_MODES if family in known else SYNC_MODES[:1], 0
    if scheme is not None:
        if family not in DEFAULT.quantised:
            known = ", ".join(sorted(DEFAULT.quantised))
            console.print(f"Which weights of a {family} vLLM quantises is not known here (only {known}).", style="red")
            return 1
        modes, rollout = ("sliced",), replace(rollout, **scheme)
        tensors = with_scales(tensors, rollout, family)
        scales = sum(t.nbytes for t in tensors if t.name.endswith(SCALES))
    weights = [t for t in tensors if not t.name.endswith(SCALES)]
    console.print(
        f"{options.model}: {sum(t.nbytes for t in weights) / _GB:.2f} GB in {options.dtype}, {len(weights)} tensors; "
        f"trainer {topology.dp_replicate} x {topology.ep_fsdp} x {topology.ep} x {topology.etp} "
        "(dp_replicate x ep_fsdp x ep x etp)"
    )
    if family not in known:
        console.print(f"How vLLM cuts a {family} is not known here (only {', '.join(sorted(known))}): mode full alone.")
    if scales:
        console.print(f"Besides, {scales / _GB:.3f} GB of scales are reduced over all ranks.")
    table, verdicts = Table(*_COLUMNS), []
    of_worker = slices_of_workers(tensors, rollout, Heads.of(config))
    for mode in modes:
        in_full = mode == "full"
        limit, workers = round_bytes(options.sync_megabytes << 20, in_full), 1 if in_full else rollout.workers
        slices_of = (lambda tensor, worker: [whole_slice(tensor)]) if in_full else of_worker
        targets = Targets.colocated(topology, workers)
        if options.standalone:
            targets = Targets.separate([i % workers for i in range(options.standalone)], topology)
        try:
            plan = make_transfer_plan(tensors, layer_names(model), topology, targets, slices_of, limit, by_name=in_full)
            row, verdict = _row(mode, plan, model, options)
        except ValueError as error:
            row, verdict = [mode, str(error)], ""
        table.add_row(*row)
        verdicts.append(verdict)
    console.print(table)
    console.print("\n".join(filter(None, verdicts)))
    console.print(_LEGEND)
    return 0


def _row(mode: SyncMode, plan: TransferPlan, model: Any, options: argparse.Namespace) -> tuple[list[str], str]:
    """Return a row of the table, and a sentence that names the bottleneck."""
    kinds, ranks, node = list(plan.targets.kinds), np.arange(plan.topology.world), options.gpus_per_node
    needed, kept, workers = plan.needed[kinds], np.zeros(len(kinds), dtype=np.int64), np.arange(len(kinds))
    if plan.targets.are_separate:
        workers += len(ranks)
    else:
        kept = plan.sent[ranks % plan.topology.fsdp, kinds]
    from_others = from_other_nodes(plan, ranks // node, workers // node)
    amounts = [int(each.max()) for each in (needed, kept, needed - kept, from_others)]
    rounds, loaded = sum(1 for _ in plan.rounds), _loaded(mode, plan, model)
    wire = (amounts[3] or amounts[2]) / _GB / options.bandwidth
    host = rounds * _ROUND_SECONDS + loaded * _TENSOR_SECONDS[mode]
    cells = [mode, *(f"{n / _GB:.2f}" for n in amounts), str(rounds), str(loaded), str(options.sync_megabytes)]
    bound = "the network" if wire >= host else "Python on the hosts"
    verdict = f"{mode} is bound by {bound}: {wire:.2f} s of wire, {host:.2f} s of host."
    return [*cells, f"{wire:.2f}", f"{host:.2f}"], verdict


def from_other_nodes(plan: TransferPlan, sources: Ints, targets: Ints) -> Ints:
    """Return the bytes that each worker receives from other nodes.

    Args:
        sources, targets: node of each trainer rank, and of each worker.
    """
    ranks, kinds, replicas = plan.topology.fsdp, list(plan.targets.kinds), np.array(plan.targets.replicas)
    nodes = int(max(sources.max(), targets.max())) + 1
    on_node = np.zeros((plan.topology.world // ranks, nodes, plan.sent.shape[1]), dtype=np.int64)
    for replica, of_replica in enumerate(sources.reshape(-1, ranks)):
        np.add.at(on_node[replica], of_replica, plan.sent)
    return plan.needed[kinds] - on_node[replicas, targets, kinds]


def _loaded(mode: SyncMode, plan: TransferPlan, model: Any) -> int:
    """Return the number of tensors that a worker loads."""
    if mode == "sliced":
        return sum(len(share.bundle.by_kind[0]) for _, round_ in plan.rounds for share in round_.shares)
    prefixes = {index: prefix for prefix, index in plan.layers}
    of_template = {i: _in_full(plan.templates[i], prefix, plan.limit, model) for i, prefix in prefixes.items()}
    return sum(of_template[index] for _, index in plan.layers)


def _in_full(template: Template, prefix: str, limit: int, model: Any) -> int:
    values = {prefix + t.name: torch.empty(t.shape, device="meta") for t in template.tensors}
    large = [prefix + t.name for t in template.tensors if t.nbytes > limit]
    by_expert = {name: values.pop(name) for name in large if is_by_expert(model, name, values[name].shape)}
    return sum(1 for _ in (*DEFAULT.named(model, values.items(), {}), *as_checkpoint(model, by_expert.items())))


if __name__ == "__main__":
    raise SystemExit(main())
