"""One family's sharded model against the plain Hugging Face model in one process, over a matrix of settings."""

import copy
import functools
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from epfsdp2.engine.build import shard_and_load
from epfsdp2.engine.checkpoint.safetensors_reader import open_checkpoint
from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.model.meta import build_on_meta
from epfsdp2.engine.optim.clip import clip_grad_norm_
from epfsdp2.engine.optim.multi_optimizer import build_multi_optimizer
from epfsdp2.engine.packing.sequences import PackedSequences
from epfsdp2.engine.topology.dtensor import local_pieces, local_tensor
from epfsdp2.engine.topology.mesh import Meshes, Topology, build_meshes
from tests.parity import families
from tests.parity.float64 import float64
from tests.support.models.tiny import VOCAB, relative_error

__all__ = ["BOUND", "WORLD", "Case", "Row", "cases", "compare", "fast_case", "packed_cases"]

WORLD = 4
BOUND = {"float32": 1e-5, "float64": 1e-12}  # relative, ||ours - theirs|| / ||theirs|| per tensor
_ROWS_PER_RANK, _LENGTH, _CLIP, _STEPS = 2, 13, 0.5, 2
# (ep, fsdp_size, etp); fsdp_size=2 gives two replicas
_MESHES = ((1, -1, 1), (2, -1, 1), (4, -1, 1), (1, 2, 1), (2, 2, 1), (2, -1, 2), (1, -1, 2), (1, 2, 2))


@dataclass(frozen=True)
class Case:
    """One setting of the matrix.

    Args:
        dtype: dtype of the computation; bfloat16 only tests that the model runs.
        packed: whether the sequences of a rank are one row; in the plain model each is a row.
    """

    ep: int
    fsdp_size: int
    shard_dim: int | str
    checkpointing: str
    dtype: str = "float32"
    packed: bool = False
    etp: int = 1

    @classmethod
    def on(cls, mesh: tuple[int, int, int], *how: Any, packed: bool = False) -> "Case":
        """Build a case from one of ``_MESHES`` and further fields."""
        ep, fsdp_size, etp = mesh
        return cls(ep, fsdp_size, *how, packed=packed, etp=etp)

    @property
    def bound(self) -> float:
        return BOUND.get(self.dtype, float("inf"))

    @property
    def mesh(self) -> str:
        replicas = 1 if self.fsdp_size == -1 else WORLD // self.fsdp_size
        etp = f" x {self.etp}" if self.etp > 1 else ""
        return f"{replicas} x {WORLD // replicas // self.ep // self.etp} x {self.ep}{etp}"


@dataclass
class Row:
    """The worst relative error of each quantity over tensors, steps and ranks, or the reason for none."""

    family: str
    case: Case
    errors: dict[str, float] = field(default_factory=dict)
    refused: str = ""
    failed: str = ""

    @property
    def worst(self) -> float:
        return max(self.errors.values(), default=0.0)

    @property
    def good(self) -> bool:
        return not self.failed and self.worst < self.case.bound

    def as_json(self) -> dict:
        return {**asdict(self), "mesh": self.case.mesh}

    @classmethod
    def of_json(cls, row: dict) -> "Row":
        row.pop("mesh")
        return cls(**{**row, "case": Case(**row["case"])})


def cases(name: str) -> list[Case]:
    """Return the whole matrix of one family; dense families have no ``ep`` and no shard dim of experts."""
    dtype = families.ALL[name].dtype
    if name in families.DENSE:
        alone = [mesh for mesh in _MESHES if mesh[0] == mesh[2] == 1]
        flat = [Case.on(mesh, "auto", ac) for mesh, ac in itertools.product(alone, ("none", "full"))]
        return [*flat, Case(1, -1, "auto", "selective"), Case(1, -1, "auto", "full", "bfloat16")]
    matrix = [Case.on(mesh, dim, ac, dtype) for mesh, dim, ac in itertools.product(_MESHES, (0, 1), ("none", "full"))]
    more = [Case(2, -1, 1, "selective", dtype), Case(2, -1, 1, "selective", dtype, etp=2)]
    return [*matrix, *more, Case(2, -1, 1, "full", "bfloat16")]


def packed_cases(name: str) -> list[Case]:
    """Return a case with packed rows for each mesh without ``etp``, with the other settings in turn."""
    meshes = [mesh for mesh in _MESHES if mesh[2] == 1 and (name not in families.DENSE or mesh[0] == 1)]
    dims = ["auto" if mesh[0] == 1 else i % 2 for i, mesh in enumerate(meshes)]
    return [
        Case.on(mesh, dim, ("full", "none")[i % 2], families.ALL[name].dtype, packed=True)
        for i, (mesh, dim) in enumerate(zip(meshes, dims, strict=True))
    ]


def fast_case(index: int, name: str) -> Case:
    """Return a case for the ``index``-th family; all families together cover every setting."""
    packed = index % 4 > 1
    if name in families.DENSE:
        return Case(1, (-1, 2)[index % 2], "auto", ("full", "none", "selective")[index % 3], packed=packed)
    mesh = [(2, -1, 1), (4, -1, 1), (2, 2, 1), (2, -1, 2), (1, 2, 2), (1, -1, 2)][index % 6]
    checkpointing = ("full", "none", "selective")[(index // 2 + index // 6) % 3]
    return Case.on(mesh, index // 6 % 2, checkpointing, families.ALL[name].dtype, packed=packed)


def compare(work: Sequence[tuple[str, Path, Sequence[Case]]], results: Path) -> None:
    """Run cases; rank 0 appends to ``results`` a line at the start of a case, and a line with its row."""
    rank = dist.get_rank()
    for name, folder, todo in work:
        with _precision(families.ALL[name].dtype):
            reference = _Reference.run(name, folder)
        for case in todo:
            if rank == 0:
                _append(results, {"started": [name, asdict(case)], "time": time.time()})
            with _precision(case.dtype):
                row = _compare(name, folder, case, reference)
            if rank == 0:
                _append(results, {"row": row.as_json()})


def _precision(dtype: str) -> AbstractContextManager[None]:
    return float64() if dtype == "float64" else nullcontext()


def _append(path: Path, line: dict) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _batch() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCAB, (WORLD * _ROWS_PER_RANK, _LENGTH), generator=generator)


def _adam(params) -> torch.optim.Optimizer:
    # An eps near the gradients' size, because AdamW's sign-like step for tiny gradients magnifies rounding errors. It
    # also shows a wrong scale of the gradients, which AdamW otherwise hides.
    return torch.optim.AdamW(params, lr=1e-3, eps=1e-4)


@dataclass
class _Reference:
    """Results of the plain model in each step, on the whole batch."""

    kind: type[nn.Module]
    config: object
    steps: list[dict]

    @classmethod
    def run(cls, name: str, folder: Path) -> "_Reference":
        model = families.load(name, folder, getattr(torch, families.ALL[name].dtype)).train(families.ALL[name].train)
        optimizer, steps = _adam([p for p in model.parameters() if p.requires_grad]), []
        for _ in range(_STEPS):
            optimizer.zero_grad()
            logits = families.logits(model, _batch())
            families.loss(name, logits, _batch()).backward()
            grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
            optimizer.step()
            steps.append(
                {
                    "logits": logits.detach(),
                    "gradients": grads,
                    "norm": norm,
                    "parameters": {n: p.detach().clone() for n, p in model.named_parameters()},
                    "moments": {n: _moments(optimizer, p) for n, p in model.named_parameters()},
                }
            )
        return cls(type(model), model.config, steps)


def _moments(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> dict[str, torch.Tensor]:
    state = optimizer.state.get(param, {})
    return {key: state[key].clone() for key in ("exp_avg", "exp_avg_sq") if key in state}


@functools.cache
def _meshes(ep: int, fsdp_size: int, etp: int) -> Meshes:
    return build_meshes("cpu", Topology.arrange(WORLD, ep, fsdp_size, etp))


def _sharded(folder: Path, case: Case, reference: _Reference):
    meshes = _meshes(case.ep, case.fsdp_size, case.etp)
    kind = SimpleNamespace(from_config=lambda config, dtype, **_: reference.kind._from_config(config, dtype=dtype))
    dtype = torch.float64 if case.dtype == "float64" else torch.float32
    model = build_on_meta(kind, copy.deepcopy(reference.config), dtype)
    if case.packed:
        PackedSequences(model)
    options = ShardingOptions(
        param_dtype=getattr(torch, case.dtype),
        reduce_dtype=dtype,
        expert_shard_dim=case.shard_dim,
        checkpointing=case.checkpointing,
    )
    shard_and_load(model, open_checkpoint(folder), meshes, options, device="cpu", device_id="cpu")
    return model, meshes


def _compare(name: str, folder: Path, case: Case, reference: _Reference) -> Row:
    family = families.ALL[name]
    try:
        model, meshes = _sharded(folder, case, reference)
    except SettingError as error:  # equal on all ranks, before any collective
        return Row(name, case, refused=str(error))
    model.train(family.train)
    rows = slice(dist.get_rank() * _ROWS_PER_RANK, (dist.get_rank() + 1) * _ROWS_PER_RANK)
    if case.dtype == "bfloat16":
        families.loss(name, families.logits(model, _batch()[rows]), _batch()[rows]).backward()
        finite = [bool(torch.isfinite(local_tensor(p.grad)).all()) for p in model.parameters() if p.grad is not None]
        return Row(name, case, failed="" if finite and all(finite) else "a gradient is not finite")
    optimizer = build_multi_optimizer(model, _adam)
    found: list[tuple[str, str, float]] = []
    for step, plain in enumerate(reference.steps, start=1):
        expected = {key: _by_own_name(model, value) for key, value in plain.items()}
        optimizer.zero_grad()
        logits = (families.packed_logits if case.packed else families.logits)(model, _batch()[rows])
        families.loss(name, logits, _batch()[rows]).backward()
        grads = [("gradients", n, g, expected["gradients"].get(n)) for n, g in _gradients(model, expected["gradients"])]
        found.append(("logits", f"of step {step}", relative_error(logits.detach(), expected["logits"][rows])))
        found += _errors(grads, meshes)
        norm = clip_grad_norm_(model.parameters(), _CLIP, meshes)
        found.append(("norm", f"of step {step}", relative_error(norm, expected["norm"])))
        optimizer.step()
        pairs = [("parameters", n, p, expected["parameters"][n]) for n, p in model.named_parameters()]
        for param_name, param in model.named_parameters():
            for key, wanted in expected["moments"][param_name].items():
                pairs.append(("moments", param_name, optimizer.state.get(param, {}).get(key), wanted))
        found += _errors(pairs, meshes)
    return _row(name, case, found)


def _by_own_name(model: nn.Module, of_plain: Any) -> Any:
    """Convert the plain model's values by parameter to the engine's names; return other values unchanged."""
    if not isinstance(of_plain, dict):
        return of_plain
    moments = {key for value in of_plain.values() if isinstance(value, dict) for key in value}
    if not moments:
        return families.own_values(model, of_plain)
    found: dict[str, dict[str, torch.Tensor]] = {name: {} for name, _ in model.named_parameters()}
    for key in moments:
        for name, value in families.own_values(model, {n: v[key] for n, v in of_plain.items() if key in v}).items():
            found[name][key] = value
    return found


def _gradients(model: nn.Module, wanted: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield gradients by name; zeros for a missing one, as of an expert without tokens."""
    for name, param in model.named_parameters():
        if param.grad is not None or name in wanted:
            yield name, torch.zeros_like(param) if param.grad is None else param.grad


def _errors(
    pairs: Sequence[tuple[str, str, torch.Tensor | None, torch.Tensor | None]], meshes: Meshes
) -> list[tuple[str, str, float]]:
    """Return relative errors of sharded tensors: ranks compare their shards, and squares are summed over ranks."""
    squares = torch.zeros(len(pairs), 2, dtype=torch.float64)
    for i, (_, _, ours, wanted) in enumerate(pairs):
        if ours is not None:
            for held, part in local_pieces(ours.detach()):
                theirs = torch.zeros(()) if wanted is None else wanted[held.slices].double()
                squares[i, 0] += (part.double() - theirs).square().sum()
                squares[i, 1] += theirs.square().sum()
    dist.all_reduce(squares, group=meshes.replica_group)
    errors = squares[:, 0].sqrt() / squares[:, 1].sqrt().clamp_min(1e-12)
    return [
        (quantity, name, error if ours is not None else float("inf"))
        for (quantity, name, ours, _), error in zip(pairs, errors.tolist(), strict=True)
    ]


def _row(name: str, case: Case, found: list[tuple[str, str, float]]) -> Row:
    """Return a row of the worst errors of all ranks, with the names of bad tensors."""
    everyone: list = [None] * WORLD
    dist.all_gather_object(everyone, found)
    errors: dict[str, float] = {}
    bad: list[str] = []
    for quantity, tensor, error in itertools.chain(*everyone):
        errors[quantity] = max(errors.get(quantity, 0.0), error)
        if not error < case.bound:
            bad.append(f"{quantity} {tensor} {error:.1e}")
    return Row(name, case, errors, failed="; ".join(dict.fromkeys(bad[:4])))
