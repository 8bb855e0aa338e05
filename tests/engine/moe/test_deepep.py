"""DeepEP as the dispatcher: when it is refused; ``test_dispatch.py`` has what it computes."""

import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3MoeConfig

from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.moe.deepep import check_deepep
from epfsdp2.engine.preflight.features import check_dispatcher
from epfsdp2.engine.preflight.run import check_training
from tests.support.trainer.settings import checkpoint, engine


def test_deepep_without_a_gpu_is_refused_by_name(tmp_path):
    with pytest.raises(SettingError, match=r"engine.dispatcher=deepep: .* device is cpu. .*dispatcher=all_to_all"):
        check_training(engine(ep_size=2, dispatcher="deepep"), 2, checkpoint(tmp_path), device="cpu")


def test_deepep_where_it_can_be_used_warns_that_it_was_never_run(monkeypatch, caplog):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    facts = SimpleNamespace(model=SimpleNamespace(config=Qwen3MoeConfig(hidden_size=2048)))
    for dispatcher, warnings in (("all_to_all", 0), ("deepep", 1)):
        check_dispatcher(engine(ep_size=8, dispatcher=dispatcher), facts, "cuda")
        assert caplog.text.count("was never run with DeepEP") == warnings


def test_deepep_with_settings_it_has_no_kernel_for_is_refused(monkeypatch):
    with pytest.raises(SettingError, match=r"engine.dispatcher=deepep: deep_ep is not installed."):
        check_deepep("cuda", 8, 2048, torch.bfloat16)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    for asked, words in (
        ((8, 2048, torch.bfloat16, True), "engine.full_determinism=True"),
        ((8, 2048, torch.float32), "float32"),
        ((8, 2880, torch.bfloat16), "hidden size is 2880"),
    ):
        with pytest.raises(SettingError, match=f"engine.dispatcher=deepep: .*{words}"):
            check_deepep("cuda", *asked)
    check_deepep("cuda", 8, 2048, torch.bfloat16)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("raise AssertionError('NCCL 2.30.4 is needed')", "can't be imported: AssertionError: NCCL 2.30.4 is needed"),
        (
            "class Buffer:\n    def get_dispatch_config(ranks):\n        assert ranks in (2, 8), ranks",
            "no configuration for engine.ep_size=6: 6",
        ),
    ],
)
def test_deepep_that_its_own_code_refuses_is_refused_with_that_text(monkeypatch, tmp_path, module, words):
    (tmp_path / "deep_ep.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    check_deepep("cuda", 6, 2048, torch.bfloat16)  # on a driver without a GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SettingError, match=f"engine.dispatcher=deepep: deep_ep .*{words}"):
        check_deepep("cuda", 6, 2048, torch.bfloat16)
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
