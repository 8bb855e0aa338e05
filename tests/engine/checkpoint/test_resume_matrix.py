"""A run that is saved on some ranks and resumed on others goes on as if it had not stopped."""

import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from epfsdp2.engine.checkpoint import state as checkpoint
from epfsdp2.engine.optim.clip import clip_grad_norm_
from epfsdp2.engine.optim.lr_scheduler import MultiLRScheduler
from epfsdp2.engine.optim.multi_optimizer import build_multi_optimizer
from epfsdp2.engine.optim.muon import Muon
from epfsdp2.engine.topology.dtensor import checkpoint_tensors, local_pieces
from epfsdp2.engine.topology.mesh import Topology, build_meshes, divisors
from tests.support.engine.checkpoints import save_checkpoint
from tests.support.engine.sharded import sharded_model, whole_tensor
from tests.support.models.tiny import VOCAB, save_qwen3_moe, token_loss
from tests.support.ranks import each_case, run_ranks

CONTENTS = {"model", "optimizer", "extra"}
OPTIMIZERS = ("adamw", "muon")
BEFORE, AFTER = 2, 2  # steps before a run is saved, and after
ROWS = 8
# By the largest entry of a tensor, on another mesh: it adds the same float32 numbers in another order. Parameters are
# then some roundings of 1.2e-7 apart. Moments are of gradients, sums in which most cancels, and of their squares.
PARAMETERS, MOMENTS = 1e-6, 4e-6


@dataclass(frozen=True)
class Mesh:
    """``replicas`` copies of the model; ``dim`` is the expert weights' that ``ep_fsdp`` cuts."""

    world: int
    ep: int = 1
    replicas: int = 1
    dim: int = 1
    etp: int = 1

    @property
    def name(self) -> str:
        copies = f"-{self.replicas}copies" if self.replicas > 1 else ""
        etp = f"-etp{self.etp}" if self.etp > 1 else ""
        return f"{self.world}ranks-ep{self.ep}{etp}{copies}" + ("-dim0" if self.dim == 0 else "")


def _meshes(world: int) -> list[Mesh]:
    """All of as many ranks: plain and HSDP, every ``ep``; both dims where ``ep_fsdp`` cuts at all."""
    return [
        Mesh(world, ep, replicas, dim, etp)
        for replicas in divisors(world)[:-1] or [1]
        for ep in divisors(world // replicas)
        for etp in (1, 2)
        if (world // replicas // ep) % etp == 0
        # Muon takes whole experts, or cut ones over one axis.
        for dim in ((1, 0) if world // replicas > ep and etp == 1 else (1,) if etp == 1 else (0,))
    ]


WORLDS = (1, 2, 4, 8)
ALL = {mesh.name: mesh for world in WORLDS for mesh in _meshes(world)}
# Optimizer, source, target; Muon leaves the rest of the model to AdamW.
FAST = [
    ("adamw", "2ranks-ep2", "2ranks-ep2"),
    ("adamw", "2ranks-ep2", "4ranks-ep2-etp2-dim0"),
    ("adamw", "4ranks-ep2-2copies", "2ranks-ep1-dim0"),
    ("muon", "2ranks-ep2", "2ranks-ep2"),
    ("muon", "4ranks-ep1-etp2-dim0", "2ranks-ep2"),
    ("muon", "4ranks-ep2-2copies", "2ranks-ep1-dim0"),
]


# A process group holds sockets and threads, and there are many trainers in a process.
_shared_meshes = functools.cache(build_meshes)


class _Trainer:
    def __init__(self, folder: Path, mesh: Mesh, optimizer: str):
        topology = Topology.arrange(mesh.world, mesh.ep, mesh.world // mesh.replicas, mesh.etp)
        with mock.patch("tests.support.engine.sharded.build_meshes", _shared_meshes):
            self.model, self.meshes = sharded_model(folder, topology, expert_shard_dim=mesh.dim)
        matrices = (lambda groups: Muon(groups, lr=1e-3, weight_decay=0.01)) if optimizer == "muon" else None
        self.optimizer = build_multi_optimizer(self.model, _adamw, matrices)
        self.schedule = MultiLRScheduler(
            self.optimizer, lambda inner: torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1 / (step + 1))
        )

    def train(self, steps: range) -> None:
        rank, each = dist.get_rank(), ROWS // dist.get_world_size()
        for step in steps:
            ids = torch.randint(0, VOCAB, (ROWS, 11), generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            token_loss(self.model, ids[rank * each : (rank + 1) * each]).backward()
            clip_grad_norm_(self.model.parameters(), 1.0, self.meshes)
            self.optimizer.step()
            self.schedule.step()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in checkpoint_tensors(self.model).items():
            yield name, tensor.detach()
        for name, entries in self.optimizer.state_dict()["state"].items():
            for key, tensor in entries.items():
                yield f"{name}|{key}", tensor

    def rates(self) -> list:
        """Where the schedule is."""
        return json.loads(json.dumps([self.schedule.state_dict(), [g["lr"] for g in self.optimizer.param_groups]]))

    def write(self, path: Path) -> None:
        """Every tensor, whole."""
        whole = {name: whole_tensor(t) for name, t in self.tensors()}
        if dist.get_rank() == 0:
            save_file({name: tensor.contiguous() for name, tensor in whole.items()}, path)

    def check(self, path: Path, parameters: float, moments: float) -> None:
        """Compare this rank's tensors with the written ones, by the largest entry of each tensor."""
        wanted = load_file(path)
        for name, tensor in self.tensors():
            whole, limit = wanted.pop(name), moments if "|" in name else parameters
            for held, local in local_pieces(tensor):
                part = whole[held.slices]
                if not torch.equal(local, part):
                    size = ((local - part).abs().max() / whole.abs().max()).nan_to_num(torch.inf).item()
                    assert size <= limit, f"{path.name}: {name} is {size:.1e} off, {limit:.0e} is allowed"
        assert not wanted, list(wanted)


def _adamw(params):
    # An eps near the gradients' size: AdamW's sign-like step for tiny gradients would magnify their rounding errors.
    return torch.optim.AdamW(params, lr=1e-3, eps=1e-3)


def _train_and_save(folder: Path, out: Path, sources: Sequence[tuple[str, Mesh]]) -> None:
    """Each run is saved, and goes on."""
    for optimizer, source in sources:
        at = out / optimizer / source.name
        trainer = _Trainer(folder, source, optimizer)
        trainer.train(range(BEFORE))
        state = (trainer.model, trainer.optimizer, trainer.schedule)
        save_checkpoint(at, *state, CONTENTS, step=BEFORE)
        trainer.write(at / "saved.safetensors")
        (at / "rates.json").write_text(json.dumps(trainer.rates()))
        trainer.train(range(BEFORE, BEFORE + AFTER))
        trainer.write(at / "continued.safetensors")


def _resume(folder: Path, out: Path, pairs: Sequence[tuple[str, Mesh, Mesh]]) -> None:
    """Resume every (optimizer, source, target), each target's one after the other."""
    trainer = functools.lru_cache(1)(_Trainer)
    each_case([(*pair, trainer, folder, out) for pair in pairs], _resumes)


def _resumes(optimizer: str, source: Mesh, target: Mesh, build, folder: Path, out: Path) -> None:
    at, trainer = out / optimizer / source.name, build(folder, target, optimizer)
    checkpoint.load_checkpoint(at, trainer.model, trainer.optimizer, trainer.schedule, CONTENTS)
    trainer.check(at / "saved.safetensors", 0.0, 0.0)
    assert trainer.rates() == json.loads((at / "rates.json").read_text())
    trainer.train(range(BEFORE, BEFORE + AFTER))
    trainer.check(at / "continued.safetensors", *((0.0, 0.0) if source == target else (PARAMETERS, MOMENTS)))


def _save_all(tmp_path: Path, sources: Iterable[tuple[str, str]]) -> tuple[Path, Path]:
    """The model and the checkpoints of optimizers on the meshes of these names."""
    sizes = {"num_hidden_layers": 2, "mlp_only_layers": [], "hidden_size": 32, "head_dim": 8}
    model, out = save_qwen3_moe(tmp_path / "model", moe_intermediate_size=24, **sizes), tmp_path / "runs"
    for world in WORLDS:
        of_world = [(optimizer, ALL[name]) for optimizer, name in sorted(set(sources)) if ALL[name].world == world]
        if of_world:
            run_ranks(_train_and_save, world, model, out, of_world, timeout=1200)
    return model, out


def _resume_all(model: Path, out: Path, pairs: Sequence[tuple[str, str, str]]) -> None:
    for world in WORLDS:
        todo = [(o, ALL[source], ALL[target]) for o, source, target in pairs if ALL[target].world == world]
        if todo:
            todo.sort(key=lambda pair: (pair[0], pair[2].name))
            run_ranks(_resume, world, model, out, todo, timeout=7200)


def test_resume_on_another_mesh_equals_an_uninterrupted_run(tmp_path):
    _resume_all(*_save_all(tmp_path, [(optimizer, source) for optimizer, source, _ in FAST]), FAST)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return _save_all(tmp_path_factory.mktemp("all"), [(optimizer, name) for optimizer in OPTIMIZERS for name in ALL])


@pytest.mark.long
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("world", WORLDS, ids=lambda world: f"{world}ranks")
def test_resume_of_every_mesh_on_every_other_equals_an_uninterrupted_run(saved, world, optimizer):
    _resume_all(*saved, [(optimizer, source, target) for target in ALL if ALL[target].world == world for source in ALL])
