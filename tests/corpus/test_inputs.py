"""Files read as one table, from any row on."""

from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embedlab.corpus.inputs import Texts
from embedlab.data.readers import open_reader
from embedlab.errors import UserError

TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=5)
LINES = st.lists(TEXT, min_size=1, max_size=30)
KINDS = ("txt", "txt.gz", "tsv", "csv", "jsonl", "parquet")


def write(path: Path, kind: str, texts: list[str], newline: str = "\n", last: bool = True) -> Path:
    path = path.with_name(f"{path.name}.{kind}")
    if kind == "parquet":
        pq.write_table(pa.table({"text": texts}), path, row_group_size=max(1, len(texts) // 3))
        return path
    lines = {
        "tsv": ["text", *texts],
        "csv": ["text", *('"{}"'.format(text.replace('"', '""')) for text in texts)],
        "jsonl": [json.dumps({"text": text}) for text in texts],
    }.get(kind.split(".")[0], texts)
    data = (newline.join(lines) + newline * last).encode()
    path.write_bytes(gzip.compress(data) if kind.endswith("gz") else data)
    return path


def texts_of(paths: list[Path]) -> Texts:
    return Texts([(open_reader(path), "text") for path in paths])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=st.lists(st.tuples(st.sampled_from(KINDS), LINES, st.booleans()), min_size=1, max_size=4),
    size=st.integers(1, 12),
    worker=st.integers(0, 3),
    workers=st.integers(1, 4),
    start=st.integers(0, 40),
)
def test_parts_and_rows_are_those_of_one_reading(
    tmp_path: Path, files: list[tuple[str, list[str], bool]], size: int, worker: int, workers: int, start: int
) -> None:
    paths, whole = [], []
    for number, (kind, texts, last) in enumerate(files):
        texts = [
            text.replace("\t", " ") + "x" for text in texts
        ]  # a line that is empty at the end is no line
        paths.append(write(tmp_path / str(number), kind, texts, last=last))
        whole += texts
    read = [(line.row, line.text) for line in texts_of(paths).lines()]
    assert read == list(enumerate(whole))
    assert [(line.row, line.text) for line in texts_of(paths).lines(start)] == read[start:]
    assert texts_of(paths).count() == len(whole)

    found = texts_of(paths)
    worker %= workers
    numbers = range(worker, 200, workers)
    parts = [(number, [line.text for line in lines]) for number, lines in found.parts(size, numbers)]
    all_parts = {n: whole[at : at + size] for n, at in enumerate(range(0, len(whole), size))}
    assert parts == [(n, texts) for n, texts in all_parts.items() if n % workers == worker]
    assert found.count() == len(whole)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(st.sampled_from(["", "a", "b\rc", "\r", "é", "x" * 9]), min_size=1, max_size=12),
    newline=st.sampled_from(["\n", "\r\n", "\r"]),
    last=st.booleans(),
    starts=st.lists(st.integers(0, 14), min_size=1, max_size=4),
    block=st.integers(1, 9),
)
def test_a_text_file_is_entered_where_reading_it_would_be(
    tmp_path: Path, lines: list[str], newline: str, last: bool, starts: list[int], block: int
) -> None:
    """Whatever ends its lines, in any order of starts, with any size of what is looked through at a time."""
    data = (newline.join(lines) + newline * last).encode()
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    if not data:
        return
    whole = list(open_reader(path).texts("text"))
    reader = open_reader(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("embedlab.data.readers._BLOCK", block)
        for start in starts:
            assert list(reader.texts("text", start)) == whole[start:]
        assert reader.count("text") == len(whole)


def test_an_error_names_the_file_and_its_own_line(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a", "txt", ["x"] * 5), write(tmp_path / "b", "tsv", ["y"] * 5)]
    line = next(islice(texts_of(paths).lines(), 7, None))
    with pytest.raises(UserError, match=r"b\.tsv:4: no good"):
        raise line.error("no good", fix="better")


def test_what_was_read_tells_how_much_there_is(tmp_path: Path) -> None:
    paths = [write(tmp_path / str(i), "txt", ["same length"] * 1000) for i in range(3)]
    texts = texts_of(paths)
    for _ in islice(texts.lines(), 1500):
        pass
    assert texts.expected == pytest.approx(3000, rel=0.2)
    assert texts.row == 1500
