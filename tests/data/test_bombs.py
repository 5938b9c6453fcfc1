"""Small files that hold very much: one line, and little memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embedlab.data.readers import open_reader
from embedlab.errors import UserError
from tests.data.test_readers import PACK, read

BOMB = r"compressed bytes hold more than 100 times as many.*Fix: unpack the file"


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2"])
def test_a_file_that_expands_without_end(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embedlab.data.reader._UNEXPANDED", 1 << 22)
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(PACK[suffix](b"many words are here\n" * 50_000) * 6)  # a file of many streams
    with pytest.raises(UserError, match=BOMB):
        for _ in open_reader(path).rows(["text"]):
            pass


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
@pytest.mark.parametrize("kind", ["txt", "csv", "tsv", "jsonl"])
def test_a_line_without_end(tmp_path: Path, suffix: str, kind: str) -> None:
    path = tmp_path / f"a.{kind}{suffix}"
    path.write_bytes(PACK[suffix](b"x" * (33 << 20)))
    with pytest.raises(UserError, match=r"a line of more than 32 MiB"):
        read(path, "text")


def test_text_that_packs_well_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.xz"
    path.write_bytes(PACK[".xz"](b"the same words again\n" * 100_000))
    assert len(read(path, "text")) == 100_000


def dictionary(folder: Path) -> Path:
    """One text of 20 MB, a thousand times, in kilobytes."""
    column = pa.DictionaryArray.from_arrays(
        pa.array([0] * 1024, pa.int32()), pa.array(["words " * 3_500_000])
    )
    pq.write_table(pa.table({"text": column}), folder / "a.parquet", compression="zstd")
    return folder / "a.parquet"


def nested(folder: Path) -> Path:
    """The same inside a struct."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 256, pa.int32()), pa.array(["words " * 3_500_000]))
    table = pa.table({"t": pa.StructArray.from_arrays([column], ["text"])})
    pq.write_table(table, folder / "a.parquet", compression="zstd")
    return folder / "a.parquet"


def pages(folder: Path) -> Path:
    """Plain pages that are all alike."""
    table = pa.table({"text": ["words " * 50_000] * 300})
    pq.write_table(table, folder / "a.parquet", compression="zstd", use_dictionary=False)
    return folder / "a.parquet"


def prefixes(folder: Path) -> Path:
    """Texts that are stored as their difference from the one before."""
    table = pa.table({"text": ["words " * 100_000] * 300})
    pq.write_table(table, folder / "a.parquet", compression="zstd", use_dictionary=False,
                   column_encoding={"text": "DELTA_BYTE_ARRAY"})  # fmt: skip
    return folder / "a.parquet"


READ = """
import resource, sys
from pathlib import Path
from embedlab.data.readers import open_reader
from embedlab.errors import UserError
import pyarrow.parquet
reader = open_reader(Path(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    for _ in reader.rows(reader.columns):
        pass
except UserError as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.parametrize("make", [dictionary, nested, pages, prefixes])
def test_a_parquet_table_that_expands_without_end(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    path = make(tmp_path)
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", READ, str(path)],
        env={"PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=True,
    )
    line, megabytes = done.stdout.splitlines()
    assert "compressed bytes hold more than 100 times as many" in line
    assert int(megabytes) < 400, "and 20 GB were asked for"


def test_rows_of_any_size_come_in_bounded_batches(tmp_path: Path) -> None:
    texts = [("ab" * (i % 7)) + str(i) for i in range(3000)] + ["long " * 100_000] * 3
    for name, how in {"a": {}, "b": {"row_group_size": 100}, "c": {"use_dictionary": False}}.items():
        pq.write_table(pa.table({"text": texts}), tmp_path / f"{name}.parquet", **how)
        assert [v for _, (v,) in read(tmp_path / f"{name}.parquet", "text")] == texts


@pytest.mark.parametrize("place", [0, 700, 1999])
def test_text_in_parquet_that_is_not_utf8_names_the_row(tmp_path: Path, place: int) -> None:
    texts = [f"row {i}".encode() for i in range(2000)]
    texts[place] = b"caf\xe9"
    column = pa.array(texts, pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet", row_group_size=500)
    with pytest.raises(UserError, match="a text that is not UTF-8") as caught:
        read(tmp_path / "a.parquet", "text")
    assert caught.value.row == place + 1
