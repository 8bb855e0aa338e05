"""Multi-token prediction layers in verl's updates, against plain operators in one process."""

import contextlib

import pytest
import torch

from tests.parity.families import ALL, Family
from tests.parity.float64 import float64
from tests.support.engine.sharded import whole_parameters
from tests.support.models.mtp import PlainDrafts, save_with_mtp
from tests.support.models.tiny import relative_error
from tests.support.models.vlm import IMAGE_TOKENS, VLMS, plain_vlm, vlm_batch, vlm_samples
from tests.support.ranks import run_ranks
from tests.support.trainer.ppo import of_this_rank, ppo_batch, ppo_samples, ppo_worker, watched_gradients

COEF, UNTIED = 0.3, {"tie_word_embeddings": False}
DEPTHS = {
    **{"deepseek_v3": 2, "deepseek_v4": 1, "glm4_moe": 1, "glm4_moe_lite": 1, "glm_moe_dsa": 2, "hy_v3": 2},
    **{"nemotron_h": 1, "qwen3_5_moe": 1, "qwen3_next": 1},
    # Not in transformers 5.9.
    **{"bailing_hybrid": 2, "deepseek_v32": 2, "inkling": 2, "mellum": 1, "step3p7": 2},
}
MESHES = [
    {"ep": 1},
    {"ep": 2, "fsdp_size": 2, "dynamic": True, "activation_checkpointing": "full"},
    {"ep": 4, "ulysses_sequence_parallel_size": 2},
    {"ep": 2, "etp_size": 2, "reshard_after_forward": False, "micro_batch": 1},
]


def _plain(folder):
    """Return gradients of the layers, the mean loss and the share of equal modes over all samples."""
    drafts, losses, agrees = PlainDrafts(folder), [], []
    for ids, prompt, *_ in ppo_samples():
        each, equal = drafts(ids, 0.7)
        for depth in range(drafts.depth):
            # From token t comes token t + 2 + depth, which is a response's.
            counts = slice(max(0, prompt - 2 - depth), max(0, len(ids) - 2 - depth))
            losses.append(each[depth, counts])
            agrees.append(equal[depth, counts])
    loss = torch.cat(losses).mean()
    (COEF * loss).backward()
    return drafts.named_gradients(), loss.item(), torch.cat(agrees).float().mean().item()


def _precision(family):
    return float64() if family == "deepseek_v4" else contextlib.nullcontext()  # it magnifies float32's rounding


def _check(family, folder, meshes):
    with _precision(family):
        _updates(folder, ALL[family].attention, meshes)


def _updates(folder, attention, meshes):
    from verl.utils import tensordict_utils as tu

    wanted, loss, agreement = _plain(folder)
    for case in meshes:
        seen, metrics, after = {}, {}, {}
        for coef in (None, COEF):
            model = {"override_config": {"attn_implementation": attention}}
            worker = ppo_worker(folder, **case, model=model, mtp_loss_coef=coef)
            gradients = watched_gradients(worker)
            output = worker.train_batch(ppo_batch(of_this_rank(worker, ppo_samples())))
            seen[coef], after[coef] = gradients, whole_parameters(worker.engine.module)
            metrics[coef] = tu.get(output, "metrics") if worker.engine.is_mp_src_rank_with_outputs() else None
        trained = {name: want for name, want in wanted.items() if want is not None}  # indexers have no gradient
        assert after[COEF].keys() - after[None].keys() == wanted.keys()
        assert seen[COEF].keys() - seen[None].keys() == trained.keys()
        for name in seen[None]:
            assert torch.equal(seen[None][name], seen[COEF][name]), (case, name)
            assert torch.equal(after[None][name], after[COEF][name]), (case, name)
        for name, want in trained.items():
            assert relative_error(seen[COEF][name], want) < 1e-5, (case, name)
        if metrics[COEF] is not None:
            assert metrics[COEF]["grad_norm"] == metrics[None]["grad_norm"]
            (found,), (share,) = set(metrics[COEF]["mtp_loss"][0]), set(metrics[COEF]["mtp_agreement"][0])
            assert found == pytest.approx(loss, rel=1e-5) and share == pytest.approx(agreement, abs=1e-6)


@pytest.mark.parametrize(
    ("family", "depth", "meshes"),
    [
        ("deepseek_v3", 2, MESHES[1:3]),
        *(pytest.param(name, n, MESHES, marks=pytest.mark.long) for name, n in DEPTHS.items() if name in ALL),
    ],
)
def test_update_with_mtp_layers_leaves_the_policys_bits_and_has_their_plain_gradients(tmp_path, family, depth, meshes):
    with _precision(family):
        folder = save_with_mtp(tmp_path, ALL[family], depth)
    run_ranks(_check, 4, family, folder, meshes, timeout=500)


def _updates_with_images(folder):
    samples, seen = vlm_samples(plain_vlm(folder), (1, 6)), {}
    for coef in (None, COEF):
        worker = ppo_worker(folder, ep=2, ulysses_sequence_parallel_size=2, mtp_loss_coef=coef, tokens=90)
        gradients = watched_gradients(worker)
        worker.train_batch(vlm_batch(of_this_rank(worker, samples)))
        seen[coef] = gradients
    for name, gradient in seen[None].items():
        assert torch.equal(gradient, seen[COEF].pop(name)), name
    assert all(name.startswith("mtp.") and gradient.norm() > 0 for name, gradient in seen[COEF].items())


@pytest.mark.long
def test_update_with_images_and_an_mtp_layer_leaves_the_policys_bits(tmp_path):
    kind, sizes = VLMS["qwen3_5_moe"]
    recipe = Family(f"{kind}ForConditionalGeneration", f"{kind}Config", {**sizes, **IMAGE_TOKENS, **UNTIED})
    run_ranks(_updates_with_images, 2, save_with_mtp(tmp_path, recipe, 1))
