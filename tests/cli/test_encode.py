"""`embedlab encode`: every kind of file in, vectors out in the same order."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import embedlab
from embedlab.cli import encode, meter
from embedlab.cli import texts as texts_of_commands
from embedlab.cli.main import main
from embedlab.errors import UserError
from tests.support import SENTENCES


@pytest.fixture(scope="module")
def ckpt(tiny: Callable[..., Path]) -> Path:
    return tiny("bert")


@pytest.fixture(scope="module")
def expected(ckpt: Path) -> np.ndarray:
    return np.asarray(embedlab.load(str(ckpt)).encode(list(SENTENCES)))


def write(path: Path, sentences: list[str]) -> Path:
    kind = "".join(path.suffixes)
    if kind == ".parquet":
        pq.write_table(pa.table({"n": list(range(len(sentences))), "text": sentences}), path)
        return path
    lines = {
        ".txt": sentences,
        ".tsv": ["n\tsentence", *(f"{i}\t{s}" for i, s in enumerate(sentences))],
        ".csv": [
            "n,sentence",
            *(f'{i},"{s.replace(chr(34), chr(34) * 2)}"' for i, s in enumerate(sentences)),
        ],
        ".jsonl": [json.dumps({"n": i, "sentence": s}) for i, s in enumerate(sentences)],
    }[kind.removesuffix(".gz")]
    data = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(data) if kind.endswith(".gz") else data)
    return path


@pytest.mark.parametrize("kind", ["txt", "txt.gz", "tsv", "csv.gz", "jsonl", "parquet"])
def test_every_input_gives_the_same_vectors_in_order(
    tmp_path: Path, ckpt: Path, expected: np.ndarray, kind: str
) -> None:
    source = write(tmp_path / f"in.{kind}", list(SENTENCES))
    out = tmp_path / "out.npy"
    assert main(["encode", str(source), str(out), f"ckpt={ckpt}", "chunk=5", "batch_size=3"]) == 0
    vectors = np.load(out)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_parquet_output_normalised(tmp_path: Path, ckpt: Path, expected: np.ndarray) -> None:
    source = write(tmp_path / "in.tsv", list(SENTENCES))
    out = tmp_path / "out.parquet"
    arguments = [f"ckpt={ckpt}", "normalize=true", "column=sentence"]
    assert main(["encode", str(source), str(out), *arguments]) == 0
    table = pq.read_table(out)
    assert table.column("row").to_pylist() == list(range(2, len(SENTENCES) + 2)), "the lines of the file"
    vectors = np.array(table.column("vector").to_pylist())
    np.testing.assert_allclose(vectors, expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-5)


def test_empty_rows(
    tmp_path: Path, ckpt: Path, expected: np.ndarray, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.txt", [SENTENCES[0], "", SENTENCES[1], "   ", SENTENCES[2]])
    out = tmp_path / "out.npy"
    assert main(["encode", str(source), str(out), f"ckpt={ckpt}"]) == 2
    line = capsys.readouterr().err
    assert f"{source}:2: an empty row" in line
    assert "empty=zero, or empty=skip into parquet" in line
    assert not out.exists()

    assert main(["encode", str(source), str(out), f"ckpt={ckpt}", "empty=zero", "chunk=2"]) == 0
    vectors = np.load(out)
    assert not vectors[[1, 3]].any()
    np.testing.assert_allclose(vectors[[0, 2, 4]], expected[:3], atol=1e-5)
    assert "2 empty rows: vectors of zeros" in capsys.readouterr().out

    parquet = tmp_path / "out.parquet"
    assert main(["encode", str(source), str(parquet), f"ckpt={ckpt}", "empty=skip", "chunk=1"]) == 0
    assert pq.read_table(parquet).column("row").to_pylist() == [1, 3, 5]


def test_an_error_late_in_the_file_keeps_the_old_output(
    tmp_path: Path, ckpt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.txt"
    source.write_bytes(b"good line\n" * 9 + b"caf\xe9\n")
    out = tmp_path / "out.npy"
    out.write_bytes(b"old")
    assert main(["encode", str(source), str(out), f"ckpt={ckpt}", "chunk=3", "overwrite=true"]) == 2
    assert f"{source}:10: not UTF-8" in capsys.readouterr().err
    assert out.read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.txt", "out.npy"]


@pytest.mark.parametrize(
    ("names", "arguments", "message"),
    [
        (("none.txt", "o.npy"), [], "no such file"),
        (("in.txt", "o.csv"), [], "unknown kind of output"),
        (("in.txt", "no/o.npy"), [], "no such folder"),
        (("in.doc", "o.npy"), [], "unknown kind of file"),
        (("empty.txt", "o.npy"), [], "the file is empty"),
        (("in.txt", "o.npy"), ["empty=drop"], "empty=drop"),
        (("in.txt", "o.npy"), ["empty=skip"], "would shift them"),
        (("in.txt", "o.npy"), ["column=text"], "one column, without a name"),
        (("in.txt", "o.npy"), ["chunk=0"], "chunk=0"),
        (("in.txt", "o.npy"), ["batch_size=0"], "batch_size=0"),
        (("two.tsv", "o.npy"), [], "has the columns a, b"),
        (("two.tsv", "o.npy"), ["column=c"], "column=c"),
        (("in.txt",), [], "output is missing"),
        (("in.txt", "o.npy"), ["ckpt=/nowhere"], "/nowhere"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    tmp_path: Path,
    ckpt: Path,
    capsys: pytest.CaptureFixture[str],
    names: tuple[str, ...],
    arguments: list[str],
    message: str,
) -> None:
    (tmp_path / "in.txt").write_text("a line\n")
    (tmp_path / "in.doc").write_text("a line\n")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "two.tsv").write_text("a\tb\nx\ty\n")
    before = sorted(tmp_path.rglob("*"))
    ckpts = [] if any(a.startswith("ckpt=") for a in arguments) else [f"ckpt={ckpt}"]
    assert main(["encode", *(str(tmp_path / name) for name in names), *ckpts, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert sorted(tmp_path.rglob("*")) == before


def test_cut_texts_are_counted(tmp_path: Path, ckpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.txt", ["a cat", "cat " * 5000, "dog " * 5000])
    assert main(["encode", str(source), str(tmp_path / "out.npy"), f"ckpt={ckpt}"]) == 0
    assert "2 texts were cut" in capsys.readouterr().err
    short = write(tmp_path / "short.txt", ["a cat"])
    assert main(["encode", str(short), str(tmp_path / "short.npy"), f"ckpt={ckpt}"]) == 0
    assert "cut" not in capsys.readouterr().err


def test_input_over_itself_is_refused(tmp_path: Path, ckpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "v.parquet", list(SENTENCES))
    content = source.read_bytes()
    assert main(["encode", str(source), str(source), f"ckpt={ckpt}"]) == 2
    assert "same file" in capsys.readouterr().err
    assert source.read_bytes() == content


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("normalize=maybe", r"not true or false \(normalize=maybe\)"),
        ("chunk=true", r"must be a positive whole number \(chunk=True\)"),
        ("chunk=null", r"must be a positive whole number \(chunk=null\)"),
    ],
)
def test_a_switch_is_a_switch_and_a_number_a_number(tmp_path: Path, argument: str, line: str) -> None:
    (tmp_path / "in.txt").write_text("a cat\n")
    with pytest.raises(UserError, match=line):
        encode.main([str(tmp_path / "in.txt"), str(tmp_path / "out.npy"), "ckpt=mini", argument])


def test_an_output_that_is_a_folder_is_said_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a cat\n")
    (tmp_path / "out.npy").mkdir()
    with pytest.raises(UserError, match=r"out.npy: is a folder \(output\)"):
        encode.main([str(tmp_path / "in.txt"), str(tmp_path / "out.npy"), "ckpt=nothing-is-loaded"])


@pytest.mark.parametrize("keys", [{"chunk": 1}, {"chunk": 7}, {"window": 1}, {"chunk": 10**9}])
def test_windows_change_no_vector(tmp_path: Path, ckpt: Path, keys: dict[str, int]) -> None:
    texts = [*SENTENCES, "cat " * 300_000, *SENTENCES, "the dog ran " * 9000]
    source = write(tmp_path / "in.txt", texts)
    arguments = [f"{key}={value}" for key, value in keys.items()]
    assert main(["encode", str(source), str(tmp_path / "out.npy"), f"ckpt={ckpt}", *arguments]) == 0
    expected = embedlab.load(str(ckpt)).encode(texts)
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, atol=1e-6)


def test_the_bar_moves_after_every_batch_in_texts_and_bytes(
    tmp_path: Path, ckpt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves: list[tuple[int, float]] = []

    @contextmanager
    def bar(
        label: str, unit: str, total: int, show: bool | None = None, lines: bool = True
    ) -> Iterator[Callable[..., None]]:
        assert (unit, total, show) == ("texts", source.stat().st_size, None)
        yield lambda count, completed, more="": moves.append((count, completed))

    monkeypatch.setattr(meter, "progress_bar", bar)
    monkeypatch.setattr(texts_of_commands, "progress_bar", bar)
    texts = [f"{i} {'word ' * (i % 7)}" for i in range(100)]
    source = write(tmp_path / "in.txt", texts)
    arguments = [f"ckpt={ckpt}", "chunk=40", "batch_size=4"]
    assert main(["encode", str(source), str(tmp_path / "out.npy"), *arguments]) == 0
    assert len(moves) == 25
    assert moves == sorted(moves)
    assert moves[0][0] == 4
    assert moves[-1] == (100, source.stat().st_size)
    moves.clear()
    assert main(["search", "index", str(source), str(tmp_path / "index"), *arguments]) == 0
    assert moves[-1] == (100, source.stat().st_size)


@pytest.mark.parametrize(
    ("name", "content", "arguments", "rows"),
    [
        ("in.csv", "first\nsecond\n", [], 2),
        ("in.csv", "title\nsecond\n", ["column=title"], 1),
        ("in.csv", "title\nsecond\n", ["header=true"], 1),
        ("in.csv", "text\nsecond\n", ["header=false"], 2),
        ("in.tsv", "1\tfirst\n2\tsecond\n", ["column=1"], 2),
        ("in.csv", "n\ttext\n2\tsecond\n", [], 1),
        ("in.txt", "first\rsecond\rthird\r", [], 3),
    ],
)
def test_layouts(
    tmp_path: Path, ckpt: Path, name: str, content: str, arguments: list[str], rows: int
) -> None:
    (tmp_path / name).write_text(content, newline="")
    assert main(["encode", str(tmp_path / name), str(tmp_path / "o.npy"), f"ckpt={ckpt}", *arguments]) == 0
    assert len(np.load(tmp_path / "o.npy")) == rows


@pytest.mark.parametrize("text", ["x" * (33 << 20), "x" * (5 << 20)])
@pytest.mark.parametrize("command", [["encode"], ["search", "index"]])
def test_a_text_without_end_is_one_line(
    tmp_path: Path, ckpt: Path, capsys: pytest.CaptureFixture[str], text: str, command: list[str]
) -> None:
    (tmp_path / "in.txt.xz").write_bytes(lzma.compress(text.encode(), preset=0))
    before = sorted(tmp_path.rglob("*"))
    assert main([*command, str(tmp_path / "in.txt.xz"), str(tmp_path / "o.npy"), f"ckpt={ckpt}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "a line of more than 32 MiB" in line or "5,242,880 characters" in line
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["in.txt", "in.csv", "in.jsonl"])
@pytest.mark.parametrize("chunk", [2, 100])
@pytest.mark.parametrize("command", [["encode"], ["search", "index"], ["train"]])
def test_a_text_that_is_too_long_is_named_by_its_row(
    tmp_path: Path,
    ckpt: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    chunk: int,
    name: str,
) -> None:
    monkeypatch.setattr("embedlab.encoders.tokenization.LONGEST", 5000)
    monkeypatch.setattr("embedlab.data.build._CHUNK", chunk)
    source = write(tmp_path / name, [*SENTENCES[:5], "x" * 6000, *SENTENCES[:5]])
    told = [str(source), str(tmp_path / "o.npy"), f"ckpt={ckpt}", f"chunk={chunk}"]
    if command == ["train"]:
        told = ["backbone=local", f"backbone.path={ckpt}", "trainer=cpu", f"data.files={source}", "data.batch_size=2",
                "data.max_chars=10000", f"data.cache_dir={tmp_path}", f"hydra.run.dir={tmp_path / 'run'}"]  # fmt: skip
    assert main([*command, *told]) == 2
    (line,) = [e for e in capsys.readouterr().err.splitlines() if e.startswith("embedlab: ")]
    row = 6 + (name == "in.csv")
    assert line.startswith(f"embedlab: {source}:{row}: a text of 6,000 characters has no space")
    assert not (tmp_path / "o.npy").exists()
