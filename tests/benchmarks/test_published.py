"""The plan's constants are those that published figures give, and their error is what users are told."""

import json

from benchmarks.tables import RESULTS
from benchmarks.update import published
from epfsdp2.recipes.plan.roofline import ERROR, Cluster


def test_published_constants_and_error_are_those_of_the_table():
    found = json.loads((RESULTS / "published.json").read_text())
    own = Cluster(nodes=1, gpus=8)
    assert found["constants"] == {"efficiency": own.efficiency, "attention": own.attention}
    assert found["error"] <= ERROR < found["error"] + 0.05
    assert [(row["name"], row["published"]) for row in found["rows"]] == [
        (row.name, row.rate) for row in published.ROWS
    ]
    assert all(0.6 < row["fitted"] < 1.5 for row in found["rows"])


def test_published_row_is_predicted_as_the_table_says():
    found = json.loads((RESULTS / "published.json").read_text())
    row, written = published.ROWS[4], found["rows"][4]
    rate = published.predicted(row, published.request(row), **found["constants"])
    assert abs(rate / row.rate / written["fitted"] - 1) < 1e-6
    slower = published.predicted(row, published.request(row), **found["constants"] | {"attention": 0.1})
    assert slower < 0.9 * rate


def test_published_constants_when_fitted_again_are_the_same():
    row = published.ROWS[4]
    asked = published.request(row)
    wanted = {"efficiency": 0.4, "attention": 0.3}
    rows = [published.replace(row, rate=published.predicted(row, asked, **wanted))]
    longer = published.replace(row, length=2 * row.length, sequences=1)
    again = published.request(longer)
    rows.append(published.replace(longer, rate=published.predicted(longer, again, **wanted)))
    assert published.fit(list(zip(rows, (asked, again), strict=True))) == wanted


def test_published_row_with_few_rows_of_an_expert_is_predicted_slower_than_by_its_products():
    row = next(row for row in published.ROWS if row.name == "Qwen3-30B-A3B, no EP")
    asked = published.request(row)
    at_full_rate = published.predicted(row, asked, half_rate_rows=0.0)
    assert 1.05 < at_full_rate / published.predicted(row, asked) < 1.4
