"""Runs two commits on this machine and compares what they compute, to the last digit.

    python tools/golden.py OLD NEW [--only losses,vectors] [--names simcse,cls]

OLD and NEW are folders of checkouts, or git revisions, which are checked out in a temporary folder. They work in turn
on the same tiny random models and texts (`tests/methods/golden.py`), on the CPU, through the command line and
`embedlab.load`:

    losses      five losses of every method, step by step; simcse and csesfp also compiled
    old_runs    of OLD's run of every method: the vectors that `load` gives, and the losses when it goes on
    vectors     32 sentences by every pooling, after two steps
    exports     a SHA-256 of the weights that `embedlab export` writes of every method's run
    quickstart  five losses of that recipe with the shipped encoder, where gensim is installed

What only one of the two has is listed and not counted. The exit status is 1 if anything differs or fails.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("losses", "old_runs", "vectors", "exports", "quickstart")
COMPILED = ("simcse", "csesfp")
QUICKSTART = (
    "experiment=quickstart", "trainer=cpu", "trainer.max_steps=5", "trainer.log_every_n_steps=1", "data.limit=640",
    "data.report=false", "callbacks.progress=none", "evaluation.final=[]", "evaluation.before=false",
)  # fmt: skip
Value = list[float] | list[list[float]] | str
"""Losses, vectors, or a hash; of what failed, the message."""
Task = tuple[str, Callable[..., Value], tuple[object, ...]]
"""What is measured, the function that measures it, and its arguments."""
# By its path, so that the package in use may be any commit's.
golden = SimpleNamespace(**runpy.run_path(str(ROOT / "tests" / "methods" / "golden.py")))


def names_of(checkout: Path, group: str) -> list[str]:
    """What a checkout has of a group of `conf/`: all that is asked of its layout."""
    return sorted(file.stem for file in (checkout / "conf" / group).glob("*.yaml"))


def pooling_run(name: str) -> tuple[str, ...]:
    """The method that a pooling is trained with, and what else its run says."""
    if name.startswith("rep"):
        return ("csesfp",)
    if name in (fitting := {"mask": "promptbert", "last": "prompteol", "cls_mlp": "simcse_supervised"}):
        return (fitting[name],)
    return ("simcse", "backbone.path={deep}", *(["pooling.r=4"] if name.startswith("s2") else []))


class Bench:
    """The tasks of one checkout, in the process that has its package in use.

    Args:
        checkout: its folder.
        folder: for its runs; beside those of the other one and the common inputs.
        names: of the methods and poolings that are wanted; none: all.
    """

    def __init__(self, checkout: Path, folder: Path, names: list[str]) -> None:
        self.checkout, self.folder, self.names = checkout, folder, names
        self.inputs = golden.Inputs(folder.parent / "inputs")
        has = names_of(checkout, "method")
        there = [name for name, line in golden.METHODS.items() if line[0].removeprefix("method=") in has]
        self.methods = [name for name in there if name in (names or there)]

    def train(self, run: Path, method: str, *more: str) -> Value:
        return golden.train(self.inputs, run, method, "step=eager", "unpad=false", *more)

    def run_of(self, method: str, side: str) -> Path:
        """The five steps of a method, trained if they are not there yet."""
        run = self.folder.parent / side / "runs" / method
        if not run.exists():
            self.train(run, method)
        return run

    def losses(self) -> Iterator[Task]:
        for method in self.methods:
            yield f"{method} eager", lambda m: golden.losses(self.run_of(m, self.folder.name)), (method,)
            if method in COMPILED:
                run = self.folder / "compiled" / method
                yield f"{method} compile", self.train, (run, method, "step=compile")

    def old_runs(self) -> Iterator[Task]:
        for method in self.methods:
            yield f"{method} vectors", lambda m: self.encode(self.run_of(m, "old")), (method,)
            yield f"{method} goes on", self.go_on, (method,)

    def go_on(self, method: str) -> Value:
        run = self.folder / "resumed" / method
        shutil.copytree(self.run_of(method, "old"), run)
        return self.train(run, method, "ckpt_path=last", "trainer.max_steps=7", "trainer.max_epochs=3")

    def vectors(self) -> Iterator[Task]:
        for name in names_of(self.checkout, "pooling"):
            if name in (self.names or [name]):
                yield name, self.pooled, (name,)

    def pooled(self, name: str) -> Value:
        run = self.folder / "poolings" / name
        method, *more = pooling_run(name)
        self.train(run, method, f"pooling={name}", "trainer.max_steps=2", *more)
        return self.encode(run)

    def encode(self, run: Path) -> Value:
        import embedlab

        return embedlab.load(run).encode(golden.sentences(32, seed=9), device="cpu").tolist()

    def exports(self) -> Iterator[Task]:
        yield from ((method, self.exported, (method,)) for method in self.methods)

    def exported(self, method: str) -> Value:
        from safetensors.numpy import load_file

        out, digest = self.folder / "exports" / method, hashlib.sha256()
        golden.command("export", f"ckpt={self.run_of(method, self.folder.name)}", "to=hf", f"out={out}")
        for file in sorted(out.rglob("*.safetensors")):
            for name, tensor in sorted(load_file(file).items()):
                digest.update(f"{file.relative_to(out)} {name} {tensor.dtype} {tensor.shape}".encode())
                digest.update(tensor.tobytes())
        return digest.hexdigest()

    def quickstart(self) -> Iterator[Task]:
        if importlib.util.find_spec("gensim") is not None:
            yield "losses", self.recipe, (self.folder / "quickstart",)

    def recipe(self, run: Path) -> Value:
        golden.command("train", *QUICKSTART, f"hydra.run.dir={run}")
        return golden.losses(run)


def work(checkout: Path, folder: Path, parts: list[str], names: list[str]) -> None:
    """Write `folder/found.json`: what the checkout of PYTHONPATH computes."""
    import embedlab

    if not Path(str(embedlab.__file__)).resolve().is_relative_to(checkout):
        raise SystemExit(f"embedlab is that of {embedlab.__file__}")
    found: dict[str, Value] = {}
    bench = Bench(checkout, folder, names)
    for part in parts:
        for what, function, arguments in getattr(bench, part)():
            try:
                found[f"{part} {what}"] = function(*arguments)
            except Exception as error:  # a row of the table: the others are wanted too
                traceback.print_exc()
                found[f"{part} {what}"] = f"failed: {error}"
    (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")


def measure(checkout: Path, folder: Path, parts: list[str], names: list[str]) -> dict[str, Value]:
    """What a checkout computes, in a process of its own, whose output goes to `folder/log`."""
    folder.mkdir()
    environment = os.environ | {
        "PYTHONPATH": str(checkout), "EMBEDLAB_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled",
    }  # fmt: skip
    line = [sys.executable, __file__, "--work", str(checkout), str(folder), ",".join(parts), ",".join(names)]
    with (folder / "log").open("w") as log:
        done = subprocess.run(line, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"{checkout}: status {done.returncode}\n{(folder / 'log').read_text()[-3000:]}")
    found: dict[str, Value] = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return found


def difference(old: Value | None, new: Value | None) -> str:
    """``equal``, ``only one``, or how far apart; what failed is equal to nothing."""
    failed = any(isinstance(value, str) and value.startswith("failed") for value in (old, new))
    if old is None or new is None:
        return "failed" if failed else "only one"
    if failed or isinstance(old, str) or isinstance(new, str) or np.shape(old) != np.shape(new):
        return "equal" if old == new and not failed else "differs"
    return "equal" if old == new else f"{np.abs(np.subtract(old, new)).max():.3g}"


def brief(value: Value | None) -> str:
    """A value in a cell of the table: the last loss, or the beginning of a hash."""
    if value is None:
        return "not there"
    if isinstance(value, str):
        return " ".join(value.split())[:60] if value.startswith("failed") else value[:12]
    return (
        repr(value[-1])
        if np.ndim(value) == 1
        else hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]
    )


@contextlib.contextmanager
def checked_out(name: str, folder: Path) -> Iterator[Path]:
    """The folder of a checkout: as given, or of a revision, in `folder`."""
    if Path(name, "embedlab").is_dir():
        yield Path(name).resolve()
        return
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), name], check=True)
    try:
        yield folder.resolve()
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def main() -> int:
    """Print the table; returns 1 if anything differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas")
    parser.add_argument("--names", default="", help="methods and poolings, with commas; all if left out")
    given = parser.parse_args()
    parts, names = given.only.split(","), [name for name in given.names.split(",") if name]
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only: {', '.join(unknown)} is none of {', '.join(PARTS)}")
    found: dict[str, dict[str, Value]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for side in ("old", "new"):
            with checked_out(getattr(given, side), Path(folder) / f"{side}-code") as checkout:
                found[side] = measure(checkout, Path(folder) / side, parts, names)
    pairs = {what: (found["old"].get(what), found["new"].get(what)) for what in found["old"] | found["new"]}
    rows = [(what, brief(old), brief(new), difference(old, new)) for what, (old, new) in pairs.items()]
    for what, *cells, told in [("what", "old", "new", "difference"), *rows]:
        print(f"{what:<36}" + "".join(f"{cell:<24}" for cell in cells) + told)
    return 0 if rows and all(row[3] in ("equal", "only one") for row in rows) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(Path(sys.argv[2]), Path(sys.argv[3]), *([n for n in a.split(",") if n] for a in sys.argv[4:6]))
    else:
        sys.exit(main())
