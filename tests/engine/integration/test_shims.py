"""The shims for verl: distillation losses, weights that workers of separate trainers save, and metrics."""

import json
import pickle
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from epfsdp2.engine.integration import shims
from tests.support.engine.sharded import sharded_model
from tests.support.models.tiny import save_qwen3_moe
from tests.support.ranks import run_ranks


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
    shims.install()
    shims.install()
    assert losses.compute_topk_loss.__wrapped__ is stock
    for found in (of("epfsdp2"), of("fsdp2")):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    with pytest.raises(NotImplementedError, match="Unsupported strategy: config.strategy='mine'"):
        of("mine")


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
    shims.install()
    shims.install()
    assert worker._get_strategy_handlers() == (shims.save, shims.restore)
    assert [f.__name__ for f in _worker("fsdp2")._get_strategy_handlers()] == [
        "fsdp2_sharded_save_to_cpu",
        "fsdp2_sharded_load_from_cpu",
    ]


def _round_trip(folder):
    model, _ = sharded_model(folder, dist.get_world_size(), 2)
    worker = _worker("fsdp2")  # as verl's scripts say; the engine that runs decides
    shims.install()
    engine = SimpleNamespace(module=model, engine_config=SimpleNamespace(strategy="epfsdp2"))
    worker.actor = SimpleNamespace(engine=engine)
    before = shims.save(model)
    worker.save_model_to_cpu(0)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    changed = shims.save(model)
    worker.save_model_to_cpu(1)
    for saved, wanted in ((0, before), (1, changed)):
        worker.restore_model_from_cpu(saved)
        now = shims.save(model)
        assert all(torch.equal(now[name], wanted[name]) for name in wanted)
    assert not any(torch.equal(before[name], changed[name]) for name in before if before[name].numel())


def test_separation_shim_after_save_and_restore_gives_the_same_weights(tmp_path):
    run_ranks(_round_trip, 2, save_qwen3_moe(tmp_path))


def test_name_of_a_trainers_metric_is_still_needed_and_reaches_the_trainer_as_it_is():
    from verl.utils.py_functional import append_to_dict, rename_dict

    def logged(*metrics):
        """The names of an update's metrics, from a worker through Ray to the trainer (``engine_workers.py``)."""
        found = {}
        append_to_dict(found, pickle.loads(pickle.dumps(dict.fromkeys(metrics, [1.0]))))
        return list(rename_dict(found, "actor/"))

    assert logged("training/x", "actor/x") == ["actor/training/x", "actor/x"]
    assert logged(shims.TrainersMetric("training/x"), shims.TrainersMetric("actor/x")) == ["training/x", "actor/x"]


def test_metrics_of_a_supervised_update_are_still_lists_and_are_logged_as_means_of_ranks(tmp_path, monkeypatch):
    from verl.utils.tracking import Tracking

    # verl's trainers of PPO have a function that takes the means.
    assert "reduce_metrics" not in Path(find_spec("verl.trainer.sft_trainer").origin).read_text()
    monkeypatch.setattr(Tracking, "log", getattr(Tracking.log, "__wrapped__", Tracking.log))
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    tracking = Tracking("project", "experiment", ["file"])
    for _ in range(2):
        tracking.log({"train/loss": 2.0, "mtp_loss": [[1.0], [3.0]]}, step=1)
        shims.install()
    tracking.finish()
    stock, ours = (json.loads(line)["data"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert stock["mtp_loss"] == [[1.0], [3.0]]
    assert ours == {"train/loss": 2.0, "train/mtp_loss": 2.0}
