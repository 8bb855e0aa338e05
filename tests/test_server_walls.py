"""Only a server's folder has its name, so a third rollout engine is one folder and a line."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping

from epfsdp2.rollout import servers
from epfsdp2.rollout.layout.rules import Family
from epfsdp2.rollout.layout.server import Server
from epfsdp2.rollout.layout.specs import Heads, Rollout, TensorSpec
from tests.support.imports import sources

NAMED = re.compile("|".join(servers.SERVERS), re.IGNORECASE)
# The operators that trainer and vLLM share are of both.
FOLDERS = (*(f"rollout/{name}/" for name in servers.SERVERS), "rollout/bitwise/")
ALLOWED = {
    "engine/checkpoint/safetensors_reader.py": "tells which of two files of a checkpoint each of two readers reads",
    "engine/compat/verl_names.py": "where verl has its test of vLLM's config",
    "engine/compat/versions.py": "the tested stacks",
    "engine/cpu/__init__.py": "installs the shims of vLLM's CPU build",
    "engine/cpu/platform.py": "a variable of vLLM's CPU build",
    "engine/cpu/vllm.py": "vLLM's CPU build",
    "engine/preflight/features.py": "verl's own extra, in a line for pip",
    "rollout/servers.py": "the list of folders",
    "rollout/transport/sender.py": "where verl has its sender of buckets",
    "rollout/vllm_start.py": "a plug-in of vLLM's, which is imported before the folder can be",
    "rollout/vllm_worker.py": "the name in users' configs",
}


def _names(text: str) -> Iterator[str]:
    """Yield names, imports and strings of code, without comments and docstrings."""
    tree = ast.parse(text)
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield node.value
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        yield from (
            value for key in ("id", "name", "attr", "arg") if isinstance(value := getattr(node, key, None), str)
        )


def _naming(files: Mapping[str, str]) -> list[str]:
    """Return the files that name a server outside of its folder."""
    of_none = (path for path in files if path.startswith(("engine/", "rollout/")) and not path.startswith(FOLDERS))
    return [path for path in of_none if any(map(NAMED.search, _names(files[path])))]


def test_servers_are_named_by_their_folders_alone():
    assert _naming(sources()) == sorted(ALLOWED)


def test_wall_of_servers_sees_a_name_in_code_and_none_in_comments():
    wrong = ('x = "vllm"', "import sglang", "from ..vllm import layout", "is_vllm = 1", "f(is_for_vllm=1)", "a.in_vllm")
    for text in wrong:
        assert _naming({"engine/a.py": text}) == ["engine/a.py"], text
    assert _naming({"engine/a.py": '"""Of vLLM."""\n# and of SGLang\n', "rollout/vllm/a.py": wrong[0]}) == []


def test_third_server_is_an_object_that_all_else_asks(monkeypatch):
    class Third(Server):
        def families(self):
            return {"qwen3_moe": Family(((".mlp.", ".moe."),))}

    config = {"name": "third", "tensor_model_parallel_size": 2}
    assert servers.choose_mode("auto", config, "qwen3_moe")[0] == "full"
    monkeypatch.setitem(servers.SERVERS, "third", Third("third", "Third"))
    assert servers.choose_mode("auto", config, "qwen3_moe") == ("sliced", "")
    assert servers.server_of(config).rollout_of(config) == (rollout := Rollout(2, server="third"))
    tensors = [TensorSpec("model.layers.0.mlp.experts.down_proj", (4, 8, 16), 2)]
    planned = [servers.planned_layout(tensors, rollout, worker, Heads(4, 2, 8, "qwen3_moe")) for worker in range(2)]
    assert [layout["model.layers.0.moe.experts.w2_weight"] for layout in planned] == ["[4, 8, 8] from 0"] * 2


def test_checkpoint_engine_is_registered_by_the_module_that_configs_name():
    code = (
        "import epfsdp2.rollout.checkpoint_backend\n"
        "from verl.checkpoint_engine import CheckpointEngineRegistry\n"
        "print(CheckpointEngineRegistry.get('epfsdp2_p2p').__module__)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.stdout.split()[-1:] == ["epfsdp2.rollout.remote.checkpoint_engine"], found.stderr[-2000:]
