from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from embedlab.config.data import DataConfig
from embedlab.data.plan import BatchPlan
from embedlab.data.rows import RowStream, check_first_rows, iter_texts, read_rows
from embedlab.errors import UserError


def rows_of(path: Path, **settings: Any) -> tuple[list[str], RowStream]:
    stream = read_rows(DataConfig(files=str(path), **settings))
    return [texts[0] for _, _, texts, _ in stream], stream


def test_empty_and_blank_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text,n\none,1\n"   ",2\n,3\n\u2003,4\ntwo,5\n')
    texts, stream = rows_of(path)
    assert texts == ["one", "two"]
    assert stream.dropped == {"empty": 3}


def test_white_space_around_a_text_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("  hello \n")
    assert rows_of(tmp_path / "a.txt")[0] == ["  hello "]


def test_an_overlong_row_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("short\n" + "x" * 100_000 + "\nshort\n")
    with pytest.raises(UserError) as caught:
        rows_of(path)
    error = caught.value
    assert (error.file, error.row, error.key) == (str(path), 2, "data.max_chars")
    assert "a text of 100,000 characters, and the limit is 10,000" in str(error)
    assert "data.overlong=drop" in str(error)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_an_overlong_row_is_named_in_every_format(tmp_path: Path, suffix: str) -> None:
    path, texts = tmp_path / f"a{suffix}", ["one", "y" * 200_000]
    if suffix == ".jsonl":
        path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    elif suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"text": texts}), path)
    else:
        path.write_text("\n".join(["text", *texts]))
    with pytest.raises(UserError) as caught:
        rows_of(path)
    assert caught.value.row == (3 if suffix in (".csv", ".tsv") else 2)


def test_overlong_rows_can_be_dropped_or_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("short\n" + "x" * 90 + "\n")
    texts, stream = rows_of(path, max_chars=50, overlong="drop")
    assert texts == ["short"]
    assert stream.dropped == {"over max_chars": 1}
    assert rows_of(path, max_chars=50, overlong="truncate")[0] == ["short", "x" * 50]


def test_short_rows_are_dropped_by_min_chars(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab\nabc\nabcd\n")
    texts, stream = rows_of(tmp_path / "a.txt", min_chars=3)
    assert texts == ["abc", "abcd"]
    assert stream.dropped == {"under min_chars": 1}


def test_repeats_are_kept_or_dropped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\nb\na\na\n")
    assert rows_of(tmp_path / "a.txt")[0] == ["a", "b", "a", "a"]
    texts, stream = rows_of(tmp_path / "a.txt", duplicates="drop")
    assert texts == ["a", "b"]
    assert stream.dropped == {"duplicate": 2}


def test_the_limit_counts_kept_rows_and_reads_no_further(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\n\nb\nc\n\xff broken\n")
    assert rows_of(tmp_path / "a.txt", limit=3)[0] == ["a", "b", "c"]


def test_a_bad_row_is_found_before_anything_is_made_of_the_first_ones(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a\nb\nlonger\n")
    config: dict[str, Any] = {"files": str(path), "max_chars": 3}
    with pytest.raises(UserError, match=r"a\.txt:3: a text of 6 characters"):
        check_first_rows(DataConfig("sentences", **config))
    check_first_rows(DataConfig("sentences", limit=2, **config))  # which reads no further
    check_first_rows(DataConfig("sentences", overlong="drop", **config))


@pytest.mark.parametrize("seed", range(40))
def test_a_first_look_refuses_too_few_rows_and_none_that_suffice(seed: int, tmp_path: Path) -> None:
    """Small files with empty and equal rows, any batch, limit and number of devices: as it is said after all."""
    draw = random.Random(seed)
    lines = [draw.choice(["", "a", "b", "c d", "long row"]) for _ in range(draw.randint(1, 20))] + ["end"]
    (tmp_path / "a.txt").write_text("\n".join(lines) + "\n")
    limit = draw.choice([None, 3, 6, 50])
    config = DataConfig(
        "sentences", files=str(tmp_path / "a.txt"), batch_size=draw.randint(1, 8), limit=limit,
        drop_last=draw.random() < 0.7, duplicates=draw.choice(["keep", "drop"]), min_chars=draw.choice([0, 2]),
    )  # fmt: skip
    devices, kept = draw.randint(1, 4), len(list(read_rows(config)))

    def refusal(check: Callable[[], object]) -> str:
        try:
            check()
        except UserError as error:
            return str(error).split(", of ")[0].split(" (")[0]
        return ""

    early = refusal(lambda: check_first_rows(config, devices))
    late = refusal(lambda: BatchPlan(kept, config.batch_size, world=devices, drop_last=config.drop_last))
    if config.duplicates == "keep":
        assert early == late
    assert not early or late, "what suffices is not refused"
    assert not refusal(lambda: check_first_rows(config)), "nothing is trained"
    assert not refusal(lambda: check_first_rows(replace(config, pack=8, max_length=None), devices))


def test_a_first_look_leaves_warnings_to_the_reading(tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("some words\nmore words\n")
    check_first_rows(DataConfig("sentences", files=str(path)))
    assert not caplog.records
    list(read_rows(DataConfig("sentences", files=str(path))))
    assert "its first line is read as text" in caplog.text


def test_several_shards_in_the_order_given_with_globs_sorted(tmp_path: Path) -> None:
    for name in ("b2", "b1", "a"):
        (tmp_path / f"{name}.txt").write_text(f"{name}\n")
    files = [str(tmp_path / "b*.txt"), str(tmp_path / "a.txt"), str(tmp_path / "b2.txt")]
    stream = read_rows(DataConfig(files=files))
    assert [texts[0] for _, _, texts, _ in stream] == ["b1", "b2", "a"]


def test_a_missing_column_is_named_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("label,premise\n0,x\n")
    with pytest.raises(UserError) as caught:
        read_rows(DataConfig(files=str(tmp_path / "a.csv")))
    assert caught.value.file == str(tmp_path / "a.csv")
    assert "no column sentence or text for the sentence; there are: label, premise" in str(caught.value)
    assert "Fix: data.columns.sentence=NAME" in str(caught.value)
    with pytest.raises(
        UserError, match=r"no column premises .* there are: label, premise \(data.columns.sentence=pr"
    ):
        read_rows(DataConfig(files=str(tmp_path / "a.csv"), columns={"sentence": "premises"}))


def test_a_file_without_a_header_is_not_printed_whole(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("word " * 5000 + "\tand\nmore\tmore\n")
    with pytest.raises(UserError, match="there are: word word") as caught:
        read_rows(DataConfig(files=str(tmp_path / "a.tsv")))
    assert len(str(caught.value)) < 400


def test_a_named_column(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("label,premise\n0,x\n")
    assert rows_of(tmp_path / "a.csv", columns={"sentence": "premise"})[0] == ["x"]


@pytest.mark.parametrize(
    ("value", "says"),
    [(12, "the sentence is 12, not text"), ("a\0b", "a NUL character"), ([1], "is [1], not text")],
)
def test_values_that_are_no_text(tmp_path: Path, value: object, says: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + json.dumps({"text": value}) + "\n")
    with pytest.raises(UserError) as caught:
        rows_of(tmp_path / "a.jsonl")
    assert caught.value.row == 2
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ("{}/none-*.txt", "the pattern matches no file"),
        ("{}/none.txt", "no such file"),
        ("{}", "this is a folder"),
    ],
)
def test_files_that_are_not_there(tmp_path: Path, files: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        read_rows(DataConfig(files=files.format(tmp_path)))
    assert caught.value.key == "data.files"


def test_a_literal_path_with_the_signs_of_a_glob(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("odd name\n")
    assert rows_of(tmp_path / "a[1].txt")[0] == ["odd name"]


def test_texts_of_one_role_or_of_all(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("sent0\tsent1\thard_neg\na\tb\tc\nd\te\tf\n")
    config = DataConfig(name="nli", files=str(tmp_path / "a.tsv"))
    assert list(iter_texts(config)) == list("abcdef")
    assert list(iter_texts(config, "positive")) == ["b", "e"]
