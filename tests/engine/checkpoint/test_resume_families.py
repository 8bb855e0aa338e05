"""Families outside transformers' interface, and all that came to it since 5.9, go on after a resume as if they had not
stopped."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from epfsdp2.engine.build import shard_and_load
from epfsdp2.engine.checkpoint import state as checkpoint
from epfsdp2.engine.checkpoint.safetensors_reader import open_checkpoint
from epfsdp2.engine.fsdp.options import ShardingOptions
from epfsdp2.engine.model.meta import build_on_meta
from epfsdp2.engine.optim.clip import clip_grad_norm_
from epfsdp2.engine.optim.multi_optimizer import build_multi_optimizer
from epfsdp2.engine.topology.dtensor import checkpoint_tensors, local_tensor
from epfsdp2.engine.topology.mesh import Topology, build_meshes
from tests.parity import families
from tests.support.engine.checkpoints import save_checkpoint
from tests.support.models.tiny import VOCAB
from tests.support.ranks import run_ranks

CONTENTS = {"model", "optimizer"}
RESUMED = tuple(name for name in (*families.OUTSIDE, *families.NEWER) if name in families.ALL)


class _Trainer:
    def __init__(self, name, folder, meshes):
        self.name, self.meshes = name, meshes
        plain = families.ALL[name].build()
        self.model = build_on_meta(families.AsAuto(type(plain)), plain.config, torch.float32)
        options = ShardingOptions(param_dtype=torch.float32)
        shard_and_load(self.model, open_checkpoint(folder), meshes, options, device="cpu", device_id="cpu")
        self.model.train(families.ALL[name].train)
        self.optimizer = build_multi_optimizer(self.model, lambda params: torch.optim.AdamW(params, lr=1e-3, eps=1e-4))

    def step(self, number):
        ids = torch.randint(0, VOCAB, (2, 11), generator=torch.Generator().manual_seed(number + 10 * dist.get_rank()))
        self.optimizer.zero_grad()
        families.loss(self.name, families.logits(self.model, ids), ids).backward()
        clip_grad_norm_(self.model.parameters(), 1.0, self.meshes)
        self.optimizer.step()

    def tensors(self):
        found = {name: local_tensor(t.detach()).clone() for name, t in checkpoint_tensors(self.model).items()}
        for name, entries in self.optimizer.state_dict()["state"].items():
            found |= {f"{name}|{key}": local_tensor(t).clone() for key, t in entries.items()}
        return found


def _resume_all(names: list[str], folder: Path) -> None:
    """Rank by rank, write per family which tensors of a resumed run are not those of one that went on."""
    meshes = build_meshes("cpu", Topology.arrange(dist.get_world_size(), 2))
    for name in names:
        try:
            trainer = _Trainer(name, folder / name, meshes)
            trainer.step(0)
            at_start = trainer.tensors()
            saved = folder / f"{name}_saved"
            save_checkpoint(saved, trainer.model, trainer.optimizer, None, CONTENTS, step=1)
            trainer.step(1)
            wanted, resumed = trainer.tensors(), _Trainer(name, folder / name, meshes)
            checkpoint.load_checkpoint(saved, resumed.model, resumed.optimizer, None, CONTENTS)
            resumed.step(1)
            found = resumed.tensors()
            moved = any(not torch.equal(at_start[n], t) for n, t in wanted.items())
            others = [n for n in wanted if n not in found or not torch.equal(found[n], wanted[n])]
            report = others if moved else ["no step was taken"]
        except Exception as error:  # alike on all ranks, and the other families can go on
            report = [f"{type(error).__name__}: {error}"]
        (folder / f"{name}.{dist.get_rank()}.json").write_text(json.dumps(report))


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    for name in RESUMED:
        families.save(name, folder / name)
    run_ranks(_resume_all, 2, list(RESUMED), folder, timeout=900)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", RESUMED)
def test_resume_of_every_family_continues_bit_for_bit(resumed, name):
    reports = [json.loads((resumed / f"{name}.{rank}.json").read_text()) for rank in range(2)]
    assert reports == [[], []]
