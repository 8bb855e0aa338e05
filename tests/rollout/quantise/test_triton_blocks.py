"""The kernels of FP8 blocks have the bits of torch's operators, in Triton's interpreter, and compile for GPUs."""

import importlib.util

import pytest
import torch

from epfsdp2.engine.quantise.blocks import FP8, LEAST, Blocks, _kernels
from epfsdp2.engine.topology.index_ranges import IndexRange
from tests.support.moe.interpreter import compiled_passes, drawn, interpreted_kernels
from tests.support.rollout.sent_slices import bits

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
BLOCK = 16  # of 128 the interpreter takes a minute


@pytest.fixture(scope="module")
def kernels():
    with interpreted_kernels("epfsdp2.engine.quantise.triton_blocks") as found:
        yield found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "first"), [((2, 33, 17), (0, 0)), ((1, 30), (15, 3)), ((2, 10, 9), (12, 30))], ids=str
)
def test_triton_blocks_equal_torchs_bit_for_bit(kernels, monkeypatch, shape, first, dtype):
    whole = drawn(*shape[:-1], shape[-1] + 3, seed=sum(shape)) * drawn(*shape[:-1], shape[-1] + 3, seed=1).exp()
    values = whole.to(dtype)[..., 2:-1]  # of a shard, whose rows are not contiguous
    values[..., :4, :] = 0.0
    blocks, (row, column), (*count, rows, columns) = Blocks(BLOCK), first, shape
    held = IndexRange((*(0 for _ in count), row, column), (*count, row + rows, column + columns))
    maxima = blocks.maxima(values, held)
    assert torch.equal(kernels.block_maxima(values, first, BLOCK), maxima)
    found, wanted = (torch.empty(shape, dtype=FP8) for _ in range(2))
    kernels.quantise(values, blocks.scales(maxima), first, BLOCK, found)
    blocks.quantise(values, blocks.scales(maxima), held, wanted)
    assert torch.equal(bits(found), bits(wanted))
    found, wanted = values.clone(), values.clone()
    inverse = 1 / torch.finfo(FP8).max  # torch on a GPU multiplies by it where a CPU divides
    monkeypatch.setattr(Blocks, "scales", lambda self, maxima: maxima.clamp(LEAST) * inverse)
    kernels.round_in_place(found, BLOCK)
    blocks.round_in_place(wanted)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("device", "capability", "used"), [("cuda", (8, 9), True), ("cuda", (8, 0), False), ("cpu", (), False)]
)
def test_triton_blocks_are_used_on_gpus_with_fp8(kernels, monkeypatch, device, capability, used):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    found = _kernels.__wrapped__(torch.device(device))
    assert found is (kernels if used else None)


@pytest.mark.long
def test_triton_blocks_compile_for_gpus_with_fp8_without_spills():
    rows = compiled_passes("fp8")
    assert {(row["kernel"], row["arch"]) for row in rows} == {
        (kernel, arch) for kernel in ("maxima_of_blocks", "quantise_blocks", "round_blocks") for arch in (90, 100)
    }
    assert all(row["stack"] == 0 and row["ctas"] >= 2 for row in rows)
