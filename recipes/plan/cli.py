"""Predict whether a model fits a cluster, and with which settings.

    python -m epfsdp2.recipes.plan --model Qwen3-30B-A3B --nodes 2 --gpus 8 --gib 80 --tokens 16384 --sequences 4

recommends a mesh, lists the ten fastest with their memory and step time, and explains why the next does not fit.
``--all`` lists every legal mesh with its memory by part and its traffic. No GPU and no weights are needed.
"""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from rich.console import Console
from transformers import AutoModelForCausalLM, PretrainedConfig

from ...engine.config.automatic import AutomaticOverlap
from ...engine.config.settings import PLANNED, planned_settings, sharding_options
from ...engine.config.values import DTYPES
from ...engine.errors import SettingError
from ...engine.lora.adapters import Lora
from ...engine.lora.settings import LoraSettings
from ...engine.model.meta import build_on_meta
from ...engine.moe.find import UnsupportedModelError
from ...engine.planner.memory import IMBALANCE, Batch
from ...engine.planner.model_sizes import ModelSizes
from ...engine.planner.run import format_plan, format_step
from ...engine.preflight.model import import_external
from .cards import MODEL_HELP, config_of
from .meshes import Request, choices, recommended, smallest
from .roofline import ERROR, Cluster
from .tables import after_the_best, draw, print_wrapped, refusal, table, time_by_part

__all__ = ["main", "parse"]

_WIDTH, _WIDTH_OF_ALL = 100, 150


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m epfsdp2.recipes.plan",
        description="Whether a model fits a cluster, and with which settings: memory, traffic and time of a step.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help=MODEL_HELP)
    add("--external-lib", help="model.external_lib: a module that registers the model's class or its experts' block")
    add("--nodes", type=int, default=1, help="nodes of the cluster")
    add("--gpus", type=int, default=8, help="GPUs per node")
    help_ = "file that recipes.doctor --out wrote; its figures become the defaults"
    add("--machine", type=Path, metavar="FILE", help=help_)
    add("--gib", type=float, default=Cluster.gib, help="GiB of memory per GPU (H100 80, H200 141)")
    add("--inside", type=float, default=Cluster.inside, help="GB/s from a GPU to the others of its node")
    add("--between", type=float, default=Cluster.between, help="GB/s of a GPU's network interface")
    add("--tflops", type=float, default=Cluster.tflops, help="bfloat16 matrix TFLOP/s, as published (H100, H200)")
    add("--efficiency", type=float, default=Cluster.efficiency, help="share of --tflops that linears and experts reach")
    add("--attention", type=float, default=Cluster.attention, help="share of --tflops that attention reaches")
    add("--hbm", type=float, default=Cluster.hbm, help="GB/s of a GPU's memory, as published (H200 4800)")
    add("--tokens", type=int, default=16384, help="tokens of a rank's micro-batch, with sp = 1")
    add("--sequences", type=int, default=1, help="sequences of a micro-batch, of equal length")
    add("--micro-batches", type=int, default=1, help="micro-batches of a rank per step, with sp = 1")
    add("--imbalance", type=float, default=IMBALANCE, help="rows of the busiest rank's experts, divided by the mean")
    add("--lora-rank", type=int, default=0, help="model.lora_rank, with adapters on all linears")
    add("--activation-offload", action="store_true", help="model.enable_activation_offload")
    add("--fused-kernels", action="store_true", help="model.use_fused_kernels: logits are not stored")
    add("--optimizer", choices=["adamw", "muon"], default="adamw", help="optimizer whose states are counted")
    add("--reserve", type=float, default=4.0, help="GiB for contexts, NCCL and a sleeping vLLM")
    add("--margin", type=float, default=0.1, help="share of the memory that has to stay free")
    add("--all", action="store_true", help="list every legal mesh, in 150 columns")
    add("--json", type=Path, metavar="FILE", help="write the whole result")
    add("--png", type=Path, metavar="FILE", help="draw the shards of each rank on the recommended mesh")
    help_ = f"settings as on a run's command line: {', '.join(PLANNED)}"
    add("settings", nargs="*", metavar="engine.SETTING=VALUE", help=help_)
    try:
        parser.set_defaults(**_measured(parser.parse_known_intermixed_args(arguments)[0].machine))
        options = parser.parse_intermixed_args(arguments)
        options.engine = planned_settings(_overrides(options.settings))
    except SettingError as error:
        parser.error(str(error))
    for name in ("nodes", "gpus", "tokens", "sequences", "micro_batches"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it has to be at least 1")
    for name in ("gib", "inside", "between", "tflops", "efficiency", "attention", "hbm"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name} is {getattr(options, name)}; it has to be positive")
    if options.tokens % options.sequences:
        parser.error(f"--sequences is {options.sequences}, which does not divide --tokens, {options.tokens}")
    if options.imbalance < 1:
        parser.error(f"--imbalance is {options.imbalance}; the busiest rank has at least the mean: 1 or more")
    if not 0 <= options.margin < 1 or min(options.reserve, options.lora_rank) < 0:
        parser.error("--margin is a share from 0 to 1; --reserve and --lora-rank are at least 0")
    return options


def _measured(file: Path | None) -> dict[str, float]:
    """Return the fields of ``Cluster`` that ``recipes.doctor --out`` wrote to a file."""
    if file is None:
        return {}
    works = "a file that `torchrun --nproc-per-node 8 -m epfsdp2.recipes.doctor --out FILE` wrote"
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise SettingError("--machine", file, f"it can't be read ({error}).", works) from error
    known = {field.name for field in fields(Cluster)}
    if not isinstance(found, dict) or not found.keys() <= known:
        raise SettingError("--machine", file, f"it has other keys than {', '.join(sorted(known))}.", works)
    if wrong := [name for name, value in found.items() if not isinstance(value, int | float) or not value > 0]:
        raise SettingError("--machine", file, f"{', '.join(wrong)} has to be positive.", works)
    return found


def _overrides(words: Sequence[str]) -> dict[str, Any]:
    """Return the values by setting, without ``engine.``; a dotted name sets a key of a mapping."""
    for word in words:
        if not re.match(r"engine\.\w[\w.]*=", word):
            rule = "is no setting of the engine with a value."
            raise SettingError("recipes.plan", word, rule, "engine.activation_checkpointing=full")
    given: Any = OmegaConf.to_container(OmegaConf.from_dotlist(list(words)))
    return given.get("engine", {})


def request_of(options: argparse.Namespace, config: PretrainedConfig) -> Request:
    """Build the planner's request; raise ``UnsupportedModelError`` for a model that can't be dispatched or traced."""
    model = {"enable_activation_offload": options.activation_offload, "use_fused_kernels": options.fused_kernels}
    sharding = sharding_options(options.engine, {"enable_gradient_checkpointing": True, **model})

    def build(dtype: torch.dtype) -> Any:
        model: Any = build_on_meta(AutoModelForCausalLM, config, dtype)
        if options.lora_rank:
            Lora(model, LoraSettings("model", options.lora_rank, options.lora_rank, "all-linear"))
        return model

    sizes = ModelSizes.built_by(build, sharding, DTYPES[options.engine.model_dtype])
    if sizes.untraced:
        raise UnsupportedModelError(sizes.untraced)
    return Request(
        sizes,
        sharding,
        Batch(options.tokens, options.micro_batches, options.imbalance),
        options.sequences,
        options.optimizer,
        options.reserve,
        options.margin,
        AutomaticOverlap.of(options.engine, build(sharding.param_dtype), sharding),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(highlight=False, soft_wrap=True, width=_WIDTH_OF_ALL if options.all else _WIDTH)
    cluster = Cluster(**{f.name: getattr(options, f.name) for f in fields(Cluster) if hasattr(options, f.name)})
    try:
        import_external({"external_lib": options.external_lib}, "model")
        request = request_of(options, config_of(options.model))
    except (SettingError, UnsupportedModelError, OSError, ValueError) as error:
        console.print(str(error), style="red", markup=False)
        return 1
    found = choices(request, cluster)
    best = recommended(found)
    said = [
        f"{options.model} on {cluster.nodes} x {cluster.gpus} GPUs of {cluster.gib:g} GiB, {request.margin:.0%} to "
        f"stay free: {request.options.checkpointing} checkpointing, {options.engine.model_dtype} parameters, "
        f"{options.optimizer}, {format_step(request.batch)}"
    ]
    larger = None if best else smallest(request, cluster)
    if best is not None:
        said += [
            f"Recommended, {best.gib:.1f} of {cluster.gib:g} GiB and {best.time.step:.2f} s a step, predicted "
            f"(published figures were within {ERROR:.0%}):",
            f"    {' '.join(best.settings)}",
            *format_plan(best.topology, best.batch, best.peak, best.traffic),
            time_by_part(best.time),
        ]
    else:
        said += refusal(min(found, key=lambda c: c.gib), larger, request, cluster)
    if not request.sizes.num_experts:
        said.append("ep is 1: the model has no experts.")
    if request.sizes.unshared:
        said.append(f"sp is 1: {request.sizes.unshared}")
    if request.sizes.uncounted:
        said.append(f"Not counted where sp is above 1: {request.sizes.uncounted}.")
    print_wrapped(console, said)
    rows, legend = table(found, best, options.all)
    console.print(rows)
    print_wrapped(console, [legend] if options.all else [*after_the_best(found), legend])
    if options.json:
        result = {
            "model": options.model,
            "cluster": asdict(cluster),
            "choices": [choice.as_json() for choice in found],
            "recommended": best.as_json() if best else None,
            "smallest_cluster": {"nodes": larger[0].nodes, **larger[1].as_json()} if larger else None,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.png:
        draw(options.model, request.sizes, best or found[0], cluster, options.png)
    return 0 if best else 2
