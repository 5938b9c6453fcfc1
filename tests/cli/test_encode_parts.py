"""`embedlab encode` into folders of parts, and one file that resumes: the same bytes whoever wrote them, and however
often they were killed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import embedlab
from embedlab.cli import encode
from embedlab.cli.main import main
from embedlab.encoders.codes import Codes, calibrate
from embedlab.locks import WorkFolder
from tests.support import SENTENCES
from tests.test_full_disk import disk_of

TEXTS = [f"{SENTENCES[i % 16]} {i}" for i in range(75)]


@pytest.fixture(scope="module")
def ckpt(tiny: Callable[..., Path]) -> Path:
    return tiny("bert")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """75 texts in three files."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "a.txt").write_text("".join(f"{text}\n" for text in TEXTS[:30]))
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[30:50]))
    pq.write_table(pa.table({"text": TEXTS[50:]}), folder / "c.parquet", row_group_size=9)
    return folder


@pytest.fixture(scope="module")
def whole(ckpt: Path, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process writes: parts of 10 rows."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert run(ckpt, inputs, out) == 0
    return out


def run(ckpt: Path, inputs: Path, out: Path, *more: str) -> int:
    told = [f"ckpt={ckpt}", "device=cpu", "chunk=4"]
    told += [] if any(m.startswith("part_rows=") for m in more) else ["part_rows=10"]
    return main(["encode", str(inputs / "*.*"), str(out), *told, *more])


def seen(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def test_rows_are_those_of_all_files_and_vectors_are_the_encoders(ckpt: Path, whole: Path) -> None:
    parts = [pq.read_table(path) for path in sorted(whole.glob("*.parquet"))]
    assert [len(part) for part in parts] == [10] * 7 + [5]
    table = pa.concat_tables(parts)
    assert table.column("row").to_pylist() == list(range(75))
    expected = embedlab.load(str(ckpt)).encode(TEXTS)
    np.testing.assert_allclose(np.array(table.column("vector").to_pylist()), expected, atol=1e-5)
    assert json.loads((whole / "done.json").read_text()) == {"parts": 8, "rows": 75, "vectors": 75}


@pytest.mark.parametrize("shards", [1, 3, 16])
def test_any_number_of_shards_writes_the_same_bytes(
    shards: int, ckpt: Path, inputs: Path, whole: Path, tmp_path: Path
) -> None:
    for shard in reversed(range(shards)):
        assert run(ckpt, inputs, tmp_path / "out", f"shard={shard}/{shards}") == 0
    assert seen(tmp_path / "out") == seen(whole)


def test_so_do_two_processes(ckpt: Path, inputs: Path, whole: Path, tmp_path: Path) -> None:
    assert run(ckpt, inputs, tmp_path / "out", "devices=2") == 0
    assert seen(tmp_path / "out") == seen(whole)


def test_each_process_of_a_launcher_takes_its_parts(
    ckpt: Path, inputs: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under `srun` and torchrun: rank r of W in shard i of n takes p = iW + r modulo nW."""
    for rank in range(2):
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", 2)):
            monkeypatch.setenv(name, str(value))
        assert run(ckpt, inputs, tmp_path / str(rank), "shard=1/2") == 0
    numbers = [{int(p.stem[-6:]) for p in (tmp_path / str(rank)).glob("*.parquet")} for rank in range(2)]
    assert numbers == [{2, 6}, {3, 7}]


@pytest.mark.parametrize("kind", ["shards", "together", ".npy", ".parquet"])
def test_kills_change_no_byte(kind: str, ckpt: Path, tmp_path: Path) -> None:
    """SIGKILL at lines of the writing code that are drawn (`tests.cli.killed_encode`): what a reader sees is whole at
    once, and in the end it is what a run wrote that nobody touched."""
    source = tmp_path / "in.txt"
    source.write_text("".join(f"{text}\n" for text in TEXTS * 2))
    command = [
        sys.executable,
        "-m",
        "tests.cli.killed_encode",
        str(ckpt),
        str(source),
        str(tmp_path),
        kind,
        "7",
    ]
    environment = os.environ | {"PYTHONPATH": str(Path(embedlab.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    assert found
    assert all(found)


# other settings, other folders


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("max_length=16", "max_length is null, this run has 16"),
        ("normalize=true", "normalize is false, this run has true"),
        ("prompt='query: '", 'prompt is "", this run has query:'),
        ("pooling=cls", "pooling.name is mean, this run has cls"),
        ("dtype=bfloat16", "dtype is null, this run has bfloat16"),
        ("store=float16", "store is float32, this run has float16"),
        ("format=npy", "suffix is .parquet, this run has .npy"),
        ("batch_size=2", "batch_size is null, this run has 2"),
        ("chunk=5", "chunk is 4, this run has 5"),
        ("part_rows=9", "part_rows is 10, this run has 9"),
        ("empty=skip", "empty is error, this run has skip"),
        ("input_hash=stat", "input_hash is sha256, this run has stat"),
    ],
)
def test_what_differs_is_one_line_with_both_values(
    more: str, said: str, ckpt: Path, inputs: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = seen(whole)
    capsys.readouterr()
    assert run(ckpt, inputs, whole, more) == 2
    (line,) = (x for x in capsys.readouterr().err.splitlines() if x.startswith("embedlab: /"))
    assert line.startswith(f"embedlab: {whole / 'manifest.json'}: {said}")
    assert seen(whole) == before


def test_a_header_is_part_of_the_input(
    ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_text("text\na cat\n")
    assert run(ckpt, tmp_path, tmp_path / "out") == 0
    assert run(ckpt, tmp_path, tmp_path / "out", "header=false") == 2
    assert f"the column of {tmp_path / 'a.csv'} is text, this run has null" in capsys.readouterr().err


def test_another_input_and_another_model_are_named(
    ckpt: Path, tiny: Callable[..., Path], inputs: Path, whole: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    changed, more, same = (
        Path(shutil.copytree(inputs, tmp_path / name)) for name in ("changed", "more", "same")
    )
    (changed / "b.jsonl").write_text((inputs / "b.jsonl").read_text().replace("a", "e"))
    (more / "d.txt").write_text("one more\n")
    assert run(ckpt, changed, whole) == 2
    assert run(ckpt, more, whole) == 2
    assert run(tiny("bert", layers=1), inputs, whole) == 2
    assert run(ckpt, same, whole) == 0
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("embedlab: /")]
    said = (
        "b.jsonl is another one now: its sha256 was ",
        "number of files is 3, this run has 4",
        "fingerprint is ",
    )
    assert len(lines) == 3
    assert all(part in line for part, line in zip(said, lines, strict=True))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{in}", "{new}", "shard=16/16"], "0 to 15 (shard=16/16)"),
        (["{in}", "{new}", "shard=-1/16"], "(shard=-1/16)"),
        (["{in}", "{new}", "shard=1"], "(shard=1)"),
        (["{in}", "{new}", "shard=0/0"], "(shard=0/0)"),
        (["{in}", "{new}", "part_rows=0"], "(part_rows=0)"),
        (["{in}", "{new}/", "devices=0"], "(devices=0)"),
        (["{in}", "{new}/", "devices=2", "device=cuda:1"], "(device=cuda:1)"),
        (["{in}", "{new}/", "format=csv"], "(format=csv)"),
        (["{in}", "{new}/", "input_hash=name"], "(input_hash=name)"),
        (["{in}", "{new}/", "empty=skip", "format=npy"], "would shift them"),
        (["{in}", "{new}/", "store=int8"], "needs the range of each feature (store=int8)"),
        (["{in}", "{new}/", "store=int4"], "no such store"),
        (["{in}", "{foreign}", "part_rows=9"], "holds other things than encoded parts, such as notes.txt"),
        (["{in}", "{foreign}/notes.txt", "part_rows=9"], "is a file"),
        (["{in}", "{in}", "{new}.npy"], "(output="),
        (["{in}", "{other}", "{new}.npy"], "several files become a folder of parts"),
        (["{in}", "{new}.npy", "devices=2"], "several processes write a folder of parts"),
        (["{in}", "{new}.npy", "check=true"], "is about a folder of parts (check)"),
        (["{in}", "{new}/", "check=true"], "no such folder"),
        (["{in}", "{new}.npy", "part_rows=9"], "parts make a folder, and this is a file's name"),
        (
            ["{in}", "{new}/", "overwrite=yess"],
            "not true or false (overwrite=yess). Fix: overwrite=true or overwrite=false",
        ),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    arguments: list[str], said: str, ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"in": tmp_path / "in.txt", "other": tmp_path / "other.txt", "new": tmp_path / "new",
             "foreign": tmp_path / "foreign"}  # fmt: skip
    names["in"].write_text("a cat\n")
    names["other"].write_text("a dog\n")
    names["foreign"].mkdir()
    (names["foreign"] / "notes.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    command = ["encode", *(a.format(**names) for a in arguments), f"ckpt={ckpt}"]
    if said == "(output=":  # the same file twice is read once
        assert main(command) == 0
        return
    assert main(command) == 2
    (line,) = (x for x in capsys.readouterr().err.splitlines() if x.startswith("embedlab: "))
    assert said in line
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("suffix", [".npy", ".parquet", ""])
@pytest.mark.parametrize("more", ["{other}", "devices=2", "check=true"])
def test_what_only_a_folder_can_be_is_made_by_the_fix(
    suffix: str, more: str, ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / f"out{suffix}"
    (tmp_path / "in.txt").write_text("a cat\n")
    (tmp_path / "other.txt").write_text("a dog\n")
    if not suffix:
        out.mkdir()
    given = [str(tmp_path / "in.txt"), more.format(other=tmp_path / "other.txt"), f"ckpt={ckpt}"]
    assert main(["encode", *given, f"output={out}"]) == 2
    fix = capsys.readouterr().err.strip().rpartition("output=")[2].split()[0]
    job = encode._job(encode.compose("encode", [*given, f"output={fix}"], ("input", "output"), "input"))
    assert not job.single


# what is missing


def test_check_lists_what_is_missing_and_damaged(
    ckpt: Path, inputs: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    (out / "part-000001.parquet").unlink()
    (out / "part-000003.json").unlink()
    data = bytearray((out / "part-000005.parquet").read_bytes())
    data[40] ^= 1
    (out / "part-000005.parquet").write_bytes(data)
    with (out / "part-000006.parquet").open("ab") as file:
        file.write(b"more")
    capsys.readouterr()
    assert run(ckpt, inputs, out, "check=true") == 1
    names = [f"part-00000{n}.parquet: " for n in (1, 3, 5, 6)]
    found = capsys.readouterr().out.splitlines()
    assert found == [
        f"{n}{what}" for n, what in zip(names, ("missing", "missing", "damaged", "missing"), strict=True)
    ]
    assert not (out / "done.json").exists()
    assert run(ckpt, inputs, out) == 0
    (out / "done.json").unlink()
    assert run(ckpt, inputs, out, "check=true") == 0
    assert seen(out) == seen(whole)


def test_whole_parts_are_not_encoded_again(
    ckpt: Path, inputs: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    (out / "part-000004.parquet").unlink()
    encoded: list[str] = []
    inner = embedlab.SentenceEncoder.encode

    def counted(self: Any, sentences: list[str], **options: Any) -> Any:
        encoded.extend(sentences)
        return inner(self, sentences, **options)

    monkeypatch.setattr("embedlab.encoders.base.Encoder.encode", counted)
    assert run(ckpt, inputs, out) == 0
    assert encoded == TEXTS[40:50]
    assert seen(out) == seen(whole)


@pytest.mark.parametrize("name", ["manifest.json", "part-000000.parquet"])
def test_a_full_disk_is_one_line_and_the_next_run_goes_on(
    name: str, ckpt: Path, inputs: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with disk_of((whole / name).stat().st_size - 1):
        assert run(ckpt, inputs, out) == 2
    (line,) = (x for x in capsys.readouterr().err.splitlines() if x.startswith("embedlab: /"))
    assert line.startswith(f"embedlab: {out / name}")
    assert "ile too large after" in line
    assert out.exists() == (name != "manifest.json")
    assert not list(out.glob(".*"))
    assert run(ckpt, inputs, out) == 0
    assert seen(out) == seen(whole)


# stores


@pytest.mark.parametrize("store", ["float16", "int8", "uint8", "binary", "ubinary"])
@pytest.mark.parametrize("form", ["parquet", "npy"])
def test_every_store_holds_the_codes_of_the_vectors(
    store: Any, form: str, ckpt: Path, inputs: Path, whole: Path, tmp_path: Path
) -> None:
    tables = [pq.read_table(path) for path in sorted(whole.glob("*.parquet"))]
    vectors = np.array(pa.concat_tables(tables).column("vector").to_pylist(), np.float32)
    np.save(tmp_path / "some.npy", vectors)
    codes = Codes(store, vectors.shape[1], calibrate([vectors]))
    told = [f"store={store}", f"format={form}", f"calibration={tmp_path / 'some.npy'}"]
    assert run(ckpt, inputs, tmp_path / "out", *told) == 0
    paths = sorted((tmp_path / "out").glob(f"part-*.{form}"))
    found = [
        np.load(p) if form == "npy" else np.array(pq.read_table(p).column("vector").to_pylist())
        for p in paths
    ]
    np.testing.assert_array_equal(np.concatenate(found), codes.encode(vectors))
    if codes.calibrated:
        assert np.array_equal(np.load(tmp_path / "out" / "ranges.npy"), codes.ranges)
        assert (
            run(ckpt, inputs, tmp_path / "out", *told[:2], f"calibration={tmp_path / 'out' / 'ranges.npy'}")
            == 0
        )


def test_empty_rows_are_zeros_or_left_out(ckpt: Path, tmp_path: Path) -> None:
    texts = ["", "a cat", "", "", "", "a dog", "a bird"]
    (tmp_path / "a.txt").write_text("".join(f"{text}\n" for text in texts))
    told = ["part_rows=2", "empty=skip"]
    assert run(ckpt, tmp_path, tmp_path / "skip", *told) == 0
    parts = [pq.read_table(path) for path in sorted((tmp_path / "skip").glob("*.parquet"))]
    assert [part.column("row").to_pylist() for part in parts] == [[1], [], [5], [6]]
    assert run(ckpt, tmp_path, tmp_path / "zero", "part_rows=2", "empty=zero", "format=npy") == 0
    vectors = np.concatenate([np.load(path) for path in sorted((tmp_path / "zero").glob("*.npy"))])
    assert vectors.any(axis=1).tolist() == [bool(text) for text in texts]


# one file


class Killed(BaseException):
    """What stands for a kill: nothing but the hidden folder is left."""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(encode, "_KEPT", 10)
    source = tmp_path / "in.txt"
    source.write_text("".join(f"{text}\n" for text in TEXTS))
    return source


def one(ckpt: Path, source: Path, out: Path, *more: str) -> int:
    return main(["encode", str(source), str(out), f"ckpt={ckpt}", "device=cpu", "chunk=5", *more])


def stopped(ckpt: Path, source: Path, out: Path, error: type[BaseException] = Killed) -> None:
    """A run that ends in its fifth chunk."""
    chunks: list[int] = []
    inner = embedlab.SentenceEncoder.encode

    def breaking(self: Any, sentences: list[str], **options: Any) -> Any:
        chunks.append(len(sentences))
        if len(chunks) == 5:
            raise error
        return inner(self, sentences, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("embedlab.encoders.base.Encoder.encode", breaking)
        if error is KeyboardInterrupt:
            assert one(ckpt, source, out) == 130
        else:
            with pytest.raises(error):
                one(ckpt, source, out)


@pytest.mark.parametrize("error", [Killed, KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("name", ["a.npy", "a.parquet"])
def test_one_file_goes_on_where_it_was(
    name: str,
    error: type[BaseException],
    ckpt: Path,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "reference").mkdir()
    assert one(ckpt, source, tmp_path / "reference" / name) == 0
    out = tmp_path / name
    stopped(ckpt, source, out, error)
    assert not out.exists()
    assert one(tmp_path / "a-slip", source, out) == 2
    encoded: list[str] = []
    inner = embedlab.SentenceEncoder.encode
    monkeypatch.setattr(
        "embedlab.encoders.base.Encoder.encode",
        lambda self, sentences, **options: encoded.extend(sentences) or inner(self, sentences, **options),
    )
    assert one(ckpt, source, out) == 0
    assert encoded == TEXTS[20:]
    assert out.read_bytes() == (tmp_path / "reference" / name).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, "in.txt", "reference"])


def test_what_came_while_it_was_stopped_is_kept(
    ckpt: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.npy"
    stopped(ckpt, source, out)
    out.write_bytes(b"another's")
    for more in ([], ["normalize=true"]):
        assert one(ckpt, source, out, *more) == 2
        assert "a.npy: is there already (overwrite=false)" in capsys.readouterr().err
        assert out.read_bytes() == b"another's"
        assert [*tmp_path.glob(".a.npy.parts/part-*.json")], "its own work is kept too"
    assert one(ckpt, source, out, "overwrite=true") == 0
    assert len(np.load(out)) == len(TEXTS)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("more", ["", "normalize=true"])
def test_a_kill_before_the_last_step_of_all(
    more: str, ckpt: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is there, and so is the work that it was made of: the same command ends well, another is refused."""
    out = tmp_path / "a.npy"

    def killed(work: WorkFolder) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(WorkFolder, "clear", killed)
        with pytest.raises(Killed):
            one(ckpt, source, out)
    before = out.read_bytes()
    assert one(ckpt, source, out, *filter(None, [more])) == (2 if more else 0)
    assert out.read_bytes() == before
    assert bool(more) == bool([p for p in tmp_path.iterdir() if p.name.startswith(".")])


@pytest.mark.parametrize("more", ["normalize=true", "max_length=8", "chunk=4", "store=float16", "input"])
def test_what_other_settings_left_is_not_taken(more: str, ckpt: Path, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.npy"
    stopped(ckpt, source, out)
    if more == "input":
        source.write_text(source.read_text().replace("a", "e"))
    told = [] if more == "input" else [more]
    assert one(ckpt, source, out, *told) == 0
    assert one(ckpt, source, tmp_path / "other.npy", *told) == 0
    assert out.read_bytes() == (tmp_path / "other.npy").read_bytes()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_a_file_has_one_writer(
    ckpt: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from embedlab.locks import locked

    with locked(tmp_path / ".a.npy.parts" / ".lock"):
        assert one(ckpt, source, tmp_path / "a.npy") == 2
    assert "another process writes it (output)" in capsys.readouterr().err


# memory

RESIDENT = """
import os, sys, torch
from pathlib import Path
from embedlab.cli.main import main
from embedlab.locks import WorkFolder
from embedlab.corpus.parts import Parts
from embedlab.encoders.encoder import SentenceEncoder

def writing(self, number):
    print(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20)
    return inner(self, number)

inner, Parts.writing = Parts.writing, writing
SentenceEncoder.forward = lambda self, input_ids, *more: torch.randn(len(input_ids), self.dim)
assert main(sys.argv[1:]) == 0
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_memory_does_not_grow_with_the_rows(ckpt: Path, tmp_path: Path) -> None:
    """From the third part of 1,000 rows to the twelfth, 36 MB of text later.

    Without the forward passes: torch keeps what it compiles for their shapes.
    """
    source = tmp_path / "in.txt"
    source.write_text("".join(f"{i} {'x' * 3990}\n" for i in range(12_000)))  # a word so long takes no time
    command = ["encode", str(source), f"{tmp_path / 'out'}/", f"ckpt={ckpt}", "chunk=512", "part_rows=1000",
               "max_length=4", "device=cpu"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT, *command], stdout=subprocess.PIPE, text=True, check=True
    )
    resident = [int(line) for line in done.stdout.splitlines()[:12]]
    assert resident[11] - resident[2] < 12, resident


@pytest.mark.parametrize("first", ["true", "false"])
@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_a_name_that_is_a_number_is_no_place(
    tmp_path: Path, tiny: Callable[..., Path], first: str, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As pandas writes columns without names: with and without the header the same rows have other numbers."""
    between = "," if suffix == "csv" else "\t"
    (file := tmp_path / f"in.{suffix}").write_text(f"0{between}1\na cat{between}x\na dog{between}y\n")
    command = ["encode", str(file), f"{tmp_path / 'out'}/", f"ckpt={tiny('bert')}", "column=0", "part_rows=1"]
    other = "false" if first == "true" else "true"
    assert main([*command, f"header={first}"]) == 0
    assert main([*command, f"header={first}"]) == 0
    capsys.readouterr()
    assert main([*command, f"header={other}"]) == 2
    assert f"the header of {file} is {first}, this run has {other}" in capsys.readouterr().err
