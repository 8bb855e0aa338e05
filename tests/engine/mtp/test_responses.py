"""Drafts that count, in each form in which verl passes responses."""

import pytest
import torch
from tensordict import TensorDict

from epfsdp2.engine.mtp.responses import drafted

# Lengths of prompt and response, and which tokens of the response the policy wrote.
SAMPLES = [(2, [1, 1, 0, 1]), (1, [1]), (3, [1, 1])]


def _nested(rows):
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def _padded(rows, left=False):
    width = max(map(len, rows))
    return torch.tensor([[0] * (width - len(row)) * left + row + [0] * (width - len(row)) * (not left) for row in rows])


def _batch(form):
    whole = [[0] * prompt + mask for prompt, mask in SAMPLES]
    data = {"input_ids": _nested([[7] * len(row) for row in whole])}
    if form == "sft":
        return {**data, "loss_mask": _nested(whole)}
    masks = [mask for _, mask in SAMPLES]
    if form == "nested":
        ids = {"prompts": _nested([[7] * p for p, _ in SAMPLES]), "responses": _nested([[7] * len(m) for m in masks])}
        return {**data, **ids, "response_mask": _nested(masks)}
    shown = [_padded([[1] * p for p, _ in SAMPLES], left=True), _padded([[1] * len(mask) for mask in masks])]
    ids = {"prompts": shown[0], "responses": shown[1], "attention_mask": torch.cat(shown, dim=1)}
    return {**data, **ids, "response_mask": _padded(masks)}


@pytest.mark.parametrize("form", ["padded", "nested", "sft"])
def test_drafts_of_response_tokens_count(form):
    batch = TensorDict(_batch(form), batch_size=[len(SAMPLES)])
    for ahead, found in enumerate(drafted(batch, 2), start=2):
        wanted = []
        for prompt, mask in SAMPLES:
            row = [0] * prompt + mask
            wanted += [bool(row[at + ahead]) if at + ahead < len(row) else False for at in range(len(row))]
        assert found.tolist() == wanted
