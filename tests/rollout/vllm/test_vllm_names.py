"""Every name of vLLM that ``rollout/`` uses exists in vLLM 0.24 to 0.32, as read from their wheels."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / ".ci" / "vllm_names.py"
LIST = json.loads((ROOT / "tests" / "rollout" / "vllm" / "vllm_names.json").read_text())


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("vllm_names", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def missing(used):
    """List the names that a version of vLLM has in none of their places."""
    unread = sorted({place for needs in used.values() for places in needs for place in places} - set(LIST["names"]))
    assert not unread, f"python {SCRIPT.relative_to(ROOT)} has not read {', '.join(unread)}"
    return [
        f"{file}: vLLM {version} has no {' or '.join(places)}"
        for file, needs in used.items()
        for places in needs
        for version in LIST["versions"]
        if not any(version in LIST["names"][place] for place in places)
    ]


def test_vllm_names_exist_in_every_supported_version(script):
    assert LIST["versions"] == list(script.VERSIONS)
    used = script.used()
    assert "vllm/worker.py" in used and len(used["vllm/compat.py"]) > 5
    assert not missing(used)


def test_vllm_names_check_sees_a_missing_and_an_unread_name(script, tmp_path):
    reload = "vllm.model_executor.model_loader.reload.meta"
    gone = f"from {reload} import SKIP_LOAD_TENSORS\n"
    (tmp_path / "gone.py").write_text(gone)
    assert missing(script.used(tmp_path)) == [f"gone.py: vLLM 0.24.0 has no {reload}:SKIP_LOAD_TENSORS"]
    (tmp_path / "gone.py").write_text(f"try:\n    {gone}except ImportError:\n    pass\n")
    assert not script.used(tmp_path)
    (tmp_path / "gone.py").write_text(f"R = '{reload}'\nfind(f'{{R}}:SKIP_LOAD_TENSORS', f'{{R}}:SKIP_TENSORS')\n")
    assert script.used(tmp_path) and not missing(script.used(tmp_path))
    (tmp_path / "gone.py").write_text("from vllm import nothing_of_the_kind\n")
    with pytest.raises(AssertionError, match="has not read vllm:nothing_of_the_kind"):
        missing(script.used(tmp_path))
