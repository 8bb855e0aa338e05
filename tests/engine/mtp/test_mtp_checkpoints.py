"""Multi-token prediction layers in checkpoints and exports, trained and frozen."""

import json

import torch
from safetensors.torch import load_file

from epfsdp2.recipes.export import export
from tests.parity.families import FAMILIES
from tests.support.engine.sharded import whole_parameters
from tests.support.models.mtp import save_with_mtp
from tests.support.ranks import run_ranks
from tests.support.trainer.ppo import of_this_rank, ppo_batch, ppo_samples, ppo_worker

COPIES = {f"model.layers.3.{name}.weight" for name in ("embed_tokens", "shared_head.head")}


def _step(worker):
    worker.train_batch(ppo_batch(of_this_rank(worker, ppo_samples())))
    return whole_parameters(worker.engine.module)


def _equal(found, wanted):
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def _go_on(folder, out):
    worker = ppo_worker(folder, 2, mtp_loss_coef=0.3)
    _step(worker)
    worker.save_checkpoint(str(out / "saved"), global_step=1)
    wanted = _step(worker)
    resumed = ppo_worker(folder, 2, mtp_loss_coef=0.3)
    resumed.load_checkpoint(str(out / "saved"))
    assert _equal(_step(resumed), wanted)


def test_resumed_training_of_mtp_layers_continues_bit_for_bit_and_exports_them(tmp_path):
    folder = save_with_mtp(tmp_path / "model", FAMILIES["glm4_moe"], 1)
    run_ranks(_go_on, 2, folder, tmp_path)
    export(tmp_path / "saved", tmp_path / "out")
    before, after = load_file(folder / "model.safetensors"), {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        after |= load_file(file)
    assert after.keys() == before.keys() - COPIES
    buffers = {name for name in after if name.endswith("e_score_correction_bias")}
    assert {name for name in after if torch.equal(before[name], after[name])} == buffers
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def _kept(folder, out):
    from verl.workers.config.model import MtpConfig

    kept = {"mtp": MtpConfig(enable=True)}
    worker = ppo_worker(folder, 2, model=kept)
    before = whole_parameters(worker.engine.module)
    drafts = {name for name in before if name.startswith("model.layers.3.")}
    after = _step(worker)
    assert drafts and {name for name in after if torch.equal(before[name], after[name])} == drafts
    worker.save_checkpoint(str(out / "saved"), global_step=1)
    assert len(ppo_worker(folder, 2, forward_only=True, model=kept).engine.module.model.layers) == 3


def test_mtp_layers_that_are_kept_stay_as_they_are_and_no_reference_has_them(tmp_path):
    folder = save_with_mtp(tmp_path / "model", FAMILIES["deepseek_v3"], 1)
    run_ranks(_kept, 2, folder, tmp_path)
    export(tmp_path / "saved", tmp_path / "out")
    after = {name: t for file in (tmp_path / "out").glob("*.safetensors") for name, t in load_file(file).items()}
    drafts = {n: t for n, t in load_file(folder / "model.safetensors").items() if n.startswith("model.layers.3.")}
    assert all(torch.equal(after[name], drafts[name]) for name in drafts.keys() - COPIES)
