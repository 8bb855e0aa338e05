"""Stands in for torchvision where it is not installed: can be imported, and does nothing.

vLLM's classes of Qwen3-VL and Qwen3.5 import the image processors, which import torchvision; text does without.
"""

import sys
from unittest import mock

for _name in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    sys.modules[f"{__name__}.{_name}"] = mock.MagicMock(name=_name)
