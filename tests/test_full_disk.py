"""A disk that takes no more, wherever it ends: one line with the file and its size, and the old output stays.

The limit of a file's size (``RLIMIT_FSIZE``) stands for the disk: every file of the process meets it as it grows.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from embedlab.cli.main import main
from embedlab.config.data import DataConfig
from embedlab.data.build import build_token_table
from embedlab.encoders.loading import load
from embedlab.errors import UserError
from embedlab.files import DiskFull
from embedlab.run.metrics_file import MetricsFile
from tests.encoders.test_encoder import build

COMMANDS = {
    "npy": ["encode", "{text}", "{out}.npy", "ckpt={encoder}"],
    "parquet": ["encode", "{text}", "{out}.parquet", "ckpt={encoder}"],
    "index": ["search", "index", "{text}", "{out}", "ckpt={encoder}", "overwrite=true"],
    "hf": ["export", "ckpt={encoder}", "to=hf", "out={out}", "overwrite=true"],
    "sentence-transformers": ["export", "ckpt={encoder}", "to=sentence-transformers", "out={out}", "overwrite=true"],
    "evaluate": ["evaluate", "ckpt={encoder}", "suite=sts", "tasks=stsb", "data_dir={sts}", "out={out}.json"],
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
    (tmp_path / "outputs").mkdir()
    out = tmp_path / "outputs" / "a"
    return {"encoder": tmp_path / "encoder", "text": text_file, "sts": sts_dir, "out": out}


@pytest.mark.parametrize("size", [0, 700])
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
    assert Path(found["file"]).parent == names["out"].parent
    assert not Path(found["file"]).name.startswith(".")
    assert seen(names["out"].parent) == before


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
