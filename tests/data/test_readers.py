from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embedlab import console
from embedlab.data.readers import open_reader
from embedlab.data.sources import find_files
from embedlab.errors import UserError

PACK: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".xz": lambda data: lzma.compress(data, preset=0),
    ".bz2": lambda data: bz2.compress(data, compresslevel=1),
}
TSV = 'id\ttext\n1\tsays "hi\n2\t  two  \n'


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(path: Path, *columns: str) -> list[tuple[int, tuple[Any, ...]]]:
    return list(open_reader(path).rows(columns))


@pytest.mark.parametrize("suffix", PACK)
def test_lines_of_text_plain_and_compressed(tmp_path: Path, suffix: str) -> None:
    text = "\ufeffone\r\n\n zwei – drei \nfour"
    path = write(tmp_path / f"a.txt{suffix}", PACK[suffix](text.encode()))
    assert read(path, "any") == [(1, ("one",)), (2, ("",)), (3, (" zwei – drei ",)), (4, ("four",))]


@pytest.mark.parametrize("suffix", PACK)
def test_tsv_has_no_quoting(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a.tsv{suffix}", PACK[suffix](TSV.encode()))
    assert open_reader(path).columns == ["id", "text"]
    assert read(path, "text", "id") == [(2, ('says "hi', "1")), (3, ("  two  ", "2"))]


def test_csv_has_quotes_and_rows_over_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'id,text\r\n1,"a, ""b""\nnext line"\r\n2,c\r\n')
    assert read(path, "text") == [(2, ('a, "b"\nnext line',)), (4, ("c",))]


def test_columns_are_found_by_name_whatever_their_order(tmp_path: Path) -> None:
    one = write(tmp_path / "1.csv", "sent0,sent1\nq,p\n")
    two = write(tmp_path / "2.csv", "sent1,sent0\np,q\n")
    assert read(one, "sent0", "sent1") == read(two, "sent0", "sent1") == [(2, ("q", "p"))]


def test_jsonl_with_nested_objects_nulls_and_blank_lines(tmp_path: Path) -> None:
    rows = [{"translation": {"en": "a", "de": "b"}, "n": 1}, {"translation": {"en": None, "de": "c"}, "n": 2}]
    path = write(tmp_path / "a.jsonl", "\n\n".join(map(json.dumps, rows)) + "\n")
    assert open_reader(path).columns == ["translation.en", "translation.de", "n"]
    assert read(path, "translation.de", "translation.en") == [(1, ("b", "a")), (3, ("c", None))]


def test_parquet_over_row_groups_with_structs_and_nulls(tmp_path: Path) -> None:
    texts = [f"text {i}" for i in range(2500)]
    both = pa.struct([("en", pa.string()), ("de", pa.string())])
    pairs = pa.array([{"en": s, "de": s.upper()} for s in texts], both)
    pq.write_table(
        pa.table({"text": [None, *texts[1:]], "t": pairs}), tmp_path / "a.parquet", row_group_size=700
    )
    reader = open_reader(tmp_path / "a.parquet")
    assert reader.columns == ["text", "t.en", "t.de"]
    rows = list(reader.rows(["t.de", "text"]))
    assert rows[0] == (1, ("TEXT 0", None))
    assert rows[2499] == (2500, ("TEXT 2499", "text 2499"))
    assert len(rows) == 2500
    assert reader.position == reader.size


def test_the_position_reaches_the_size(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt.gz", gzip.compress(b"some words\n" * 5000, mtime=0))
    reader = open_reader(path)
    for _ in reader.rows(["x"]):
        pass
    assert 0 < reader.position <= reader.size


BAD = [
    ("empty.txt", b"", None, "the file is empty"),
    ("empty.csv", b"", None, "the file is empty"),
    ("empty.tsv", b"", None, "the file is empty"),
    ("empty.jsonl", b"\n\n", None, "the file is empty"),
    ("empty.parquet", b"", None, "the file is empty"),
    ("empty.txt.gz", b"", None, "the file is empty"),
    ("header.csv", b"text\n", None, "a header and no rows"),
    ("latin1.txt", b"good\ngr\xfc\xdfe\n", 2, "not UTF-8: byte 0xfc at place 3"),
    ("latin1.csv", b"text\na\nb\n\xe9t\xe9\n", 4, "not UTF-8"),
    ("nul.txt", b"good\nbad\0bad\n", 2, "a NUL byte"),
    ("utf16.tsv", "text\na\n".encode("utf-16-le"), 1, "a NUL byte"),
    ("ragged.tsv", b"text\tx\na\tb\nc\n", 3, "1 fields where the header has 2"),
    ("ragged.csv", b"text,x\na,b\nc,d,e\n", 3, "3 fields where the header has 2"),
    ("twice.tsv", b"text\ttext\na\tb\n", 1, "names text twice"),
    ("open.csv", b'text,x\na,b\n"c,d\ne,f\n', 3, "not a well-formed csv record"),
    ("quote.csv", b'text\na\n"b" c\n', 3, "not a well-formed csv record"),
    ("broken.jsonl", b'{"text": "a"}\n{"text": \n', 2, "not JSON"),
    (
        "half.jsonl",
        b'{"text": "\\ud83d\\ude00"}\n{"text": "\\ud83d x"}\n',
        2,
        "\\ud83d is half of a character",
    ),
    ("list.jsonl", b'{"text": "a"}\n["b"]\n', 2, "a JSON object is needed"),
    ("key.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', 2, "no 'text' in this row, which has: txt"),
    ("not.parquet", b"PAR1 no", None, "not a readable parquet file"),
    ("not.txt.gz", b"plain text\n", None, "the .gz file is truncated or damaged before its first row"),
    ("not.txt.xz", b"plain text\n", None, "the .xz file is truncated or damaged before its first row"),
    ("not.txt.bz2", b"plain text\n", None, "the .bz2 file is truncated or damaged before its first row"),
]


@pytest.mark.parametrize(("name", "content", "row", "says"), BAD, ids=[case[0] for case in BAD])
def test_bad_files_are_named_with_the_row_and_the_reason(
    tmp_path: Path, name: str, content: bytes, row: int | None, says: str
) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(UserError) as caught:
        read(path, "text")
    error = caught.value
    assert (error.file, error.row) == (str(path), row)
    assert says in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("content", ["text\ngrüße\nñ\n", "text\r\ngrüße\r\nñ"])
@pytest.mark.parametrize("encoding", ["latin1", "utf-16-le", "utf-16-be"])
def test_a_file_of_another_encoding_is_converted_by_what_the_line_says(
    tmp_path: Path, encoding: str, content: str, suffix: str
) -> None:
    mark = "\ufeff" if encoding != "latin1" else ""
    raw = (mark + content).encode(encoding)
    with pytest.raises(UserError, match="not UTF-8") as caught:
        read(write(tmp_path / f"a.csv{suffix}", PACK[suffix](raw)), "text")
    words = str(caught.value.fix).split()
    given, wanted = words[words.index("-f") + 1], words[words.index("-t") + 1]
    converted = write(tmp_path / "b.csv", raw.decode(given).encode(wanted))
    assert [text for _, (text,) in read(converted, "text")] == ["grüße", "ñ"]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2"])
def test_a_plain_file_called_an_archive_is_read_by_the_name_that_the_line_says(
    tmp_path: Path, suffix: str
) -> None:
    path = write(tmp_path / f"plain.txt{suffix}", "one\ntwo\n")
    with pytest.raises(UserError, match=f"its name without {suffix}$"):
        read(path, "text")
    assert read(path.rename(path.with_suffix("")), "text") == [(1, ("one",)), (2, ("two",))]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2"])
def test_a_truncated_archive_says_after_which_row(tmp_path: Path, suffix: str) -> None:
    lines = "".join(f"{i * 7919 % 104729} some words {i * i}\n" for i in range(20_000))
    whole = PACK[suffix](lines.encode())
    path = write(tmp_path / f"cut.txt{suffix}", whole[: len(whole) // 2])
    with pytest.raises(
        UserError, match=rf"cut.txt{suffix}: the {suffix} file is truncated or damaged after row \d\d+"
    ):
        read(path, "text")


def test_a_damaged_archive_is_told_by_its_checksum(tmp_path: Path) -> None:
    whole = bytearray(gzip.compress(b"some words\n" * 100))
    whole[-8] ^= 0xFF
    with pytest.raises(UserError, match="damaged"):
        read(write(tmp_path / "a.txt.gz", bytes(whole)), "text")


def test_a_damaged_parquet_table(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"text": [f"{i * 7919 % 104729}" for i in range(9000)]}), path, compression="snappy"
    )
    data = bytearray(path.read_bytes())
    data[200:2000] = bytes(1800)
    path.write_bytes(bytes(data))
    with pytest.raises(UserError, match="damaged after row"):
        read(path, "text")


def test_one_text_a_line_is_not_enough_for_pairs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"one text a line, and 2 are needed \(en, de\)"):
        read(write(tmp_path / "a.txt", "x\n"), "en", "de")


@pytest.mark.parametrize("name", ["a.doc", "a.txt.zip", "a.parquet.gz", "a.gz", "txt"])
def test_unknown_kinds_of_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"unknown kind of file. Fix: one of .txt, .csv"):
        open_reader(write(tmp_path / name, "x"))


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.txt", "x\n")
    reader = open_reader(path)
    path.unlink()
    with pytest.raises(UserError, match="cannot be read: No such file"):
        list(reader.rows(["text"]))


def test_a_parquet_schema_with_a_name_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array(["a"])] * 3, ["text", "x", "text"]), path)
    with pytest.raises(UserError, match=r"a\.parquet: the schema names text twice"):
        _ = open_reader(path).columns


BAD = {
    "empty": dict.fromkeys(("txt", "csv", "tsv", "jsonl", "parquet"), b""),
    "binary": dict.fromkeys(("txt", "csv", "tsv", "jsonl", "parquet"), b"a\0b\tc\n" * 9),
    "latin-1": dict.fromkeys(("txt", "csv", "tsv", "jsonl"), b"text\nol\xe9\n"),
    "a field too many": {"csv": b"text,n\na,1\nb,2,3\n", "tsv": b"text\tn\na\t1\nb\t2\t3\n"},
    "a header alone": {"csv": b"text,n\n", "tsv": b"text\tn\n"},
    "a name twice": {"csv": b"text,text\na,b\n", "tsv": b"text\ttext\na\tb\n"},
    "an open quote": {"csv": b'text,n\n"a,1\n'},
    "no object": {"jsonl": b"[1]\n"},
    "half an object": {"jsonl": b'{"text": \n'},
    "half a character": {"jsonl": b'{"text": "\\ud800"}\n'},
    "another key": {"jsonl": b'{"text": "a"}\n{"txt": "b"}\n'},
    "a number": {"jsonl": b'{"text": "a"}\n{"text": 1}\n'},
}


@pytest.mark.parametrize(
    ("fault", "kind", "packed"),
    [(fault, kind, packed) for fault, kinds in BAD.items() for kind in kinds
     for packed in (PACK if kind != "parquet" else [""])],
)  # fmt: skip
def test_a_bad_file_is_one_line_with_its_name_and_a_fix(
    fault: str, kind: str, packed: str, tmp_path: Path
) -> None:
    path = write(tmp_path / f"a.{kind}{packed}", PACK[packed](BAD[fault][kind]))

    def read_whole() -> None:
        reader = open_reader(path)
        list(reader.texts((reader.columns or ["text"])[0]))

    with pytest.raises(UserError) as refused:
        read_whole()
    line = str(refused.value)
    assert line.startswith(f"{path}:")
    assert ". Fix: " in line
    assert not line.endswith("Fix: ")
    assert refused.value.fix not in ("None", "")


@pytest.mark.parametrize("packed", [".gz", ".xz", ".bz2"])
def test_a_damaged_archive_says_a_fix(packed: str, tmp_path: Path) -> None:
    whole = PACK[packed](b"a line of text\n" * 1000)
    for content in (b"", b"junk" * 20, whole[: len(whole) // 2]):
        path = write(tmp_path / f"a.txt{packed}", content)
        with pytest.raises(UserError, match=r"\. Fix: \S"):
            list(open_reader(path).texts("text"))


@pytest.mark.parametrize(("given", "fix"), [("sentense.txt", r"did you mean .*sentence\.txt"), ("no*.txt", "'FOLDER"),
                                            ("zebra.csv", "a file that is there, seen from")])  # fmt: skip
def test_a_file_that_is_not_there_says_a_fix(given: str, fix: str, tmp_path: Path) -> None:
    (tmp_path / "sentence.txt").write_text("a")
    (tmp_path / "other.txt").write_text("a")
    with pytest.raises(UserError, match=rf"(no such file|matches no file).*Fix: .*{fix}"):
        find_files(str(tmp_path / given), "input")


def test_of_all_ranks_one_warns_of_a_file(tmp_path, monkeypatch, caplog):  # type: ignore[no-untyped-def]
    path = tmp_path / "text.csv"
    path.write_text("a cat\na dog\n")
    monkeypatch.setenv(console.SAID, str(tmp_path / "said"))
    with console.quiet("embedlab.data.readers"):  # a look that says nothing counts for nothing
        assert open_reader(path).columns is None
    for _ in range(3):
        assert open_reader(path).columns is None
    assert caplog.text.count("its first line is read as text") == 1
