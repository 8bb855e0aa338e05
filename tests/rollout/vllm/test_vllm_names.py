"""Every name of vLLM that ``rollout/`` uses exists in vLLM 0.24 to 0.32, as read from their wheels."""

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / ".ci" / "vllm_names.py"
LIST = json.loads((ROOT / "tests" / "rollout" / "vllm" / "vllm_names.json").read_text())


def test_vllm_names_exist_in_every_supported_version():
    spec = importlib.util.spec_from_file_location("vllm_names", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert LIST["versions"] == list(script.VERSIONS)
    used = script.used()
    assert "vllm/worker.py" in used and len(used["vllm/compat.py"]) > 5
    unread = sorted({place for needs in used.values() for places in needs for place in places} - set(LIST["names"]))
    assert not unread, f"python {SCRIPT.relative_to(ROOT)} has not read {', '.join(unread)}"
    missing = [
        f"{file}: vLLM {version} has no {' or '.join(places)}"
        for file, needs in used.items()
        for places in needs
        for version in LIST["versions"]
        if not any(version in LIST["names"][place] for place in places)
    ]
    assert not missing
