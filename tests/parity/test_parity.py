"""The fast subset of ``make parity``: every family once, with the settings in turn."""

import json

import pytest

from tests.parity import families
from tests.parity.compare import WORLD, Row, compare, fast_case
from tests.support.ranks import run_ranks

NAMES = list(families.ALL)
AT_A_TIME = 9  # families per set of ranks: starting one costs more than a family


@pytest.mark.parametrize("start", range(0, len(NAMES), AT_A_TIME), ids=lambda i: "+".join(NAMES[i : i + AT_A_TIME]))
def test_training_of_every_family_equals_the_plain_model(tmp_path, start):
    chosen = list(enumerate(NAMES))[start : start + AT_A_TIME]
    work = [(name, families.save(name, tmp_path / name), [fast_case(i, name)]) for i, name in chosen]
    run_ranks(compare, WORLD, work, tmp_path / "results.jsonl", timeout=600)
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    rows = [Row.of_json(line["row"]) for line in lines if "row" in line]
    assert [row.family for row in rows] == [name for _, name in chosen]
    assert all(row.good and not row.refused for row in rows), [row for row in rows if not row.good or row.refused]
