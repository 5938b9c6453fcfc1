"""Files as people have them: other line ends, no header, another delimiter, another suffix, half a character."""

from __future__ import annotations

import csv
import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embedlab.config.data import DataConfig
from embedlab.data.kinds import data_config
from embedlab.data.reader import Layout
from embedlab.data.readers import open_reader
from embedlab.data.rows import read_rows
from embedlab.errors import UserError
from tests.data.test_readers import PACK

FILES = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
LINE = st.text(st.characters(exclude_characters="\r\n\0", exclude_categories=["Cs"]), max_size=12)
CELL = st.text("abc é,;|'\".", min_size=1, max_size=8)


def read(path: Path, *columns: str, layout: Layout | None = None) -> list[tuple[int, tuple[Any, ...]]]:
    return list(open_reader(path, layout).rows(columns))


def texts(**settings: Any) -> list[tuple[Any, ...]]:
    return [row[2] for row in read_rows(data_config(settings))]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("suffix", PACK)
def test_lines_end_in_any_of_three_ways(tmp_path: Path, end: str, last: bool, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"

    @FILES
    @given(st.lists(LINE, min_size=2, max_size=8))
    def same(lines: list[str]) -> None:
        lines = ["first", *lines, "last"]  # a text of line ends alone has none of them for certain
        path.write_bytes(PACK[suffix]((end.join(lines) + end * last).encode()))
        assert [line for _, (line,) in read(path, "any")] == lines

    same()


def test_a_return_inside_a_line_is_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\rstill one\ntwo\n")
    assert [values for _, values in read(tmp_path / "a.txt", "any")] == [("one\rstill one",), ("two",)]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_lines_of_tables_may_end_in_returns(tmp_path: Path, name: str) -> None:
    mark = "," if name == "a.csv" else "\t"
    (tmp_path / name).write_bytes(f"text{mark}n\ra{mark}1\rb{mark}2\r".encode())
    assert read(tmp_path / name, "n", "text") == [(2, ("1", "a")), (3, ("2", "b"))]


def test_very_long_files_of_returns_are_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embedlab.data.reader.LONGEST_LINE", 1000)
    (tmp_path / "a.txt").write_bytes(b"some words\r" * 50_000)
    assert len(read(tmp_path / "a.txt", "any")) == 50_000
    (tmp_path / "a.txt").write_bytes(b"a\r" + b"x" * 100_000)
    with pytest.raises(UserError, match=r"a\.txt:2: a line of more than"):
        read(tmp_path / "a.txt", "any")


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".csv.gz", ".tsv.xz"])
@pytest.mark.parametrize(
    ("first", "settings", "kept"),
    [
        ("sentence", {}, False),
        ("text", {}, False),
        ("A first sentence", {}, True),
        ("heading", {}, True),
        ("heading", {"columns": {"sentence": "heading"}}, False),
        ("heading", {"header": True}, False),
        ("text", {"header": False}, True),
        ("A first sentence", {"columns": {"sentence": 0}}, True),
    ],
)
def test_the_first_row_of_one_column(
    tmp_path: Path, suffix: str, first: str, settings: dict[str, Any], kept: bool
) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(
        PACK["." + suffix.split(".")[2] if suffix.count(".") > 1 else ""](f"{first}\nb c\nd\n".encode())
    )
    if settings == {"header": True}:
        settings = settings | {"columns": {"sentence": first}}
    found = [text for (text,) in texts(files=str(path), **settings)]
    assert found == ([first] if kept else []) + ["b c", "d"]


def test_a_first_line_that_is_read_as_text_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.csv").write_text("title\nb\n")
    with caplog.at_level(logging.WARNING):
        assert texts(files=str(tmp_path / "a.csv")) == [("title",), ("b",)]
    assert "a.csv: its first line is read as text; header=true if it names the column" in caplog.text


@pytest.mark.parametrize("suffix", ["csv", "tsv", "csv.gz"])
@pytest.mark.parametrize("fields", [1, 2, 3])
@pytest.mark.parametrize("header", [None, False])
def test_a_first_line_that_a_place_makes_a_text_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, header: bool | None, fields: int, suffix: str
) -> None:
    parted = ("," if suffix.startswith("csv") else "\t").join
    lines = [parted(f"{name} {i}" for i in range(fields)) for name in ("head", "row")]
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(PACK[".gz" if suffix.endswith("gz") else ""]("\n".join(lines).encode()))
    with caplog.at_level(logging.WARNING):
        found = texts(files=str(path), columns={"sentence": 0}, header=header)
    assert found == [("head 0",), ("row 0",)]
    assert ("its first line is read as text" in caplog.text) is (header is None)


def test_columns_by_their_place(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("p\tq\tr\ns\tt\tu\n")
    files = {"name": "nli", "files": str(tmp_path / "a.tsv")}
    columns: dict[str, Any] = {"anchor": 1, "positive": "2", "negative": 0}
    assert texts(**files, columns=columns) == [("q", "r", "p"), ("t", "u", "s")]
    assert texts(**files, columns=columns, header=False) == [("q", "r", "p"), ("t", "u", "s")]
    with pytest.raises(UserError, match=r"no column 5 for the anchor; there are: 0, 1, 2"):
        texts(**files, columns=columns | {"anchor": 5})
    (tmp_path / "a.tsv").write_text("p\tq\tr\ns\tt\n")
    with pytest.raises(UserError, match=r"2 fields where the first line has 3") as caught:
        texts(**files, columns=columns)
    assert caught.value.row == 2


def test_a_header_of_usual_names_is_not_read_as_a_row(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("sent0\tsent1\thard_neg\na\tb\tc\n")
    with pytest.raises(UserError, match="no column 0 for the anchor; there are: sent0, sent1, hard_neg"):
        texts(name="nli", files=str(tmp_path / "a.tsv"), columns={"anchor": 0, "positive": 1, "negative": 2})


@pytest.mark.parametrize("delimiter", ["\t", ",", ";", "|"])
@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_fields_are_parted_by_what_parts_them(
    tmp_path: Path, delimiter: str, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / f"a{suffix}"
    usual = {".csv": ",", ".tsv": "\t"}[suffix]

    @FILES
    @given(st.lists(st.tuples(CELL, CELL, CELL), min_size=1, max_size=5))
    def same(rows: list[tuple[str, str, str]]) -> None:
        out = io.StringIO()
        if suffix == ".tsv" and delimiter == "\t":
            out.write("\n".join("\t".join(row) for row in [("sent0", "sent1", "hard_neg"), *rows]) + "\n")
        else:
            csv.writer(out, delimiter=delimiter, lineterminator="\n").writerows(
                [("sent0", "sent1", "hard_neg"), *rows]
            )
        path.write_text(out.getvalue())
        reader = open_reader(path, Layout(known={"sent0": "data=nli"}))
        found = [values for _, values in reader.rows(["hard_neg", "sent0", "sent1"])]
        assert found == [(c, a, b) for a, b, c in rows]

    with caplog.at_level(logging.WARNING):
        same()
    assert ("its columns are parted by" in caplog.text) == (delimiter != usual)


@pytest.mark.parametrize("line", ["one; two", "a, b", "text, or so", "x|y"])
@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_marks_in_a_sentence_part_no_columns(tmp_path: Path, suffix: str, line: str) -> None:
    if suffix == ".csv" and "," in line:
        line = f'"{line}"'
    (tmp_path / f"a{suffix}").write_text(f"{line}\nmore\n")
    assert texts(files=str(tmp_path / f"a{suffix}")) == [(line.strip('"'),), ("more",)]


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (["sent0", "sent1", "hard_neg"], "data=nli"),
        (["premise", "hypothesis", "label"], "data=nli"),
        (["english", "non_english"], "data=parallel"),
        ([f"c{i}" for i in range(12)], "data.columns.ROLE=0"),
    ],
)
def test_a_table_called_txt_is_refused_with_its_columns(tmp_path: Path, header: list[str], says: str) -> None:
    rows = [header, *([f"{name} {i}" for name in header] for i in range(5))]
    path = tmp_path / "a.txt"
    path.write_text("".join("\t".join(row) + "\n" for row in rows))
    with pytest.raises(UserError) as caught:
        texts(files=str(path))
    line = str(caught.value)
    assert f"a table of {len(header)} columns parted by tabs ({', '.join(header)})" in line
    assert says in line
    assert "call it .tsv" in line


def test_a_tab_here_and_there_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\tb\nno tab\na\tb\n")
    assert len(texts(files=str(tmp_path / "a.txt"))) == 3
    (tmp_path / "a.txt").write_text("a\tb\n")
    assert len(texts(files=str(tmp_path / "a.txt"))) == 1


@pytest.mark.parametrize("depth", [10, 300, 2000, 100_000])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_deep_json_is_one_line_or_read(tmp_path: Path, depth: int, opening: str) -> None:
    deep = opening * depth + "1" + {"[": "]", '{"a":': "}"}[opening] * depth
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b", "x": ' + deep + "}\n")
    if depth <= 500:
        assert [values for _, values in read(tmp_path / "a.jsonl", "text")] == [("a",), ("b",)]
    else:
        with pytest.raises(UserError, match=r"a\.jsonl:2: JSON that is nested too deep"):
            read(tmp_path / "a.jsonl", "text")


@FILES
@given(st.text(st.characters(categories=["Cs", "L"]), min_size=1, max_size=5), st.booleans())
def test_half_a_character_names_file_and_row(tmp_path: Path, text: str, in_name: bool) -> None:
    record = {text: "a", "text": "b"} if in_name else {"text": text}
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + json.dumps(record) + "\n")
    whole = not any(0xD800 <= ord(c) < 0xE000 for c in json.loads(json.dumps(text)))
    if whole:
        assert len(read(tmp_path / "a.jsonl", "text")) == 2
    else:
        with pytest.raises(UserError, match=r"a\.jsonl:2: \\ud.* is half of a character"):
            read(tmp_path / "a.jsonl", "text")


def test_another_reading_of_the_same_bytes_is_another_cache(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("title\nb\n")
    path = tmp_path / "a.csv"
    layouts = [Layout(header=True), Layout(header=False), Layout(asked=("title",)), Layout()]
    named, bare, asked, found = (open_reader(path, layout).identity() for layout in layouts)
    assert named == asked != bare == found


def test_the_columns_of_a_configuration_are_names_or_places() -> None:
    assert DataConfig(files="a.tsv", columns={"sentence": 0}).chosen == {"sentence": "0"}
    for bad in (True, -1, 1.5, "", []):
        with pytest.raises(UserError, match=r"data\.columns\.sentence"):
            DataConfig(files="a.tsv", columns={"sentence": bad})  # type: ignore[dict-item]
