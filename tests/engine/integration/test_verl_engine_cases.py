"""The checks of verl's own test of its engines (``tests/models/test_engine.py`` there), exact, for this engine.

As there, a worker group of verl runs two ranks on Ray: verl distributes the batch and collects the results.
"""

import shutil
import tempfile
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoConfig, AutoModelForTokenClassification

from epfsdp2.engine.config import EPFSDP2ActorConfig, EPFSDP2CriticConfig, EPFSDP2EngineConfig
from tests.support.models.tiny import reference_model, save_qwen3_moe, save_random
from tests.support.trainer.ppo import RESPONSE, SAMPLES, ppo_batch, ppo_samples, reference_update

pytestmark = pytest.mark.e2e

WORLD = 2


@pytest.fixture(scope="module")
def cluster():
    import ray

    folder = tempfile.mkdtemp(prefix="epfsdp2-", dir="/tmp")  # short: a socket's path may have 107 characters
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_prestart_worker_first_driver", "0")  # else it starts a worker for each CPU
        ray.init(
            address="local",
            num_cpus=16,
            num_gpus=2 * WORLD,  # a group keeps its own until the end
            include_dashboard=False,
            object_store_memory=100 << 20,
            log_to_driver=False,
            _temp_dir=folder,
        )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def _engine():
    return EPFSDP2EngineConfig(
        ep_size=WORLD,
        mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"},
        param_offload=True,
        optimizer_offload=True,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=30,
        infer_max_token_len_per_gpu=60,
    )


def _group(folder, model_type, engine, checkpoint=None):
    import ray
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig

    sdpa = {"attn_implementation": "sdpa"}
    config = TrainingWorkerConfig(
        model_type=model_type,
        model_config=HFModelConfig(path=str(folder), load_tokenizer=False, override_config=sdpa),
        engine_config=engine,
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, clip_grad=1e9, total_training_steps=10),
        checkpoint_config=checkpoint,
    )
    group = RayWorkerGroup(
        resource_pool=RayResourcePool(process_on_nodes=[WORLD], max_colocate_count=1),
        ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(TrainingWorker), config=config),
        device_name="cpu",
    )
    group.reset()
    return group


def _end(group):
    import ray

    for worker in group.workers:
        ray.kill(worker)


def _infer(group, name):
    from verl.utils import tensordict_utils as tu

    batch = ppo_batch(ppo_samples())
    tu.assign_non_tensor(batch, compute_loss=False)
    return tu.get(group.infer_batch(batch).get(), name).unbind()


def _train(group, batch, **facts):
    from verl.utils import tensordict_utils as tu

    tu.assign_non_tensor(batch, **facts)
    return tu.get(group.train_batch(batch).get(), "metrics")


def _norm(model):
    return torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum().sqrt().item()


def _sft_batch():
    batch = ppo_batch(ppo_samples())
    masks = [torch.arange(len(ids)) >= prompt for ids, prompt, *_ in ppo_samples()]
    batch["loss_mask"] = torch.nested.as_nested_tensor([mask.long() for mask in masks], layout=torch.jagged)
    return batch


def test_actor_engine_in_verls_workers_equals_the_plain_model_and_resumes(cluster, tmp_path):
    from verl.trainer.config import CheckpointConfig
    from verl.workers.utils.losses import ppo_loss, sft_loss

    folder = save_qwen3_moe(tmp_path / "model")
    engine, contents = _engine(), ["model", "optimizer", "extra"]
    checkpoint = CheckpointConfig(save_contents=contents, load_contents=contents)
    group = _group(folder, "language_model", engine, checkpoint)
    samples, plain = ppo_samples(), reference_model(folder)
    with torch.no_grad():
        every = [(plain(input_ids=ids[None]).logits[0] / 0.7).log_softmax(-1) for ids, *_ in samples]
    wanted = [full[:-1].gather(-1, ids[1:, None])[:, 0] for full, (ids, *_) in zip(every, samples, strict=True)]
    before = _infer(group, "log_probs")
    assert len(before) == SAMPLES
    for got, want in zip(before, wanted, strict=True):
        torch.testing.assert_close(got[:-1], want, rtol=1e-5, atol=1e-5)

    group.save_checkpoint(str(tmp_path / "kept"))

    group.set_loss_fn(partial(sft_loss, config=None))
    metrics = _train(group, _sft_batch())
    answers = [want[prompt - 1 :] for want, (_, prompt, *_) in zip(wanted, samples, strict=True)]
    assert metrics["loss"] == pytest.approx(-torch.cat(answers).mean().item(), rel=1e-5)

    group.load_checkpoint(str(tmp_path / "kept"))
    for got, want in zip(_infer(group, "log_probs"), before, strict=True):
        assert torch.equal(got, want)

    actor = EPFSDP2ActorConfig(
        engine=replace(engine), rollout_n=1, ppo_micro_batch_size_per_gpu=-1, entropy_coeff=0.01, clip_ratio_c=3.0
    )
    group.set_loss_fn(partial(ppo_loss, config=actor))
    metrics = _train(group, ppo_batch(samples))
    loss = reference_update(plain, samples)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(_norm(plain), rel=1e-5)

    # Whoever loads and offloads by hand gets the same: once more from where the engine did it by itself.
    automatic = _train(group, ppo_batch(samples))
    group.load_checkpoint(str(tmp_path / "kept"))
    group.to("device")
    _train(group, ppo_batch(samples), disable_auto_offload=True)
    by_hand = _train(group, ppo_batch(samples), disable_auto_offload=True)
    group.to("cpu")
    assert by_hand["grad_norm"] == pytest.approx(automatic["grad_norm"], rel=1e-5) != metrics["grad_norm"]
    _end(group)


@pytest.mark.long
def test_critic_engine_in_verls_workers_equals_the_plain_model(cluster, tmp_path):
    from verl.workers.utils.losses import value_loss

    config = AutoConfig.from_pretrained(save_qwen3_moe(tmp_path / "language"), num_labels=1, classifier_dropout=0.0)
    folder = save_random(AutoModelForTokenClassification.from_config(config), tmp_path / "value", 1)
    samples = ppo_samples()
    plain = AutoModelForTokenClassification.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", experts_implementation="eager"
    )
    wanted = [plain(input_ids=ids[None]).logits[0, :, 0] for ids, *_ in samples]

    engine = _engine()
    group = _group(folder, "value_model", engine)
    for got, want in zip(_infer(group, "values"), wanted, strict=True):
        torch.testing.assert_close(got, want.detach(), rtol=1e-5, atol=1e-5)

    batch = ppo_batch(samples)
    batch["values"], batch["returns"] = torch.zeros(SAMPLES, RESPONSE), batch["advantages"]
    critic = EPFSDP2CriticConfig(engine=replace(engine), ppo_micro_batch_size_per_gpu=-1)
    group.set_loss_fn(partial(value_loss, config=critic))
    metrics = _train(group, batch)
    losses = []
    for (_, prompt, _, returns), values in zip(samples, wanted, strict=True):
        answer = values[prompt - 1 : -1]
        losses.append(torch.maximum((answer - returns) ** 2, (answer.clamp(-0.5, 0.5) - returns) ** 2))
    loss = 0.5 * torch.cat(losses).mean()
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(_norm(plain), rel=1e-5)
    _end(group)
