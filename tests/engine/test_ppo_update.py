"""One PPO update through verl's own TrainingWorker on 4 ranks against the plain model in one process."""

import pytest
import torch
import torch.distributed as dist

from tests.support.models import VOCAB, reference_model, save_qwen3_moe
from tests.support.ranks import run_ranks

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


def _worker(folder, ep, fsdp_size, dynamic, forward_only=False):
    from functools import partial

    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
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
        forward_only=forward_only,
    )
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(
            path=str(folder), load_tokenizer=False, override_config={"attn_implementation": "sdpa"}
        ),
        engine_config=engine,
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, clip_grad=1e9, total_training_steps=10),
        checkpoint_config=CheckpointConfig(),
    )
    worker = TrainingWorker(config)
    worker.reset()
    actor = EPFSDP2ActorConfig(
        engine=engine, rollout_n=1, ppo_micro_batch_size_per_gpu=2, entropy_coeff=0.01, clip_ratio_c=3.0
    )
    worker.set_loss_fn(partial(ppo_loss, config=actor))
    return worker


def _ppo_update(folder, cases):
    from verl.utils import tensordict_utils as tu

    rank, samples = dist.get_rank(), _samples()
    reference = reference_model(folder)
    loss = _reference_update(reference, samples)
    wanted = {n: p.grad for n, p in reference.named_parameters()}
    wanted_norm = torch.stack([g.square().sum() for g in wanted.values()]).sum().sqrt().item()
    mine = samples[rank * PER_RANK : (rank + 1) * PER_RANK]

    for ep, fsdp_size, dynamic in cases:
        where = f"ep={ep} fsdp_size={fsdp_size} dynamic={dynamic}"
        worker = _worker(folder, ep, fsdp_size, dynamic)

        # Log-probs as the actor and the reference policy compute them.
        infer = _batch(mine)
        tu.assign_non_tensor(infer, compute_loss=False)
        log_probs = tu.get(worker.infer_batch(infer), "log_probs")
        with torch.no_grad():
            for (ids, *_), got in zip(mine, log_probs.unbind(), strict=True):
                full = (reference(input_ids=ids[None], use_cache=False).logits[0] / 0.7).log_softmax(-1)
                want = full[:-1].gather(-1, ids[1:, None])[:, 0]
                torch.testing.assert_close(got[:-1], want, rtol=1e-5, atol=1e-5)

        # zero_grad=False of the exit is not verl's; read the gradients where the step would use them.
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
    cases = [(1, -1, False), (2, -1, False), (4, -1, False), (2, -1, True), (2, 2, False)]
    run_ranks(_ppo_update, WORLD, save_qwen3_moe(tmp_path), cases, timeout=400)


def _reference_policy(folder):
    from verl.utils import tensordict_utils as tu

    worker = _worker(folder, 2, -1, False, forward_only=True)
    assert worker.engine.optimizer is None
    mine = _samples()[:2]
    infer = _batch(mine)
    tu.assign_non_tensor(infer, compute_loss=False)
    output = worker.infer_batch(infer)
    assert {"log_probs", "entropy"} <= set(output.keys())
    with pytest.raises(AssertionError):
        worker.train_batch(_batch(mine))


def test_reference_policy_is_forward_only(tmp_path):
    run_ranks(_reference_policy, 2, save_qwen3_moe(tmp_path))
