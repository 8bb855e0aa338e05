"""verl's plug-in, which every process imports at ``import verl`` (entry point group ``verl.plugins``).

It prints its errors, because verl logs them at debug level, and later fails with "Unknown backend: epfsdp2". A run with
this engine ends here if its versions are known to break, because verl's own imports may fail next.
"""

import sys
import traceback

__all__ = ["install"]

_CHOSEN = "engine=epfsdp2"  # in a command of verl's


def install() -> None:
    """Register the CPU platform where there is no GPU, and Hydra's ``engine`` group, in this process."""
    from ..conf import search_path
    from . import cpu

    if _CHOSEN in sys.orig_argv:
        _check_versions(next((word for word in sys.orig_argv if word.startswith("verl.")), ""))
    cpu.install()
    search_path.install()


def _check_versions(program: str) -> None:
    from .compat import versions

    found = {name: versions.installed(name) for name in ("verl", "torch", "transformers")}
    for name, rule, works in versions.faults(found, program):
        raise SystemExit(f"epfsdp2: {name}={found[name]}: {rule} What works: pip install '{works}'")


try:
    install()
except Exception:
    print("epfsdp2: the verl plug-in could not be loaded, engine=epfsdp2 will not be found:", file=sys.stderr)
    traceback.print_exc()
    raise
