"""Multi-token prediction layers in checkpoints and exports, trained and frozen."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from epfsdp2.engine.model_files import predicted_layers
from epfsdp2.engine.mtp.layers import add_mtp_layers
from epfsdp2.recipes.export import export
from tests.parity.families import ALL, FAMILIES
from tests.rollout.served_families import SERVED
from tests.support.engine.sharded import sharded_model, whole_parameters
from tests.support.models.mtp import save_with_mtp
from tests.support.ranks import run_ranks
from tests.support.trainer.ppo import of_this_rank, ppo_batch, ppo_samples, ppo_worker

EXPERTS = "mtp.layers.0.mlp.experts"
NEWER = sorted({"inkling", "step3p7"} & ALL.keys())  # not in transformers 5.9
COPIES = {f"model.layers.3.{name}.weight" for name in ("embed_tokens", "shared_head.head")}


def _step(worker):
    worker.train_batch(ppo_batch(of_this_rank(worker, ppo_samples())))
    return whole_parameters(worker.engine.module)


def _equal(found, wanted):
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def _go_on(folder, out, attention):
    model = {"override_config": {"attn_implementation": attention}}
    worker = ppo_worker(folder, 2, model=model, mtp_loss_coef=0.3)
    _step(worker)
    worker.save_checkpoint(str(out / "saved"), global_step=1)
    wanted = _step(worker)
    resumed = ppo_worker(folder, 2, model=model, mtp_loss_coef=0.3)
    resumed.load_checkpoint(str(out / "saved"))
    assert _equal(_step(resumed), wanted)


@pytest.mark.parametrize("family", ["deepseek_v4", "glm4_moe", "nemotron_h", "qwen3_next", *NEWER])
def test_resumed_training_of_mtp_layers_continues_bit_for_bit_and_exports_them(tmp_path, family):
    folder = save_with_mtp(tmp_path / "model", ALL[family], 1)
    run_ranks(_go_on, 2, folder, tmp_path, ALL[family].attention)
    export(tmp_path / "saved", tmp_path / "out")
    before, after = load_file(folder / "model.safetensors"), {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        after |= load_file(file)
    assert after.keys() == before.keys() - COPIES
    biases = "e_score_correction_bias", "gate.bias", "router_bias", "tid2eid"
    buffers = {name for name in after if name.endswith(biases)}
    towers = {name for name in after if name.startswith(("model.audio.", "model.visual.", "vision_model.", "vit_"))}
    assert {name for name in after if torch.equal(before[name], after[name])} == buffers | towers
    assert predicted_layers(tmp_path / "out" / "config.json") == 1


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


def _as_qwen_3_6(folder):
    """Store the experts of the layer as stacks, as Qwen3.6 does, and not one by one, as Qwen3.5 does."""
    tensors = load_file(folder / "model.safetensors")
    parts = {
        part: torch.stack([tensors.pop(f"{EXPERTS}.{i}.{part}_proj.weight") for i in range(8)])
        for part in ("gate", "up", "down")
    }
    tensors[f"{EXPERTS}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
    tensors[f"{EXPERTS}.down_proj"] = parts["down"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _experts(folder):
    model, _ = sharded_model(folder, 2, ep=2, extend=partial(add_mtp_layers, count=1, dtype=torch.float32))
    return {name: t for name, t in whole_parameters(model).items() if name.startswith(EXPERTS)}


def _read_alike(one_by_one, stacked):
    found = _experts(stacked)
    assert len(found) == 2 and _equal(found, _experts(one_by_one))


def test_experts_of_a_layer_beside_a_vision_model_are_read_one_by_one_and_as_stacks(tmp_path):
    recipe = SERVED["qwen3_5_moe_vl"].family
    folders = [save_with_mtp(tmp_path / name, recipe, 1) for name in ("3.5", "3.6")]
    _as_qwen_3_6(folders[1])
    run_ranks(_read_alike, 2, *folders)
