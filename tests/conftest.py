"""Fixtures and order of all tests."""

import importlib.util
import os
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

from tests.support.fast import is_fast

# A CUDA build of torch on a machine without a GPU needs the CPU platform by name (engine/cpu/__init__.py).
if torch.version.cuda is not None and not torch.cuda.is_available():
    os.environ.setdefault("VERL_PLATFORM", "cpu")

# `make test` has a worker per core. With more threads, the workers would wait for each other, and Ray's processes, at
# nice 15, would wait for the ranks of the other worker.
torch.set_num_threads(1)
os.environ.setdefault("RAY_worker_niceness", "0")


@pytest.fixture(scope="session", autouse=True)
def files_of_hydra_are_parsed_once() -> Iterator[None]:
    """Cache parsed files, because every composition parses verl's files again, in a third of its time."""
    if importlib.util.find_spec("omegaconf") is None:  # the stack `newest` has no Hydra
        yield
        return
    from omegaconf import omegaconf

    parsed: dict[str, bytes] = {}

    def load(file: Any, Loader: Any) -> Any:
        text = file if isinstance(file, str) else file.read()
        if text not in parsed:
            parsed[text] = pickle.dumps(yaml.load(text, Loader=Loader))
        return pickle.loads(parsed[text])

    with mock.patch.object(omegaconf, "yaml", SimpleNamespace(**{**vars(yaml), "load": load})):
        yield


@pytest.fixture
def stacks_are_sent(monkeypatch):
    """Send experts as stacks, as to vLLM since 0.27, with every version of vLLM."""
    from epfsdp2.rollout.vllm import names

    monkeypatch.setattr(names, "_takes_stacks", lambda: True)


# Tests with Ray, vLLM or segments in /dev/shm check the leftovers of a run on the machine.
_ON_ONE_WORKER = ("tests/e2e/", "tests/rollout/")
# The slowest of the other files, each over half a minute.
_SLOWEST = (
    "recipes/test_resilient.py",
    "parity/test_parity.py",
    "engine/preflight/test_validate_config.py",
    "engine/integration/test_algorithms.py",
    "engine/model/test_vision.py",
    "engine/integration/test_ppo_update.py",
    "engine/checkpoint/test_resume_matrix.py",
    "engine/test_exactness.py",
    "engine/moe/gemm/test_kernels.py",
    "engine/integration/test_value_update.py",
    "engine/test_bf16.py",
    "engine/optim/test_loss_scale.py",
    "conf/test_compose.py",
    "engine/optim/test_muon.py",
    "engine/survivors/test_survivors.py",
    "engine/packing/test_shared_mixers.py",
    "recipes/test_plan.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if is_fast(item.nodeid):
            item.add_marker("fast")
    if hasattr(config, "workerinput"):
        order = {file: i for i, file in enumerate(_SLOWEST)}

        def longest_first(item: pytest.Item) -> int:
            file = item.nodeid.partition("::")[0].removeprefix("tests/")
            return -1 if item.nodeid.startswith(_ON_ONE_WORKER) else order.get(file, len(order))

        items.sort(key=longest_first)  # the last files are short, so that both workers end at about the same time


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Schedule the tests of `make test` on two workers.

    Tests that check the machine run in order on one worker, and mostly wait. The others run a file at a time, the
    longest first. (The marks for groups of pytest-xdist 3.8 do nothing under pytest 9.2.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "machine" if file.startswith(_ON_ONE_WORKER) else file

    config.option.loadscopereorder = False  # keep the order of the items
    return Groups(config, log)
