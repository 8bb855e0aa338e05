"""The cross-entropy of two distributions, tile by tile, against plain operators."""

import pytest
import torch

from epfsdp2.engine.head import soft_cross_entropy as module

TOKENS, WIDTH, VOCABULARY = 13, 8, 30


@pytest.mark.parametrize("has_own_head", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_soft_cross_entropy_and_its_gradients_equal_plain_operators(monkeypatch, dtype, bound, with_bias, has_own_head):
    monkeypatch.setattr(module, "tile_sizes", lambda device: (5, 7))
    generator = torch.Generator().manual_seed(0)
    sizes = (TOKENS, WIDTH), (TOKENS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,), (VOCABULARY, WIDTH)
    draft, target, weight, bias, own = (
        torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes
    )
    target[::3] = draft[::3]
    temperature, by = torch.rand(TOKENS, generator=generator) + 0.5, torch.randn(TOKENS, generator=generator)
    bias = bias if with_bias else None
    trained = [draft.requires_grad_(), own.requires_grad_()] if has_own_head else [draft.requires_grad_()]
    losses, agrees = module.soft_cross_entropy(draft, target, weight, bias, temperature, *trained[1:])
    found = torch.autograd.grad((losses * by).sum(), trained)

    plain = [each.detach().double().requires_grad_() for each in trained]
    shift = 0 if bias is None else bias.double()
    of_policy = target.double() @ weight.double().t() + shift
    of_draft = plain[0] @ plain[1].t() if has_own_head else plain[0] @ weight.double().t() + shift
    q, p = ((each / temperature[:, None].double()).log_softmax(-1) for each in (of_draft, of_policy))
    wanted = -(p.exp() * q).sum(-1)
    gradients = torch.autograd.grad((wanted * by).sum(), plain)
    assert losses.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(losses.double(), wanted, rtol=bound, atol=bound)
    for each, gradient in zip(found, gradients, strict=True):
        assert each.dtype == dtype
        torch.testing.assert_close(each.double(), gradient, rtol=bound, atol=bound)
    assert torch.equal(agrees, p.argmax(-1) == q.argmax(-1)) and not agrees.all()
    assert has_own_head or agrees[::3].all()
