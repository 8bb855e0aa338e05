"""An engine that starts builds its model on the meta device once: checks, the plan and the training share it."""

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from epfsdp2.engine.config import EPFSDP2EngineConfig
from epfsdp2.engine.model.meta import build_on_meta, copy_on_meta
from tests.support.models.tiny import reference_model, save_qwen3, save_qwen3_moe
from tests.support.ranks import run_ranks
from tests.support.trainer.verl_worker import training_worker


def _counted(folder, model_type, settings, model):
    started, plain = [], PreTrainedModel.__init__

    def count(self, *args, **kwargs):
        if "For" in type(self).__name__:  # the whole with its head, not the backbone in it
            started.append(type(self).__name__)
        plain(self, *args, **kwargs)

    PreTrainedModel.__init__ = count
    try:
        worker = training_worker(folder, model_type, EPFSDP2EngineConfig(**settings), None, **model)
    finally:
        PreTrainedModel.__init__ = plain
    assert len(started) == 1, started
    return worker


def _builds_once(folder, dense, cases):
    for model_type, settings, model in cases:
        worker = _counted(folder, model_type, {"ep_size": 2, "use_dynamic_bsz": False, **settings}, model)
        plan = worker.engine.run_plan
        assert plan is None if settings.get("forward_only") else not plan.sizes.untraced
    _counted(dense, "language_model", {"ep_size": 1}, {})


def test_engine_builds_its_model_on_meta_once(tmp_path):
    lora = {"lora_rank": 4, "target_modules": "all-linear"}
    cases = [
        ("language_model", {"dtype": "bf16", "router_aux_loss_coef": 0.1}, {}),
        ("language_model", {"forward_only": True}, {}),
        ("language_model", {}, lora),
        ("value_model", {"model_dtype": "bf16"}, {}),
    ]
    run_ranks(_builds_once, 2, save_qwen3_moe(tmp_path / "moe"), save_qwen3(tmp_path / "dense"), cases)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copy_on_meta_equals_what_is_built_in_that_dtype(tmp_path, dtype):
    config = reference_model(save_qwen3_moe(tmp_path)).config
    model = build_on_meta(AutoModelForCausalLM, config, torch.float32)
    copied, built = copy_on_meta(model, dtype), build_on_meta(AutoModelForCausalLM, config, dtype)
    assert type(copied) is type(built) and copied is not model
    described = [{n: (p.shape, p.dtype, p.device) for n, p in m.named_parameters()} for m in (copied, built)]
    assert described[0] == described[1]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for (name, buffer), (_, other) in zip(copied.named_buffers(), built.named_buffers(), strict=True):
        assert torch.equal(buffer, other) and buffer.dtype == other.dtype, name
