"""The quickstart with a model of another family: ``python -m other_family FAMILY ...``."""

import functools
import sys

from epfsdp2.recipes.quickstart import cli, commands, model
from tests.e2e.models import small_families

_, _FAMILY, *_OPTIONS = sys.argv

_overrides = commands.overrides


def _with_its_attention(name: str, values: dict) -> list[str]:
    own = f"attn_implementation={small_families.ATTENTION.get(_FAMILY, 'sdpa')}"
    return [line.replace("attn_implementation=sdpa", own) for line in _overrides(name, values)]


if __name__ == "__main__":
    model.build_model = functools.partial(small_families.build_model, _FAMILY)
    commands.overrides = _with_its_attention
    raise SystemExit(cli.main(_OPTIONS))
