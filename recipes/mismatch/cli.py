"""Explain a run's difference between trainer and rollout by its causes.

    python -m epfsdp2.recipes.mismatch checkpoints/global_step_11/actor rollouts/12 --run outputs/.hydra/config.yaml

computes the log-probs of saved responses as the trainer does, compares them with the rollout's, and replaces one thing
at a time. The rollouts of a step are sampled with the weights of the step before it. verl saves them for any engine:

    skip.rollout_tq.enable=True skip.rollout_tq.steps=[12] skip.rollout_tq.dump_dir=rollouts
    actor_rollout_ref.rollout.calculate_log_probs=True
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.progress import Progress

from ...engine.checkpoint.atomic_folder import CheckpointError
from ...engine.config.values import DTYPES
from ...engine.moe.find import UnsupportedModelError
from ...engine.moe.router.replay import ReplayError
from .causes import Gap, Report, causes_of, explain
from .checkpoint import hf_folder, step_of
from .model import ROWS, Setup, TrainerModel
from .rollouts import HOW_TO_SAVE, Response, RolloutError, Rollouts, check_tokenizer, read_rollouts
from .sampling import Sampling
from .tables import draw, table

__all__ = ["main", "parse"]

_WIDTH = 150
_LEGEND = (
    "share: of the difference of log-probs; shares sum to the explained part. alone: removed by replacing nothing "
    "else; left then: mean of log-probs, largest of probabilities."
)
_SAMPLING = {field.name: field.type for field in fields(Sampling)}
_ROLLOUT = "actor_rollout_ref.rollout"
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES.values()}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m epfsdp2.recipes.mismatch",
        description="Share of the difference between trainer and rollout that each possible cause explains.",
        epilog=f"A run with any engine saves rollouts with {HOW_TO_SAVE}.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, dtypes = parser.add_argument, list(_NAMES.values())
    help_ = "checkpoint of the step before the rollouts': this engine's, verl's fsdp2, or a Hugging Face model"
    add("checkpoint", type=Path, help=help_)
    add("rollouts", type=Path, help="skip.rollout_tq.dump_dir or a folder below, or a JSON Lines file")
    add("--previous", type=Path, metavar="CHECKPOINT", help="checkpoint of an earlier step, to try stale weights")
    help_ = "the run's .hydra/config.yaml; its values become the defaults of the next six options"
    add("--run", type=Path, metavar="FILE", help=help_)
    add("--dtype", choices=dtypes, default="bfloat16", help="dtype in which the trainer computes")
    add("--head-dtype", choices=dtypes, help="the same for the head; default: --dtype")
    add("--router-dtype", choices=dtypes, help="the same for the routers; default: --dtype")
    add("--rows", choices=ROWS, default="packed", help="sequences of a micro-batch in the trainer")
    add("--temperature", type=float, default=1.0, help="the trainer's temperature")
    add("--ep", type=int, default=8, help="expert-parallel ranks whose slice may not be synced, at most")
    help_ = f"sampling of the rollout to try, also repeated, besides generation_config.json: {', '.join(_SAMPLING)}"
    add("--sampling", nargs="+", action="extend", metavar="NAME=VALUE", help=help_, default=[])
    add("--replayed", action="store_true", help="the trainer has replayed the rollout's routes")
    add("--rollout", default="vllm", metavar="NAME", help="verl's name of the rollout")
    add("--responses", type=int, default=64, help="responses that are compared, at most")
    add("--tokens", type=int, default=8192, help="tokens of a micro-batch; a longer sequence has its own")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device of the model")
    add("--scratch", type=Path, metavar="FOLDER", help="where a checkpoint is converted; default: the system's")
    add("--json", type=Path, metavar="FILE", help="write the whole result")
    add("--png", type=Path, metavar="FILE", help="draw the shares")
    try:
        run = parser.parse_known_args(arguments)[0].run
        of_run, sampled = ({}, {}) if run is None else _of_run(run)
        parser.set_defaults(**of_run)
        options = parser.parse_args(arguments)
        options.sampled = sampled
        for word in options.sampling:
            name, _, value = word.partition("=")
            if name not in _SAMPLING:
                raise ValueError(f"--sampling {word} sets none of {', '.join(_SAMPLING)}")
            options.sampled.setdefault(name, []).append(float(value))
    except (ValueError, OSError, OmegaConfBaseException) as error:
        parser.error(str(error))
    for name in ("ep", "responses", "tokens", "temperature"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name} is {getattr(options, name)}; it has to be positive")
    return options


def _of_run(file: Path) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Return defaults of options and the sampling of a run, from the config that Hydra wrote."""
    config = OmegaConf.load(file)

    def get(name: str) -> Any:
        return OmegaConf.select(config, name, throw_on_missing=False)

    found: dict[str, Any] = {"rollout": get(f"{_ROLLOUT}.name"), "temperature": get(f"{_ROLLOUT}.temperature")}
    node = "engine" if get("engine.strategy") else "actor_rollout_ref.actor.fsdp_config"
    if name := get(f"{node}.mixed_precision.param_dtype") or get(f"{node}.dtype"):
        found["dtype"] = _NAMES[DTYPES[str(name)]]
    modules = get("engine.fp32_modules") or []
    found["head_dtype"] = "float32" if any("head" in pattern for pattern in modules) else None
    is_router = any("gate" in pattern or "router" in pattern for pattern in modules)
    found["router_dtype"] = "float32" if is_router else None
    found["ep"] = size if (size := get("engine.ep_size") or 1) > 1 else None
    found["rows"] = "padded" if get("actor_rollout_ref.model.use_remove_padding") is False else None
    found["replayed"] = (get("engine.router_replay.mode") == "R3") or None
    sampled = {name: [float(value)] for name in _SAMPLING if (value := get(f"{_ROLLOUT}.{name}")) is not None}
    return {name: value for name, value in found.items() if value is not None}, sampled


def _to_try(options: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Return the values of sampling to try: given ones, the model's generation config, and no temperature."""
    file, found = folder / "generation_config.json", {name: list(values) for name, values in options.sampled.items()}
    generation = json.loads(file.read_text()) if file.is_file() else {}
    for name in _SAMPLING:
        if isinstance(value := generation.get(name), int | float):
            found.setdefault(name, []).append(float(value))
    found.setdefault("temperature", []).append(1.0)
    kinds = {name: int if name == "top_k" else float for name in _SAMPLING}
    return {name: sorted({kinds[name](value) for value in values}) for name, values in found.items()}


def _measure(model: TrainerModel, rollouts: Rollouts, setups: Sequence[Setup], done: Any) -> list[Gap]:
    """Return the gap of each setup; setups with the same logits share a forward."""
    found: dict[Setup, Gap] = {}
    together: dict[tuple[Any, ...], list[Setup]] = {}
    for setup in setups:
        together.setdefault(setup.forward, []).append(setup)
    for _, group in sorted(together.items(), key=lambda entry: entry[0]):
        for setup, log_probs in zip(group, model.log_probs(group, rollouts.responses), strict=True):
            found[setup] = _gap(log_probs, rollouts.responses)
            done()
    return [found[setup] for setup in setups]


def _gap(log_probs: Sequence[torch.Tensor], responses: Sequence[Response]) -> Gap:
    ours = torch.cat([own[r.is_sampled] for own, r in zip(log_probs, responses, strict=True)])
    theirs = torch.cat([r.log_probs[r.is_sampled] for r in responses])
    return Gap((ours - theirs).abs().mean().item(), (ours.exp() - theirs.exp()).abs().max().item())


def _explain(options: argparse.Namespace, console: Console, scratch: Path) -> tuple[Report, Rollouts, Setup, list[str]]:
    step = step_of(options.checkpoint)
    rollouts = read_rollouts(options.rollouts, options.responses, None if step is None else step + 1)
    if step is not None and rollouts.step not in (None, step + 1):
        wanted = f"rollouts of step {rollouts.step} are sampled with the weights of step {rollouts.step - 1}"
        console.print(f"{options.checkpoint} is of step {step}; {wanted}.", style="yellow", markup=False)
    folders = []
    for name, path in (("checkpoint", options.checkpoint), ("previous", options.previous)):
        (scratch / name).mkdir()
        folders.append(None if path is None else hf_folder(path, scratch / name))
    folder, previous = folders
    assert folder is not None
    model = TrainerModel(folder, previous, options.device, options.tokens, options.rollout)
    check_tokenizer(rollouts, folder, model.vocabulary)
    sampling = Sampling(options.temperature)
    dtypes = options.dtype, options.head_dtype or "", options.router_dtype or ""
    base = Setup(*dtypes, replay=options.replayed, rows=options.rows, sampling=sampling)
    # With one expert per token, a route looks like an unrecorded row.
    has_routes = all(r.routes is not None and r.routes.shape[2] > 1 for r in rollouts.responses)
    if options.replayed and not (has_routes and model.experts):
        raise RolloutError(f"{options.rollouts} has no routes to replay, or the model has none.")
    causes = causes_of(
        model,
        base,
        has_routes=has_routes,
        has_previous=previous is not None,
        ranks=model.expert_ranks(options.ep),
        sampled=_to_try(options, folder),
    )
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("Comparing", total=len(causes) + 1)
        report = explain(
            lambda setups: _measure(model, rollouts, setups, lambda: progress.advance(task)),
            base,
            causes,
            lambda count: progress.update(task, total=count),
        )
    untried = ["--previous"] if previous is None else []
    untried += ["rollouts with routes"] if model.experts and not has_routes else []
    return report, rollouts, base, untried


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(highlight=False, soft_wrap=True, width=_WIDTH)
    try:
        with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
            report, rollouts, base, untried = _explain(options, console, Path(scratch))
    except (RolloutError, ReplayError, CheckpointError, UnsupportedModelError, OSError, ValueError) as error:
        console.print(str(error), style="red", markup=False)
        return 1
    gap, rest = report.gap, report.rest
    tokens = sum(int(r.is_sampled.sum()) for r in rollouts.responses)
    title = (
        f"{tokens} tokens of {len(rollouts.responses)} responses: log-probs differ by {gap.mean:.3g} in the mean, "
        f"probabilities by {gap.largest:.3g} at most"
    )
    console.print(f"{title} ({base.dtype}, {base.rows} rows, temperature {base.sampling.temperature:g}).", markup=False)
    if gap.mean > 0:
        console.print(table(report))
        console.print(f"Not explained: {rest.mean / gap.mean:.0%}, a mean of {rest.mean:.3g}. {_LEGEND}", markup=False)
    if gap.mean > 0 and not report.shares:
        hint = f" Not tried: {', '.join(untried)}." if untried else ""
        console.print(f"No cause explains 3 % of the difference.{hint}", markup=False)
    if options.json:
        result = {
            "tokens": tokens,
            "gap": asdict(gap),
            "rest": asdict(rest),
            "base": asdict(base),
            "causes": [
                {"name": c.name, "share": report.shares.get(c, 0.0), "alone": asdict(g), "setting": c.setting}
                for c, g in sorted(report.alone.items(), key=lambda entry: -report.shares.get(entry[0], 0.0))
            ],
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.png and gap.mean > 0:
        draw(title, report, options.png)
    return 0
