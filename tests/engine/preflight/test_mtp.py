"""Multi-token prediction layers that can't be kept or trained are refused on the driver."""

import pytest

from epfsdp2.engine.preflight.model import inspect_model
from epfsdp2.engine.preflight.mtp import COEF, check_drafter, check_mtp
from tests.parity.family import LINEAR
from tests.support.trainer.preflight import MODEL, refused, rollout
from tests.support.trainer.settings import TINY, checkpoint, engine

GLM = {**{name: size for name, size in TINY.items() if name != "num_experts"}, "n_routed_experts": 8}
TRAINED = {"enable": True, "enable_train": True, "detach_encoder": True, "mtp_loss_scaling_factor": 0.1}


def _checked(folder, settings, model, kind="glm4_moe", layers=1):
    sizes = {"glm4_moe": GLM, "qwen3_next": {**TINY, **LINEAR, "layer_types": ["full_attention"] * 2}}.get(kind, {})
    own = {**checkpoint(folder, kind, num_nextn_predict_layers=layers, **sizes), **model}
    return check_mtp(engine(**settings), own, inspect_model(own).model)


@pytest.mark.parametrize(
    ("settings", "model", "layers"),
    [
        ({}, {}, 0),
        ({}, {"mtp": {"enable": True}}, 2),
        ({}, {"mtp": TRAINED}, 2),
        ({"mtp_loss_coef": 0.2}, {}, 2),
        ({"mtp_loss_coef": 0.0}, {"use_remove_padding": False}, 2),
        ({"mtp_loss_coef": 0.2, "forward_only": True}, {}, 0),
    ],
)
def test_mtp_layers_of_a_known_family_are_counted(tmp_path, settings, model, layers):
    assert _checked(tmp_path, settings, model, layers=2) == layers


@pytest.mark.parametrize(
    ("name", "value", "settings", "model", "words"),
    [
        (f"{MODEL}.mtp.detach_encoder", False, {}, {"mtp": {**TRAINED, "detach_encoder": False}}, "that draft alone"),
        (f"{MODEL}.mtp.enable", True, {}, {"mtp": TRAINED, "lora_rank": 4, "target_modules": "all-linear"}, "adapters"),
        (f"{MODEL}.use_remove_padding", False, {"mtp_loss_coef": 0.2}, {"use_remove_padding": False}, "packed rows"),
        (COEF, 0.2, {"mtp_loss_coef": 0.2, "chunked_logits": False}, {}, "logits are whole"),
        (COEF, 0.2, {"mtp_loss_coef": 0.2}, {"use_fused_kernels": True}, "verl's fused kernels"),
    ],
)
def test_mtp_layers_that_can_not_be_trained_are_refused(tmp_path, name, value, settings, model, words):
    with refused(name, value, words):
        _checked(tmp_path, settings, model)


@pytest.mark.parametrize(
    ("kind", "layers", "words"),
    [
        ("qwen3_moe", 1, "of Qwen3MoeForCausalLM are not known"),
        ("glm4_moe", 0, "has no such layers"),
        ("qwen3_next", 2, "only one is known"),
    ],
)
def test_models_without_known_mtp_layers_are_refused(tmp_path, kind, layers, words):
    with refused(COEF, 0.0, words, works=f"{COEF}=null"):
        _checked(tmp_path, {"mtp_loss_coef": 0.0}, {}, kind, layers)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "sglang"}, "rollout.name=sglang"),
        ({"backend": "nccl"}, "checkpoint_engine.backend=nccl"),
        ({"quantization": "fp8"}, "rollout.quantization"),
    ],
)
def test_drafters_that_no_sync_reaches_are_refused(settings, words):
    drafts = {"mtp": {"enable": True, "enable_rollout": True}}
    check_drafter(drafts, rollout())
    check_drafter({"mtp": {"enable": False, "enable_rollout": True}}, rollout(**settings))
    with refused(f"{MODEL}.mtp.enable_rollout", True, words):
        check_drafter(drafts, rollout(**settings))
