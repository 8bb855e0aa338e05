"""One PPO update through verl's own TrainingWorker on 4 ranks against the plain model in one process."""

import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.support.models import reference_model, save_qwen3_moe
from tests.support.ppo import SAMPLES, plain_ppo_loss, ppo_batch, ppo_samples, ppo_worker
from tests.support.ranks import run_ranks

WORLD = 4
PER_RANK = SAMPLES // WORLD
RELATIVE = 1e-5


def _ppo_update(folder, cases):
    from verl.utils import tensordict_utils as tu

    rank, samples = dist.get_rank(), ppo_samples()
    reference = reference_model(folder)
    loss = plain_ppo_loss(samples, [reference(input_ids=ids[None], use_cache=False).logits[0] for ids, *_ in samples])
    loss.backward()
    loss = loss.item()
    wanted = {n: p.grad for n, p in reference.named_parameters()}
    wanted_norm = torch.stack([g.square().sum() for g in wanted.values()]).sum().sqrt().item()
    mine = samples[rank * PER_RANK : (rank + 1) * PER_RANK]

    for settings in cases:
        where = str(settings)
        worker = ppo_worker(folder, **settings)

        # Log-probs as the actor and the reference policy compute them.
        infer = ppo_batch(mine)
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
        metrics = tu.get(worker.train_batch(ppo_batch(mine)), "metrics")
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

    worker = ppo_worker(folder, 2, forward_only=True)
    assert worker.engine.optimizer is None
    reference, mine = reference_model(folder), ppo_samples()[2 * dist.get_rank() :][:2]
    infer = ppo_batch(mine)
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
        worker.train_batch(ppo_batch(mine))


def test_reference_policy_is_forward_only(tmp_path):
    run_ranks(_reference_policy, 2, save_qwen3_moe(tmp_path))


def _weights_after_evaluation(folder):
    """Without reshard_after_forward an evaluation gathers every layer; what is handed over is still every tensor."""
    from verl.utils import tensordict_utils as tu

    worker = ppo_worker(folder, 2, reshard_after_forward=False)
    infer = ppo_batch(ppo_samples()[:2])
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
    mine = ppo_samples()[4 * rank : 4 * rank + 4]
    worker = ppo_worker(folder, 2, optimizer_offload=True)
    for step in (1, 2):
        worker.train_batch(ppo_batch(mine))
        worker.save_checkpoint(str(out / f"global_step_{step}"), global_step=step, max_ckpt_to_keep=1)
    dist.barrier()  # rank 0 deletes
    assert not (out / "global_step_1").exists()
    after = worker.train_batch(ppo_batch(mine))

    resumed = ppo_worker(folder, 1, optimizer_offload=True)
    resumed.load_checkpoint(str(out / "global_step_2"))
    again = resumed.train_batch(ppo_batch(mine))
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
    worker = ppo_worker(folder, 2)
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
