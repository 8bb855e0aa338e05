"""One line when trainer and rollout differ more than usual (``engine.mismatch_warning``)."""

import contextlib
import io

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from epfsdp2.engine.integration.step_features import MismatchWarning
from tests.support.models.tiny import save_qwen3_moe
from tests.support.ranks import run_ranks
from tests.support.trainer.ppo import ppo_batch, ppo_samples, ppo_worker

COMMAND = "python -m epfsdp2.recipes.mismatch CHECKPOINT ROLLOUTS"


def _batch(difference, nested, masked=0.9):
    """Return sampled tokens with probabilities 0.5 and 0.5 + difference; masked tokens differ by more."""
    masks = [torch.tensor([1, 1, 0]), torch.tensor([1, 0, 1])]
    old = [torch.full((3,), 0.5).log() for _ in masks]
    rollout = [torch.where(mask == 1, 0.5 + difference, masked).log() for mask in masks]
    fields = {"response_mask": masks, "old_log_probs": old, "rollout_log_probs": rollout}

    def join(rows):
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged) if nested else torch.stack(rows)

    return TensorDict({name: join(rows) for name, rows in fields.items()}, batch_size=[2])


@pytest.mark.parametrize("nested", [True, False])
def test_warning_comes_once_and_again_when_the_difference_has_doubled(nested):
    lines = []
    feature = MismatchWarning(0.02, lines.append)
    for difference, count in ((0.019, 0), (0.03, 1), (0.05, 1), (0.07, 2), (0.1, 2), (0.2, 3)):
        feature.begin_batch(_batch(difference, nested), True)
        feature.begin_batch(_batch(difference, nested), False)
        assert len(lines) == count, difference
    assert lines[0].startswith("rollout and trainer differ by 0.03 in a token's mean probability, more than engine.")
    assert COMMAND in lines[0] and "\n" not in lines[0]


def test_warning_needs_the_rollouts_log_probs_and_a_sampled_token():
    lines, batch = [], _batch(0.3, True)
    feature = MismatchWarning(0.02, lines.append)
    feature.begin_batch(batch.select("response_mask", "old_log_probs"), False)
    none = _batch(0.3, False)
    none["response_mask"] = torch.zeros_like(none["response_mask"])
    feature.begin_batch(none, False)
    assert lines == []


def _update(folder, warning):
    samples = ppo_samples()[8 * dist.get_rank() :][:8]
    worker = ppo_worker(folder, 2, mismatch_warning=warning)
    batch = ppo_batch(samples)
    batch["rollout_log_probs"] = batch["old_log_probs"] + 0.5
    with contextlib.redirect_stdout(io.StringIO()) as said:
        worker.train_batch(batch)
    assert (COMMAND in said.getvalue()) == (warning == 0.001 and dist.get_rank() == 0)


def _updates(folder):
    for warning in (0.001, 1.0, 0.0):
        _update(folder, warning)


def test_warning_of_an_update_is_printed_by_the_first_rank_unless_it_is_off(tmp_path):
    run_ranks(_updates, 2, save_qwen3_moe(tmp_path), timeout=200)
