"""`embedlab quantize`: files and folders of vectors in another store, with one set of ranges, resumable."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from embedlab.cli.main import main
from embedlab.corpus import quantize
from embedlab.corpus.parts import Manifest, Parts
from embedlab.corpus.quantize import Source, calibration, float_blocks
from embedlab.corpus.vector_files import read_vectors, vector_file
from embedlab.encoders.codes import RANGES, STORES, Codes, Store, calibrate
from embedlab.errors import UserError

X = np.random.default_rng(0).normal(size=(50, 13)).astype(np.float32)


@pytest.fixture(params=[".npy", ".parquet"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with vector_file(path := tmp_path / f"vectors{request.param}") as target:
        target.add(range(30), X[:30])
        target.add(range(30, 50), X[30:])
    return path


def folder(path: Path, rows: int = 20) -> Path:
    manifest = Manifest(
        encoder="mini", revision=None, dim=13, prompt="", max_length=None, pooling={}, dtype=None, normalize=False,
        store="float32", ranges=None, suffix=".npy", empty="error", batch_size=None, chunk=8, window=1,
        part_rows=rows, files=[], fingerprint="f",
    )  # fmt: skip
    parts = Parts.begin(path, manifest, Codes("float32", 13))
    for number, start in enumerate(range(0, len(X), rows)):
        with parts.writing(number) as (target, counts):
            some = X[start : start + rows]
            target.add(range(start, start + len(some)), some)
            counts.rows = len(some)
    assert parts.finish(len(X)) is not None
    return path


def codes_of(path: Path) -> NDArray[np.generic]:
    return np.concatenate([codes for _, codes in read_vectors(path)])


def run(*arguments: object) -> None:
    assert main(["quantize", *map(str, arguments)]) == 0


@pytest.mark.parametrize("store", STORES)
def test_a_file(file: Path, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    out = file.with_name(f"out{file.suffix}")
    run(file, out, f"store={store}")
    codes = Codes(store, 13, calibrate([X]))
    np.testing.assert_array_equal(codes_of(out), codes.encode(X))
    assert f"50 vectors: {out}, {out.stat().st_size:,} bytes" in capsys.readouterr().out
    ranges = file.with_name(RANGES)
    assert ranges.exists() == codes.calibrated
    if codes.calibrated:
        np.testing.assert_array_equal(np.load(ranges), [X.min(0), X.max(0)])


@pytest.mark.parametrize("store", ["int8", "ubinary"])
def test_the_parts_of_a_folder_are_coded_alike(tmp_path: Path, store: Store) -> None:
    source = folder(tmp_path / "in")
    run(source, tmp_path / "out", f"store={store}")
    out = Parts.read(tmp_path / "out")
    codes = Codes(store, 13, calibrate([X]))
    found = np.concatenate([codes_of(out.path(number)) for number in out.whole()])
    np.testing.assert_array_equal(found, codes.encode(X))
    assert out.total() == Parts.read(source).total()
    digest = hashlib.sha256(np.stack([X.min(0), X.max(0)]).tobytes()).hexdigest()
    expected = replace(Parts.read(source).manifest, store=store, ranges=digest if codes.calibrated else None)
    assert out.manifest == expected
    assert (tmp_path / "out" / "done.json").is_file()
    with pytest.raises(UserError, match=f"holds {store} codes"):
        Source(tmp_path / "out")


def test_a_folder_that_was_begun_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, copied = folder(tmp_path / "in"), list[Path]()
    real = quantize._copy

    def stopping(file: Path, target: object) -> None:
        if len(copied) == 2:
            raise KeyboardInterrupt
        copied.append(file)
        real(file, target)  # type: ignore[arg-type]

    monkeypatch.setattr(quantize, "_copy", stopping)
    with pytest.raises(KeyboardInterrupt):
        quantize.quantize(Source(source), tmp_path / "out", "int8")
    monkeypatch.setattr(quantize, "_copy", lambda file, target: (copied.append(file), real(file, target)))
    quantize.quantize(Source(source), tmp_path / "out", "int8")
    assert len(copied) == 3
    quantize.quantize(Source(source), tmp_path / "whole", "int8")
    names = sorted(p.name for p in (tmp_path / "whole").iterdir())
    assert names == sorted(p.name for p in (tmp_path / "out").iterdir())
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_calibration_is_one_for_all(file: Path) -> None:
    np.save(other := file.with_name("sample.npy"), X[:9])
    expected = np.stack([X[:9].min(0), X[:9].max(0)])
    np.testing.assert_array_equal(calibration(other), expected)
    out = file.with_name(f"out{file.suffix}")
    run(file, out, "store=uint8", f"calibration={other}")
    np.testing.assert_array_equal(codes_of(out), Codes("uint8", 13, expected).encode(X))
    again = file.with_name(f"again{file.suffix}")
    run(file, again, f"calibration={file.with_name(RANGES)}", "store=uint8")
    assert again.read_bytes() == out.read_bytes()


def broken(path: Path, what: str) -> None:
    content = {
        "nan": np.where(np.arange(13) == 3, np.nan, X[:4]),
        "codes": np.zeros((3, 4), np.int8),
        "flat": X[0],
        "empty": X[:0],
    }
    np.save(path, content[what]) if what in content else path.write_bytes(b"nothing")


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("nan", "in.npy:1: a vector is not finite"),
        ("codes", "holds int8 of shape (4,) a row, no floats"),
        ("flat", "no floats"),
        ("empty", "has no rows"),
        ("bytes", "holds no vectors"),
    ],
)
def test_what_holds_no_vectors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str, told: str
) -> None:
    broken(tmp_path / "in.npy", what)
    for store in ("int8", "binary"):
        assert main(["quantize", str(tmp_path / "in.npy"), str(tmp_path / "out.npy"), f"store={store}"]) == 2
        *warnings, line = capsys.readouterr().err.splitlines()
        assert told in line
        assert all("rows or more say more" in warning for warning in warnings)
    assert not (tmp_path / "out.npy").exists()


def test_commands_that_cannot_be(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: object) -> str:
        assert main(["quantize", *map(str, arguments)]) == 2
        *warnings, line = capsys.readouterr().err.splitlines()
        assert all("rows or more say more" in warning for warning in warnings)
        return line

    out = tmp_path / f"out{file.suffix}"
    assert "(store=int4)" in refused(file, out, "store=int4")
    assert "no such file" in refused(tmp_path / "none.npy", out)
    assert "the same" in refused(file, file)
    for store in ("int8", "ubinary"):
        assert "nowhere: no such folder" in refused(file, tmp_path / "nowhere" / out.name, f"store={store}")
    assert "unknown kind of output" in refused(file, tmp_path / "out.txt")
    other = tmp_path / f"out{'.npy' if file.suffix == '.parquet' else '.parquet'}"
    for store in STORES:  # whose rows would have other numbers, or those of other texts
        assert f"end its name in {file.suffix}" in refused(file, other, f"store={store}")
    assert not other.exists()
    np.save(tmp_path / "narrow.npy", X[:, :5])
    assert "width 5, the vectors are of width 13" in refused(
        file, out, f"calibration={tmp_path / 'narrow.npy'}"
    )
    np.save(tmp_path / RANGES, X[:3])
    assert "holds no ranges" in refused(file, out, f"calibration={tmp_path / RANGES}")
    parts = folder(tmp_path / "in")
    (parts / "done.json").unlink()
    assert "has no done.json" in refused(parts, tmp_path / "coded")
    assert "holds other things" in refused(folder(tmp_path / "more"), file.parent)


def test_blocks_are_floats(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X.astype(np.float16))
    ((rows, vectors),) = float_blocks(tmp_path / "x.npy")
    assert vectors.dtype == np.float32
    assert list(rows) == list(range(50))


def test_int8_of_an_encoded_file_is_what_encode_writes(tiny: Callable[..., Path], tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"text {i} of some\n" for i in range(12)))
    ckpt = f"ckpt={tiny('bert')}"
    assert main(["encode", str(texts), str(tmp_path / "x.npy"), ckpt]) == 0
    run(tmp_path / "x.npy", tmp_path / "q.npy", "store=int8")
    arguments = ["store=int8", f"calibration={tmp_path / 'x.npy'}"]
    (tmp_path / "b").mkdir()
    assert main(["encode", str(texts), str(tmp_path / "b/q.npy"), ckpt, *arguments]) == 0
    assert (tmp_path / "b/q.npy").read_bytes() == (tmp_path / "q.npy").read_bytes()
