"""``python -m epfsdp2.recipes.import_fsdp2``; ``convert/import_fsdp2.py`` has it."""

from .convert.import_fsdp2 import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
