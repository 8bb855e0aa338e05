"""Checkpoints and vLLM engines that tests share."""

import pytest

from tests.support.rollout.vllm_engine import Checkpoint, Engine, make_checkpoint


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> list[Checkpoint]:
    """Two untied checkpoints with different weights, then two tied ones."""
    root = tmp_path_factory.mktemp("checkpoints")
    return [make_checkpoint(root / str(seed), seed, tied=seed > 2) for seed in (1, 2, 3, 4)]


# Settings that an engine's process keeps from its start.
OF_THE_PROCESS = ("environment", "extension", "tp_size")


@pytest.fixture(scope="module")
def start_engine():
    """Start engines one at a time: a new one stops the one before it.

    ``again`` reuses a running engine with the same settings, whatever its weights. If vLLM runs in one process and only
    its own settings differ, the next engine starts in that process.
    """
    running: list[tuple[dict, Engine]] = []

    def start(model: str, again: bool = False, **settings) -> Engine:
        asked = {"model": model, **settings}
        if again and running:
            before, engine = running[0]
            if before == asked:
                return engine
            in_one = before.get("distributed_executor_backend") == "uni" and before.keys() == asked.keys()
            if in_one and all(before.get(key) == asked.get(key) for key in OF_THE_PROCESS):
                settings = {key: value for key, value in asked.items() if key not in OF_THE_PROCESS}
                running.clear()
                try:
                    engine.call("start", timeout=120, **settings).result()
                except Exception:
                    engine.stop()
                    raise
                running.append((asked, engine))
                return engine
        while running:
            running.pop()[1].stop()
        running.append((asked, Engine(**asked)))
        return running[-1][1]

    yield start
    for _, engine in running:
        engine.stop()
