"""The quickstart with a model of another family: ``python -m other_family FAMILY ...``."""

import functools
import sys

from epfsdp2.recipes.quickstart import cli, model
from tests.e2e import small_families

_, _FAMILY, *_OPTIONS = sys.argv

if __name__ == "__main__":
    model.build_model = functools.partial(small_families.build_model, _FAMILY)
    raise SystemExit(cli.main(_OPTIONS))
