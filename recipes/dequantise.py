"""``python -m epfsdp2.recipes.dequantise``; ``convert/dequantise.py`` has it."""

from .convert.dequantise import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
