"""The Triton kernels in Triton's interpreter, and compiled in a process of its own."""

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch

__all__ = ["compiled_passes", "drawn", "integers", "interpreted_kernels"]


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Draw a tensor, equal in every process."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def integers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Draw from -2 to 2: sums are exact in any order, which depends on the processor and the shapes of a product."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def compiled_passes(*which: str) -> list[dict[str, Any]]:
    """Return rows of ``tests/support/moe/compiled.py``, from a process in which Triton does not interpret kernels."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.moe.compiled", *which]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment, timeout=1100)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@contextlib.contextmanager
def interpreted_kernels(module: str = "epfsdp2.engine.moe.gemm.triton_backend") -> Iterator[ModuleType]:
    """Import a module of kernels, interpreted, which Triton decides at import."""
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        kernels = importlib.import_module(module)
        interpreter = importlib.import_module("triton.runtime.interpreter")
        # It would compute every sum of indices once more, in 64 bits, which indices of tests do not need.
        options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
        with (
            mock.patch.object(interpreter.interpreter_builder, "options", options),
            mock.patch.object(interpreter, "_convert_float", _converted),
            mock.patch.object(interpreter.InterpreterBuilder, "create_dot", _product),
        ):
            yield kernels


def _converted(values: np.ndarray, source: object, target: object, rounding: object) -> np.ndarray:
    """Round as a GPU does; the interpreter's own function (Triton 3.9) cuts bfloat16, and carries nothing in FP8."""
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn}
    tensor = torch.from_numpy(np.ascontiguousarray(values)).view(dtypes[str(source)]).to(dtypes[str(target)])
    return tensor.view(torch.uint8).numpy()


def _product(builder: Any, a: Any, b: Any, total: Any, *precision: object) -> Any:
    """Multiply in float32; the interpreter (Triton 3.9) multiplies the bits of bfloat16 as integers."""
    wide = [
        torch.from_numpy(np.ascontiguousarray(x.data)).view(torch.bfloat16).float().numpy()
        if str(x.dtype) == "bf16"
        else x.data
        for x in (a, b)
    ]
    return type(total)(np.matmul(*wide, dtype=total.data.dtype) + total.data, total.dtype.scalar)
