"""``python -m epfsdp2.recipes.quickstart``."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
