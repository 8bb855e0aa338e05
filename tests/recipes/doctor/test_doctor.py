"""The doctor on ranks of this machine, started by torchrun and by Ray, and its report of ranks that hang."""

import json
import os
import re
import subprocess
import sys
import time

import pytest

from epfsdp2.recipes.doctor.watch import hanging
from epfsdp2.recipes.plan import cli as plan

LAUNCHED = ("-m", "tests.recipes.doctor.launched")


def _doctor(ranks, *words):
    """Return status and output of a run; words begin with ``-m MODULE`` or a script."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "200"}
    done = subprocess.run(
        [*command, f"--nproc-per-node={ranks}", *map(str, words)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


def _row(text, what):
    (line,) = [line for line in text.splitlines() if line.startswith(what)]
    return line


def test_doctor_on_two_ranks_has_every_check_in_forty_lines_and_the_plan_reads_its_file(tmp_path):
    out = tmp_path / "machine.json"
    status, text, errors = _doctor(2, "-m", "epfsdp2.recipes.doctor", "--folder", tmp_path, "--out", out)
    assert status == 0, text + errors
    *table, command = text.splitlines()
    assert len(table) < 40 and max(map(len, table)) <= 118 and command.endswith(f"--machine {out}")
    for what in ("versions", "gradients", "weights of a sync", "a tensor to another process"):
        assert _row(text, what).rstrip().endswith("right")
    for what in ("disk", "all-gather within a node", "all-to-all within a node", "host's part", "experts over ep 2"):
        assert _row(text, what)
    assert text.count("needs a GPU") == 3
    machine = json.loads(out.read_text())
    assert machine.keys() == {"nodes", "gpus", "inside"} and (machine["nodes"], machine["gpus"]) == (1, 2)
    assert list(tmp_path.iterdir()) == [out]
    out.write_text(json.dumps(machine | {"half_rate_rows": 300}))
    options = plan.parse(["--model", "Qwen3-30B-A3B", "--machine", str(out), "--gpus", "4"])
    assert (options.nodes, options.gpus, options.inside, options.half_rate_rows) == (1, 4, machine["inside"], 300)


def test_doctor_of_two_nodes_measures_between_them_after_a_rank_that_raises_and_finds_wrong_gradients(tmp_path):
    """The gradients of ranks with other experts are divided by another number than they have to be."""
    words = ["raises", "--only", "raises", "links", "gradients", "sync", "experts", "--folder", tmp_path]
    status, text, errors = _doctor(4, *LAUNCHED, *words)
    assert status == 1, text + errors
    row = _row(text, "raises")
    assert "rank 1: RuntimeError: no such cable" in row and row.rstrip().endswith("WRONG")
    assert _row(text, "all-gather between 2 nodes") and _row(text, "all-to-all within a node")
    assert re.search(r"\d of 8 meshes are wrong: ep_fsdp 2 x ep 2: \de[+-]\d+; .* WRONG", _row(text, "gradients"))
    assert _row(text, "weights of a sync").rstrip().endswith("right") and _row(text, "experts over ep 2")


def test_doctor_names_a_rank_that_hangs_with_its_stack_and_one_that_failed_within_the_limit(tmp_path):
    began = time.monotonic()
    status, text, errors = _doctor(3, *LAUNCHED, "sleeps", "--only", "disk", "sleeps", "--folder", tmp_path)
    assert status != 0 and time.monotonic() - began < 120, errors
    assert "sleeps did not end within 4 s" in text and _row(text, "disk")
    hung, _, waited = text[text.index("sleeps did not") :].partition("rank 0 waits at a nap:")
    assert "rank 1 hangs at a nap:" in hung and "launched.py" in hung and "time.sleep(600)" in hung
    assert "rank 2 failed: RuntimeError: no such cable" in hung and "barrier" in waited


@pytest.mark.long
def test_doctor_ends_where_a_rank_holds_pythons_lock_and_has_its_stack_in_stderr(tmp_path):
    status, text, errors = _doctor(2, *LAUNCHED, "spins", "--only", "spins", "--folder", tmp_path)
    assert status != 0 and "rank 1 gave no answer" in text and "barrier" in text
    assert "Timeout (0:00:06)" in errors and re.search(r"launched.py\W+ line \d+ in spins", errors)


@pytest.mark.e2e
@pytest.mark.long
def test_doctor_under_ray_starts_the_ranks_itself(tmp_path):
    out = tmp_path / "machine.json"
    command = [sys.executable, "-W", "ignore", "-m", "epfsdp2.recipes.doctor", "--ray", "--ranks", "2"]
    words = ["--only", "versions", "links", "--folder", str(tmp_path), "--out", str(out)]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 x 2" in _row(done.stdout, "ranks") and _row(done.stdout, "all-gather within a node")
    assert json.loads(out.read_text())["gpus"] == 2


def test_hanging_lists_ranks_by_stack_and_those_that_wait_last():
    stacks = {0: "waits:\n    a", 1: "waits:\n    a", 2: "hangs:\n    b", 3: "waits:\n    c", 4: "failed: it broke"}
    lines = [line for line in hanging(stacks).splitlines() if line.startswith("rank")]
    assert lines == ["rank 2 hangs:", "rank 4 failed: it broke", "rank 3 waits:", "rank 0, 1 waits:"]


@pytest.mark.parametrize(
    ("text", "said"),
    [("[]", "has other keys than"), ('{"between": 0}', "between has to be positive"), ("{", "can't be read")],
)
def test_plan_refuses_a_machine_that_the_doctor_did_not_write(text, said, tmp_path, capsys):
    file = tmp_path / "machine.json"
    file.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        plan.parse(["--model", "Qwen3-30B-A3B", "--machine", str(file)])
    assert said in capsys.readouterr().err
