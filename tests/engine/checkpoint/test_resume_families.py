"""Families outside transformers' interface, and all that came to it since 5.9, go on after a resume as if they had not
stopped."""

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
from epfsdp2.engine.topology.mesh import Meshes, Topology, build_meshes
from tests.parity import families
from tests.support.models.tiny import VOCAB
from tests.support.ranks import each_case, run_ranks

CONTENTS = {"model", "optimizer"}
FEW = ["dbrx", "granitemoehybrid"]
OTHERS = [name for name in (*families.OUTSIDE, *families.NEWER) if name not in FEW]


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


def _resumes(name: str, folder: Path, meshes: Meshes) -> None:
    trainer = _Trainer(name, folder / name, meshes)
    trainer.step(0)
    at_start = trainer.tensors()
    saved = folder / f"{name}_saved"
    checkpoint.save_checkpoint(saved, trainer.model, trainer.optimizer, None, CONTENTS, step=1)
    trainer.step(1)
    wanted, resumed = trainer.tensors(), _Trainer(name, folder / name, meshes)
    checkpoint.load_checkpoint(saved, resumed.model, resumed.optimizer, None, CONTENTS)
    resumed.step(1)
    found = resumed.tensors()
    assert any(not torch.equal(at_start[n], t) for n, t in wanted.items()), "no step was taken"
    assert [n for n in wanted if n not in found or not torch.equal(found[n], wanted[n])] == []


def _each_resumes(names: list[str], folder: Path) -> None:
    meshes = build_meshes("cpu", Topology.arrange(dist.get_world_size(), 2))
    each_case([(name, folder, meshes) for name in names], _resumes)


@pytest.mark.parametrize("names", [FEW, pytest.param(OTHERS, marks=pytest.mark.long)], ids=["few", "others"])
def test_resume_of_every_family_continues_bit_for_bit(tmp_path, names):
    for name in names:
        families.save(name, tmp_path / name)
    run_ranks(_each_resumes, 2, names, tmp_path, timeout=900)
