"""Vectors that were encoded before: folders of parts in every store, read by their manifest, and what is missing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

import embedlab
from embedlab.cli.main import main
from embedlab.corpus.search import Index
from embedlab.corpus.stored import Part, Stored, find_vectors
from embedlab.encoders.codes import Codes
from tests.support import SENTENCES

TEXTS = [f"{a} {b}" for a in SENTENCES[:8] for b in SENTENCES[8:]]


@pytest.fixture
def encoded(
    tmp_path: Path, tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> Callable[..., Path]:
    """encoded("store=int8", ...) -> a folder of parts."""
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    np.save(tmp_path / "some.npy", embedlab.load(str(tiny("bert"))).encode(TEXTS))

    def encode(*keys: str) -> Path:
        command = [
            "encode",
            str(tmp_path / "texts.txt"),
            str(tmp_path / "parts"),
            f"ckpt={tiny('bert')}",
            "part_rows=10",
        ]
        assert main([*command, *keys]) == 0
        capsys.readouterr()
        return tmp_path / "parts"

    return encode


@pytest.mark.parametrize("format", ["npy", "parquet"])
@pytest.mark.parametrize("store", ["float32", "float16", "int8", "uint8", "binary", "ubinary"])
def test_a_folder_of_parts_is_searched_in_any_store(
    tmp_path: Path, encoded: Callable[..., Path], store: str, format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [f"calibration={tmp_path / 'some.npy'}"] if store in ("int8", "uint8") else []
    folder, index = encoded(f"store={store}", f"format={format}", *more), tmp_path / "index"
    assert main(["search", "index", str(folder), str(index), f"texts={tmp_path / 'texts.txt'}"]) == 0
    capsys.readouterr()
    assert main(["search", "query", str(index), TEXTS[37], "k=1"]) == 0, "by the encoder of the manifest"
    score, row, text = capsys.readouterr().out.rstrip("\n").split("\t")
    if store not in ("binary", "ubinary"):
        assert (row, text) == ("38", TEXTS[37])
        assert float(score) == pytest.approx(1, abs=2e-2)
    opened = Index(index)
    floats = np.load(tmp_path / "some.npy")
    want = floats if store in ("float32", "float16", "int8", "uint8") else np.where(floats > 0, 1, -1)
    want = want / np.linalg.norm(want, axis=1, keepdims=True)
    found = opened.stored.take(np.arange(len(TEXTS))).numpy()
    assert (found * want).sum(axis=1).min() > (0.999 if store in ("int8", "uint8") else 0.99999)
    assert len(list(index.glob("vectors.npy"))) == (format == "parquet"), ".npy parts stay where they are"
    assert opened.info.fingerprint


BROKEN: dict[str, Callable[[NDArray[np.float32]], bytes | NDArray[Any] | None]] = {
    "missing": lambda ranges: None,
    "empty": lambda ranges: b"",
    "text": lambda ranges: b"lo,hi\n0,1\n",
    "narrower": lambda ranges: ranges[:, 1:],
    "turned round": lambda ranges: ranges[::-1],
    "no numbers": lambda ranges: np.full_like(ranges, np.nan),
    "whole numbers": lambda ranges: ranges.astype(int),
    "objects": lambda ranges: ranges.astype(object),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_ranges_are_named(
    kind: str, tmp_path: Path, encoded: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = encoded("store=int8", "format=npy", f"calibration={tmp_path / 'some.npy'}")
    index = ["search", "index", str(folder), str(tmp_path / "index")]
    assert main(index) == 0
    query = ["search", "query", str(tmp_path / "index"), "words"]
    for file, command in (
        (tmp_path / "index" / "ranges.npy", query),
        (folder / "ranges.npy", [*index, "overwrite=true"]),
    ):
        whole = file.read_bytes()
        content = BROKEN[kind](np.load(file))
        file.unlink()
        if isinstance(content, bytes):
            file.write_bytes(content)
        elif content is not None:
            np.save(file, content)
        capsys.readouterr()
        assert main(command) == 2
        line = capsys.readouterr().err
        assert f"{file}: is damaged (" in line
        assert line.count("\n") == 1
        file.write_bytes(whole)
    assert main(query) == 0, "the index is as it was"


def test_parts_that_are_not_all_there(
    tmp_path: Path, encoded: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = encoded("format=npy")
    (folder / "done.json").rename(tmp_path / "done.json")
    assert main(["search", "index", str(folder), str(tmp_path / "index")]) == 2
    assert "has no done.json" in capsys.readouterr().err
    (tmp_path / "done.json").rename(folder / "done.json")
    assert main(["search", "index", str(folder), str(tmp_path / "index")]) == 0
    for number in (0, 6, 2):  # the last one, too
        part = folder / f"part-{number:06}.npy"
        part.rename(tmp_path / part.name)
        for command in (["search", "index"], ["quantize"]):
            assert main([*command, str(folder), str(tmp_path / "other")]) == 2
            assert f"{part.name} is missing" in capsys.readouterr().err
        (tmp_path / part.name).rename(part)
    content = (folder / "done.json").read_text()
    for damage in ("{", "[]", "{}", content.replace("64", '"x"'), content.replace("64", "63")):
        (folder / "done.json").write_text(damage)
        assert main(["search", "index", str(folder), str(tmp_path / "other")]) == 2
        assert "done.json" in capsys.readouterr().err
    (folder / "done.json").write_text(content)
    (folder / "part-000002.npy").unlink()
    assert main(["search", "query", str(tmp_path / "index"), "a cat"]) == 2
    assert "part-000002.npy: no such file: a part of the vectors is missing" in capsys.readouterr().err


def test_parts_that_were_encoded_anew(
    tmp_path: Path, encoded: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The same rows and width, but other vectors: only the manifest tells."""
    folder = encoded("format=npy")
    assert main(["search", "index", str(folder), str(tmp_path / "index")]) == 0
    assert main(["search", "query", str(tmp_path / "index"), "a cat"]) == 0
    folder.rename(tmp_path / "old")
    encoded("format=npy", "normalize=true")
    assert main(["search", "query", str(tmp_path / "index"), "a cat"]) == 2
    assert "manifest.json: its parts were encoded anew, or moved" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["file", "folder"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("rows", [1, 2, 3000])
def test_files_that_were_encoded_anew(
    tmp_path: Path, form: str, dtype: Any, rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same rows and width, but in another order or of other texts; a copy or a later date is the same file."""
    (tmp_path / "x").mkdir()
    x = np.random.default_rng(0).normal(size=(rows, 8)).astype(dtype)
    files = [tmp_path / "x" / f"{i}.npy" for i in range(1 if form == "file" else 3)]
    for file in files:
        np.save(file, x)
    given, index = files[0] if form == "file" else tmp_path / "x", tmp_path / "index"
    assert main(["search", "index", str(given), str(index)]) == 0
    np.save(files[-1], x)
    assert len(Index(index)) == rows * len(files)
    np.save(files[-1], x[::-1] if rows > 1 else -x)
    capsys.readouterr()
    assert main(["search", "query", str(index), f"queries={files[0]}", "k=1"]) == 2
    assert f"index: its vectors were encoded anew ({tmp_path / 'x'})" in capsys.readouterr().err


def test_rows_keep_their_numbers_where_some_were_left_out(
    tmp_path: Path, encoded: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [*TEXTS[:12], "", *TEXTS[12:]]
    folder = encoded  # the fixture writes the texts first
    (tmp_path / "texts.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert main(["search", "index", str(folder("empty=skip")), str(tmp_path / "index")]) == 0
    capsys.readouterr()
    assert main(["search", "query", str(tmp_path / "index"), lines[30], "k=1"]) == 0
    assert capsys.readouterr().out.split("\t")[1].strip() == "31"


@pytest.mark.parametrize("form", ["parts", "file"])
@pytest.mark.parametrize("suffix", ["txt", "csv", "jsonl"])
def test_texts_are_found_where_rows_were_left_out(
    tmp_path: Path, tiny: Callable[..., Path], form: str, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["", *TEXTS[:5], "", " ", *TEXTS[5:9], ""]
    lines = {
        "csv": ["text", *('"' + t.replace('"', '""') + '"' for t in texts)],
        "jsonl": [json.dumps({"text": t}) for t in texts],
    }
    (file := tmp_path / f"in.{suffix}").write_text(
        "\n".join(lines.get(suffix, texts)) + "\n", encoding="utf-8"
    )
    out = tmp_path / ("x.parquet" if form == "file" else "parts/")
    more = ["part_rows=4"] if form == "parts" else []
    assert (
        main(["encode", str(file), str(out) + "/" * bool(more), f"ckpt={tiny('bert')}", "empty=skip", *more])
        == 0
    )
    assert main(["search", "index", str(out), str(tmp_path / "index"), f"texts={file}"]) == 0
    capsys.readouterr()
    index = Index(tmp_path / "index")
    assert index.texts(range(9)) == TEXTS[:9]
    (tmp_path / "other.txt").write_text("one\n\n" * 3)
    assert main(["search", "index", str(out), str(tmp_path / "no"), f"texts={tmp_path / 'other.txt'}"]) == 2
    assert "texts for 9 vectors" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["file", "folder"])
@pytest.mark.parametrize("suffix", [".npy", ".NPY", ".parquet", ".Parquet"])
def test_what_encode_writes_is_found_by_its_suffix_in_any_case(
    tmp_path: Path, tiny: Callable[..., Path], suffix: str, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.txt").write_text("\n".join(TEXTS[:6]) + "\n", encoding="utf-8")
    (tmp_path / "out").mkdir()
    out, ckpt = tmp_path / "out" / f"x{suffix}", f"ckpt={tiny('bert')}"
    assert main(["encode", str(tmp_path / "in.txt"), str(out), ckpt]) == 0
    given, index = out if form == "file" else out.parent, str(tmp_path / "index")
    assert main(["search", "index", str(given), index, f"texts={tmp_path / 'in.txt'}"]) == 0
    capsys.readouterr()
    if suffix.lower() == ".npy":
        assert main(["search", "query", index, f"queries={out}", "k=1"]) == 0
        assert [line.split("\t")[2] for line in capsys.readouterr().out.splitlines()] == [*"123456"]
    assert Index(index).texts(range(6)) == TEXTS[:6]


@pytest.mark.parametrize("block", [1, 3, 100])
def test_any_rows_in_any_order(tmp_path: Path, block: int) -> None:
    x = np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32)
    cuts = [0, 7, 8, 20]
    for i, (start, end) in enumerate(itertools.pairwise(cuts)):
        np.save(tmp_path / f"{i}.npy", x[start:end])
    stored = Stored([Part(tmp_path / f"{i}.npy", n) for i, n in enumerate((7, 1, 12))], Codes("float32", 6))
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    rows = np.array([19, 0, 7, 7, 6, 8, 3])
    np.testing.assert_allclose(stored.take(rows).numpy(), unit[rows], atol=1e-6)
    pieces = list(stored.pieces(block))
    np.testing.assert_allclose(np.concatenate([stored.block(*p).numpy() for p in pieces]), unit, atol=1e-6)
    assert max(end - first for first, end in pieces) <= block


def test_what_holds_no_vectors(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    assert find_vectors(tmp_path / "a.txt") is None
    assert find_vectors(tmp_path / "nowhere.npy") is None


@pytest.mark.parametrize("kind", ["exact", "ivf_flat", "hnsw"])
@pytest.mark.parametrize("form", ["npy", "parquet"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_vectors_that_are_not_finite_are_no_index(
    tmp_path: Path, kind: str, form: str, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    x[41, 2] = value
    path = tmp_path / f"x.{form}"
    if form == "npy":
        np.save(path, x)
    else:
        vector = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 4)
        pq.write_table(pa.table({"row": range(60), "vector": vector}), path)
    assert main(["search", "index", str(path), str(tmp_path / "index"), f"kind={kind}"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert path.name in line
    assert "not finite" in line
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize("shape", [(5, 0), (0, 5), (5,), (2, 2, 2)])
@pytest.mark.parametrize("dtype", [np.float32, np.int8])
def test_arrays_that_are_no_vectors(
    tmp_path: Path, shape: tuple[int, ...], dtype: type, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "x.npy", np.zeros(shape, dtype))
    assert main(["search", "index", str(tmp_path / "x.npy"), str(tmp_path / "index")]) == 2
    assert "x.npy: " in capsys.readouterr().err
    np.save(tmp_path / "x.npy", np.zeros((5, 5), np.int8))
    assert main(["search", "index", str(tmp_path / "x.npy"), str(tmp_path / "index")]) == 2
    assert "is no array of float16" in capsys.readouterr().err
