"""What verl loads at ``import verl``, in every process (entry point group ``verl.plugins``).

Small on purpose, and loud: verl logs a plug-in's import error at debug level and goes on, and the user would meet it
much later as "Unknown backend: epfsdp2".
"""

import sys
import traceback

__all__ = ["install"]


def install() -> None:
    """Let this process know the CPU platform, the CPU build of vLLM and the ``engine`` group of Hydra."""
    from .integration.shims import cpu_backend_shim, vllm_distribution

    # isort: split
    from .integration import cpu_platform as _registers_itself  # noqa: F401

    vllm_distribution.install()
    cpu_backend_shim.install()

    from ..conf import search_path

    search_path.install()


try:
    install()
except Exception:
    print("epfsdp2: the verl plug-in could not be loaded, engine=epfsdp2 will not be found:", file=sys.stderr)
    traceback.print_exc()
    raise
