"""Save and resume a training state, and export it to Hugging Face format.

A checkpoint folder of one role holds

    epfsdp2_checkpoint.json  format, and size and checksum of every other file (``atomic_folder.py``)
    dist_ckpt/               torch's distributed format in safetensors: model and optimizer by parameter name, with
                             real placements
    trainer_state.json       step, learning-rate schedule, the optimizer's settings
    rng/                     torch's random state on each rank, of the CPU and of its device
    huggingface/             config and small files of the base; with ``hf_model`` also the weights in the layout of the
                             family's checkpoints, adapters merged
    lora_adapter/            adapters, if there are any, as peft saves them
    frozen_base.json         of a run with adapters whose frozen weights are not stored: the model that they are of, and
                             shape and checksum of each

All of it is safetensors and JSON: nothing is ever unpickled.
"""

import json
import logging
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from ..errors import listed
from ..lora.adapters import lora_of
from ..lora.frozen_base import base_checksums, difference
from ..lora.peft_files import ADAPTER, write_adapter
from ..model.hf_convert import cache_shapes
from ..optim.loss_scale import LossScale
from ..optim.multi_optimizer import MultiOptimizer
from ..topology.dtensor import checkpoint_tensors, is_adapter
from ..topology.rank_consistency import raise_on_all_ranks
from .atomic_folder import CheckpointError, atomic_dir_all_ranks, verify_all_ranks
from .background import copied_to_host
from .export_hf import reader, write_hf_weights
from .stored_shards import (
    HF,
    MODEL,
    OPTIMIZER,
    SHARDS,
    STATE,
    StoredTensor,
    check_contents,
    first_held,
    overlapping,
    read_facts,
    read_shards,
    stored_tensors,
    write_shards,
)

__all__ = ["BASE", "KNOWN_CONTENTS", "RNG", "Snapshot", "load_checkpoint", "plain_value", "random_state"]

logger = logging.getLogger("epfsdp2")

KNOWN_CONTENTS = frozenset({"model", "optimizer", "extra", "hf_model"})
BASE, RNG, _FOR_HF = "frozen_base.json", "rng", "for_hf"


@dataclass(frozen=True)
class Snapshot:
    """The state of a trainer at one step, to be written as a checkpoint.

    Args:
        tensors: sharded tensors by their names in SHARDS.
        facts: the content of ``trainer_state.json``.
        random: torch's random state of this rank.
        base: the content of ``BASE``; empty where all tensors of the model are stored.
    """

    model: nn.Module
    contents: frozenset[str]
    tensors: dict[str, torch.Tensor]
    facts: dict[str, Any]
    random: dict[str, torch.Tensor]
    base: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        optimizer: MultiOptimizer | None,
        lr_scheduler: Any,
        contents: Iterable[str],
        step: int,
        loss_scale: LossScale | None = None,
        with_base: bool = True,
        parameters: Mapping[str, torch.Tensor] | None = None,
    ) -> "Snapshot":
        """Snapshot the parts that ``contents`` names, without copying tensors. Collective without the base.

        Args:
            with_base: whether to store the weights that adapters are trained on.
            parameters: the sharded parameters by name, for a model that has gathered its own to compute.
        """
        contents = frozenset(contents)
        if "hf_model" in contents:
            cache_shapes(model)  # ``write`` may run in another thread, during a forward
        tensors = _of_model(model, parameters) if contents & {"model", "hf_model"} else {}
        groups = None
        if "optimizer" in contents and optimizer is not None:
            packed = optimizer.state_dict()
            tensors |= _flat(packed["state"])
            groups = packed["param_groups"]
        schedule = lr_scheduler.state_dict() if "extra" in contents and lr_scheduler is not None else None
        facts = {"step": step, "lr_scheduler": schedule, "param_groups": groups, "lora": _lora_facts(model)}
        if "extra" in contents and loss_scale is not None:
            facts["loss_scale"] = loss_scale.state_dict()
        facts = json.loads(json.dumps(facts, default=plain_value))
        base = {}
        if "model" in contents and not with_base and lora_of(model) is not None:
            base = {"model": cast(Any, model).config.name_or_path, "tensors": base_checksums(model)}
        return cls(model, contents, tensors, facts, random_state() if "extra" in contents else {}, base)

    def on_host(self, kept: dict[str, torch.Tensor] | None = None) -> "Snapshot":
        """Copy the tensors to host memory, where training does not change them; ``kept`` as ``copied_to_host``'s."""
        return replace(self, tensors=copied_to_host(self.tensors, kept))

    def write(
        self,
        folder: Path,
        describe: Callable[[Path], None],
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Write the folder; collective over ``group``, whose backend sends tensors of ``device``.

        Args:
            describe: writes config and tokenizer into a folder; called on one rank.
        """
        rank, ranks = dist.get_rank(), dist.get_world_size()
        with atomic_dir_all_ranks(folder, device, group) as partial:
            shards = partial / SHARDS
            of_model = {name: t for name, t in self.tensors.items() if name.startswith(MODEL)}
            left_out = {name for name in of_model if "model" not in self.contents or self.base and not is_adapter(name)}
            with raise_on_all_ranks(device, group):
                _write_shards(shards, {n: t for n, t in self.tensors.items() if n not in left_out})
                if left_out and "hf_model" in self.contents:
                    shards = partial / _FOR_HF
                    _write_shards(shards, of_model)
            with raise_on_all_ranks(device, group):
                if self.random:
                    (partial / RNG).mkdir(exist_ok=True)
                    save_file(self.random, partial / RNG / f"{rank:05d}.safetensors")
                (partial / HF).mkdir(exist_ok=True)
                if rank == 0:
                    (partial / STATE).write_text(json.dumps(self.facts))
                    if self.base:
                        (partial / BASE).write_text(json.dumps(self.base))
                    describe(partial / HF)
                lora = lora_of(self.model)
                if "hf_model" in self.contents:
                    dtypes = dict.fromkeys(n.removeprefix(MODEL) for n in of_model if not is_adapter(n))
                    targets = None if lora is None else lora.targets
                    stored = stored_tensors(shards)
                    write_hf_weights(self.model, stored, partial / HF, dtypes, targets=targets, share=(rank, ranks))
                if lora is not None and of_model and rank == 0:
                    base = cast(Any, self.model).config.name_or_path
                    write_adapter(partial / ADAPTER, lora, base, reader(stored_tensors(shards)))
            with raise_on_all_ranks(device, group):
                if rank == 0:
                    shutil.rmtree(partial / _FOR_HF, ignore_errors=True)


def load_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: MultiOptimizer | None,
    lr_scheduler: Any,
    contents: Iterable[str],
    device: torch.device | str = "cpu",
    loss_scale: LossScale | None = None,
) -> None:
    """Restore what ``contents`` names, on any mesh; collective.

    Frozen weights that a checkpoint does not have stay as they are: those of the model that this run has loaded.

    Raises:
        CheckpointError: the folder holds no complete checkpoint, files are damaged, its tensors are not the model's, or
            its adapters were trained on other weights.
        SettingError: it has no weights or optimizer state to load, or its weights are not to be loaded.
        ValueError: the optimizer's state belongs to another model or algorithm, or the schedule to other optimizers.
            All of these are raised before a parameter has changed.
    """
    contents = set(contents)
    try:
        held = check_contents(folder, contents)  # before its bytes are read
    except CheckpointError:
        verify_all_ranks(folder, device)  # names every damaged file
        raise
    verify_all_ranks(folder, device)
    facts = read_facts(folder)
    if "model" in contents and facts.get("lora") != _lora_facts(model):
        raise CheckpointError(f"{folder} has adapters {facts.get('lora')}, but this run's are {_lora_facts(model)}.")
    schedule = facts["lr_scheduler"] if "extra" in contents and lr_scheduler is not None else None
    if schedule is not None:
        lr_scheduler.check_state_dict(schedule)
    stored: dict[str, StoredTensor] = {}
    state: dict[str, torch.Tensor] = {}
    with raise_on_all_ranks(device):
        stored = stored_tensors(folder / SHARDS, overlapping(checkpoint_tensors(model)))
    if "model" in contents:
        own = _of_model(model)
        if (folder / BASE).is_file():
            _check_base(folder, model)
            own = {name: tensor for name, tensor in own.items() if is_adapter(name)}
        _check_tensors(folder, stored, own)
        state |= own
    packed = None
    if "optimizer" in contents and optimizer is not None:
        packed = _optimizer_template(facts["param_groups"], stored, optimizer)
        state |= _flat(packed["state"])
    with raise_on_all_ranks(device):
        read_shards(stored, state)
    if packed is not None and optimizer is not None:
        optimizer.load_state_dict(packed)
    if "extra" in contents:
        if schedule is not None:
            lr_scheduler.load_state_dict(schedule)
        if loss_scale is not None and "loss_scale" in facts:
            loss_scale.load_state_dict(facts["loss_scale"])
        _restore_random_state(folder)
    anew = sorted({"optimizer", "extra"} - (contents & held))
    if anew and optimizer is not None and dist.get_rank() == 0:
        logger.warning("epfsdp2: resumed from %s without %s (checkpoint.load_contents); it starts anew", folder, anew)
    dist.barrier()


def _check_base(folder: Path, model: nn.Module) -> None:
    """Raise ``CheckpointError`` if this model's frozen weights are not those that the adapters were trained on.

    Collective.
    """
    base = json.loads((folder / BASE).read_text())
    wrong = difference(base["tensors"], base_checksums(model))
    if wrong:
        name = cast(Any, model).config.name_or_path
        raise CheckpointError(
            f"{folder} holds adapters without the frozen weights that they were trained on, those of {base['model']}, "
            f"and the weights of {name} are others: {listed(wrong)}. Resume with model.path={base['model']} as it was."
        )


def _lora_facts(model: nn.Module) -> dict[str, Any] | None:
    lora = lora_of(model)
    return None if lora is None else lora.facts()


def random_state() -> dict[str, torch.Tensor]:
    """Return torch's random state of this rank, of the CPU and of its device."""
    state = {"cpu": torch.get_rng_state()}
    if torch.accelerator.is_available():
        state["device"] = torch.get_device_module().get_rng_state()
    return state


def _restore_random_state(folder: Path) -> None:
    """Restore this rank's state; a rank that the saved run did not have is seeded from rank 0's and its number."""
    rank, ranks, saved = dist.get_rank(), dist.get_world_size(), sorted((folder / RNG).glob("*.safetensors"))
    if not saved:
        return
    own = folder / RNG / f"{rank:05d}.safetensors"
    path = own if own.is_file() else saved[0]
    try:
        random = load_file(path)
        if path == own:
            torch.set_rng_state(random["cpu"])
            if "device" in random and torch.accelerator.is_available():
                torch.get_device_module().set_rng_state(random["device"])
        else:
            drawn = torch.Generator()
            drawn.set_state(random["cpu"])
            torch.manual_seed(int(torch.randint(2**62, (), generator=drawn)) + rank)
    except (SafetensorError, KeyError, RuntimeError, TypeError) as error:
        raise CheckpointError(f"{path} holds no random state: {error}") from error
    if len(saved) < ranks and rank == 0:
        said = "epfsdp2: %s has the random state of %d ranks and this run has %d: the others start from a seed made of "
        logger.warning(said + "rank 0's state and their number", folder, len(saved), ranks)


def _write_shards(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if tensors:
        folder.mkdir(exist_ok=True)
    write_shards(folder, first_held(tensors, rank), rank + 1, ranks)


def _of_model(model: nn.Module, parameters: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors of a model to save, or to load in place, by name; tied parameters once."""
    tensors = {**checkpoint_tensors(model), **(parameters or {})}
    return {MODEL + name: tensor.detach() for name, tensor in tensors.items()}


def _flat(state: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {f"{OPTIMIZER}{fqn}.{key}": value for fqn, entries in state.items() for key, value in entries.items()}


def plain_value(value: Any) -> Any:
    """Convert a value of an optimizer's settings that JSON has no type for."""
    return value.item() if isinstance(value, torch.Tensor) else str(value)


def _check_tensors(folder: Path, stored: Mapping[str, StoredTensor], own: Mapping[str, torch.Tensor]) -> None:
    """Raise ``CheckpointError`` with the first tensors that are missing, unknown or of another shape."""
    saved = {name: tensor for name, tensor in stored.items() if name.startswith(MODEL)}
    wrong = [f"{name} is missing" for name in own if name not in saved]
    wrong += [f"{name} (in {saved[name].file.name}) is no tensor of the model" for name in saved if name not in own]
    wrong += [
        f"{name} (in {saved[name].file.name}) is {saved[name].shape}, the model's is {tuple(own[name].shape)}"
        for name in own
        if name in saved and saved[name].shape != tuple(own[name].shape)
    ]
    if wrong:
        raise CheckpointError(f"{folder} is the checkpoint of another model: {listed(wrong)}.")


def _optimizer_template(
    groups: list[dict[str, Any]], stored: Mapping[str, StoredTensor], optimizer: MultiOptimizer
) -> dict[str, Any]:
    """Return this optimizer's own state tensors for the entries that the checkpoint has, to read into; collective.

    Raises:
        ValueError: the state does not fit.
    """
    optimizer.check_groups(groups)
    saved: dict[str, dict[str, tuple[int, ...]]] = {}  # parameter -> entry -> shape
    for name, tensor in stored.items():
        if name.startswith(OPTIMIZER):
            parameter, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
            saved.setdefault(parameter, {})[key] = tensor.shape
    # torch allocates state at the first step, and loading needs tensors to read into.
    optimizer.init_state()
    own = optimizer.state_dict()["state"]
    for fqn, entries in saved.items():
        if entries.keys() != own[fqn].keys():
            raise ValueError(f"The saved state of {fqn} is {sorted(entries)}, the optimizer's is {sorted(own[fqn])}.")
        for key, size in entries.items():
            shape = tuple(own[fqn][key].shape)
            if size != shape:
                raise ValueError(f"The saved {key} of {fqn} is {size}, the optimizer's is {shape}.")
    # A parameter that had no gradient before the save has no state in the checkpoint.
    return {"state": {fqn: own[fqn] for fqn in own if fqn in saved}, "param_groups": groups}
