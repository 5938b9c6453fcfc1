"""Whatever has happened to a small file, a command says it in one line: damage by type, key, value and byte.

Each kind of file is damaged in a fixed sample of ways (with `--whole` in many more), and the command that reads it is
run in this process: it ends well or with status 2, raises nothing, and leaves no part of an output.
"""

from __future__ import annotations

import copy
import io
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from embedlab.cli.main import main
from embedlab.evaluation.core.protocol import REQUIRED
from tests.encoders.test_encoder import build
from tests.support import SENTENCES
from tests.tiny_run import sentences

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 1.5, float("nan"), float("inf"), 1e300, 10**30, 1 << 40, "", "x", "mean",
    "\x1b[31m", "../../x", "a\0b", "é" * 300, [], [1], ["x"], [None], [[1]], {}, {"a": 1}, {"name": 3},
    {"name": "mean"},
)  # fmt: skip
"""What is put in the place of a value."""


def places(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value in nested dictionaries and lists."""
    if depth > 7:
        return
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places(value[key], depth + 1)


def in_structure(content: Any, draw: random.Random) -> Any:
    """One value of plain data is removed, or another one is in its place; or the whole is another value."""
    content = copy.deepcopy(content)
    found = list(places(content))
    if not found or draw.random() < 0.05:
        return draw.choice(VALUES)
    # Places near the root are few, and the ones that are read by name.
    container, key = draw.choice(found[: draw.choice((5, 20, len(found)))])
    if draw.random() < 0.3:
        del container[key]
    else:
        container[key] = copy.deepcopy(draw.choice(VALUES))
    return content


def in_bytes(content: bytes, draw: random.Random) -> bytes:
    """Cut short, a changed byte, more bytes, none, or other ones."""
    place = draw.randrange(len(content) or 1)
    return draw.choice((
        content[:place],
        content[:place] + bytes([draw.randrange(256)]) + content[place + 1 :],
        content[:place] + bytes(draw.choices(range(256), k=3)) + content[place:],
        b"",
        bytes(draw.choices(range(256), k=40)),
        b"[" * 50_000,
    ))  # fmt: skip


def damaged(path: Path, draw: random.Random) -> bytes:
    """The content of a damaged copy of a file."""
    content = path.read_bytes()
    if draw.random() < 0.3:
        return in_bytes(content, draw)
    if path.suffix == ".json":
        return json.dumps(in_structure(json.loads(content), draw)).encode()
    if path.suffix == ".yaml":
        return yaml.safe_dump(in_structure(yaml.safe_load(content), draw)).encode()
    if path.suffix == ".ckpt":
        file = io.BytesIO()
        torch.save(in_structure(torch.load(path, weights_only=True), draw), file)
        return file.getvalue()
    if path.suffix == ".npy":
        array, file = np.load(path), io.BytesIO()
        change = draw.choice((
            lambda x: -x, lambda x: x[:-1], lambda x: x[:, None], lambda x: x[::-1], lambda x: x.astype(float),
            lambda x: x * 0, lambda x: x.astype(">i8"), lambda x: x.astype("O"), lambda x: x + 1,
        ))  # fmt: skip
        np.save(file, change(array))
        return file.getvalue()
    return in_bytes(content, draw)


@pytest.fixture(scope="module")
def home(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, an index, an encoder and a token cache, all whole."""
    home = tmp_path_factory.mktemp("home")
    build(tiny("bert"), "cls_mlp").save(home / "encoder")
    build(tiny("bert"), "cls_mlp").to_sentence_transformers(home / "modules")
    (home / "modules" / "embedlab.json").unlink()
    (home / "texts.txt").write_text("\n".join(SENTENCES) + "\n", encoding="utf-8")
    (home / "rows.txt").write_text("\n".join(sentences(60)) + "\n", encoding="utf-8")
    assert (
        main(["search", "index", str(home / "texts.txt"), str(home / "index"), f"ckpt={home / 'encoder'}"])
        == 0
    )
    assert main(train(home, tiny("bert"))) == 0
    run = home / "run"
    block = dict.fromkeys(REQUIRED, "x") | {"suite": "lee", "warnings": [], "pooling": {"name": "cls"}}
    (run / "scores").mkdir()
    (run / "scores" / "lee.json").write_text(
        json.dumps({"scores": {"lee/spearman": 50.0}, "protocol": block})
    )
    scores = json.loads((run / "scores.json").read_text())
    lines = {"0–1": "0.1 0.2 0.3", "1–2": "0.2 0.4 0.5"}
    scores |= {"scores": {"sts7/spearman": 70.0}, "protocol": {"geometry": {"cosines_by_rating": lines}}}
    (run / "scores.json").write_text(json.dumps(scores))
    (run / "trial.json").write_text(json.dumps({"status": "finished", "overrides": ["pooling=cls"]}))
    (run / "trial.yaml").write_text("seed: 0\n")
    (home / "backbone").symlink_to(tiny("bert"))
    return home


def train(home: Path, backbone: Path, *more: str) -> list[str]:
    return [
        "train", "backbone=local", f"backbone.path={backbone}", f"data.files={home / 'rows.txt'}", "trainer=cpu",
        f"data.cache_dir={home / 'cache'}", "data.batch_size=8", "callbacks.progress=none", "evaluation.final=[]",
        "evaluation.before=false", "trainer.max_steps=2", f"hydra.run.dir={home / 'run'}", *more,
    ]  # fmt: skip


def report(home: Path) -> list[str]:
    return ["report", str(home / "run"), f"out={home / 'report'}", "overwrite=true"]


def query(home: Path) -> list[str]:
    return ["search", "query", str(home / "index"), "a cat", f"ckpt={home / 'encoder'}"]


def encode(home: Path) -> list[str]:
    return [
        "encode",
        str(home / "texts.txt"),
        str(home / "vectors.npy"),
        "overwrite=true",
        f"ckpt={home / 'encoder'}",
    ]


def encode_by_modules(home: Path) -> list[str]:
    return [*encode(home)[:-1], f"ckpt={home / 'modules'}"]


def resume(home: Path) -> list[str]:
    backbone = (home / "backbone").resolve()
    return train(home, backbone, "trainer.max_steps=3", f"ckpt_path={home / 'run' / 'last.ckpt'}")


def of_checkpoint(home: Path) -> list[str]:
    return [*encode(home)[:-1], f"ckpt={home / 'run' / 'last.ckpt'}"]


KINDS: tuple[tuple[str, Callable[[Path], list[str]]], ...] = (
    ("run/scores.json", report),
    ("run/scores/lee.json", report),
    ("run/trial.json", report),
    ("run/trial.yaml", report),
    ("index/index.json", query),
    ("index/offsets.npy", query),
    ("index/vectors.npy", query),
    ("index/texts.txt", query),
    ("encoder/embedlab.json", encode),
    ("encoder/config.json", encode),
    ("encoder/tokenizer_config.json", encode),
    ("encoder/pooling.safetensors", encode),
    ("modules/modules.json", encode_by_modules),
    ("modules/1_Pooling/config.json", encode_by_modules),
    ("modules/2_Dense/config.json", encode_by_modules),
    ("modules/sentence_bert_config.json", encode_by_modules),
    ("modules/config_sentence_transformers.json", encode_by_modules),
    ("run/last.ckpt", of_checkpoint),
    ("run/last.ckpt", resume),
    ("run/metrics.csv", resume),
    ("run/config.yaml", resume),
    ("cache/*/meta.json", resume),
    ("cache/*/offsets0.i8", resume),
)
IDS = [f"{command.__name__} {name}" for name, command in KINDS]


def outputs(home: Path) -> set[str]:
    """What commands have written or left behind."""
    made = {p.name for p in home.iterdir()} - {"run", "index", "encoder", "modules", "cache", "backbone"}
    return made | {str(p) for p in (home / "run").rglob("*") if p.name.endswith(".new") or ".tmp" in p.name}


def check(home: Path, scratch: Path, name: str, command: Callable[[Path], list[str]], seed: int) -> None:
    """One kind of damage, the command on it, and what has to be true afterwards."""
    place = scratch / "home"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(home, place, symlinks=True)
    path = next(place.glob(name))
    path.write_bytes(damaged(path, random.Random(seed)))
    before, config = outputs(place), (place / "run" / "config.yaml").read_bytes()
    status = main(command(place))
    assert status in (0, 2)
    left = outputs(place) - before
    if status == 2:
        assert left == set()
        assert (place / "run" / "config.yaml").read_bytes() == config
    if command is encode and status == 0:
        assert np.load(place / "vectors.npy").shape == (len(SENTENCES), 32)


def whole(home: Path, scratch: Path, name: str, command: Callable[[Path], list[str]], examples: int) -> None:
    @settings(
        max_examples=examples, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate],  # a smaller seed is no smaller damage
    )  # fmt: skip
    @given(st.integers(0, 1 << 32))
    def one(seed: int) -> None:
        check(home, scratch, name, command, seed)

    one()


@pytest.mark.parametrize(("name", "command"), KINDS, ids=IDS)
def test_damage_is_one_line(
    name: str, command: Callable[[Path], list[str]], home: Path, tmp_path: Path
) -> None:
    whole(home, tmp_path, name, command, 2 if command is resume else 3)


@pytest.mark.whole
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "command"), KINDS, ids=IDS)
def test_much_damage_is_one_line(
    name: str, command: Callable[[Path], list[str]], home: Path, tmp_path: Path
) -> None:
    whole(home, tmp_path, name, command, 20)


def test_without_damage_all_commands_end_well(home: Path, tmp_path: Path) -> None:
    """Guards the test: every command reads its file and has an output."""
    place = tmp_path / "home"
    shutil.copytree(home, place, symlinks=True)
    for command in dict.fromkeys(command for _, command in KINDS):
        assert main(command(place)) == 0
    assert {"report", "vectors.npy"} <= outputs(place)
