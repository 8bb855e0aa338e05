"""Checksums detect every changed value and every swap of rows, for any dtype, offset and strides."""

import pytest
import torch

from epfsdp2.rollout.transport.checksums import CHECKSUMS, PlacedChecksums, ReceivedChecksums, checksum, with_checksums

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64, torch.int32]


def values(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-100, 100, shape, generator=generator).to(torch.float32).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (16,), (3, 5), (4, 8), (2, 3, 7)])
def test_checksum_changes_with_any_single_value(shape, dtype):
    tensor = values(shape, dtype)
    whole = checksum(tensor)
    assert whole.dtype == torch.int64 and whole.dim() == 0 and checksum(tensor.clone()) == whole
    for index in range(tensor.numel()):
        changed = tensor.clone()
        bits = changed.view(-1).view(torch.uint8)
        bits[index * tensor.element_size()] ^= 1
        assert checksum(changed) != whole, index


@pytest.mark.parametrize("shape", [(8,), (8, 6), (8, 3, 4)])
def test_checksum_changes_when_rows_are_swapped(shape):
    tensor = values(shape, torch.float32)
    order = torch.tensor([1, 0, 2, 3, 4, 5, 6, 7])
    assert checksum(tensor[order]) != checksum(tensor)
    assert checksum(tensor[:0]) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_checksum_is_independent_of_offset_and_strides(dtype):
    tensor = values((6, 8), dtype)
    for before in range(4):
        bucket = torch.empty((before + tensor.numel()) * tensor.element_size(), dtype=torch.uint8)
        copy = bucket[before * tensor.element_size() :].view(dtype).view(6, 8)
        copy.copy_(tensor)
        assert checksum(copy) == checksum(tensor)
    assert checksum(tensor.t().contiguous().t()) == checksum(tensor)


def sent():
    return with_checksums((name, values((4, 4), torch.bfloat16) + n) for n, name in enumerate("abc"))


def test_received_checksums_compare_tensors_in_order():
    for check in (True, False):
        received = ReceivedChecksums(check)
        buckets = list(sent())
        assert [name for name, _ in buckets] == ["a", "b", "c", CHECKSUMS]
        assert [name for part in (buckets[:2], buckets[2:]) for name, _ in received.record(part)] == ["a", "b", "c"]
        assert received.difference() == ""

    def after(change):
        received = ReceivedChecksums(True)
        received.record(change(list(sent())))
        return received.difference()

    assert after(lambda items: [items[0], ("b", items[1][1] + 1), *items[2:]]).startswith("the received values of b")
    assert after(lambda items: [items[1], items[0], *items[2:]]).startswith("the received values of b")
    assert after(lambda items: items[1:]) == "2 tensors were received of 3 that were sent"
    assert after(lambda items: items[:-1]) == "the checksums of the tensors were not received"


def test_with_checksums_closed_early_closes_its_source():
    closed = []

    def source():
        try:
            yield "a", torch.ones(1)
            yield "b", torch.ones(1)
        finally:
            closed.append(True)

    tensors = with_checksums(source())
    next(tensors)
    tensors.close()
    assert closed == [True]
    assert list(with_checksums(each for each in ())) == []


def test_placed_checksums_see_a_changed_unit():
    held = torch.zeros(6, 8)
    placements = PlacedChecksums()
    assert placements.difference([("w", held)]) == ""
    for rows in (slice(0, 6, 2), slice(1, 7, 2)):
        part = values((3, 8), torch.float32)
        held[rows] = part
        placements.add("w", (rows,), part)
    assert placements.difference([("other", held), ("w", held)]) == ""
    held[3, 4] += 1
    assert placements.difference([("w", held)]) == "the values of w on the worker differ from those that were received"
