"""Makes the files of this folder again, by the code of an older commit: `python -m tests.old.make CHECKOUT`.

CHECKOUT is a folder with that commit (`git worktree add CHECKOUT 3e130d8`). Its code makes everything in a temporary
folder, to which the paths in the files are made relative, and records the vectors and losses that
`tests/test_old_files.py` asks of today's code. The models and sentences are those of `tests/methods/golden.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from tests.methods.golden import command, losses, sentences, tiny_bert, tiny_decoder

HERE = Path(__file__).resolve().parent
BASICS = (
    "backbone=local", "backbone.path=bert", "data.files=text.txt", "data.batch_size=8", "data.max_length=16",
    "data.report=false", "data.processes=1", "trainer=cpu", "trainer.log_every_n_steps=1", "optimizer.lr=1e-3",
    "callbacks.progress=none", "evaluation.final=[]", "evaluation.before=false", "step=eager", "unpad=false",
)  # fmt: skip
POOLINGS: dict[str, tuple[str, ...]] = {
    "cls": (),
    "mean": (),
    "s2sent": ("pooling.n=2", "pooling.m=2", "pooling.r=4"),
    "mask": ("method=promptbert", "template=promptbert_bert"),
}
"""Exported in both forms: what their runs say beyond the pooling."""
RUN = ("pooling=cls", "evaluation.sts_dir=sts", "evaluation.every=1", "evaluation.final=[geometry]")
LORA = (
    "method=prompteol",
    "pooling=last",
    "template=eol",
    "backbone.path=decoder",
    "adapter=lora",
    "adapter.r=2",
)
TWIN = ("method=jtcse", "pooling=cls", "method.tower1=bert", "method.tower2=exports/cls-hf", "method.n_ca=1")
ENCODERS = ("run", "bare.ckpt", "twin", "lora", "lora/last.ckpt",
            *(f"exports/{name}-{form}" for name in POOLINGS for form in ("hf", "st")))  # fmt: skip
"""What `embedlab.load` opens here."""
QUERY = "the red cat runs in the house"
_LEFT_OUT = (".hydra", "train.log", "README.md", "resumed", "fitted", "work")


def say(*arguments: str) -> str:
    """What a command prints; it must end well."""
    with redirect_stdout(StringIO()) as out:
        command(*arguments)
    return out.getvalue()


def train(run: str, *arguments: str, steps: int = 2) -> None:
    """A run in the folder `run`."""
    given = {a.partition("=")[0]: a for a in (*BASICS, f"trainer.max_steps={steps}", *arguments)}
    command("train", *given.values(), f"hydra.run.dir={run}")


def vectors(ckpt: str) -> list[list[float]]:
    """Of `queries.txt`."""
    import embedlab

    found: list[list[float]] = (
        embedlab.load(ckpt).encode(Path("queries.txt").read_text().splitlines()).tolist()
    )
    return found


def write_inputs() -> None:
    """The models and texts that the runs begin with."""
    tiny_bert(Path("bert"), width=16)
    tiny_decoder(Path("decoder"), width=16)
    Path("work").mkdir()
    Path("sts").mkdir()
    texts = sentences(96)
    Path("text.txt").write_text("\n".join(texts[:48]) + "\n")
    Path("queries.txt").write_text("\n".join(texts[48:54]) + "\n")
    for i, name in enumerate(("stsb_train", "stsb_dev", "stsb_test")):
        rows = [f"{n % 6}\t{texts[n]}\t{texts[n + 20 + i]}" for n in range(54, 66)]
        Path("sts", f"{name}.tsv").write_text("\n".join(["score\tsentence1\tsentence2", *rows]) + "\n")


def make() -> dict[str, object]:
    """All files, in the working folder; and what today's code must give."""
    train("run", *RUN, steps=4)
    for name, arguments in POOLINGS.items():
        train(f"work/{name}", f"pooling={name}", *arguments)
        for to, form in (("hf", "hf"), ("sentence-transformers", "st")):
            command("export", f"ckpt=work/{name}", f"to={to}", f"out=exports/{name}-{form}")
    shutil.copy("work/s2sent/last.ckpt", "bare.ckpt")
    train("work/twin", *TWIN)
    shutil.copytree("work/twin/export", "twin")
    train("lora", *LORA)
    command("search", "index", "text.txt", "index", "ckpt=run", "device=cpu")
    command("evaluate", "ckpt=run", "suite=sts", "tasks=stsb", "data_dir=sts", "device=cpu",
            "out=run/scores/sts.json")  # fmt: skip
    line = (*BASICS, "pooling=mean", "trainer.max_steps=2", "hydra.run.dir=fitted", "--cli-config")
    Path("fit.yaml").write_text(say("train", *line))
    command("fit", "--config", "fit.yaml")
    shutil.copytree("run", "resumed")
    train("resumed", *RUN, "ckpt_path=last", steps=6)
    return {
        "vectors": {ckpt: vectors(ckpt) for ckpt in ENCODERS},
        "run_losses": losses(Path("run")),
        "resumed_losses": losses(Path("resumed")),
        "fitted_losses": losses(Path("fitted")),
        "hits": say("search", "query", "index", QUERY, "k=5", "device=cpu"),
    }


def relative(value: Any, folder: str) -> Any:
    """A value of JSON or of a checkpoint, with its paths as seen from the folder."""
    if isinstance(value, dict):
        return type(value)({k: relative(v, folder) for k, v in value.items()})
    if isinstance(value, list | tuple):
        return type(value)(relative(v, folder) for v in value)
    return value.replace(f"{folder}/", "") if isinstance(value, str) else value


def without_paths(folder: Path) -> None:
    """Make the paths in all files relative to `folder`, where the files are used."""
    import torch

    for file in (p for p in folder.rglob("*") if p.is_file() and str(folder).encode() in p.read_bytes()):
        if file.suffix == ".ckpt":
            torch.save(relative(torch.load(file, weights_only=True), str(folder)), file)
        else:
            file.write_text(relative(file.read_text(), str(folder)))


def main() -> None:
    """Fill the folder of this file."""
    checkout = Path(sys.argv[1]).resolve()
    sys.path.insert(0, str(checkout))
    sys.argv[1:] = []
    import embedlab

    if not Path(embedlab.__file__).is_relative_to(checkout):
        raise SystemExit(f"no embedlab in {checkout}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        os.environ["EMBEDLAB_CACHE"] = str(folder / "work" / "cache")
        os.chdir(folder)
        write_inputs()
        expected = make()
        left_out = shutil.ignore_patterns(*_LEFT_OUT)
        for path in HERE.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
        without_paths(folder)
        shutil.copytree(folder, HERE, ignore=left_out, dirs_exist_ok=True)
        os.chdir(HERE)
    Path("expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main()
