"""Where vLLM's private names are looked up, with fake modules for the places of other versions."""

import importlib

import pytest

from epfsdp2.engine.compat.private_names import MissingNameError

pytestmark = pytest.mark.e2e

RELOAD_META = "vllm.model_executor.model_loader.reload.meta"


@pytest.fixture
def compat():
    pytest.importorskip("vllm")
    module = importlib.import_module("epfsdp2.rollout.vllm.compat")
    yield module
    importlib.reload(module)


def test_compat_before_0_27_has_one_set_of_skipped_tensors(compat, monkeypatch):
    meta = importlib.import_module(RELOAD_META)
    monkeypatch.delattr(meta, "SKIP_LOAD_TENSORS", raising=False)
    monkeypatch.setattr(meta, "SKIP_TENSORS", {"_expert_map"})
    found = importlib.reload(compat)
    assert {"_expert_map"} == found.SKIP_LOAD_TENSORS == found.SKIP_TENSORS


def test_compat_with_a_missing_name_raises_with_version_and_workaround(compat, monkeypatch):
    from epfsdp2.rollout.vllm.server import EXTENSION

    monkeypatch.delattr(importlib.import_module("vllm.model_executor.model_loader.reload"), "finalize_layerwise_reload")
    with pytest.raises(MissingNameError, match=r"vllm \S+ has no \S+:finalize_layerwise_reload.*0\.24") as error:
        importlib.reload(compat)
    assert "worker_extension_cls=verl." in str(error.value) and EXTENSION not in str(error.value)
