"""Names the cause when vLLM fails to start; a plug-in that vLLM calls in each of its processes.

vLLM's error says "See root cause above", and the cause is in the output of another process. The first process that
fails writes its exception into a file, and the process that waits for it adds that to vLLM's error.
``tests/rollout/test_vllm_start.py`` fails when vLLM changes its messages.
"""

import logging
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from ..engine.compat.wrap_function import wrap

__all__ = ["install"]

_FILE = "EPFSDP2_VLLM_CAUSE"  # path of the file; child processes inherit the variable


class _Writer(logging.Handler):
    """Write the first exception with which a process of vLLM fails to start."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and "failed to start" in str(record.msg):
            with suppress(OSError), open(os.environ[_FILE], "x") as file:
                file.write(f"{type(error).__name__}: {error}")


def install() -> None:
    """Write this process's failure, and add a child's to vLLM's error (entry point ``vllm.general_plugins``)."""
    folder = os.environ.get("VLLM_RPC_BASE_PATH") or tempfile.gettempdir()
    os.environ.setdefault(_FILE, str(Path(folder, f"epfsdp2-vllm-{uuid4().hex}")))
    logging.getLogger("vllm").addHandler(_Writer(logging.ERROR))
    if starting := sys.modules.get("vllm.v1.engine.utils"):  # else this process starts no engine
        wrap(starting, "wait_for_engine_startup", _with_cause)


def _with_cause(wait: Callable[..., Any]) -> Callable[..., Any]:
    def wait_for_engine_startup(*args: Any, **kwargs: Any) -> Any:
        file = Path(os.environ[_FILE])
        try:
            return wait(*args, **kwargs)
        except RuntimeError as error:
            cause = file.read_text() if file.exists() else "none of its processes raised; one was killed or has exited"
            error.args = (f"{str(error).replace(' See root cause above.', '')}. The cause: {cause}",)
            raise
        finally:
            file.unlink(missing_ok=True)

    return wait_for_engine_startup
