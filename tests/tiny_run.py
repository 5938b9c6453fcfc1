"""A tiny run: a random two-layer BERT, a file of sentences, everything through the composed configuration."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from embedlab.cli.compose import compose
from embedlab.config.run import RunConfig
from embedlab.run.parse import parse_run

WORDS = "the a cat dog house river runs sees likes red old small happy fast of in on with bird tree"


def sentences(n: int, seed: int = 0) -> list[str]:
    """Distinct sentences of 4 to 12 common words."""
    draw, found = random.Random(seed), set()
    while len(found) < n:
        found.add(" ".join(draw.choices(WORDS.split(), k=draw.randint(4, 12))))
    return sorted(found)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "sentences.txt"
    path.write_text("\n".join(sentences(60)) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def sts_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """STS-B dev and test in the layout of the real files, small."""
    folder, draw = tmp_path_factory.mktemp("sts"), random.Random(1)
    texts = sentences(40, seed=2)
    for name in ("stsb_dev", "stsb_test"):
        rows = ["score\tsentence1\tsentence2\tsentence1_tok\tsentence2_tok"]
        pairs = zip(texts[::2], texts[1::2], strict=True)
        rows += [f"{draw.uniform(0, 5):.2f}\t{a}\t{b}\t{a}\t{b}" for a, b in pairs]
        (folder / f"{name}.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder


def all_sts_files(sts_dir: Path, folder: Path) -> Path:
    """The seven tasks, small."""
    shutil.copytree(sts_dir, folder)
    pairs = (sts_dir / "stsb_test.tsv").read_text(encoding="utf-8")
    for name in ("sts12", "sts13", "sts14", "sts15", "sts16"):
        (folder / f"{name}_test.tsv").write_text(pairs, encoding="utf-8")
    sick = pairs.replace("score", "relatedness", 1).replace("\n0.", "\n1.")  # whose scale begins at 1
    (folder / "sick_test.tsv").write_text(sick, encoding="utf-8")
    return folder


@pytest.fixture
def compose_run(
    tiny: Callable[..., Path], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., RunConfig]:
    """compose_run("optimizer.lr=1e-3", ...) -> the configuration of a tiny CPU run."""
    monkeypatch.setenv("EMBEDLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)

    def make(*overrides: str, model_type: str = "bert", **arch: Any) -> RunConfig:
        folder = tiny(model_type, **arch)
        other = any(o.startswith("backbone=") and o != "backbone=local" for o in overrides)
        path = "null" if other else folder  # which nothing but backbone=local reads
        basics = ["backbone=local", f"backbone.path={path}", f"data.files={text_file}", "trainer=cpu",
                  "data.batch_size=8", "optimizer.lr=1e-3", "callbacks.progress=none", "data.report=false",
                  "trainer.log_every_n_steps=1", "evaluation.final=[]", "evaluation.before=false"]  # fmt: skip
        return parse_run(compose("train", [*basics, *overrides]))

    return make
