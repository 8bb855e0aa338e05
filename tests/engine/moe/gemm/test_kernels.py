"""The Triton kernels, in Triton's interpreter, equal torch's operators; sizes are not multiples of a tile."""

import importlib
import itertools
import math
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from epfsdp2.engine.compat.private_names import MissingNameError
from epfsdp2.engine.compat.torch_sms import leave_sms
from epfsdp2.engine.moe.gemm import backends
from epfsdp2.engine.moe.gemm.backends import Backend, Groups, IndexedRows
from epfsdp2.engine.moe.gemm.gate import Gate, gate_of
from tests.support.models.tiny import relative_error
from tests.support.moe.experts import FAMILIES, D, assert_equal, make, routed, rows_with, tokens_with
from tests.support.moe.interpreter import drawn, integers, interpreted_kernels

COUNTS = [21, 0, 3, 17, 0]
RAGGED = [21, 0, 1, 16, 0, 33]  # experts without rows, with one, with a whole tile, with a part of a tile
LONG = pytest.mark.long
GATES = [Gate(1.0, 0.0, math.inf, False), Gate(1.702, 1.0, 0.7, True), Gate(1.702, 1.0, 0.7, False)]


@pytest.fixture(scope="module", autouse=True)
def kernels():
    with interpreted_kernels() as backend:
        yield backend


@pytest.fixture
def tiles(monkeypatch):
    """Return the module of tiles, with nothing measured."""
    module = importlib.import_module("epfsdp2.engine.moe.gemm.triton_tiles")
    monkeypatch.setattr(module, "_fastest", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return module


def test_triton_gemms_and_sums_accumulate_in_float32(kernels):
    """A sum of ones in bfloat16 stops at 256."""
    ours, n = kernels.TritonBackend(), 1024
    ones, groups = torch.ones(n, n, dtype=torch.bfloat16), Groups(torch.tensor([0, n]), n)
    assert (ours.mm(ones[:1], torch.ones(1, n, 3).bfloat16(), Groups(torch.tensor([1]), 1)) == n).all()
    assert (ours.outer(ones[:, :3], ones[:, :2], groups)[1] == n).all()
    for backend, weights in itertools.product((ours, Backend()), (None, ones[:1], ones[:1].float())):
        assert (backend.gather_sum(ones[:, :3], torch.arange(n).view(1, n), weights, torch.float32) == n).all()


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), pytest.param(torch.float16, 1e-3, marks=LONG)],
)
def test_triton_operators_equal_torchs_and_have_their_bits_on_small_integers(kernels, dtype, bound):
    ours, twin, total = kernels.TritonBackend(), Backend(), sum(RAGGED)
    groups, whole = Groups(torch.tensor(RAGGED), total), partial(integers, dtype=dtype)
    order = torch.randperm(total + 1, generator=torch.Generator().manual_seed(5))
    order = order[order != total]
    rows, weight, bias, other = whole(total, 37), whole(6, 37, 23, seed=1), whole(6, 23, seed=2), whole(total, 18)
    scale, vectors = 2.0 ** whole(total, seed=3).float(), whole(6, 37, seed=4)
    slots, turned = torch.tensor([[0, 4, 6], [1, 1, 2]]), weight.mT.contiguous().mT
    calls = [lambda b, w=w, v=v: b.mm(rows, w, groups, v) for w in (weight, turned) for v in (None, bias)]
    calls += [lambda b, w=w: b.mm(rows, w, groups, bias, order) for w in (weight, turned)]
    calls += [lambda b: b.outer(rows, other, groups), lambda b: b.row_dot(rows, vectors, groups).float()]
    calls += [lambda b, s=s: b.segment_sum(rows, groups, s) for s in (None, scale)]
    calls += [lambda b: b.take(rows, order[:9])]
    weights = None, whole(2, 3, seed=6).float(), whole(2, 3, seed=6)
    calls += [lambda b, w=w: b.gather_sum(rows, slots, w, torch.float32) for w in weights]
    for number, call in enumerate(calls):
        assert torch.equal(call(ours), call(twin)), number
    sent = torch.empty(total, 23, dtype=dtype)
    sent[order] = twin.mm(rows, weight, groups, bias)
    assert torch.equal(ours.mm(rows, weight, groups, bias, order), sent)
    rows, weight, other = drawn(total, 37, dtype=dtype), drawn(6, 37, 23, dtype=dtype), drawn(total, 18, dtype=dtype)
    for call in (lambda b: b.mm(rows, weight, groups), lambda b: b.outer(rows, other, groups)):
        found, wanted = call(ours), call(twin)
        assert found.dtype == dtype and relative_error(found.float(), wanted.float()) < bound


@pytest.mark.parametrize("gate", GATES[:2], ids=str)
def test_triton_gemm_with_a_fused_gate_equals_the_separate_gate_bit_for_bit(kernels, gate):
    ours, total, (hidden, inner) = kernels.TritonBackend(), sum(RAGGED), (24, 20)
    groups, rows = Groups(torch.tensor(RAGGED), total), integers(total, hidden)
    up, bias = integers(6, hidden, 2 * inner), integers(6, 2 * inner, seed=2)
    for in_out, b in ((up, bias), (up.mT.contiguous().mT, None)):
        pre, act = ours.up_gate(rows, in_out, groups, b, gate)
        assert torch.equal(pre, ours.mm(rows, in_out, groups, b)) and torch.equal(act, ours.activate(pre, gate))


@pytest.fixture
def in_epilogue(kernels, tiles, monkeypatch):
    """Return a function that switches the gate's backward to the GEMM's epilogue, and returns a list of launches."""
    launched = []

    def switch_on(columns=64):
        def launch_it(what, key, choices, groups, launch, results=()):
            is_both = what == "mm and gate's backward"
            launch(tiles.Tile(16, columns, 16) if is_both else choices[0])
            launched.extend([what] * is_both)

        monkeypatch.setattr(kernels, "launch_fastest", launch_it)
        return launched

    return switch_on


@pytest.fixture
def persistent(kernels, tiles, monkeypatch):
    """Return a function that calls another with the persistent kernels, and adds their names to a set."""

    def call(function, launched):
        def launch_it(what, key, choices, groups, launch, results=()):
            assert key[-1] is True, "the persistent kernel does not support the operands"
            launch(tiles.Tile(16, 16, 16, is_persistent=True))
            launched.add(what)

        with monkeypatch.context() as patched:
            patched.setattr(kernels, "launch_fastest", launch_it)
            return function()

    return call


@pytest.mark.parametrize(
    ("gate", "dtype", "counts"),
    [
        (GATES[2], torch.float32, [5, 0, 1, 16, 0, 18]),
        (GATES[1], torch.bfloat16, [2, 0, 17]),
        (GATES[0], torch.float32, [0, 0]),
    ],
    ids=str,
)
def test_triton_gemm_with_the_gates_backward_equals_two_passes_bit_for_bit(kernels, in_epilogue, gate, dtype, counts):
    ours, total, experts, (hidden, inner) = kernels.TritonBackend(), sum(counts), len(counts), (24, 36)
    groups, x = Groups(torch.tensor(counts), total), integers(11, hidden, dtype=dtype)
    rows = ours.indexed(x, torch.randint(11, (total,), generator=torch.Generator().manual_seed(5)))
    pre, scale = drawn(total, 2 * inner, dtype=dtype), drawn(total, seed=3)
    down = integers(experts, hidden, inner, dtype=dtype, seed=1)
    calls = [
        lambda r=r, w=w, s=s: ours.mm_gate_backward(r, w, groups, pre, s, gate)
        for r, w, s in ((rows, down, scale), (ours.take(x, rows.index_R), down.mT.contiguous().mT, None))
    ]
    wanted = [call() for call in calls]
    for columns in (16, 32):  # a tile is one piece, or two
        launched = in_epilogue(columns)
        for call, want in zip(calls, wanted, strict=True):
            got = call()
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
            assert (got[2] is None) == (want[2] is None)
            if got[2] is not None and total:  # a sum in another order
                assert got[2].shape == want[2].shape and relative_error(got[2], want[2]) < 1e-6
    assert len(launched) == 4


def test_triton_gemm_with_the_gates_backward_is_taken_if_faster_unless_runs_have_to_be_equal(
    kernels, tiles, monkeypatch, capsys
):
    ours, passes = kernels.TritonBackend(), []
    activate_backward = ours.activate_backward
    monkeypatch.setattr(ours, "activate_backward", lambda *args: passes.append(1) or activate_backward(*args))
    monkeypatch.setattr(kernels, "gate_backward_tiles", lambda *sizes: (tiles.Tile(16, 32, 16),))
    monkeypatch.setattr(tiles, "_milliseconds", lambda launch: launch() or 1.0 + isinstance(launch.args[0], str))
    groups, pre = Groups(torch.tensor([64]), 64), drawn(64, 64)
    grad, down = integers(64, 16), integers(1, 16, 32, seed=1)  # whose sums are equal in any order
    found, launched = [], []
    for is_fixed in (True, False, True):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda is_fixed=is_fixed: is_fixed)
        found.append(ours.mm_gate_backward(grad, down, groups, pre, drawn(64), GATES[0]))
        launched.append(len(passes))
    assert launched == [1, 2, 3]  # the second of them was measured
    for fixed, taken, again in zip(*found, strict=True):
        assert torch.equal(fixed, again) and relative_error(taken, fixed) < 1e-6
    assert torch.equal(found[0][0], found[1][0])
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "two passes 2.000 ms, 16x32x16 with 3 stages 1.000 ms (taken)" in said


@pytest.mark.parametrize(
    ("dtype", "counts"),
    [(torch.bfloat16, [2, 0, 17]), (torch.float32, [0, 0]), pytest.param(torch.float32, RAGGED, marks=LONG)],
    ids=str,
)
def test_triton_gemm_of_rows_read_through_an_index_equals_that_of_their_copy_bit_for_bit(kernels, dtype, counts):
    ours, total, experts, (hidden, inner) = kernels.TritonBackend(), sum(counts), len(counts), (19, 18)
    groups, x = Groups(torch.tensor(counts), total), drawn(11, hidden, dtype=dtype)
    index = torch.randint(11, (total + 1,), generator=torch.Generator().manual_seed(5))[1:]  # of another alignment
    rows, copied = ours.indexed(x, index), ours.take(x, index)
    assert isinstance(rows, IndexedRows) and torch.equal(copied, Backend().indexed(x, index))
    scale, other = drawn(total, seed=3), drawn(total, inner, dtype=dtype, seed=1)
    up, bias = drawn(experts, hidden, 2 * inner, dtype=dtype), drawn(experts, 2 * inner, dtype=dtype, seed=2)
    vectors = drawn(experts, hidden, dtype=dtype)
    linears = (up, None), (up.mT.contiguous().mT, bias)
    calls = [lambda r, w=w, b=b: ours.mm(r, w, groups, b) for w, b in linears]
    calls += [lambda r: ours.outer(r, other, groups), lambda r: ours.outer(other, r, groups)]
    calls += [lambda r: ours.outer(r, r, groups), lambda r: ours.row_dot(r, vectors, groups)]
    calls += [lambda r, s=s: ours.segment_sum(r, groups, s) for s in (None, scale)]
    calls += [
        lambda r, g=g, w=w, b=b: ours.up_gate(r, w, groups, b, g) for g, (w, b) in zip(GATES[:2], linears, strict=True)
    ]
    for call in calls:
        got, want = call(rows), call(copied)
        for found, wanted in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want)), strict=True):
            assert found is wanted is None or torch.equal(found, wanted)


def test_triton_outer_of_many_columns_copies_the_rows_that_are_read_through_an_index(kernels, monkeypatch):
    ours, taken = kernels.TritonBackend(), []
    take = ours.take
    monkeypatch.setattr(ours, "take", lambda x, index: taken.append(x) or take(x, index), raising=False)
    groups, x, other = Groups(torch.tensor(COUNTS), sum(COUNTS)), drawn(11, 19), drawn(sum(COUNTS), 18, seed=1)
    rows = ours.indexed(x, torch.arange(sum(COUNTS)) % 11)
    wanted = ours.outer(rows, other, groups), ours.outer(other, rows, groups)
    assert not taken
    monkeypatch.setattr(kernels, "MOST_BY_INDEX", 17)
    found = ours.outer(rows, other, groups), ours.outer(other, rows, groups)
    assert len(taken) == 2 and all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_gate_of_every_activation_equals_autograd(kernels, monkeypatch, gate):
    monkeypatch.setattr(backends, "_BLOCK", 5 * 2 * 20)
    pre, grad, scale = drawn(37, 2 * 20), drawn(37, 20, seed=1), drawn(37, seed=2)
    leaf, scale_leaf = pre.clone().requires_grad_(), scale.clone().requires_grad_()
    act = gate(leaf)
    (act * scale_leaf[:, None]).backward(grad)
    wanted = act.detach(), leaf.grad, (act * scale[:, None]).detach(), scale_leaf.grad
    for backend, bound in ((kernels.TritonBackend(), 1e-6), (Backend(), 1e-5)):
        found = backend.activate(pre, gate), *backend.activate_backward(pre, grad.clone(), scale, gate)
        for got, want in zip(found, wanted, strict=True):
            assert relative_error(got, want) < bound


def test_triton_tiles_of_any_counts_cover_every_row_once_and_surplus_tiles_none(kernels):
    for counts in (RAGGED, [0, 0, 5], [16, 16], [0], [1]):
        table, covered = kernels.tiles_of(Groups(torch.tensor(counts), sum(counts)), 16), []
        for expert, first, end in zip(*(part.tolist() for part in table.table), strict=True):
            covered += [(row, expert) for row in range(first, min(end, first + 16)) if expert < len(counts)]
            assert expert <= len(counts) and (expert < len(counts) or first >= end)
        assert covered == list(enumerate(torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).tolist()))
        for expert, count in enumerate(counts):
            first, end = table.first_of_expert[expert], table.end_of_expert[expert]
            assert end - first == -(-count // 16) and (table.expert[first:end] == expert).all()


def test_fastest_tile_is_measured_once_for_each_key_by_a_launch_with_enough_rows(kernels, tiles, monkeypatch, capsys):
    choices, launched = [tiles.Tile(16, n, 16) for n in (16, 32, 64)], []
    few, many = (Groups(torch.tensor([rows, 0]), rows) for rows in (127, 128))
    times = iter((3.0, 1.0, 2.0))
    monkeypatch.setattr(tiles, "_milliseconds", lambda launch: next(times))
    for groups in (few, many, few, many):
        kernels.launch_fastest("mm", (torch.float16, 8), choices, groups, launched.append)
    assert launched == [choices[0], *choices[1:2] * 3]
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "16x32x16 with 3 stages 1.000 ms (taken)" in said
    with pytest.raises(StopIteration):
        kernels.launch_fastest("mm", (torch.float16, 16), choices, many, launched.append)
    kernels.launch_fastest("mm", (torch.float16, 16), choices[:1], many, launched.append)
    assert launched[-1] == choices[0] and not capsys.readouterr().out


def test_fastest_tile_with_other_results_or_one_that_does_not_compile_is_not_taken(tiles, monkeypatch, capsys):
    choices, out = [tiles.Tile(16, n, 16, is_persistent=n > 16) for n in (16, 32, 64, 128)], torch.zeros(4, 3)
    groups = Groups(torch.tensor([64]), 64)

    def launch(tile):
        if tile.n == 64:
            raise RuntimeError("PassManager::run failed\nand more")
        out.copy_(torch.arange(12.0).view(4, 3))
        out[3, 2] += tile.n == 128

    monkeypatch.setattr(tiles, "_milliseconds", lambda launch: launch() or 1.0 / launch.args[0].n)
    tiles.launch_fastest("mm", (8,), choices, groups, launch, (out,))
    said = capsys.readouterr().out
    assert tiles._fastest == {("mm", 8): choices[1]} and out[3, 2] == 11
    assert "16x32x16 with 3 stages, persistent 0.031 ms (taken)" in said
    assert "16x64x16 with 3 stages, persistent does not run here (RuntimeError: PassManager::run failed)" in said
    assert "persistent 0.008 ms, not taken, for its results differ from the first's" in said and said.count("\n") == 1
    with pytest.raises(RuntimeError, match="PassManager"):
        tiles.launch_fastest("mm", (9,), choices[2:], groups, launch, (out,))


@pytest.mark.parametrize(
    ("family", "has_epilogue"),
    [("transposed, biases", False), ("no gate", False), ("interleaved, transposed, biases", True)]
    + [pytest.param(family, True, marks=LONG) for family in ("plain", "clamped")],
)
def test_triton_experts_of_every_layout_equal_plain_operators(kernels, in_epilogue, family, has_epilogue):
    """Compute the gate's backward in a second pass or in the epilogue; copy no rows if tokens stay on their rank."""
    module, inputs, launched = make(family), routed(), in_epilogue() if has_epilogue else []
    with mock.patch.object(kernels.TritonBackend, "take", side_effect=AssertionError("rows are copied")):
        found = tokens_with(module, "triton", *inputs)
    assert_equal(found, tokens_with(module, "reference", *inputs))
    counts_e = torch.tensor([18, 0, 4, 0, 1, 3])
    rows = drawn(int(counts_e.sum()), D)
    assert_equal(rows_with(module, "triton", rows, counts_e), rows_with(module, "reference", rows, counts_e))
    assert len(launched) == (2 if has_epilogue and family != "no gate" else 0)
    none = counts_e * 0
    assert_equal(rows_with(module, "triton", rows[:0], none), rows_with(module, "reference", rows[:0], none))


@pytest.mark.parametrize(
    "family",
    ["transposed, biases", *(pytest.param(name, marks=LONG) for name in FAMILIES if name != "transposed, biases")],
)
def test_triton_experts_in_half_precision_are_as_near_to_float32_as_torchs(kernels, family):
    module, (hidden, ids, weights) = make(family), routed()
    wanted = tokens_with(module, "reference", hidden, ids, weights)
    half = module.to(torch.float16), hidden.half(), ids, weights
    got, torchs = (tokens_with(half[0], backend, *half[1:]) for backend in ("triton", "torch"))
    for name, value in wanted.items():
        assert got[name].dtype == torchs[name].dtype
        errors = [relative_error(found[name].float(), value) for found in (got, torchs)]
        assert errors[0] < 1.5 * errors[1] < 0.01, (name, errors)


def test_triton_experts_with_adapters_or_an_unknown_activation_equal_plain_operators(kernels):
    module = make("plain", adapters=True)
    assert gate_of(module) is not None
    assert_equal(tokens_with(module, "triton", *routed()), tokens_with(module, "reference", *routed()))
    module = make("plain")
    module.act_fn = torch.nn.Tanh()
    assert gate_of(module) is None
    assert_equal(tokens_with(module, "triton", *routed()), tokens_with(module, "reference", *routed()))


@pytest.mark.parametrize(("dtype", "counts"), [(torch.bfloat16, RAGGED), (torch.float32, [0, 17])], ids=str)
def test_persistent_kernels_have_the_bits_of_the_others(kernels, persistent, dtype, counts):
    launched = set()
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
            calls += [
                lambda up=up, g=g, rows=rows: ours.up_gate(rows, up, groups, None, g) for g in (GATES[0], GATES[2])
            ]
        for call in calls:
            assert all(map(torch.equal, persistent(call, launched), call()))
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
        found = persistent(lambda rows=rows, weight=weight: ours.mm(rows, weight, groups), set())
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
