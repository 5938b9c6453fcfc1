from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from embedlab.config.data import DataConfig
from embedlab.console import print_table
from embedlab.data.build import build_token_table
from embedlab.data.report import count_duplicates, report_tables
from tests.data.standin import WordTokenization

WORDS: Any = WordTokenization(max_length=6)


def printed(report: dict[str, Any]) -> str:
    out = io.StringIO()
    for title, table in report_tables(report).items():
        print_table(table, title, file=out)
    return out.getvalue()


def test_the_report_counts_what_happened(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_text("a b\n\na b\nc\n")
    (tmp_path / "2.txt").write_text("a b c d e f g\n   \na b\n" + "x" * 99 + "\n")
    config = DataConfig(files=str(tmp_path / "*.txt"), max_chars=50, overlong="drop")
    table = build_token_table(config, {"sentence": ("sentence", WORDS)})
    report = table.report
    assert report == json.loads((table.folder / "report.json").read_text())
    assert (report["read"], report["rows"]) == (8, 5)
    assert report["dropped"] == {"empty": 2, "over max_chars": 1}
    assert report["duplicates"] == report["duplicate_texts"]["sentence"] == 2
    assert [(Path(t["name"]).name, t["rows"]) for t in report["tables"]] == [("1.txt", 3), ("2.txt", 2)]
    assert {k: v for k, v in report["fields"]["sentence"].items() if k != "p95"} == {
        "tokens": 4 + 4 + 3 + 6 + 4,
        "mean": 4.2,
        "median": 4,
        "longest": 6,
        "truncated": 0.2,
        "histogram": {"from": [0], "rows": [5]},
    }
    text = printed(report)
    for line in ("dropped: empty", "dropped: over max_chars", "truncated", "20.0%", "62.5%"):
        assert line in text


def test_the_histogram_has_every_row(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"{'w ' * n}\n" for n in range(1, 101)))
    long: Any = WordTokenization(max_length=200)
    table = build_token_table(DataConfig(files=str(tmp_path / "a.txt")), {"sentence": ("sentence", long)})
    # n words make n + 2 tokens: 3 .. 102
    histogram = table.report["fields"]["sentence"]["histogram"]
    assert histogram["from"] == [0, 8, 16, 24, 32, 48, 64, 96]
    assert histogram["rows"] == [5, 8, 8, 8, 16, 16, 32, 7]


def test_language_pairs_have_their_own_lines(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("en\tde\tfr\na b\tc\td\na\t\te f g\n")
    config = DataConfig(name="parallel", files=str(tmp_path / "a.tsv"))
    table = build_token_table(config, {"source": ("source", WORDS), "target": ("target", WORDS)})
    assert table.groups == ["en-de", "en-fr"]
    assert table.group_of.tolist() == [0, 1, 1]
    assert table.report["groups"] == {
        "en-de": {"rows": 1, "dropped": {"empty": 1}, "mean_tokens": {"source": 4.0, "target": 3.0}},
        "en-fr": {"rows": 2, "dropped": {}, "mean_tokens": {"source": 3.5, "target": 4.0}},
    }
    # tokens with the two special ones: en 4 + 3 + 4 (both pairs), de 3, fr 3 + 5
    assert table.report["languages"] == {
        "en": {"texts": 3, "pairs": 2, "tokens": 4 + 4 + 3, "mean_tokens": 3.67},
        "fr": {"texts": 2, "pairs": 1, "tokens": 3 + 5, "mean_tokens": 4.0},
        "de": {"texts": 1, "pairs": 1, "tokens": 3, "mean_tokens": 3.0},
    }
    text = printed(table.report)
    assert "en-fr" in text
    assert "Languages" in text
    assert "33.3%" in text


def test_repeats_are_those_of_whole_rows_in_their_roles() -> None:
    one = np.array([1, 2, 1, 1, 2], np.uint64)
    two = np.array([2, 1, 2, 1, 1], np.uint64)
    assert count_duplicates([one]) == 3
    assert count_duplicates([one, two]) == 2
    assert count_duplicates([np.array([1, 2], np.uint64), np.array([2, 1], np.uint64)]) == 0


def test_the_content_is_named_whatever_it_is_tokenised_with(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a b\nc\n")
    contents = []
    for longest in (4, 5):
        words: Any = WordTokenization(max_length=longest)
        table = build_token_table(DataConfig(files=str(path)), {"sentence": ("sentence", words)})
        contents.append(table.report["content"])
    path.write_text("a b\nd\n")
    changed = build_token_table(DataConfig(files=str(path)), {"sentence": ("sentence", WORDS)}).report[
        "content"
    ]
    assert contents[0] == contents[1] != changed
