"""Persistent kernels give what the others do bit for bit, in Triton's interpreter, and are taken only if they do."""

import importlib
import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from epfsdp2.engine.compat.private_names import MissingNameError
from epfsdp2.engine.compat.torch_sms import leave_sms, sms_left
from epfsdp2.engine.moe.gemm.backends import Groups
from epfsdp2.engine.moe.gemm.gate import Gate
from tests.support.engine.sharded import sharded_model
from tests.support.models.tiny import save_qwen3_moe
from tests.support.moe.interpreter import drawn, integers, interpreted_kernels
from tests.support.ranks import run_ranks

RAGGED = [5, 0, 1, 16, 0, 18]  # without rows, with one, with a whole tile, with a part of one
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
    """Return a function that calls another with the persistent kernels; adds which ran to ``launched``."""
    tiles = importlib.import_module("epfsdp2.engine.moe.gemm.triton_tiles")

    def call(function):
        def launch_it(what, key, choices, groups, launch, results=()):
            assert key[-1] is True, "the operands are not such that the persistent kernel takes them"
            launch(tiles.Tile(16, 16, 16, is_persistent=True))
            launched.add(what)

        with monkeypatch.context() as patched:
            patched.setattr(kernels, "launch_fastest", launch_it)
            return function()

    return call


@pytest.fixture
def tiles(monkeypatch):
    module = importlib.import_module("epfsdp2.engine.moe.gemm.triton_tiles")
    monkeypatch.setattr(module, "_fastest", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return module


def same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize(
    ("dtype", "counts"), [(torch.bfloat16, RAGGED), (torch.float32, [2, 0, 17]), (torch.float16, [0, 1])], ids=str
)
def test_persistent_kernels_give_what_the_others_do_bit_for_bit(kernels, persistent, launched, dtype, counts):
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
            wanted = call()
            same(persistent(call), wanted)
    assert launched == {"mm", "mm and gate"}


def test_persistent_kernels_read_rows_by_copies_what_they_read_by_tma(kernels, persistent, monkeypatch):
    """On compute capability 9 rows of an index come by asynchronous copies, also where tiles don't divide ``k``."""
    launch = kernels.persistent_launch
    ours, total, e = kernels.TritonBackend(), sum(RAGGED), len(RAGGED)
    groups, x, index = Groups(torch.tensor(RAGGED), total), integers(11, 40), torch.arange(total) % 11
    described = launch._described

    def without_gather(tile, rows, index, has_index, in_out, gates=1):
        operands, how = described(tile, rows, index, has_index, in_out, gates)
        return (rows, *operands[1:]), how | {"GATHERS": False}

    rows = ours.indexed(x, index)
    for k in (40, 32):
        weight, rows = integers(e, k, 24), ours.indexed(x[:, :k].contiguous(), index)
        wanted = ours.mm(rows, weight, groups)
        monkeypatch.setattr(launch, "_described", without_gather)
        found = persistent(lambda rows=rows, weight=weight: ours.mm(rows, weight, groups))
        monkeypatch.setattr(launch, "_described", described)
        assert torch.equal(found, wanted)


def test_fastest_tile_with_other_results_or_one_that_does_not_compile_is_not_taken(tiles, monkeypatch, capsys):
    choices, out = [tiles.Tile(16, n, 16, is_persistent=n > 16) for n in (16, 32, 64, 128)], torch.zeros(4, 3)
    groups = Groups(torch.tensor([64]), 64)

    def launch(tile):
        if tile.n == 64:
            raise RuntimeError("PassManager::run failed\nand more")
        out.copy_(torch.arange(12.0).view(4, 3))
        out[3, 2] += tile.n == 128

    def took(launch):
        launch()
        return 1.0 / launch.args[0].n

    monkeypatch.setattr(tiles, "_milliseconds", took)
    tiles.launch_fastest("mm", (8,), choices, groups, launch, (out,))
    said = capsys.readouterr().out
    assert tiles._fastest == {("mm", 8): choices[1]} and out[3, 2] == 11
    assert "16x32x16 with 3 stages, persistent 0.031 ms (taken)" in said
    assert "16x64x16 with 3 stages, persistent does not run here (RuntimeError: PassManager::run failed)" in said
    assert "persistent 0.008 ms, not taken, for its results differ from the first's" in said and said.count("\n") == 1
    with pytest.raises(RuntimeError, match="PassManager"):
        tiles.launch_fastest("mm", (9,), choices[2:], groups, launch, (out,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sum_of_bits_of_results_that_differ_in_one_bit_differs(tiles, dtype):
    x = drawn(3, 5, dtype=dtype)
    x[0, 0] = math.nan
    other = x.clone()
    assert tiles._sum_of_bits(x) == tiles._sum_of_bits(other)
    other.view(torch.int16).view(-1)[-1] ^= 1
    assert tiles._sum_of_bits(x) != tiles._sum_of_bits(other)


@pytest.mark.parametrize(("capability", "wanted"), [((8, 0), 0), ((9, 0), 1), ((10, 0), 1)])
def test_persistent_tile_is_one_of_three_where_a_gpu_has_tma(tiles, monkeypatch, capability, wanted):
    monkeypatch.setattr(tiles, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    half, lists = torch.bfloat16, {}
    for takes in (False, True):
        lists[takes] = [tiles.mm_tiles(half, 2048, 768, takes), tiles.gate_tiles(half, 2048, takes)]
    for few, more in zip(lists[False], lists[True], strict=True):
        assert not any(tile.is_persistent for tile in few)
        assert few[0] == more[0] and len(more) <= 3 and sum(tile.is_persistent for tile in more) == wanted


def test_persistent_gemms_with_reserved_sms_leave_them_to_collectives(kernels, monkeypatch):
    """Torch's grouped GEMM reads the number from where it is set (cuda/GroupMM.cu, ``_SMCarveout_EXPERIMENTAL``)."""
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


def _leaves_sms(folder):
    before = sms_left()
    sharded_model(folder, 1, communication_sms=20)
    assert (before, sms_left()) == (0, 20)


def test_parallelize_with_reserved_sms_passes_them_to_the_gemms(tmp_path):
    run_ranks(_leaves_sms, 1, save_qwen3_moe(tmp_path))


def test_persistent_kernels_take_no_operands_that_tma_does_not(kernels):
    takes, rows, weight = kernels.persistent_launch.takes, drawn(4, 40), drawn(2, 40, 24)
    assert takes(rows, weight, None) and takes(rows, weight.mT.contiguous().mT, None)
    assert not takes(rows, weight, drawn(2, 24))  # a bias
    assert not takes(rows, drawn(2, 40, 26)[:, :, ::2], None)  # no dimension is contiguous
    assert not takes(drawn(4, 38), drawn(2, 38, 24), None)  # rows of 152 bytes
    assert not takes(drawn(161)[1:].view(4, 40), weight, None)  # 4 bytes behind an aligned address
    assert not takes(rows, weight, None, gates=2) and takes(rows, weight.mT.contiguous().mT, None, gates=2)
