"""``python -m epfsdp2.recipes.dequantise`` runs ``convert/dequantise.py``."""

from .convert.dequantise import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
