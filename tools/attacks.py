"""Tries to break each promise of `docs/security.md`, and says which of them held.

    python tools/attacks.py [--only WORD] [--json OUT]

Every attempt makes its hostile files in a folder of its own, runs what a user would run in this process, and fails
where the promise is broken: a mark that planted code leaves, text that reaches the terminal raw, an exception instead
of a line, an output by halves. Exit status 1 if any is broken. Models are tiny and random; nothing needs a network.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from attack_machines import ON_MACHINES, NotTried
from attack_place import TEXTS, Bomb, Place, change, whole

# Each attempt: what it tries, in its docstring. An AssertionError says that the promise is broken.


def adapter_of_an_encoder(at: Place) -> None:
    """B.1 embedlab.json trusts the code of an adapter's base (encode, evaluate, export)"""
    folder = at.adapter()
    at.run("encode", at.folder / "texts.txt", at.folder / "out.npy", f"ckpt={folder}", status=2)
    at.run("evaluate", f"ckpt={folder}", "suite=lee", status=2)
    at.run("export", f"ckpt={folder}", "to=hf", f"out={at.folder / 'export'}", status=2)


def adapter_of_a_checkpoint(at: Place) -> None:
    """B.1 the same inside a .ckpt"""
    folder = at.adapter()
    files = {p.name: p.read_text() for p in folder.iterdir() if p.suffix in (".json", ".py")}
    record = {"encoder": {"files": files, "weights": {}}}
    torch.save({"state_dict": {}, "global_step": 1, "embedlab": record}, at.folder / "a.ckpt")
    at.run("encode", at.folder / "texts.txt", at.folder / "out.npy", f"ckpt={at.folder / 'a.ckpt'}", status=2)


def encoder_of_an_index(at: Place) -> None:
    """B.1 index.json names an encoder with code, and one with a pickle"""
    pickled = at.folder / "pickled"
    shutil.copytree(at.folder / "model", pickled, ignore=shutil.ignore_patterns("*.safetensors"))
    (pickled / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(at.mark)))
    for folder in (at.adapter(), at.folder / "hostile", pickled):
        change(at.folder / "index" / "index.json", {"encoder": str(folder)})
        at.run("search", "query", at.folder / "index", "a cat", status=2)


def experiment_file(at: Place) -> None:
    """B.1 an experiment's file allows the code of a backbone"""
    backbone = {"source": "local", "path": str(at.hostile()), "trust_remote_code": True}
    (at.folder / "conf" / "experiment").mkdir(parents=True)
    text = "# @package _global_\n" + yaml.safe_dump({"backbone": backbone})
    (at.folder / "conf" / "experiment" / "theirs.yaml").write_text(text)
    command, *rest = [a for a in at.train() if not a.startswith("backbone.path")]
    at.run(command, "--config-dir", at.folder / "conf", *rest[:1], "experiment=theirs", *rest[1:],
           f"hydra.run.dir={at.folder / 'new'}", status=2)  # fmt: skip


def pickled_checkpoint(at: Place) -> None:
    """B.1 a pickle with a call as checkpoint, to load and to go on from"""
    path = at.folder / "bomb.ckpt"
    torch.save({"state_dict": {}, "global_step": 1, "embedlab": Bomb(at.mark)}, path)
    at.run("encode", at.folder / "texts.txt", at.folder / "out.npy", f"ckpt={path}", status=2)
    at.run(*at.train(f"ckpt_path={path}", f"hydra.run.dir={at.folder / 'new'}"), status=2)


def pickled_arrays(at: Place) -> None:
    """B.1 pickled objects in an index's arrays"""
    for name in ("offsets.npy", "vectors.npy"):
        np.save(at.folder / "index" / name, np.array([Bomb(at.mark)], dtype=object), allow_pickle=True)
        at.run("search", "query", at.folder / "index", "a cat", status=2)


def export_carries_code(at: Place) -> None:
    """B.2 a foreign auto_map is carried along by an export, or run by its round trip"""
    folder = Path(shutil.copytree(at.folder / "model", at.folder / "foreign"))
    at.plant(folder)
    for target in ("hf", "sentence-transformers"):
        out = at.folder / target
        at.run("export", f"ckpt={folder}", f"to={target}", f"out={out}", status=0)
        assert not [p for p in out.rglob("*.json") if "theirs" in p.read_text()]
        assert not list(out.rglob("*.py"))


def injection_in_reports(at: Place) -> None:
    """B.3 titles, devices, states and settings as LaTeX, HTML, Markdown, formulas and terminal commands"""
    bad = (
        "\x1b]0;x\x07",
        "<script>x</script>",
        "=cmd()",
        "x\n\\input{y}",
        "a | b",
        "[x](javascript:y)",
        "\u202ex",
    )
    content = json.loads((at.folder / "run" / "scores.json").read_text())
    for i, text in enumerate(bad):
        trial = at.folder / "sweep" / str(i)
        trial.mkdir(parents=True)
        scores = {"sts7/spearman": 70.0, text: 1.0}
        config = content["config"] | {text: text}
        training = content["training"] | {"device": text, "seed": i}
        (trial / "scores.json").write_text(
            json.dumps({"scores": scores, "config": config, "training": training})
        )
        (trial / "trial.json").write_text(json.dumps({"status": text, "overrides": [text]}))
        (trial / "dead").mkdir()
        (trial / "dead" / "trial.yaml").write_text("seed: 1\n")
        shutil.copy(trial / "trial.json", trial / "dead")
    out = at.folder / "report"
    said = at.run("report", at.folder / "sweep", f"out={out}", status=0)
    written = {p.suffix: p.read_text() for p in out.iterdir() if p.suffix != ".png"}
    for text in (said, *written.values()):
        assert not set(text) & {"\x1b", "\x07", "\u202e"}
    assert "<script" not in written[".html"]
    assert "\\input{" not in written[".tex"].replace("textbackslash{}input", "")
    assert not [line for line in written[".csv"].splitlines() if line.startswith("=")]
    assert "](javascript" not in written[".md"]


def injection_in_hits(at: Place) -> None:
    """B.3 texts of an index reach the terminal raw"""
    (at.folder / "odd.txt").write_text("cat \x1b]0;x\x07 \u202edog\n")
    at.run(
        "search", "index", at.folder / "odd.txt", at.folder / "odd", f"ckpt={at.folder / 'encoder'}", status=0
    )
    said = at.run("search", "query", at.folder / "odd", "cat", status=0)
    assert not set(said) & {"\x1b", "\x07", "\u202e"}


def texts_are_a_link(at: Place) -> None:
    """B.3 texts.txt is a link to another file, which a query prints"""
    texts = at.folder / "index" / "texts.txt"
    texts.rename(at.folder / "secret")
    texts.symlink_to(at.folder / "secret")
    assert "cat" not in at.run("search", "query", at.folder / "index", "x", status=2).replace("a cat", "")


def paths_out_of_a_checkpoint(at: Place) -> None:
    """B   file names in a checkpoint lead out of its folder"""
    for name in ("../../escaped.json", str(at.folder / "escaped.json")):
        record = {"encoder": {"files": {name: "{}", "config.json": "{}"}, "weights": {}}}
        torch.save({"state_dict": {}, "global_step": 1, "embedlab": record}, at.folder / "a.ckpt")
        at.run(
            "encode", at.folder / "texts.txt", at.folder / "out.npy", f"ckpt={at.folder / 'a.ckpt'}", status=2
        )
    assert not list(at.folder.parent.rglob("escaped.json"))


def bombs_of_small_files(at: Place) -> None:
    """B.5 deep JSON, aliases of YAML that stand for billions of values, a file of 16 GiB without a block, a pipe"""
    index = at.folder / "index" / "index.json"
    for content in ("[" * 100_000, "9" * 100_000, '{"a":' * 5_000):
        index.write_text(content)
        at.run("search", "query", at.folder / "index", "x", status=2)
    with index.open("wb") as file:
        file.truncate(1 << 34)
    at.run("search", "query", at.folder / "index", "x", status=2)
    index.unlink()
    os.mkfifo(index)
    at.run("search", "query", at.folder / "index", "x", status=2)
    rows = ["a0: &a0 [1]", *(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))]
    (at.folder / "run" / "config.yaml").write_text("\n".join(rows))
    content = torch.load(at.folder / "run" / "last.ckpt", weights_only=True)
    content["embedlab"]["recipe"] = None  # as of before recipes were kept in checkpoints
    torch.save(content, at.folder / "run" / "last.ckpt")
    at.run(*at.train("ckpt_path=last", "trainer.max_steps=2"), status=2)


def half_written_runs(at: Place) -> None:
    """C.4 a run that is writing its scores stops the report of the others"""
    content = json.loads((at.folder / "run" / "scores.json").read_text())
    content["scores"] = {"sts7/spearman": 70.0}
    for name, text in (("good", json.dumps(content)), ("cut", json.dumps(content)[:50]), ("empty", "")):
        (at.folder / "sweep" / name).mkdir(parents=True)
        (at.folder / "sweep" / name / "scores.json").write_text(text)
    said = at.run("report", at.folder / "sweep", status=0)
    assert "cut/scores.json" in said
    assert "empty/scores.json" in said


def wrong_shapes(at: Place) -> None:
    """D   JSON of another shape in every small file is one line and status 2"""
    values: tuple[Any, ...] = (None, [], 3, "x", {}, {"a": [None]}, {"format": "1"})
    for value in values:
        for name in ("encoder/embedlab.json", "encoder/config.json", "index/index.json"):
            kept = (at.folder / name).read_text()
            (at.folder / name).write_text(json.dumps(value))
            at.run("search", "query", at.folder / "index", "x", f"ckpt={at.folder / 'encoder'}", status=2)
            (at.folder / name).write_text(kept)
    for score in (True, float("nan"), float("inf"), "70", [70]):
        content = json.loads((at.folder / "run" / "scores.json").read_text())
        (at.folder / "odd").mkdir(exist_ok=True)
        (at.folder / "odd" / "scores.json").write_text(
            json.dumps(content | {"scores": {"sts7/spearman": score}})
        )
        at.run("report", at.folder / "odd", status=2)


def another_recipe(at: Place) -> None:
    """D2.1 a checkpoint of another recipe is continued, here and from elsewhere"""
    before = (at.folder / "run" / "config.yaml").read_bytes()
    longer = (f"ckpt_path={at.folder / 'run' / 'last.ckpt'}", "trainer.max_steps=2")
    for more in ("pooling=mean", "method.tau=0.5", "optimizer.lr=1e-2", "adapter=lora"):
        for folder in ("run", "new"):
            said = at.run(*at.train(*longer, more, f"hydra.run.dir={at.folder / folder}"), status=2)
            assert "another recipe" in said
            assert more.partition("=")[0] in said
    assert (at.folder / "run" / "config.yaml").read_bytes() == before
    at.run(*at.train(*longer), status=0)


def refused_resume(at: Place) -> None:
    """D2.6 a refused resume leaves its configuration"""
    (at.folder / "other.txt").write_text("\n".join(reversed(TEXTS)) + "\n")
    other = [f"data.files={at.folder / 'other.txt'}", f"hydra.run.dir={at.folder / 'new'}"]
    last = f"ckpt_path={at.folder / 'run' / 'last.ckpt'}"
    assert "other text" in at.run(*at.train(last, "trainer.max_steps=2", *other), status=2)
    assert not (at.folder / "new" / "config.yaml").exists()


ATTEMPTS: tuple[Callable[[Place], None], ...] = (
    adapter_of_an_encoder, adapter_of_a_checkpoint, encoder_of_an_index, experiment_file, pickled_checkpoint,
    pickled_arrays, export_carries_code, injection_in_reports, injection_in_hits, texts_are_a_link,
    paths_out_of_a_checkpoint, bombs_of_small_files, half_written_runs, wrong_shapes, another_recipe, refused_resume,
    *ON_MACHINES,
)  # fmt: skip


def attempt(one: Callable[[Place], None], home: Path) -> str | None:
    """Make an attempt; returns how the promise is broken, or None where it held."""
    place = Place(home)
    try:
        one(place)
    except NotTried:
        raise
    except AssertionError as broken:
        return str(broken) or traceback.format_exc().strip().splitlines()[-2].strip()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "planted code ran" if place.mark.exists() else None


def main(argv: list[str]) -> int:
    """Prints a line an attempt; returns 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="attempts whose line has this word")
    parser.add_argument("--json", type=Path, help="also write the outcomes here")
    options = parser.parse_args(argv)
    chosen = [one for one in ATTEMPTS if options.only in f"{one.__name__} {one.__doc__}"]
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="attacks-") as name:
        # Files name each other by their paths, so that every attempt finds them at the same place.
        home, kept = Path(name) / "home", Path(name) / "kept"
        home.mkdir()
        whole(home)
        shutil.copytree(home, kept)
        for one in chosen:
            shutil.rmtree(home)
            shutil.copytree(kept, home)
            try:
                problem = attempt(one, home)
            except NotTried as why:
                print(f"not tried  {one.__doc__}: {why}", flush=True)
                continue
            outcomes.append({"attempt": one.__name__, "tries": one.__doc__, "broken": problem})
            print(f"{'held  ' if problem is None else 'BROKEN'}  {one.__doc__}", flush=True)
            if problem is not None:
                print(f"        {problem[:400]}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(outcomes, indent=2) + "\n")
    held = sum(o["broken"] is None for o in outcomes)
    print(f"{held} of {len(outcomes)} held")
    return 0 if held == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
