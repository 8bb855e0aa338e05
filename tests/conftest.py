"""For all tests."""

import os

import torch

# A CUDA build of torch on a machine without a GPU: the CPU platform has to be asked for (see engine/cpu_platform.py).
if torch.version.cuda is not None and not torch.cuda.is_available():
    os.environ.setdefault("VERL_PLATFORM", "cpu")
