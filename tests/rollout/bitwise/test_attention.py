"""Attention of ``rollout/bitwise``: its values, gradients and bits; the trainer's products in parts of workers."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from epfsdp2.rollout.bitwise.attention import attend
from tests.support.models.tiny import save_qwen3, save_qwen3_moe
from tests.support.ranks import run_ranks
from tests.support.trainer.ppo import check_ppo_updates

SCALING = 0.2


def _heads(length, dtype=torch.float32):
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(heads, length, 32, generator=generator).to(dtype) for heads in (4, 2, 2)]


@pytest.mark.parametrize("length", [1, 31, 64, 65, 200])
def test_values_and_gradients_are_those_of_sdpa(length):
    mine, others = ([each.clone().requires_grad_() for each in _heads(length)] for _ in range(2))
    out = attend(*mine, SCALING)
    wanted = scaled_dot_product_attention(*others, is_causal=True, scale=SCALING, enable_gqa=True)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    for result in (out, wanted):
        (result * torch.linspace(-1, 1, result.numel()).view_as(result)).sum().backward()
    for a, b in zip(mine, others, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_has_the_same_bits_alone_in_a_chunk_and_in_longer_sequences(dtype):
    torch.set_num_threads(1)
    query, key, value = _heads(200, dtype)
    whole = attend(query, key, value, SCALING)
    for first, end in ((0, 1), (0, 63), (63, 64), (64, 65), (100, 164), (199, 200)):
        part = attend(query[:, first:end], key[:, :end], value[:, :end], SCALING)
        assert torch.equal(part, whole[:, first:end]), (first, end)


def _exact_updates(folder, tp, is_moe):
    settings = {"batch_invariant": True, "rollout_bitwise": True, "_rollout_tp": tp}
    first = {"ep": 2 if is_moe else 1}
    check_ppo_updates(folder, [{**first, **settings}, {"ep": 1, "ulysses_sequence_parallel_size": 2, **settings}])


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("save", [save_qwen3, save_qwen3_moe])
def test_updates_are_those_of_the_plain_model(tmp_path, save, tp):
    run_ranks(_exact_updates, 2, save(tmp_path), tp, save is save_qwen3_moe)
