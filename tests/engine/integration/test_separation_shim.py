"""verl's workers for separate trainers save and restore this engine's weights."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from epfsdp2.engine.integration.shims import separation_shim
from tests.support.engine.sharded import sharded_model
from tests.support.models.tiny import save_qwen3_moe
from tests.support.ranks import run_ranks


def _worker(strategy):
    from verl.experimental.separation.engine_workers import DetachActorWorker

    worker = DetachActorWorker.__new__(DetachActorWorker)
    worker.config = SimpleNamespace(actor=SimpleNamespace(strategy=strategy))
    worker._strategy_handlers = None
    return worker


def test_separation_shim_is_still_needed_and_leaves_other_strategies_unchanged(monkeypatch):
    worker = _worker("epfsdp2")
    kind = type(worker)
    stock = getattr(kind._get_strategy_handlers, "__wrapped__", kind._get_strategy_handlers)
    monkeypatch.setattr(kind, "_get_strategy_handlers", stock)
    with pytest.raises(NotImplementedError, match="Unsupported strategy: epfsdp2"):
        worker._get_strategy_handlers()
    separation_shim.install()
    separation_shim.install()
    assert worker._get_strategy_handlers() == (separation_shim.save, separation_shim.restore)
    assert [f.__name__ for f in _worker("fsdp2")._get_strategy_handlers()] == [
        "fsdp2_sharded_save_to_cpu",
        "fsdp2_sharded_load_from_cpu",
    ]


def _round_trip(folder):
    model, _ = sharded_model(folder, dist.get_world_size(), 2)
    worker = _worker("fsdp2")  # as verl's scripts say; the engine that runs decides
    separation_shim.install()
    engine = SimpleNamespace(module=model, engine_config=SimpleNamespace(strategy="epfsdp2"))
    worker.actor = SimpleNamespace(engine=engine)
    before = separation_shim.save(model)
    worker.save_model_to_cpu(0)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    changed = separation_shim.save(model)
    worker.save_model_to_cpu(1)
    for saved, wanted in ((0, before), (1, changed)):
        worker.restore_model_from_cpu(saved)
        now = separation_shim.save(model)
        assert all(torch.equal(now[name], wanted[name]) for name in wanted)
    assert not any(torch.equal(before[name], changed[name]) for name in before if before[name].numel())


def test_separation_shim_after_save_and_restore_gives_the_same_weights(tmp_path):
    run_ranks(_round_trip, 2, save_qwen3_moe(tmp_path))
