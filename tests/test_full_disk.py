"""A disk that takes no more, wherever it ends: one line with the file and its size, and the old output stays.

The limit of a file's size (``RLIMIT_FSIZE``) stands for the disk: every file of the process meets it as it grows.
"""

from __future__ import annotations

import json
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import embedlab
from embedlab.cli.main import main
from embedlab.config.data import DataConfig
from embedlab.data.build import build_token_table
from embedlab.data.vectors import text_vectors
from embedlab.encoders.loading import load
from embedlab.errors import UserError
from embedlab.files import DiskFull, write_array
from embedlab.run.metrics_file import MetricsFile
from tests.encoders.test_encoder import build
from tests.report.test_report import write_run
from tests.support import SENTENCES

COMMANDS = {
    "npy": ["encode", "{text}", "{out}.npy", "ckpt={encoder}", "overwrite=true"],
    "parquet": ["encode", "{text}", "{out}.parquet", "ckpt={encoder}", "overwrite=true"],
    "index": ["search", "index", "{text}", "{out}", "ckpt={encoder}", "overwrite=true"],
    "lists": ["search", "index", "{vectors}", "{out}", "kind=ivf_flat", "overwrite=true"],
    "graph": ["search", "index", "{vectors}", "{out}", "kind=hnsw", "overwrite=true"],
    "work": ["search", "index", "{vectors}", "{out}", "kind=ivf_flat", "work={out}.w", "overwrite=true"],
    "mine": ["mine", "{pairs}", "{out}.jsonl", "ckpt={encoder}", "device=cpu", "overwrite=true"],
    "mine parquet": ["mine", "{pairs}", "{out}.parquet", "ckpt={encoder}", "device=cpu", "overwrite=true"],
    "quantize": ["quantize", "{vectors}", "{out}.npy", "store=int8", "overwrite=true"],
    "report": ["report", "{runs}", "out={out}", "overwrite=true"],
    "hf": ["export", "ckpt={encoder}", "to=hf", "out={out}", "overwrite=true"],
    "sentence-transformers": ["export", "ckpt={encoder}", "to=sentence-transformers", "out={out}", "overwrite=true"],
    "evaluate": ["evaluate", "ckpt={encoder}", "suite=sts", "tasks=stsb", "data_dir={sts}", "out={out}.json",
                 "overwrite=true"],
}  # fmt: skip
LINE = r"embedlab: (?P<file>/.*?): (cannot be written \()?[Ff]ile too large after (?P<size>[\d,]+) bytes\)?\. Fix: "


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def seen(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def names(tiny: Callable[..., Path], text_file: Path, sts_dir: Path, tmp_path: Path) -> dict[str, Path]:
    build(tiny("bert")).save(tmp_path / "encoder")
    np.save(tmp_path / "in.npy", np.random.default_rng(0).normal(size=(200, 16)).astype(np.float32))
    rows = [json.dumps({"query": a, "pos": b}) for a, b in zip(SENTENCES[:8], SENTENCES[8:], strict=True)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows) + "\n")
    write_run(tmp_path / "runs" / "0", 0, 70.0, ["pooling=mean"])
    (tmp_path / "outputs").mkdir()
    out = tmp_path / "outputs" / "a"
    return {"encoder": tmp_path / "encoder", "text": text_file, "sts": sts_dir, "out": out,
            "vectors": tmp_path / "in.npy", "pairs": tmp_path / "pairs.jsonl", "runs": tmp_path / "runs"}  # fmt: skip


@pytest.mark.parametrize("size", [0, 100, 700])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_which_file_and_how_much_of_it(
    name: str, size: int, names: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    line = [part.format(**names) for part in COMMANDS[name]]
    assert main(line) == 0
    before = seen(names["out"].parent)
    capsys.readouterr()
    with disk_of(size):
        assert main(line) == 2
    said = [e for e in capsys.readouterr().err.splitlines() if e.startswith("embedlab: /")]
    assert len(said) == 1
    found = re.match(LINE, said[0])
    assert found, said
    assert Path(found["file"]).is_relative_to(names["out"].parent)
    assert not Path(found["file"]).name.startswith(".")
    left = seen(names["out"].parent)
    assert {name: left[name] for name in left if not name.startswith("a.w/")} == before  # whose work goes on


def test_an_array_is_written_whole_or_says_so(tmp_path: Path) -> None:
    """numpy's own `save` leaves the end to the C library, whose failure nobody hears of."""
    arrays = [np.arange(n).astype(dtype) for n in (0, 1, 200, 5000) for dtype in (np.int64, np.float16, bool)]
    for array in (*arrays, np.ones((3, 5), order="F")[:, ::2], np.ones((7, 2, 3), np.float32).T):
        np.save(tmp_path / "wanted.npy", np.ascontiguousarray(array))
        with (tmp_path / "a.npy").open("wb") as file:
            write_array(file, array)
        assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "wanted.npy").read_bytes()
    whole = (tmp_path / "a.npy").stat().st_size
    for size in range(whole):
        with (
            disk_of(size),
            pytest.raises(OSError, match="too large"),
            (tmp_path / "b.npy").open("wb") as file,
        ):
            write_array(file, np.ones((7, 2, 3), np.float32).T)


def test_arrays_are_written_in_no_other_way() -> None:
    silent = re.compile(r"np\.save\(|\.tofile\(|open_memmap\(|faiss\.write_index\(index, str")
    files = sorted(Path(embedlab.__file__).parent.rglob("*.py"))
    assert [str(path) for path in files if silent.search(path.read_text())] == []


def test_the_vectors_of_a_teacher_name_their_folder(names: dict[str, Path], tmp_path: Path) -> None:
    encoder = load(names["encoder"])
    config = DataConfig(files=str(names["text"]), cache_dir=str(tmp_path / "cache"))
    table = build_token_table(config, {"sentence": ("sentence", encoder.tokenization)})
    before = {name: data for name, data in seen(tmp_path / "cache").items() if not name.endswith(".lock")}
    with (
        disk_of(500),
        pytest.raises(UserError, match=r"too large after [\d,]+ bytes \(data\.cache_dir="),
    ):
        text_vectors(encoder, config, table, "sentence", "cpu")
    left = seen(tmp_path / "cache")
    assert {name: left[name] for name in left if not name.endswith(".lock")} == before
    rows = text_vectors(encoder, config, table, "sentence", "cpu")
    assert rows.shape == (table.n_rows, encoder.dim)


def test_the_token_cache_names_its_folder(names: dict[str, Path], tmp_path: Path) -> None:
    config = DataConfig(files=str(names["text"]), cache_dir=str(tmp_path / "cache"))
    tokenization = load(names["encoder"]).tokenization
    with (
        disk_of(100),
        pytest.raises(UserError, match=r"too large after [\d,]+ bytes \(data\.cache_dir=") as caught,
    ):
        build_token_table(config, {"sentence": ("sentence", tokenization)})
    assert str(caught.value.file).startswith(f"{tmp_path / 'cache'}/wikipedia-")
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_row_of_metrics_names_its_file(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.csv", None)
    file.log_metrics({"loss": 1.0}, 1)
    with disk_of(file.path.stat().st_size), pytest.raises(DiskFull) as caught:
        file.log_metrics({"loss": 0.5}, 2)
    assert caught.value.filename == str(file.path)


@pytest.mark.parametrize("size", [0, 600])
@pytest.mark.parametrize(("multirun", "key"), [((), "hydra.run.dir"), (("-m",), "hydra.sweep.dir")])
def test_a_run_and_a_sweep_name_their_folder(
    multirun: tuple[str, ...], key: str, size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hydra writes there first, and says no name."""
    with disk_of(size):
        assert main(["train", *multirun, "trainer=cpu", f"{key}={tmp_path / 'run'}"]) == 2
    line = rf"cannot be written: File too large after [\d,]+ bytes \({key}={tmp_path / 'run'}\). Fix: "
    assert re.search(line, capsys.readouterr().err)
