"""A real GRPO run under ``recipes/resilient`` of which a process is killed again and again, at random moments."""

import random
import signal
import tempfile
import time
from pathlib import Path

import pytest

from epfsdp2.engine.checkpoint.atomic_folder import verify_files
from tests.e2e.failures.resilient_runs import command, environment, processes
from tests.e2e.runs import leftovers, running, unused

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def _saved(folder: Path) -> int:
    tracker = folder / "saved" / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text() or 0) if tracker.exists() else 0


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.timeout(7200))])
def test_run_survives_random_kills_of_any_process_that_it_needs(folder, warmed_up, kills):
    before, here, rng, killed = leftovers(), folder / f"kills-{kills}", random.Random(kills), []
    here.mkdir()
    steps = 4 * kills  # at least one is made between two kills, and seldom more than three
    with tempfile.TemporaryDirectory(prefix="epr-", dir="/tmp") as ray_dir:
        words = command(here, warmed_up, ray_dir, steps=steps, hook="batches")
        program = ["epfsdp2.recipes.resilient", "--backoff-seconds", "0.5", "--max-restarts", str(kills), "--", *words]
        with running(here, program=program, environment=environment(here)) as run:
            for _ in range(kills):
                # A step that fails twice for the same reason ends a run: each attempt gets further than the last one.
                saved, begun = _saved(here), run.text().count("starts again")
                run.wait(until=lambda saved=saved: _saved(here) > saved)
                time.sleep(rng.uniform(0, 6))
                assert run.process.poll() is None, (killed, run.text()[-3000:])
                living = processes(run)
                kind = rng.choice(sorted(living))
                killed.append(kind)
                rng.choice(sorted(living[kind], key=lambda process: process.pid)).send_signal(signal.SIGKILL)
                run.wait(until=lambda begun=begun: run.text().count("starts again") > begun)
                assert run.process.poll() is None, (killed, run.text()[-3000:])
            run.wait()
    assert run.process.returncode == 0, (killed, run.text()[-3000:])
    assert len(set(killed)) > 1 and run.text().count("starts again") == kills
    assert _saved(here) == steps
    assert [step["training/global_step"] for step in run.steps()][-1] == steps
    verify_files(here / "saved" / f"global_step_{steps}" / "actor")
    assert run.living() == [] and unused(leftovers() - before) == set()
    print(f"survived {kills} kills: {', '.join(killed)}")
