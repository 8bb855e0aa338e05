"""The short first run that the other tests start from."""

import pytest

from tests.e2e.runs import leftovers, running, unused


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("quickstart")


@pytest.fixture(scope="session")
def first_run(folder):
    """A short quickstart from nothing. What it leaves is checked by the test that asks for it."""
    before = leftovers()
    with running(folder / "first", "--steps", "12") as run:
        run.wait()
    run.left = unused(leftovers() - before)
    return run


@pytest.fixture(scope="session")
def warmed_up(first_run):
    (model,) = (first_run.output / "warmup").glob("global_step_*/huggingface")
    return str(model)
