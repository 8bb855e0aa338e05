"""Where vLLM's private names are looked up, with fake modules for the places of other versions."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

from epfsdp2.engine.compat.private_names import MissingNameError

pytestmark = pytest.mark.e2e

FUSED_MOE = "vllm.model_executor.layers.fused_moe"
RELOAD_META = "vllm.model_executor.model_loader.reload.meta"
PLACES = (f"{FUSED_MOE}.cpu_fused_moe", f"{FUSED_MOE}.experts.cpu_moe")


@pytest.fixture
def compat():
    pytest.importorskip("vllm")
    module = importlib.import_module("epfsdp2.rollout.vllm.compat")
    yield module
    importlib.reload(module)


@pytest.mark.parametrize("present", [(True, False), (False, True), (False, False)], ids=["0.24", "0.29", "none"])
def test_cpu_experts_module_is_found_in_either_place(compat, monkeypatch, present):
    stands = {place: ModuleType(place) if there else None for place, there in zip(PLACES, present, strict=True)}
    for place, module in stands.items():
        monkeypatch.setitem(sys.modules, place, module)  # None: importing it fails
    expected = next((module for module in stands.values() if module is not None), None)
    assert compat.cpu_experts_module() is expected


def test_cpu_shims_without_a_cpu_experts_module_change_nothing(compat, monkeypatch):
    for place in PLACES:
        monkeypatch.setitem(sys.modules, place, None)
    module = importlib.import_module("epfsdp2.rollout.vllm.shims.cpu_shims")
    monkeypatch.setattr(module, "current_platform", SimpleNamespace(is_cpu=lambda: True))
    runner = importlib.import_module("vllm.v1.worker.gpu_model_runner")
    before = vars(runner).copy(), vars(runner.GPUModelRunner).copy()
    module.install()
    assert before == (vars(runner), vars(runner.GPUModelRunner))


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
