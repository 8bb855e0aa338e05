"""Names of settings, and the form of a refusal, for tests of a run's checks."""

from contextlib import contextmanager

import pytest

from epfsdp2.engine.errors import SettingError
from epfsdp2.rollout.vllm.server import EXTENSION

__all__ = ["BACKEND", "BUCKET", "MODEL", "SDPA", "TENSOR_PARALLEL", "VLLM", "paragraph", "refused", "rollout"]

MODEL = "actor_rollout_ref.model"
BACKEND = "actor_rollout_ref.rollout.checkpoint_engine.backend"
SDPA = {"override_config": {"attn_implementation": "sdpa"}}
TENSOR_PARALLEL = "actor_rollout_ref.rollout.tensor_model_parallel_size"
BUCKET = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"


def paragraph(error: SettingError, setting: str, value: object) -> str:
    text = str(error)
    assert text.startswith(f"{setting}={value}: ")
    assert "What works: " in text and "\n" not in text
    return text


@contextmanager
def refused(setting, value, *words, works=""):
    """Expect a paragraph on a setting with these words, whose last ones are ``works``."""
    with pytest.raises(SettingError) as caught:
        yield
    text = paragraph(caught.value, setting, value)
    assert [word for word in words if word not in text] == [] and text.endswith(works), text


def rollout(tp=2, **settings):
    """Return settings of a vLLM rollout that takes slices; keys of ``vllm`` are vLLM's own."""
    vllm = {"worker_extension_cls": EXTENSION, **settings.pop("vllm", {})}
    return {"name": "vllm", "tensor_model_parallel_size": tp, "engine_kwargs": {"vllm": vllm}, **settings}
