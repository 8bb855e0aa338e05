"""``python -m epfsdp2.recipes.plan_sync`` runs ``plan/sync.py``."""

from .plan.sync import main, parse

__all__ = ["main", "parse"]

if __name__ == "__main__":
    raise SystemExit(main())
