"""``python -m epfsdp2.recipes.import_fsdp2`` runs ``convert/import_fsdp2.py``."""

from .convert.import_fsdp2 import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
