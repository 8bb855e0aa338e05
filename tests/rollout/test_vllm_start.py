"""An engine of vLLM that does not start says why in its last word, also where a worker of it has failed."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from epfsdp2.recipes.quickstart.model import write_model

pytest.importorskip("vllm")
START = """
import sys
from vllm import LLM

LLM(sys.argv[1], distributed_executor_backend=sys.argv[2], worker_extension_cls="no_such_module.Extension",
    dtype="float32", enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=16 << 20)
"""


@pytest.mark.parametrize("executor", ["uni", pytest.param("mp", marks=pytest.mark.long)])
def test_vllm_that_does_not_start_names_its_workers_exception_last(tmp_path, request, executor):
    """The engine's process raises itself, or after a worker of its own; as in Ray's actors all are spawned."""
    write_model(tmp_path / "model", seed=1)
    short = tempfile.mkdtemp()
    request.addfinalizer(lambda: shutil.rmtree(short))
    environment = {
        **{"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"},
        **{"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
        "VLLM_RPC_BASE_PATH": short,  # a socket's path has 107 characters at most
    }
    (tmp_path / "start.py").write_text(f"if __name__ == '__main__':{START}".replace("\n", "\n    "))
    done = subprocess.run(
        [sys.executable, tmp_path / "start.py", tmp_path / "model", executor],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("RuntimeError")]
    assert done.returncode == 1 and len(errors) == 1, done.stderr[-3000:]
    assert errors[0].endswith("The cause: ModuleNotFoundError: No module named 'no_such_module'")
    assert "See root cause above" not in errors[0] and not list(Path(short).glob("epfsdp2-vllm-*"))
