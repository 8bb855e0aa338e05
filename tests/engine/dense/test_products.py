"""Dense products by the experts' GEMM: rows have the same bits in any number of rows. Interpreted on a CPU."""

import pytest
import torch
from torch.nn import functional as F

from epfsdp2.engine.dense.products import replace_products
from tests.support.moe.interpreter import drawn, integers, interpreted_kernels
from tests.support.ranks import run_ranks


def _check():
    # Exact sums: interpreted, a tile is a product of the processor's library, which sums by the tile's shape.
    x, weight, bias, grad = integers(40, 24), integers(20, 24, seed=1), integers(20, seed=2), drawn(40, 20, seed=3)
    batches, other = integers(3, 40, 24, seed=4), integers(3, 24, 5, seed=5)
    wanted = F.linear(x.double(), weight.double(), bias.double())
    wanted_batches = torch.bmm(batches.double(), other.double())
    wanted_grads = grad.double() @ weight.double(), grad.double().t() @ x.double()
    with interpreted_kernels():
        replace_products("cpu")
        for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 0.05)):
            of_dtype = [t.to(dtype) for t in (x, weight, bias, batches, other)]
            a, w, b, many, factor = of_dtype
            whole, out = F.linear(a, w, b), torch.empty(40, 20, dtype=dtype)
            assert (whole - wanted).abs().max() < bound * wanted.abs().max()
            torch.mm(a, w.t(), out=out)
            assert torch.equal(F.linear(a, w), out)
            for first, last in ((0, 1), (5, 8), (3, 20)):
                assert torch.equal(F.linear(a[first:last], w, b), whole[first:last]), (dtype, first, last)
                assert torch.equal((a[first:last][None] @ w.t())[0], out[first:last])
            products = torch.bmm(many, factor)
            assert (products - wanted_batches).abs().max() < bound * wanted_batches.abs().max()
            assert torch.equal(torch.bmm(many[1:2, 4:7], factor[1:2]), products[1:2, 4:7])
            scaled = torch.baddbmm(products, many, factor, beta=0.5, alpha=2.0)
            assert torch.equal(scaled, products * 2.0 + products * 0.5)
        leaf, leaf_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        F.linear(leaf, leaf_weight).backward(grad)
        for found, exact in zip((leaf.grad, leaf_weight.grad), wanted_grads, strict=True):
            assert (found - exact).abs().max() < 1e-6 * exact.abs().max()
        with pytest.raises(TypeError, match="engine.batch_invariant has no product of torch.float64"):
            torch.mm(x.double(), weight.t().double())


def test_products_of_a_process_are_invariant_and_right_in_forward_and_backward():
    run_ranks(_check, 1)  # a process of its own, because the replacement stays
