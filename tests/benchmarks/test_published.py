"""The plan's share of attention is what published figures give, and their error is what users are told."""

import json

from benchmarks.tables import RESULTS
from benchmarks.update import published
from epfsdp2.recipes.plan.roofline import ERROR, Cluster


def test_published_constants_and_error_are_those_of_the_table():
    found = json.loads((RESULTS / "published.json").read_text())
    assert found["attention"] == Cluster(nodes=1, gpus=8).attention
    assert found["error"] <= ERROR < found["error"] + 0.05
    assert [(row["name"], row["published"]) for row in found["rows"]] == [
        (row.name, row.rate) for row in published.ROWS
    ]
    assert all(0.6 < row["fitted"] < 1.5 for row in found["rows"])


def test_published_row_is_predicted_as_the_table_says():
    found = json.loads((RESULTS / "published.json").read_text())
    row, written = published.ROWS[4], found["rows"][4]
    rate = published.predicted(row, published.request(row), attention=found["attention"])
    assert abs(rate / row.rate / written["fitted"] - 1) < 1e-6
    assert published.predicted(row, published.request(row), attention=0.1) < 0.9 * rate


def test_published_share_when_fitted_again_is_the_same():
    row = published.ROWS[4]
    asked = published.request(row)
    longer = published.replace(row, length=2 * row.length, sequences=1)
    rows = [(row, asked), (longer, published.request(longer))]
    made = [(published.replace(r, rate=published.predicted(r, a, attention=0.3)), a) for r, a in rows]
    assert published.fit(made) == 0.3


def test_published_row_of_automodel_is_faster_with_fused_norms_as_the_table_says():
    found = json.loads((RESULTS / "published.json").read_text())
    row, fused = published.ROWS[0], found["rows"][0]["fitted"] * published.ROWS[0].rate
    assert 1.2 < fused / found["eager"] < 1.5
    eager = published.predicted(row, published.request(row, "engine.fuse_dense=false"))
    assert abs(eager / found["eager"] - 1) < 1e-6
