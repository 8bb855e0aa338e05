"""verl's plug-in, which every process imports at ``import verl`` (entry point group ``verl.plugins``).

It prints its errors, because verl logs them at debug level, and later fails with "Unknown backend: epfsdp2".
"""

import sys
import traceback

__all__ = ["install"]


def install() -> None:
    """Register the CPU platform, the CPU build of vLLM and Hydra's ``engine`` group in this process."""
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
