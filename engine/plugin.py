"""verl's plug-in, which every process imports at ``import verl`` (entry point group ``verl.plugins``).

It prints its errors, because verl logs them at debug level, and later fails with "Unknown backend: epfsdp2".
"""

import sys
import traceback

__all__ = ["install"]


def install() -> None:
    """Register the CPU platform where there is no GPU, and Hydra's ``engine`` group, in this process."""
    from ..conf import search_path
    from . import cpu

    cpu.install()
    search_path.install()


try:
    install()
except Exception:
    print("epfsdp2: the verl plug-in could not be loaded, engine=epfsdp2 will not be found:", file=sys.stderr)
    traceback.print_exc()
    raise
