"""Persistent kernels have the bits of the others, in Triton's interpreter."""

import importlib
import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from epfsdp2.engine.compat.private_names import MissingNameError
from epfsdp2.engine.compat.torch_sms import leave_sms
from epfsdp2.engine.moe.gemm.backends import Groups
from epfsdp2.engine.moe.gemm.gate import Gate
from tests.support.moe.interpreter import drawn, integers, interpreted_kernels

RAGGED = [5, 0, 1, 16, 0, 18]  # experts without rows, with one, with a whole tile, with a part of a tile
GATES = Gate(1.0, 0.0, math.inf, False), Gate(1.0, 0.0, 0.7, False)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    with interpreted_kernels() as backend:
        yield backend


@pytest.fixture
def launched():
    return set()


@pytest.fixture
def persistent(kernels, launched, monkeypatch):
    """Return a function that calls another with the persistent kernels, and adds their names to ``launched``."""
    tiles = importlib.import_module("epfsdp2.engine.moe.gemm.triton_tiles")

    def call(function):
        def launch_it(what, key, choices, groups, launch, results=()):
            assert key[-1] is True, "the persistent kernel does not support the operands"
            launch(tiles.Tile(16, 16, 16, is_persistent=True))
            launched.add(what)

        with monkeypatch.context() as patched:
            patched.setattr(kernels, "launch_fastest", launch_it)
            return function()

    return call


@pytest.mark.parametrize(("dtype", "counts"), [(torch.bfloat16, RAGGED), (torch.float32, [0, 17])], ids=str)
def test_persistent_kernels_have_the_bits_of_the_others(kernels, persistent, launched, dtype, counts):
    ours, (hidden, inner), e, total = kernels.TritonBackend(), (24, 24), len(counts), sum(counts)
    groups, x = Groups(torch.tensor(counts), total), integers(11, hidden, dtype=dtype)
    index = torch.randint(11, (total,), generator=torch.Generator().manual_seed(5))
    order = torch.randperm(total, generator=torch.Generator().manual_seed(6))
    for is_indexed, is_transposed in itertools.product((False, True), (False, True)):
        rows = ours.indexed(x, index) if is_indexed else x[index]
        down = integers(e, hidden, inner, dtype=dtype, seed=1)
        down = down.mT.contiguous().mT if is_transposed else down
        calls = [lambda rows=rows, down=down, to=to: (ours.mm(rows, down, groups, None, to),) for to in (None, order)]
        if not is_transposed:
            up = integers(e, 2 * inner, hidden, dtype=dtype, seed=2).mT
            calls += [lambda up=up, g=g, rows=rows: ours.up_gate(rows, up, groups, None, g) for g in GATES]
        for call in calls:
            assert all(map(torch.equal, persistent(call), call()))
    assert launched == {"mm", "mm and gate"}


def test_persistent_kernels_read_the_same_rows_by_copies_and_by_tma(kernels, persistent, monkeypatch):
    """On compute capability 9 rows of an index come by asynchronous copies, also if tiles don't divide ``k``."""
    ours, total, e = kernels.TritonBackend(), sum(RAGGED), len(RAGGED)
    groups, x, index = Groups(torch.tensor(RAGGED), total), integers(11, 40), torch.arange(total) % 11
    described = kernels.persistent_launch._described

    def without_gather(tile, rows, *args):
        operands, how = described(tile, rows, *args)
        return (rows, *operands[1:]), how | {"GATHERS": False}

    monkeypatch.setattr(kernels.persistent_launch, "_described", without_gather)
    for k in (40, 32):
        weight, rows = integers(e, k, 24), ours.indexed(x[:, :k].contiguous(), index)
        found = persistent(lambda rows=rows, weight=weight: ours.mm(rows, weight, groups))
        assert torch.equal(found, ours.mm(rows, weight, groups))


def test_persistent_gemms_with_reserved_sms_leave_them_to_collectives(kernels, monkeypatch):
    """torch's grouped GEMM reads the same number (cuda/GroupMM.cu, ``_SMCarveout_EXPERIMENTAL``)."""
    launch, before = kernels.persistent_launch, torch._C._get_sm_carveout_experimental()
    monkeypatch.setattr(launch, "INTERPRETED", False)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    try:
        for asked, has_collectives, programs in ((-1, False, 132), (-1, True, 116), (24, True, 108), (0, True, 108)):
            leave_sms(asked, has_collectives)
            assert launch._programs() == programs
        leave_sms(200)
        assert launch._programs() == 1
    finally:
        torch._C._set_sm_carveout_experimental(before)
    monkeypatch.delattr(torch._C, "_set_sm_carveout_experimental")
    with pytest.raises(MissingNameError, match="engine.communication_sms=0"):
        leave_sms(1)


def test_persistent_kernels_refuse_operands_that_tma_can_not_load(kernels):
    takes, rows, weight = kernels.persistent_launch.takes, drawn(4, 40), drawn(2, 40, 24)
    assert takes(rows, weight, None) and takes(rows, weight.mT.contiguous().mT, None)
    assert not takes(rows, weight, drawn(2, 24))  # a bias
    assert not takes(rows, drawn(2, 40, 26)[:, :, ::2], None)  # no dimension is contiguous
    assert not takes(drawn(4, 38), drawn(2, 38, 24), None)  # rows of 152 bytes
    assert not takes(drawn(161)[1:].view(4, 40), weight, None)  # 4 bytes behind an aligned address
    assert not takes(rows, weight, None, gates=2) and takes(rows, weight.mT.contiguous().mT, None, gates=2)
