"""One PPO update through verl's own TrainingWorker on 4 ranks against the plain model in one process."""

import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.support.models import VOCAB, reference_model, save_qwen3_moe
from tests.support.ranks import run_ranks
from tests.support.verl_worker import training_worker

WORLD, PER_RANK, PROMPT, RESPONSE = 4, 4, 5, 9
RELATIVE = 1e-5


def _samples():
    """Per sample: prompt and response ids of different lengths, old log-probs and advantages of the response."""
    generator = torch.Generator().manual_seed(3)
    samples = []
    for i in range(WORLD * PER_RANK):
        prompt, response = 2 + i % (PROMPT - 1), 3 + (5 * i) % (RESPONSE - 2)
        ids = torch.randint(0, VOCAB, (prompt + response,), generator=generator)
        old = -2.0 - torch.rand(response, generator=generator)
        advantage = torch.randn(response, generator=generator)
        samples.append((ids, prompt, old, advantage))
    return samples


def _batch(samples):
    """verl's no-padding batch of some samples."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    n, width = len(samples), PROMPT + RESPONSE
    data = {
        "input_ids": torch.zeros(n, width, dtype=torch.long),
        "attention_mask": torch.zeros(n, width, dtype=torch.long),
        "position_ids": torch.zeros(n, width, dtype=torch.long),
        "prompts": torch.zeros(n, PROMPT, dtype=torch.long),
        "responses": torch.zeros(n, RESPONSE, dtype=torch.long),
        "response_mask": torch.zeros(n, RESPONSE, dtype=torch.long),
        "old_log_probs": torch.zeros(n, RESPONSE),
        "advantages": torch.zeros(n, RESPONSE),
    }
    for i, (ids, prompt, old, advantage) in enumerate(samples):
        response, start = len(ids) - prompt, PROMPT - prompt
        data["input_ids"][i, start : start + len(ids)] = ids
        data["attention_mask"][i, start : start + len(ids)] = 1
        data["position_ids"][i, start : start + len(ids)] = torch.arange(len(ids))
        data["prompts"][i, start:] = ids[:prompt]
        data["responses"][i, :response] = ids[prompt:]
        data["response_mask"][i, :response] = 1
        data["old_log_probs"][i, :response] = old
        data["advantages"][i, :response] = advantage
    batch = left_right_2_no_padding(TensorDict(data, batch_size=[n]))
    tu.assign_non_tensor(batch, global_batch_size=WORLD * PER_RANK, temperature=0.7, calculate_entropy=True)
    return batch


def _reference_update(model, samples):
    """verl's formula on one sample at a time: clipped ratio, mean over all response tokens, entropy bonus."""
    tokens = sum(len(old) for _, _, old, _ in samples)
    losses = []
    for ids, prompt, old, advantage in samples:
        logits = model(input_ids=ids[None], use_cache=False).logits[0, prompt - 1 : -1] / 0.7
        log_probs = logits.log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        log_prob = log_probs.gather(-1, ids[prompt:, None])[:, 0]
        ratio = (log_prob - old).clamp(-20, 20).exp()
        clipped = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
        dual = torch.minimum(-advantage * 3.0, clipped)
        losses.append((torch.where(advantage < 0, dual, clipped) - 0.01 * entropy).sum())
    loss = torch.stack(losses).sum() / tokens
    loss.backward()
    return loss.item()


def _worker(folder, ep, fsdp_size=-1, dynamic=False, **settings):
    from functools import partial

    from verl.workers.utils.losses import ppo_loss

    from epfsdp2.engine.config import EPFSDP2ActorConfig, EPFSDP2EngineConfig

    engine = EPFSDP2EngineConfig(
        ep_size=ep,
        fsdp_size=fsdp_size,
        mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"},
        use_dynamic_bsz=dynamic,
        max_token_len_per_gpu=40,
        infer_max_token_len_per_gpu=40,
        micro_batch_size_per_gpu=2,
        infer_micro_batch_size_per_gpu=2,
        **settings,
    )
    actor = EPFSDP2ActorConfig(
        engine=engine, rollout_n=1, ppo_micro_batch_size_per_gpu=2, entropy_coeff=0.01, clip_ratio_c=3.0
    )
    return training_worker(folder, "language_model", engine, partial(ppo_loss, config=actor))


def _ppo_update(folder, cases):
    from verl.utils import tensordict_utils as tu

    rank, samples = dist.get_rank(), _samples()
    reference = reference_model(folder)
    loss = _reference_update(reference, samples)
    wanted = {n: p.grad for n, p in reference.named_parameters()}
    wanted_norm = torch.stack([g.square().sum() for g in wanted.values()]).sum().sqrt().item()
    mine = samples[rank * PER_RANK : (rank + 1) * PER_RANK]

    for settings in cases:
        where = str(settings)
        worker = _worker(folder, **settings)

        # Log-probs as the actor and the reference policy compute them.
        infer = _batch(mine)
        tu.assign_non_tensor(infer, compute_loss=False)
        log_probs = tu.get(worker.infer_batch(infer), "log_probs")
        with torch.no_grad():
            for (ids, *_), got in zip(mine, log_probs.unbind(), strict=True):
                full = (reference(input_ids=ids[None], use_cache=False).logits[0] / 0.7).log_softmax(-1)
                want = full[:-1].gather(-1, ids[1:, None])[:, 0]
                torch.testing.assert_close(got[:-1], want, rtol=1e-5, atol=1e-5)

        # train_mode drops the gradients when it ends, so read them where the step uses them.
        seen = {}
        step = worker.engine.optimizer.step
        worker.engine.optimizer.step = lambda *a, seen=seen, engine=worker.engine, step=step: (
            seen.update({n: p.grad.full_tensor() for n, p in engine.module.named_parameters()}),
            step(*a),
        )
        metrics = tu.get(worker.train_batch(_batch(mine)), "metrics")
        for name, want in wanted.items():
            error = ((seen[name] - want).norm() / want.norm()).item()
            assert error < RELATIVE, (where, name, error)
        assert abs(metrics["grad_norm"] / wanted_norm - 1) < RELATIVE, where
        assert abs(metrics["loss"] - loss) < 1e-5 * abs(loss) + 1e-6, where
        assert all(p.grad is None for p in worker.engine.module.parameters())


def test_gradients_and_norm_equal_the_plain_model(tmp_path):
    cases = [
        {"ep": 1},
        {"ep": 2},
        {"ep": 4},
        {"ep": 2, "fsdp_size": 2},
        {"ep": 2, "dynamic": True},
        {"ep": 2, "use_no_sync_for_gradient_accumulation": True},
        {"ep": 2, "param_offload": True, "optimizer_offload": True},
        {"ep": 2, "offload_policy": True},
        {"ep": 2, "pad_to_length": True, "pad_to_length_bucket": 32},
        {"ep": 2, "entropy_from_logits_with_chunking": True, "entropy_from_logits_chunk_size": 8},
        {"ep": 2, "entropy_checkpointing": True, "reshard_after_forward": False},
    ]
    run_ranks(_ppo_update, WORLD, save_qwen3_moe(tmp_path), cases, timeout=500)


def _reference_policy(folder):
    from verl.utils import tensordict_utils as tu

    worker = _worker(folder, 2, forward_only=True)
    assert worker.engine.optimizer is None
    reference, mine = reference_model(folder), _samples()[2 * dist.get_rank() :][:2]
    infer = _batch(mine)
    tu.assign_non_tensor(infer, compute_loss=False)
    output = worker.infer_batch(infer)
    for i, (ids, *_) in enumerate(mine):
        with torch.no_grad():
            log_probs = (reference(input_ids=ids[None], use_cache=False).logits[0] / 0.7).log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        taken = log_probs[:-1].gather(-1, ids[1:, None])[:, 0]
        torch.testing.assert_close(tu.get(output, "log_probs")[i][:-1], taken, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(tu.get(output, "entropy")[i], entropy, rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError):
        worker.train_batch(_batch(mine))


def test_reference_policy_is_forward_only(tmp_path):
    run_ranks(_reference_policy, 2, save_qwen3_moe(tmp_path))


def _weights_after_evaluation(folder):
    """Without reshard_after_forward an evaluation gathers every layer; what is handed over is still every tensor."""
    from verl.utils import tensordict_utils as tu

    worker = _worker(folder, 2, reshard_after_forward=False)
    infer = _batch(_samples()[:2])
    tu.assign_non_tensor(infer, compute_loss=False)
    worker.infer_batch(infer)
    weights, peft = worker.engine.get_per_tensor_param(layered_summon=False, base_sync_done=True)
    wanted = dict(reference_model(folder).named_parameters())
    got = dict(weights)
    assert peft is None and got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_weights_handed_over_after_an_evaluation(tmp_path):
    run_ranks(_weights_after_evaluation, 2, save_qwen3_moe(tmp_path))


def _saves_and_resumes(folder, out):
    from verl.utils import tensordict_utils as tu

    rank = dist.get_rank()
    mine = _samples()[4 * rank : 4 * rank + 4]
    worker = _worker(folder, 2, optimizer_offload=True)
    for step in (1, 2):
        worker.train_batch(_batch(mine))
        worker.save_checkpoint(str(out / f"global_step_{step}"), global_step=step, max_ckpt_to_keep=1)
    dist.barrier()  # rank 0 deletes
    assert not (out / "global_step_1").exists()
    after = worker.train_batch(_batch(mine))

    resumed = _worker(folder, 1, optimizer_offload=True)
    resumed.load_checkpoint(str(out / "global_step_2"))
    again = resumed.train_batch(_batch(mine))
    norms = [tu.get(output, "metrics")["grad_norm"] for output in (after, again)]
    assert abs(norms[1] / norms[0] - 1) < 1e-5
    for (name, a), (_, b) in zip(
        worker.engine.module.named_parameters(), resumed.engine.module.named_parameters(), strict=True
    ):
        torch.testing.assert_close(a.detach().full_tensor(), b.detach().full_tensor(), rtol=1e-4, atol=1e-6, msg=name)


def test_saves_keeps_the_newest_and_resumes_on_another_mesh(tmp_path):
    run_ranks(_saves_and_resumes, 2, save_qwen3_moe(tmp_path / "model"), tmp_path / "out")


def _waits_for_the_last(folder, out):
    """As ``separate_async`` with two updates in each of its steps."""
    worker = _worker(folder, 2)
    engine = worker.engine
    engine.checkpoint_config = replace(engine.checkpoint_config, async_save=True)
    engine.optimizer_config = replace(engine.optimizer_config, total_training_steps=4)
    tracker = out / "latest_checkpointed_iteration.txt"
    may_write = threading.Event()
    engine._save_hf_config = lambda folder: may_write.wait()  # rank 0 writes it, and all write together
    for step in (1, 2):
        if step == 2:
            assert not tracker.exists()
            may_write.set()
        for _ in range(2):
            engine.lr_scheduler_step()
        worker.save_checkpoint(str(out / f"global_step_{step}" / "actor"), global_step=step)
    dist.barrier()  # rank 0 names it
    assert tracker.read_text() == "2"


def test_of_saves_in_the_background_the_run_s_last_is_waited_for(tmp_path):
    run_ranks(_waits_for_the_last, 2, save_qwen3_moe(tmp_path / "model"), tmp_path / "out")
