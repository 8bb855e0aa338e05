"""``CastOnCopy`` casts values while they are copied."""

import pytest
import torch

from epfsdp2.rollout.transport.cast import CastOnCopy


@pytest.fixture
def values():
    return torch.randn(5, 7, 3, generator=torch.Generator().manual_seed(0)).transpose(0, 1)


def test_cast_on_copy_casts_when_it_is_copied(values):
    lazy, wanted = CastOnCopy(values, torch.bfloat16), values.to(torch.bfloat16)
    assert (lazy.shape, lazy.dtype, lazy.nbytes, lazy.element_size()) == ((7, 5, 3), torch.bfloat16, wanted.nbytes, 2)
    into = torch.empty(7, 5, 3, dtype=torch.bfloat16)
    into.copy_(lazy.detach(), non_blocking=True)
    assert type(into) is torch.Tensor and torch.equal(into, wanted)
    values.mul_(2)
    assert torch.equal(into.copy_(lazy), wanted * 2)


def test_cast_on_copy_copies_from_the_stored_values(values, monkeypatch):
    made = []
    monkeypatch.setattr("epfsdp2.rollout.transport.cast._materialized", lambda value: made.append(value))
    torch.empty(7, 5, 3, dtype=torch.bfloat16).copy_(CastOnCopy(values, torch.bfloat16).detach())
    assert not made


def test_cast_on_copy_casts_before_any_other_operation(values):
    lazy, wanted = CastOnCopy(values, torch.bfloat16), values.to(torch.bfloat16)
    assert torch.equal(lazy, wanted) and torch.equal(lazy[2:4], wanted[2:4])
    assert torch.equal(lazy.contiguous().view(torch.int16), wanted.contiguous().view(torch.int16))
    assert type(lazy.clone()) is torch.Tensor and lazy.float().sum() == wanted.float().sum()
