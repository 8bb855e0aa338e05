"""Positions that depend on a sequence's length: log-probs of the trainer and of a real vLLM with the same weights."""

import pytest
import torch

from tests.rollout.served_families import SERVED
from tests.support.models.rope import with_rope
from tests.support.models.tiny import save_random
from tests.support.ranks import run_ranks
from tests.support.trainer.ppo import PADDED, ppo_batch
from tests.support.trainer.verl_worker import training_worker

pytestmark = pytest.mark.e2e

ORIGINAL = 24
LENGTHS = (9, 40, 16, 30)
SAME, OTHER = 1e-4, 1e-2


def _prompts(longest):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 190, (length,), generator=generator).tolist() for length in LENGTHS if length <= longest]


def _of_vllm(engine, prompts):
    """Log-probs of each prompt's tokens but the first."""
    answers = engine.generating(prompts).result()
    found = zip(prompts, (answer[2] for answer in answers), strict=True)
    return [torch.tensor([row[token] for token, row in zip(ids[1:], rows, strict=True)]) for ids, rows in found]


def _difference(folder, prompts, wanted, rollout, model):
    """On a rank: the largest difference of a token's log-prob, of an actor beside such a rollout."""
    from verl.utils import tensordict_utils as tu

    from epfsdp2.engine.config import EPFSDP2ActorConfig, EPFSDP2EngineConfig

    mixed = {"param_dtype": "fp32", "reduce_dtype": "fp32"}
    size = {"use_dynamic_bsz": False, "infer_micro_batch_size_per_gpu": len(prompts)}
    engine = EPFSDP2EngineConfig(mixed_precision=mixed, **size)
    actor = EPFSDP2ActorConfig(engine=engine, rollout=rollout, rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    worker = training_worker(folder, "language_model", actor.engine, None, **model)
    samples = [(torch.tensor(ids), 1, torch.zeros(len(ids) - 1), torch.zeros(len(ids) - 1)) for ids in prompts]
    batch = ppo_batch(samples, len(samples), prompt=1, response=max(LENGTHS))
    tu.assign_non_tensor(batch, compute_loss=False, temperature=1.0)
    found = tu.get(worker.infer_batch(batch), "log_probs").unbind()
    return max((mine[:-1] - theirs).abs().max().item() for mine, theirs in zip(found, wanted, strict=True))


def _check(folder, prompts, wanted, limit, kind):
    rollout = {"name": "vllm", "max_model_len": limit}
    for model in ({}, PADDED):
        assert (found := _difference(folder, prompts, wanted, rollout, model)) < SAME, (model, found)
    alone = _difference(folder, prompts, wanted, {}, {})
    # Without a rollout, longrope follows each sequence's length. vLLM never changes dynamic NTK.
    assert alone > OTHER if kind == "longrope" else alone < SAME


@pytest.mark.parametrize(
    ("name", "kind", "original", "limit"),
    [
        ("qwen3_moe", "longrope", ORIGINAL, 64),
        pytest.param("phimoe", "longrope", ORIGINAL, 64, marks=pytest.mark.long),
        ("qwen3_moe", "dynamic", 48, 48),
    ],
)
def test_positions_of_an_actor_beside_vllm_follow_its_max_model_len(
    start_engine, tmp_path, name, kind, original, limit
):
    served = SERVED[name]
    served.skip_where_broken()
    save_random(with_rope(served.family, kind, original).build(), tmp_path, 0)
    prompts = _prompts(limit - 8)  # vLLM continues them
    settings = {"max_model_len": limit, "distributed_executor_backend": "uni", **served.settings}
    wanted = _of_vllm(start_engine(str(tmp_path), again=True, **settings), prompts)
    run_ranks(_check, 1, tmp_path, prompts, wanted, limit, kind)
