"""Checkpoints and vLLM engines that tests share."""

import pytest

from tests.support.vllm_engine import Checkpoint, Engine, make_checkpoint


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> list[Checkpoint]:
    """Two untied checkpoints with different weights, then two tied ones."""
    root = tmp_path_factory.mktemp("checkpoints")
    return [make_checkpoint(root / str(seed), seed, tied=seed > 2) for seed in (1, 2, 3, 4)]


@pytest.fixture(scope="module")
def start_engine():
    """Start engines one at a time: a new one stops the one before it.

    With ``again`` the running one is taken where it was started in the same way; it has whatever weights it was given.
    """
    running: list[tuple[dict, Engine]] = []

    def start(model: str, again: bool = False, **settings) -> Engine:
        asked = {"model": model, **settings}
        if again and running and running[0][0] == asked:
            return running[0][1]
        while running:
            running.pop()[1].stop()
        running.append((asked, Engine(**asked)))
        return running[-1][1]

    yield start
    for _, engine in running:
        engine.stop()
