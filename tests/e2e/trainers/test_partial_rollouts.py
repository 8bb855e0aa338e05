"""Fully-async with partial rollouts: a sync interrupts answers, and the new weights write the rest of them."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from epfsdp2.recipes.quickstart.model import write_model
from tests.e2e.runs import overrides, running
from tests.e2e.trainers.trainers import CHANGES, FULLY_ASYNC, SEPARATE

pytestmark = [pytest.mark.e2e, pytest.mark.long]

UPDATES, ANSWERS = 5, 64  # answers of an update
SETTINGS = [
    *CHANGES,
    *SEPARATE,
    "algorithm.rollout_correction.bypass_mode=True",  # old log-probs are those of the rollout
    "async_training.partial_rollout=True",
    "async_training.staleness_threshold=1",  # generation continues while weights are sent
    "async_training.trigger_parameter_sync_step=1",
    f"rollout.total_rollout_steps={(UPDATES + 1) * 8}",
    "rollout.n=8",
    "data.train_batch_size=0",
    "data.gen_batch_size=1",
    # Long answers, so that a sync interrupts most of them.
    "data.max_response_length=100",
    "actor_rollout_ref.rollout.max_model_len=120",
    "actor_rollout_ref.rollout.ignore_eos=True",
    "engine.router_replay.mode=R3",
    "actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
    # Every version of the weights, to compute log-probs by.
    "trainer.save_freq=1",
    "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",
    "actor_rollout_ref.model.external_lib=batches",
]
SAME = 1e-4  # of a log-prob in float32; an update changes it by 0.3 on average


@torch.no_grad()
def _log_probs(folder, sequences, prompts):
    """The plain model's, of each token that was written."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for ids, prompt in zip(sequences, prompts, strict=True):
        scores = model(input_ids=ids[None], use_cache=False).logits[0, prompt - 1 : -1].log_softmax(-1)
        found.append(scores.gather(-1, ids[prompt:, None])[:, 0])
    return found


def test_partial_rollout_keeps_the_log_prob_of_the_weights_that_wrote_each_token(tmp_path):
    write_model(tmp_path / "model", 1)
    options = ["--model", str(tmp_path / "model"), "--steps", str(UPDATES), "--batch-size", "8", *overrides(*SETTINGS)]
    environment = {"EPFSDP2_TEST_BATCHES": str(tmp_path / "batches")}
    with running(tmp_path / "run", *options, program=FULLY_ASYNC, environment=environment) as run:
        run.wait()
    saved = sorted((tmp_path / "run/checkpoints").glob("global_step_*"), key=lambda path: int(path.name.split("_")[-1]))
    versions = [tmp_path / "model", *(path / "actor/huggingface" for path in saved)]
    assert len(versions) > UPDATES - 1, run.text()[-3000:]

    batches = [torch.load(file) for file in sorted((tmp_path / "batches").iterdir())]
    entries = {key: [one for batch in batches for one in batch[key]] for key in batches[0]}
    sequences = entries["input_ids"]
    old = [values[: len(ids)] for values, ids in zip(entries["old_log_probs"], entries["responses"], strict=True)]
    prompts = [len(ids) - len(values) for ids, values in zip(sequences, old, strict=True)]
    # For each token, find the first and the last version whose log-prob the update got.
    differences = [
        torch.stack([(got - want).abs() for want in of_versions])
        for got, *of_versions in zip(old, *(_log_probs(folder, sequences, prompts) for folder in versions), strict=True)
    ]
    assert all((one.min(0).values < SAME).all() for one in differences)
    numbers = torch.arange(len(versions))[:, None]
    writers = [torch.where(one < SAME, numbers, len(versions)).min(0).values for one in differences]
    latest = [torch.where(one < SAME, numbers, -1).max(0).values for one in differences]
    # A later token was never written by earlier weights.
    assert all((late >= early.cummax(0).values).all() for late, early in zip(latest, writers, strict=True))
    by_two = [i for i, one in enumerate(differences) if not (one < SAME).all(1).any()]
    assert len(by_two) > ANSWERS // 8, [sorted(set(one.tolist())) for one in writers]
    # All but the last token have the experts that vLLM chose, whichever weights wrote them.
    chosen = [routes[:-1].sort(-1).values for routes in entries["routed_experts"]]
    assert all((one[..., 1:] != one[..., :-1]).all() for one in chosen)
