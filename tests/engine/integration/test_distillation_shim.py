"""verl's top-k distillation loss is computed for this engine's logits."""

from types import SimpleNamespace

import pytest
import torch

from epfsdp2.engine.integration.shims import distillation_shim


def _inputs():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(1, 5, 11, generator=generator)
    ids = torch.randint(0, 11, (5, 3), generator=generator)
    lengths = torch.tensor([0, 2, 5])
    teacher = {
        "teacher_logprobs": torch.nested.nested_tensor_from_jagged(torch.randn(5, 3).log_softmax(-1), lengths),
        "teacher_ids": torch.nested.nested_tensor_from_jagged(ids, lengths),
    }
    return logits, teacher


def test_distillation_shim_is_still_needed_and_leaves_other_strategies_unchanged(monkeypatch):
    from verl.trainer.distillation import losses
    from verl.workers.config import DistillationConfig

    stock = getattr(losses.compute_topk_loss, "__wrapped__", losses.compute_topk_loss)
    monkeypatch.setattr(losses, "compute_topk_loss", stock)
    logits, teacher = _inputs()

    def of(strategy):
        actor = SimpleNamespace(strategy=strategy)
        return losses.distillation_ppo_loss(actor, DistillationConfig(), data=teacher, student_logits=logits)

    with pytest.raises(NotImplementedError, match="Unsupported strategy: config.strategy='epfsdp2'"):
        of("epfsdp2")
    wanted = of("fsdp2")
    distillation_shim.install()
    distillation_shim.install()
    assert losses.compute_topk_loss.__wrapped__ is stock
    for found in (of("epfsdp2"), of("fsdp2")):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    with pytest.raises(NotImplementedError, match="Unsupported strategy: config.strategy='mine'"):
        of("mine")
