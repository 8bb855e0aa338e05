"""SGLang's update of weights on a machine without a GPU: what it does by itself, and with the shim."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from epfsdp2.recipes.quickstart.commands import sglang_environment

pytestmark = pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed (make setup STACK=sglang)")

_SENDS = """
import multiprocessing, sys
import torch
from sglang.srt.utils import MultiprocessingSerializer, patch_torch
from epfsdp2.rollout.sglang import cpu_shim

def receive(packed, answers):
    answers.put(MultiprocessingSerializer.deserialize(packed).sum().item())

if __name__ == "__main__":
    if sys.argv[1] == "shim":
        cpu_shim.install()
        cpu_shim.install()  # once
    patch_torch.monkey_patch_torch_reductions()
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    tensors = [torch.full((3, 5), float(i)) for i in range(3000)]  # more than a process has file descriptors
    packed = [MultiprocessingSerializer.serialize(tensor) for tensor in tensors]
    other = context.Process(target=receive, args=(packed[2], answers))
    other.start()
    assert answers.get(timeout=60) == 30.0
    other.join()
"""


@pytest.mark.parametrize("how", ["stock", "shim"])
def test_tensors_on_the_cpu_can_be_sent_with_the_shim_alone(tmp_path, how):
    script = tmp_path / "sends.py"
    script.write_text(_SENDS)
    environment = os.environ | sglang_environment() | {"VERL_PLATFORM": "cpu"}
    done = subprocess.run(
        [sys.executable, script, how], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode == 0) == (how == "shim"), done.stderr[-2000:]
    assert how == "shim" or "IndexError: tuple index out of range" in done.stderr
