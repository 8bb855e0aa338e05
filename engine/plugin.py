"""verl loads this at ``import verl``, in every process (entry point group ``verl.plugins``).

It is small and loud because verl logs a plug-in's import error at debug level and continues. The user would see it much
later as "Unknown backend: epfsdp2".
"""

import sys
import traceback

__all__ = ["install"]


def install() -> None:
    """Register the CPU platform, where there is no GPU, and the ``engine`` group of Hydra."""
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
