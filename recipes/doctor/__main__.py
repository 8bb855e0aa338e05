"""``torchrun --nproc-per-node 8 -m epfsdp2.recipes.doctor``."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
