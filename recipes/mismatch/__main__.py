"""``python -m epfsdp2.recipes.mismatch``."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
