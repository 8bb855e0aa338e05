"""``python -m epfsdp2.recipes.export`` runs ``convert/export.py``."""

from .convert.export import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
