"""The kernels of tiles of logits equal torch's operators, in Triton's interpreter, and compile for GPUs."""

import importlib.util

import pytest
import torch

from epfsdp2.engine.head import log_probs, tiles
from tests.support.models.tiny import relative_error
from tests.support.moe.interpreter import compiled_passes, drawn, interpreted_kernels

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def kernels():
    with interpreted_kernels("epfsdp2.engine.head.triton_tiles") as found:
        yield found


@pytest.fixture
def small_tiles(kernels, monkeypatch):
    """Use tiles of several blocks of columns, none a power of two."""
    monkeypatch.setattr(kernels, "_REDUCED", 16)
    monkeypatch.setattr(kernels, "_WRITTEN", 8)
    monkeypatch.setattr(log_probs, "tile_sizes", lambda device: (5, 37))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_triton_tiles_give_the_values_and_gradients_of_torchs(
    kernels, small_tiles, monkeypatch, dtype, bound, with_entropy
):
    hidden, weight = drawn(12, 8, dtype=dtype), drawn(100, 8, dtype=dtype, seed=1) * 4
    labels = torch.tensor([0, 36, 37, 73, 74, 99, *range(6)])  # at the edges of tiles
    temperature, grad = drawn(12, seed=2).abs() + 0.5, drawn(12, 1 + with_entropy, seed=3)
    found = {}
    for side in (None, kernels):
        monkeypatch.setattr(tiles, "_kernels", lambda *_, side=side: side)
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        out = log_probs.log_probs_and_entropy(*leaves, None, labels, temperature, with_entropy)
        out.backward(grad)
        found[side] = out.detach(), *(leaf.grad for leaf in leaves)
    for i, (ours, torchs) in enumerate(zip(found[kernels], found[None], strict=True)):
        assert ours.dtype == torchs.dtype and relative_error(ours, torchs) < (bound if i else 1e-6)


def test_triton_tiles_of_logits_that_are_minus_infinity_are_finite(kernels, small_tiles):
    logits, scale = drawn(3, 37), torch.ones(3)
    logits[:, ::2] = -torch.inf
    sums = torch.zeros(4, 3)
    sums[tiles.MOST] = torch.finfo(torch.float32).min
    kernels.reduce_tile(logits, scale, torch.tensor([1, -5, 40]), sums, True)
    wanted = logits.softmax(-1)
    entropy = sums[tiles.TOTAL].log() - sums[tiles.WEIGHTED] / sums[tiles.TOTAL]
    assert relative_error(entropy, torch.distributions.Categorical(wanted).entropy()) < 1e-6
    assert sums[tiles.LABEL].tolist() == [logits[0, 1].item(), 0.0, 0.0]


def test_triton_tiles_are_used_on_gpus_in_float32(kernels):
    choose = tiles._kernels.__wrapped__
    assert choose("cuda", torch.float32) is kernels
    assert choose("cuda", torch.float64) is choose("cpu", torch.float32) is None


@pytest.mark.long
@pytest.mark.parametrize("arch", (80, 90, 100))
def test_triton_tiles_compile_for_gpus_without_spills(arch):
    rows = compiled_passes("head", str(arch))
    assert {(row["kernel"], row["arch"]) for row in rows} == {("reduce_rows", arch), ("write_gradients", arch)}
    assert all(row["stack"] == 0 and row["ctas"] >= 2 for row in rows)
