"""Updates of models that see images, through verl's TrainingWorker, against the plain model in one process."""

import contextlib
import copy
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from transformers import Gemma4ForConditionalGeneration

from epfsdp2.engine.compat.versions import is_older
from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.model import vision
from epfsdp2.engine.model.vision import VisionTowerSync, preserve_forward, why_not_images
from epfsdp2.engine.moe.find import find_experts
from epfsdp2.engine.mtp.layers import policy_experts
from epfsdp2.engine.preflight.features import check_images
from tests.parity.families import FAMILIES
from tests.parity.float64 import float64
from tests.support.engine.sharded import whole_gradients, whole_parameters
from tests.support.models.tiny import relative_error
from tests.support.models.vlm import plain_vlm, save_vlm, vlm_batch, vlm_config, vlm_logits, vlm_samples
from tests.support.ranks import run_ranks
from tests.support.trainer.ppo import SAMPLES, of_this_rank, plain_ppo_loss, ppo_worker
from tests.support.trainer.settings import engine

SEES_AHEAD = pytest.mark.skipif(is_older("transformers", "5.13"), reason="its masks of images are wrong before 5.13")
WORLD = 4
RELATIVE = 1e-5
IN_FLOAT64 = 1e-10
UPDATES = 2
# An eps near the gradients' size: AdamW's sign-like step for tiny gradients would magnify their rounding errors.
ADAM = {"eps": 1e-4}
FUSED = {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "torch"}}

# Numbers of the samples without images and videos. Micro-batches are pairs, and each rank has four samples (with sp=2
# eight).
IMAGES = {
    "all have images": (),
    "some have none": (1, 6, 7, 12),  # one of a pair, and a pair
    "one rank has none": (4, 5, 6, 7, 11),
    "none has any": range(SAMPLES),
}
WITHOUT = {**IMAGES, "some have videos": (1, 6, 7), "all have videos": ()}
GLM = (*IMAGES, "all have videos")
VIDEOS = {"some have videos": (0, 2, 3, 9), "all have videos": range(SAMPLES)}  # numbers of the samples with a video


def _plain_updates(folder, which, frozen):
    """Return the samples and of each update: log-probs before it, gradients, norm, loss, and parameters after it."""
    model = plain_vlm(folder)
    samples = vlm_samples(model, WITHOUT[which], VIDEOS.get(which, ()))
    _tower(model).requires_grad_(not frozen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, **ADAM)
    found = []
    for _ in range(UPDATES):
        optimizer.zero_grad()
        logits = vlm_logits(model, samples)
        loss = plain_ppo_loss([s.sample for s in samples], logits)
        loss.backward()
        grads = {n: p.grad.clone() if p.grad is not None else None for n, p in model.named_parameters()}
        norm = torch.stack([g.square().sum() for g in grads.values() if g is not None]).sum().sqrt().item()
        optimizer.step()
        after = {n: p.detach().clone() for n, p in model.named_parameters()}
        log_probs = [(scores.detach() / 0.7).log_softmax(-1) for scores in logits]
        taken = [s[:-1].gather(-1, e.sample[0][1:, None])[:, 0] for s, e in zip(log_probs, samples, strict=True)]
        found.append((taken, grads, norm, loss.item(), after))
    return samples, found


def _updates(folder, cases, bound=RELATIVE):
    """Compare updates with those of the plain model."""
    from verl.utils import tensordict_utils as tu

    plain = {}
    for which, settings in cases:
        where, kind = f"{which} {settings}", (which, settings.get("freeze_vision_tower", False))
        samples, wanted = plain[kind] = plain.get(kind) or _plain_updates(folder, *kind)
        worker = ppo_worker(folder, optimizer=ADAM, tokens=90, **settings)
        mine = of_this_rank(worker, samples)
        calls: list[int] = []
        _tower(worker.engine.module).register_forward_hook(lambda *_, calls=calls: calls.append(1))
        for log_probs, grads, norm, loss, after in wanted:
            infer = vlm_batch(mine)
            tu.assign_non_tensor(infer, compute_loss=False)
            output = worker.infer_batch(infer)  # of ranks that share rows the first has it
            found = [] if output is None else tu.get(output, "log_probs")
            for got, want in zip(found, of_this_rank(worker, log_probs)[: len(found)], strict=True):
                torch.testing.assert_close(got[:-1], want, rtol=bound, atol=bound, msg=where)
            # train_mode drops the gradients when it ends, so read them where the step uses them.
            seen, step = {}, worker.engine.optimizer.step
            worker.engine.optimizer.step = lambda *a, seen=seen, engine=worker.engine, step=step: (
                seen.update(whole_gradients(engine.module)),
                step(*a),
            )
            output = worker.train_batch(vlm_batch(mine))
            worker.engine.optimizer.step = step
            for name, want in grads.items():
                if want is None:
                    assert seen[name] is None, (where, name)
                else:
                    assert relative_error(seen[name], want) < bound, (where, name, relative_error(seen[name], want))
            if output is not None:
                metrics = tu.get(output, "metrics")
                assert abs(metrics["grad_norm"] / norm - 1) < bound, where
                assert abs(metrics["loss"] - loss) < bound * (abs(loss) + 0.1), where
            for name, param in whole_parameters(worker.engine.module).items():
                assert relative_error(param, after[name]) < bound, (where, name)
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, len(calls))
        assert len(set(everyone)) == 1 and (everyone[0] > 0) == (which != "none has any"), (where, everyone)


def _updates_in_float64(folder, cases):
    """Compare those of a family that magnifies float32's rounding beyond 1e-5, as by a gated norm near zero."""
    with float64():
        _updates(folder, cases, IN_FLOAT64)


def _tower(model):
    return model.base_model.vision_tower if hasattr(model.base_model, "vision_tower") else model.base_model.visual


def _features(model, run):
    """All features of images that a tower computes in a run."""
    found: list[torch.Tensor] = []
    hook = _tower(model).register_forward_hook(lambda *args: found.append(args[-1].pooler_output.float()))
    run()
    hook.remove()
    return torch.cat(found).detach()


@torch.no_grad()
def _in_bfloat16(folder):
    from verl.utils import tensordict_utils as tu

    plain, in_bfloat16 = plain_vlm(folder), plain_vlm(folder, torch.bfloat16)
    mine = vlm_samples(plain)[dist.get_rank() * SAMPLES // 2 :][: SAMPLES // 2]
    wanted = _features(plain, lambda: vlm_logits(plain, mine))
    rounded = _features(in_bfloat16, lambda: vlm_logits(in_bfloat16, mine))
    worker = ppo_worker(folder, ep=2, mixed_precision={"param_dtype": "bf16", "reduce_dtype": "fp32"})
    batch = vlm_batch(mine)
    tu.assign_non_tensor(batch, compute_loss=False)
    ours = _features(worker.engine.module, lambda: worker.infer_batch(batch))
    assert 0 < relative_error(ours, wanted) < 1.1 * relative_error(rounded, wanted), (ours, rounded)


def _refuses_on_all_ranks(name):
    model = FAMILIES[name].build()
    own = [{"pixel_values": torch.zeros(4, 6)}] if dist.get_rank() == 0 else [None, {}]
    towers = VisionTowerSync(model)
    towers.sync_modalities([{}], "cpu")
    with pytest.raises(SettingError, match=f"{type(model).__name__} can't be trained on images: "):
        towers.sync_modalities(own, "cpu")
    heard = [{"input_features": torch.zeros(4, 6)}] if dist.get_rank() == 0 else [None]
    with pytest.raises(SettingError, match=f"{type(model).__name__} can't be trained on audio"):
        towers.sync_modalities(heard, "cpu")


def _refuses_both_on_all_ranks():
    towers, one = VisionTowerSync(FAMILIES["glm4v_moe"].build()), torch.zeros(4, 6)
    own = {"pixel_values": one} if dist.get_rank() == 0 else {"pixel_values_videos": one}
    with pytest.raises(SettingError, match="can't have images and videos in one batch"):
        towers.sync_modalities([own], "cpu")


def test_vision_update_of_images_and_videos_with_one_token_is_refused_on_all_ranks():
    run_ranks(_refuses_both_on_all_ranks, 2)


@pytest.mark.parametrize("name", ["ernie4_5_vl_moe", "qwen3_omni_moe"])
def test_vision_update_of_unsuitable_images_is_refused_on_all_ranks_and_on_the_driver(tmp_path, name):
    run_ranks(_refuses_on_all_ranks, 2, name)
    data = tmp_path / "train.parquet"
    facts = SimpleNamespace(model=FAMILIES[name].build(), name=name)
    pd.DataFrame({"prompt": ["?"]}).to_parquet(data)
    check_images(engine(), {}, {"train_files": str(data), "image_key": "images"}, facts)
    pd.DataFrame({"prompt": ["?"], "images": [[b""]]}).to_parquet(data)
    with pytest.raises(SettingError, match=f"data.train_files=data with images: {name} can't be trained on images"):
        check_images(engine(), {}, {"train_files": [str(data)], "image_key": "images"}, facts)
    facts = SimpleNamespace(model=FAMILIES["qwen3_vl_moe"].build(), name="qwen3_vl_moe")
    check_images(engine(), {}, {"train_files": str(data), "image_key": "images"}, facts)
    with pytest.raises(SettingError, match="which engine.batch_invariant=True rules out"):
        check_images(engine(batch_invariant=True), {}, {"train_files": str(data), "image_key": "images"}, facts)
    check_images(engine(), FUSED, {"train_files": str(data), "image_key": "images"}, facts)
    facts = SimpleNamespace(model=FAMILIES["glm4v_moe"].build(), name="glm4v_moe")
    with pytest.raises(SettingError, match="verl's fused kernels would leave them out"):
        check_images(engine(), FUSED, {"train_files": str(data), "image_key": "images"}, facts)


def test_towers_without_features_at_the_top_or_with_experts_are_no_part_of_the_text(monkeypatch):
    """As Dots3-Note's of transformers 5.24."""
    model = FAMILIES["qwen3_vl_moe"].build()
    model.model.visual.mlp = copy.deepcopy(model.get_decoder().layers[1].mlp)
    assert [info.fqn for info in find_experts(model)][0] == "model.visual.mlp.experts"
    assert [info.fqn for info in policy_experts(model)] == [
        f"model.language_model.layers.{layer}.mlp.experts" for layer in range(3)
    ]
    monkeypatch.delattr(type(model), "get_image_features")
    VisionTowerSync(model)
    assert why_not_images(model) == "it has no vision tower"


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_videos_of_a_run_with_vllm_are_refused_whose_times_it_would_write_twice(tmp_path, name):
    data = tmp_path / "train.parquet"
    pd.DataFrame({"prompt": ["?"], "videos": [[b""]]}).to_parquet(data)
    rollout = {"name": name, "train_files": str(data), "image_key": "images", "video_key": "videos"}
    facts = SimpleNamespace(model=FAMILIES["qwen3_vl_moe"].build(), name="qwen3_vl_moe")
    with pytest.raises(SettingError, match="video_key=videos") if name == "vllm" else contextlib.nullcontext():
        check_images(engine(), {}, rollout, facts)


def _refuses_videos_on_all_ranks():
    own = {"pixel_values_videos": torch.zeros(4, 6)} if dist.get_rank() == 0 else {}
    model = Gemma4ForConditionalGeneration(vlm_config("gemma4"))
    with pytest.raises(SettingError, match="trained on videos|before transformers 5.13"):
        VisionTowerSync(model).sync_modalities([own], "cpu")


def test_vision_update_of_gemmas_videos_is_refused_and_of_images_with_flash_attention_or_wrong_masks(monkeypatch):
    run_ranks(_refuses_videos_on_all_ranks, 2)
    model = Gemma4ForConditionalGeneration(vlm_config("gemma4"))
    monkeypatch.setattr(vision, "is_older", lambda name, release: (name, release) == ("transformers", "5.13"))
    assert why_not_images(model) == "before transformers 5.13 tokens of one image see each other in the wrong layers"
    monkeypatch.setattr(vision, "is_older", lambda *_: False)
    assert why_not_images(model) is None
    model.config.get_text_config()._attn_implementation_internal = "flash_attention_2"
    assert "needs attn_implementation=sdpa" in why_not_images(model)


def test_vision_updates_of_two_steps_equal_the_plain_model(tmp_path):
    cases = [("one rank has none", {"ep": 2}), ("none has any", {"ep": 2})]
    run_ranks(_updates, WORLD, save_vlm("qwen3_vl_moe", tmp_path), cases)


SHARED = {"ep": 2, "ulysses_sequence_parallel_size": 2}


@pytest.mark.parametrize(
    ("family", "compare"),
    [
        ("qwen3_vl_moe", _updates),
        ("qwen3_5_moe", _updates_in_float64),
        pytest.param("gemma4", _updates_in_float64, marks=SEES_AHEAD),
    ],
)
def test_vision_updates_of_shared_rows_with_a_frozen_tower_equal_the_plain_model(tmp_path, family, compare):
    """Slices end within images, and some have none."""
    cases = [("some have none", {**SHARED, "activation_checkpointing": "full", "freeze_vision_tower": True})]
    run_ranks(compare, 2, save_vlm(family, tmp_path), cases)


@pytest.mark.long
def test_vision_tower_in_bfloat16_is_no_further_from_float32_than_the_plain_one(tmp_path):
    """Log-probs can't show it: with so small a model they are moved far more by other experts chosen in a near tie."""
    run_ranks(_in_bfloat16, 2, save_vlm("qwen3_vl_moe", tmp_path))


EVERY_SETTING = [
    {"ep": 2, "fsdp_size": 2},
    {"ep": 2, "dynamic": True},
    {**SHARED, "dynamic": True},
    {"ep": 2, "use_no_sync_for_gradient_accumulation": True},
    {"ep": 2, "param_offload": True, "optimizer_offload": True},
    {"ep": 2, "offload_policy": True},
    {"ep": 2, "pad_to_length": True, "pad_to_length_bucket": 32},
    {"ep": 2, "activation_checkpointing": "full"},
    {"ep": 2, "activation_checkpointing": "selective", "reshard_after_forward": False},
    {"ep": 2, "prefetch_depth": 2, "micro_batch": 1},
    {"ep": 2, "ulysses_sequence_parallel_size": 4, "model": FUSED},
    {"ep": 1, "ulysses_sequence_parallel_size": 2, "fsdp_size": 2, "activation_checkpointing": "full"},
]
ITS_SETTINGS = [settings for settings in EVERY_SETTING if "model" not in settings]  # without verl's fused kernels


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "cases"),
    [
        *(("qwen3_vl_moe", [(which, {"ep": ep}) for which in WITHOUT]) for ep in (1, 2, 4)),
        ("qwen3_vl_moe", [("one rank has none", settings) for settings in EVERY_SETTING]),
        ("qwen3_vl_moe", [(which, SHARED) for which in VIDEOS]),
        ("glm4v_moe", [(which, {"ep": ep}) for which in GLM for ep in (2, 4)] + [(which, SHARED) for which in GLM]),
        ("qwen3_vl", [("one rank has none", {"ep": 1})]),
    ],
    ids=["ep1", "ep2", "ep4", "every setting", "shared videos", "glm4v_moe", "dense"],
)
def test_vision_updates_with_images_on_any_ranks_equal_the_plain_model(tmp_path, family, cases):
    run_ranks(_updates, WORLD, save_vlm(family, tmp_path), cases, timeout=500)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "cases"),
    [
        *(("qwen3_5_moe", [(which, {"ep": ep}) for which in WITHOUT]) for ep in (1, 2, 4)),
        ("qwen3_5_moe", [("some have videos", settings) for settings in EVERY_SETTING]),
        ("qwen3_5", [(which, {"ep": 1}) for which in ("one rank has none", "some have videos")]),
        pytest.param("gemma4", [(which, {"ep": ep}) for which in IMAGES for ep in (1, 4)], marks=SEES_AHEAD),
        pytest.param("gemma4", [("one rank has none", settings) for settings in ITS_SETTINGS], marks=SEES_AHEAD),
    ],
    ids=["ep1", "ep2", "ep4", "every setting", "dense", "gemma4", "gemma4 every setting"],
)
def test_vision_updates_in_float64_equal_the_plain_model(tmp_path, family, cases):
    run_ranks(_updates_in_float64, WORLD, save_vlm(family, tmp_path), cases, timeout=500)


def test_preserve_forward_after_a_failed_patch_restores_the_forward(monkeypatch):
    model = FAMILIES["qwen3_moe"].build()
    own = {kind: kind.forward for kind in map(type, (model.base_model, *model.model.layers[0].children()))}
    with pytest.raises(OSError, match="half way"), preserve_forward(model):
        for kind in own:
            monkeypatch.setattr(kind, "forward", lambda *_: None)
        raise OSError("half way")
    assert {kind: kind.forward for kind in own} == own
