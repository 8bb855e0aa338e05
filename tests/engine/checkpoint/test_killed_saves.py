"""A rank that is killed in the middle of a save leaves nothing that looks like a checkpoint and is none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.models.tiny import save_qwen3_moe

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("moments", [3, pytest.param(20, marks=pytest.mark.long)])
def test_save_with_a_rank_killed_at_a_random_moment_leaves_a_complete_checkpoint(tmp_path, moments):
    folder, out = save_qwen3_moe(tmp_path / "model"), tmp_path / "out"
    command = [sys.executable, str(Path(__file__).with_name("save_process.py")), str(folder), str(out), str(moments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(tmp_path)}
    environment["PYTHONPATH"] = str(ROOT)
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert len(found) == moments
    for run_of in found:
        assert run_of["statuses"] == [0, 0], run.stderr[-3000:]
        last = run_of["loaded"][-1]
        # The step before it was complete; the one that was being saved may have been.
        assert last in (run_of["saving"] - 1, run_of["saving"]), run_of
