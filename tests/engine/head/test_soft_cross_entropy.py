"""The cross-entropy of two distributions, tile by tile, against plain operators."""

import pytest
import torch

from epfsdp2.engine.head import soft_cross_entropy as module

TOKENS, WIDTH, VOCABULARY = 13, 8, 30


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_soft_cross_entropy_and_its_gradient_equal_plain_operators(monkeypatch, dtype, bound, with_bias):
    monkeypatch.setattr(module, "tile_sizes", lambda device: (5, 7))
    generator = torch.Generator().manual_seed(0)
    sizes = (TOKENS, WIDTH), (TOKENS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,)
    draft, target, weight, bias = (
        torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes
    )
    target[::3] = draft[::3]
    temperature, by = torch.rand(TOKENS, generator=generator) + 0.5, torch.randn(TOKENS, generator=generator)
    bias = bias if with_bias else None
    draft.requires_grad_()
    losses, agrees = module.soft_cross_entropy(draft, target, weight, bias, temperature)
    (found,) = torch.autograd.grad((losses * by).sum(), draft)

    plain = draft.detach().double().requires_grad_()
    extra = 0 if bias is None else bias.double()
    logits = [(x @ weight.double().t() + extra) / temperature[:, None].double() for x in (plain, target.double())]
    q, p = (each.log_softmax(-1) for each in logits)
    wanted = -(p.exp() * q).sum(-1)
    (gradient,) = torch.autograd.grad((wanted * by).sum(), plain)
    assert losses.dtype == torch.promote_types(dtype, torch.float32) and found.dtype == dtype
    torch.testing.assert_close(losses.double(), wanted, rtol=bound, atol=bound)
    torch.testing.assert_close(found.double(), gradient, rtol=bound, atol=bound)
    assert agrees[::3].all() and not agrees.all()
