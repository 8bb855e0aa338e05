"""A real GRPO run over two hosts under ``recipes/resilient``, one of which loses its power."""

import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from epfsdp2.engine.checkpoint.atomic_folder import verify_files
from tests.e2e.failures.hosts import INTERFACE, Host, two_hosts, why_no_hosts
from tests.e2e.failures.resilient_runs import check_equal_from, command, environment
from tests.e2e.runs import HOOKS, Run, running

_WHY = why_no_hosts()
pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.skipif(bool(_WHY), reason=_WHY)]

PORT, STEPS = 6379, 3
OWN_RAY = "ray_kwargs.ray_init."


@contextmanager
def _run_on_two_hosts(folder: Path, model: str, part: str) -> Iterator[Run]:
    """The recipe on the first host, for a run over both; the second one waits in ``part`` of the second step."""
    folder.mkdir()
    variables = _variables(folder, part) | _of_ray()
    with _cluster(variables) as (first, second):
        mesh = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1"]
        words = [word for word in _command(folder, model, "unused", *mesh) if OWN_RAY not in word]
        words.append(f"+{OWN_RAY}address={first.address}:{PORT}")
        program = ["epfsdp2.recipes.resilient", "--backoff-seconds", "2", "--", *words]
        with running(folder, program=program, environment=variables, before=first.words()) as run:
            run.wait(until=(folder / "reached").exists)
            assert run.process.poll() is None, run.text()[-3000:]
            second.kill()
            shutil.rmtree(folder / "batches", ignore_errors=True)  # those of two ranks
            yield run


def _of_ray() -> dict[str, str]:
    # Without a token a head asks for one where the user has one from earlier, and other nodes send none.
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return {"GLOO_SOCKET_IFNAME": INTERFACE, "RAY_health_check_period_ms": "1000", **token}


@contextmanager
def _cluster(variables: dict[str, str]) -> Iterator[tuple[Host, Host]]:
    """Two hosts in one Ray cluster, each with one GPU that need not be there."""
    with tempfile.TemporaryDirectory(prefix="epr-", dir="/tmp") as ray_dir, two_hosts(Path(ray_dir)) as (first, second):
        head = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={ray_dir}"]
        first.start_ray(*head, environment=variables)
        second.start_ray(f"--address={first.address}:{PORT}", environment=variables)
        yield first, second


def _command(folder: Path, model: str, ray_dir: str, *extra: str) -> list[str]:
    return command(folder, model, ray_dir, *extra, steps=STEPS, hook="host_killed", reward=HOOKS / "host_killed.py")


def _variables(folder: Path, part: str) -> dict[str, str]:
    return environment(folder, EPFSDP2_TEST_PART=part, EPFSDP2_TEST_REACHED=str(folder / "reached"))


def _uninterrupted(folder: Path, model: str, part: str, saved: Path, settings: list[str]) -> Run:
    """A run without the recipe that goes on from a copy of a checkpoint, on this machine."""
    (folder / "saved").mkdir(parents=True)
    (folder / "reached").touch()
    own = shutil.copytree(saved, folder / "saved" / saved.name)
    resumed = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={own}", "trainer.n_gpus_per_node=1"]
    with tempfile.TemporaryDirectory(prefix="epr-", dir="/tmp") as ray_dir:
        words = _command(folder, model, ray_dir, *settings, *resumed)
        variables = _variables(folder, part) | {"VLLM_RPC_BASE_PATH": ray_dir}
        with running(folder, program=words[words.index("-m") + 1 :], environment=variables) as run:
            run.wait()
    assert run.process.returncode == 0, run.text()[-3000:]
    return run


@pytest.mark.parametrize("part", ["generation", "update", "sync", "save"])
def test_run_over_two_hosts_continues_on_one_when_the_other_is_killed_in(folder, warmed_up, part):
    here, whole = folder / f"hosts-{part}", folder / f"whole-{part}"
    with _run_on_two_hosts(here, warmed_up, part) as run:
        run.wait()
    assert run.process.returncode == 0, run.text()[-3000:]
    assert run.living() == []
    again = re.search(r"starts again from step 1: (trainer.nnodes=1 .*) trainer.resume_mode", run.text())
    assert again, run.text()[-3000:]
    for step in range(1, STEPS + 1):
        verify_files(here / "saved" / f"global_step_{step}" / "actor")
    unbroken = _uninterrupted(whole, warmed_up, part, here / "saved" / "global_step_1", again[1].split())
    check_equal_from(2, run, unbroken)
