"""Stands in for torchvision where it is not installed.

vLLM's classes of Qwen3-VL and Qwen3.5 import the image processors, which import torchvision. The functions that
these call for images are in ``transforms.v2.functional``. The rest can be imported, and does nothing.
"""

import sys
from unittest import mock

__version__ = "0.28.0"  # transformers 5.12 compares it

for _name in ("io", "transforms", "transforms.functional", "transforms.v2"):
    sys.modules[f"{__name__}.{_name}"] = mock.MagicMock(name=_name)

from . import functional  # noqa: E402

sys.modules[f"{__name__}.transforms.v2.functional"] = functional
sys.modules[f"{__name__}.transforms.v2"].functional = functional
sys.modules[f"{__name__}.transforms"].InterpolationMode = functional.InterpolationMode
