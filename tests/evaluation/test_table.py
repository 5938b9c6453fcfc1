from __future__ import annotations

import io
import math

import pytest

from embedlab.evaluation.core.protocol import REQUIRED
from embedlab.evaluation.core.suite import suite
from embedlab.evaluation.core.table import (
    Metric,
    Table,
    before_after_table,
    number,
    score_table,
    suite_table,
    task_table,
)
from embedlab.evaluation.sts.lee import Lee
from embedlab.evaluation.sts.sts import SEVEN, STS

SEED = {f"sts{y}/spearman": 60.0 + y for y in range(12, 17)} | {"stsb/spearman": 70.0, "sickr/spearman": 71.0}


def seed(shift: float) -> dict[str, float]:
    scores = {key: value + shift for key, value in SEED.items()}
    return scores | {"sts7/spearman": sum(scores.values()) / 7}


def test_what_is_no_number_is_a_dash() -> None:
    assert number(math.nan) == "-"


def test_score_table_says_n_for_each_encoder() -> None:
    table = score_table({"one": [seed(0)], "three": [seed(-1), seed(0), seed(1)]}, STS.metrics, "STS")
    assert table.columns == (
        "encoder",
        "STS12",
        "STS13",
        "STS14",
        "STS15",
        "STS16",
        "STS-B",
        "SICK-R",
        "Avg",
        "n",
    )
    assert table.rows[0][-1] == "1"
    assert table.rows[1][-1] == "3"
    assert table.rows[0][1] == "72.00"
    assert table.rows[1][1] == "72.00 ± 1.00"
    with pytest.raises(ValueError, match="no n to state"):
        score_table({"none": []}, STS.metrics, "STS")


def test_a_metric_that_a_seed_lacks_is_not_averaged_over_the_others() -> None:
    table = score_table({"x": [seed(0), {"stsb/spearman": 1.0}]}, STS.metrics, "STS")
    assert table.rows[0][1] == "-"
    assert table.rows[0][6].startswith("35.50 ±")


def test_suite_table_refuses_scores_without_n() -> None:
    assert "(n=1)" in suite_table(SEED, 1, "t").title
    with pytest.raises(ValueError, match="n must be"):
        suite_table(SEED, 0, "t")


def test_before_and_after_with_intervals_changes_and_verdicts() -> None:
    before = {
        "lee/spearman": 50.0,
        "lee/spearman_low": 45.0,
        "lee/spearman_high": 55.0,
        "lee/uniformity": -1.5,
    }
    after = {
        "lee/spearman": 49.0,
        "lee/spearman_low": 44.0,
        "lee/spearman_high": 54.0,
        "lee/uniformity": -2.5,
    }
    table = before_after_table([before], [after], Lee.metrics, "quickstart")
    assert table.columns == ("metric", "before (n=1)", "after (n=1)", "change", "")
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["Lee human similarity, Spearman"] == (
        "50.00 [45.00, 55.00]",
        "49.00 [44.00, 54.00]",
        "-1.00",
        "not resolved",
    )
    assert rows["uniformity"] == ("-1.500", "-2.500", "-1.000", ""), "a single seed shows nothing"
    pairs = before_after_table([before, before], [after, after], Lee.metrics, "quickstart")
    assert pairs.rows[-1][-1] == "better", "lower uniformity is better"
    assert set(rows) == {"Lee human similarity, Spearman", "uniformity"}, "only what both sides have"
    lower = after | {"lee/spearman": 40.0, "lee/spearman_low": 35.0, "lee/spearman_high": 51.0}
    assert before_after_table([before] * 2, [lower] * 2, Lee.metrics, "quickstart").rows[0][-1] == "worse"
    for sides in (([before], [lower]), ([before], [lower, lower]), ([before, before], [lower])):
        assert not {"better", "worse"} & {
            row[-1] for row in before_after_table(*sides, Lee.metrics, "x").rows
        }
    with pytest.raises(ValueError, match="at least one run"):
        before_after_table([], [after], Lee.metrics, "x")
    several = before_after_table([before], [after, after], Lee.metrics, "x")
    assert several.columns[2] == "after (n=2)"
    assert several.rows[0][2] == "49.00 ± 0.00"
    same = before_after_table([before], [before], [Metric("lee/spearman", "x", "higher")], "x")
    assert same.rows[0][-1] == ""


def test_markdown_and_pipe_output() -> None:
    table = Table("Title", ("a|b", "score"), (("[red]x", "1.00"), ("y", "2.00")), "Caption.")
    assert table.markdown() == (
        "**Title**\n\n| a\\|b | score |\n| :-- | --: |\n| [red]x | 1.00 |\n| y | 2.00 |\n\nCaption.\n"
    )
    stream = io.StringIO()
    score_table({"an encoder": [seed(0)]}, STS.metrics, "STS").print(stream)
    text = stream.getvalue()
    assert "\x1b" not in text, "no escape codes in a pipe"
    line = next(line for line in text.splitlines() if "an encoder" in line)
    for value in ("72.00", "73.00", "74.00", "75.00", "76.00", "70.00", "71.00"):
        assert value in line, "one line a row, nothing cut"
    stream = io.StringIO()
    table.print(stream)
    assert "[red]x" in stream.getvalue(), "names are no markup"


def test_tables_of_a_suite() -> None:
    protocol = dict.fromkeys(REQUIRED, "x") | {"text": "raw", "truncated": None, "seed": None}
    protocol |= {"data": dict.fromkeys(SEVEN, "x")}
    scores = seed(0) | {key.replace("/", "_tok/"): value + 1 for key, value in seed(0).items()}
    (table,) = suite("sts").tables("mini", scores, protocol)
    assert [row[0] for row in table.rows] == ["mini (raw)", "mini (tok)"]
    assert (table.rows[0][1], table.rows[1][1]) == ("72.00", "73.00")
    assert table.columns[-1] == "n"
    measured = {"geometry/alignment": 0.25, "geometry/separation": 1.5}
    (table,) = suite("geometry").tables("mini", measured, protocol)
    assert table.rows == (("alignment", "0.250"), ("separation of rating groups, STS-B test", "1.50"))
    assert "(n=1)" in table.title
    (table,) = suite("lee").tables(
        "mini", {"lee/spearman": 1, "lee/spearman_low": 0, "lee/spearman_high": 2}, protocol
    )
    assert table.rows[0][1] == "1.00 [0.00, 2.00]"
    (table,) = suite("transfer").tables(
        "mini", {"mr/accuracy": 80.0, "mrpc/accuracy": 70.0, "mrpc/f1": 75.5}, protocol
    )
    assert table.columns == ("task", "accuracy", "f1")
    assert table.rows == (("mr", "80.00", ""), ("mrpc", "70.00", "75.50"))
    with pytest.raises(ValueError, match="n must be"):
        task_table({}, 0, "t")
