"""The README's table of methods is complete, and what it says that a method needs is enough for a step."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from embedlab import files as _paths
from embedlab.cli import main as command
from tests.tiny_run import text_file as text_file

README = Path(__file__).parents[1] / "README.md"
CELL = r"[^|]*"
ROWS = re.findall(rf"^\| (`{CELL}) \|({CELL})\|{CELL}\|{CELL}\|$", README.read_text(encoding="utf-8"), re.M)
METHODS = {name: needs for names, needs in ROWS for name in re.findall(r"`(\w+)`", names)}


def train(folder: Path, *settings: str) -> None:
    less = ["trainer=cpu", "trainer.max_steps=1", "data.batch_size=8", "data.limit=16", "evaluation.final=[]",
            "callbacks.progress=none", f"data.cache_dir={folder}", f"hydra.run.dir={folder / 'run'}"]  # fmt: skip
    assert command.main(["train", *settings, *less]) == 0


@pytest.fixture(scope="module")
def runs(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folders = [tmp_path_factory.mktemp("of_a_seed") for _ in range(2)]
    for seed, folder in enumerate(folders):
        train(folder, f"data.files={text_file}", f"seed={seed}")
    return [folder / "run" for folder in folders]


def test_every_method_has_a_row() -> None:
    variants = {"bepa_official", "jtcse_official"}
    assert set(METHODS) == {p.stem for p in (_paths.conf_dir() / "method").glob("*.yaml")} - variants


@pytest.mark.parametrize("name", METHODS)
def test_what_stands_beside_a_method_is_enough(
    name: str, runs: list[Path], text_file: Path, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    needs = METHODS[name]
    settings = [part for cell in re.findall(r"`([^`]+=[^`]+)`", needs) for part in cell.split()]
    left = list(runs)
    settings = [s.replace("RUN", str(left.pop())) if s.endswith("=RUN") else s for s in settings]
    if "a decoder" in needs:
        settings += ["backbone=local", f"backbone.path={tiny('llama')}"]
    if "a masked language model" in needs:
        settings += ["backbone=local", f"backbone.path={tiny('bert')}"]
    # Of a few sentences, and of a vocabulary that they gave.
    settings += {"whitening": ["method.k=8"], "mntp": ["method.mask_token=e"]}.get(name, [])
    if "data=pairs" in settings:
        pairs = tmp_path / "pairs.csv"
        texts = text_file.read_text().splitlines()
        pairs.write_text("anchor,positive\n" + "".join(f"{a},{b}\n" for a, b in itertools.pairwise(texts)))
        settings.append(f"data.files={pairs}")
    elif "data=parallel" not in settings:
        settings.append(f"data.files={text_file}")
    train(tmp_path, f"method={name}", *settings)
