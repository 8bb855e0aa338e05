"""For all tests."""

import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent

# A CUDA build of torch on a machine without a GPU: the CPU platform has to be asked for (see engine/cpu_platform.py).
if torch.version.cuda is not None and not torch.cuda.is_available():
    os.environ.setdefault("VERL_PLATFORM", "cpu")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say which tests may run at the same time as others, for `make test`, which has two workers (pytest-xdist).

    Those with Ray, vLLM or segments in /dev/shm look at what a run leaves on the machine, so they are one group, which
    runs in order on one worker; they mostly wait, and come first. The others are a group per file.
    """

    def is_alone(item: pytest.Item) -> bool:
        folder = item.path.relative_to(HERE).parts[0]
        return folder in ("e2e", "rollout") or item.get_closest_marker("e2e") is not None

    for item in items:
        item.add_marker(pytest.mark.xdist_group("machine" if is_alone(item) else str(item.path.relative_to(HERE))))
    items.sort(key=lambda item: not is_alone(item))
