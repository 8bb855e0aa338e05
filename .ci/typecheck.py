"""Run mypy over the packages under the names they are imported by.

The repository's folders are the packages (``engine/`` is ``epfsdp2.engine``), which mypy can't be told. It gets a tree
of links that looks like the installed package.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "typecheck"
PACKAGES = ("engine", "rollout", "conf", "recipes")

if __name__ == "__main__":
    (TREE / "epfsdp2").mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        link = TREE / "epfsdp2" / package
        if not link.is_symlink():
            link.symlink_to(ROOT / package, target_is_directory=True)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "-p", "epfsdp2"]
    sys.exit(subprocess.run(command, cwd=TREE).returncode)
