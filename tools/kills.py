"""Kills writers at random moments, and looks at what a reader finds: for ``tools/faults.py``.

One interpreter imports everything once; every writer is a fork of it that runs what a user would run. A third of the
kills come at a moment of the whole command, a third between its first file and its end, and a third within 5 ms of
when the output changes; half of each with SIGKILL, half with SIGTERM.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

Content = dict[str, bytes]
_TIMES = re.compile(
    rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[\d.+:Z]*|(?<=\"seconds\": )[\d.]+|(?<=\"digest\": \")\w+"
)
MOMENTS = ("start", "first file", "change")
_LOCK = re.compile(r".*\.lock")


@dataclass
class Output:
    """Something that is written.

    Args:
        name: of the file or folder; ``.``: several files, each on its own.
        write: ``write(target, given)`` makes it of what lies in the folder `given`; ends well, or raises.
        replaces: whether there is an older one, made of other things.
    """

    name: str
    write: Callable[[Path, Path], None]
    replaces: bool = True


@dataclass
class Outcome:
    """What kills of one kind left: the old, the new (or neither), and hidden files after the next run."""

    kind: str
    kills: int = 0
    old: int = 0
    new: int = 0
    broken: list[str] = field(default_factory=list)
    during: int = 0
    leftovers: int = 0

    @property
    def whole(self) -> int:
        return self.kills - len(self.broken)


def fork(write: Callable[[], None], log: Path) -> int:
    """Starts a writer; returns its process number."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # tqdm's own lock is one of all processes that are forked, and stays taken where its holder is killed.
        tqdm.set_lock(threading.RLock())
        to = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(to, 1)
        os.dup2(to, 2)
        write()
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def content(path: Path) -> Content:
    """Every file of what a reader sees, without its dates, durations and the digest of the cache's, which has one."""
    if path.is_file():
        return {"": _TIMES.sub(b"", path.read_bytes())}
    files = (p for p in path.rglob("*") if p.is_file() and not _LOCK.fullmatch(p.name))
    return {
        str(p.relative_to(path)): _TIMES.sub(b"", p.read_bytes())
        for p in files
        if not _hidden(p.relative_to(path))
    }


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def leftovers(*folders: Path) -> list[str]:
    """What lies there and is not an output: hidden files, and all of a folder for temporary ones."""
    found = [
        p.relative_to(f)
        for f in folders
        for p in f.rglob("*")
        if f.name == "tmp" or (_hidden(p.relative_to(f)) and ".hydra" not in p.parts)
    ]
    return sorted(map(str, found))


class Place:
    """A folder for one kind of output: ``out/`` for what is written, ``tmp/`` for what is temporary."""

    def __init__(self, work: Path, kind: str, output: Output) -> None:
        self.home, self.output = work / re.sub(r"\W+", "-", kind), output
        self.out, self.tmp, self.log = self.home / "out", self.home / "tmp", self.home / "log"
        self.target = self.out / output.name
        for folder in (self.out, self.tmp):
            folder.mkdir(parents=True)

    def start(self, given: Path) -> int:
        def write() -> None:
            import tempfile

            os.environ["TMPDIR"], tempfile.tempdir = str(self.tmp), None
            self.output.write(self.target, given)

        return fork(write, self.log)

    def finish(self, given: Path) -> tuple[float, float, Content]:
        """Write undisturbed: seconds, seconds until the first file, what is there then."""
        begin, first = time.monotonic(), None
        child = self.start(given)
        before = self._seen()
        while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if first is None and self._seen() != before:
                first = time.monotonic()
            time.sleep(0.0002)
        end = time.monotonic()
        if os.waitpid(child, 0)[1] != 0:
            raise SystemExit(f"a writer failed by itself:\n{self.log.read_text()}")
        return end - begin, (first or begin) - begin, content(self.out)

    def _seen(self, hidden: bool = True) -> list[tuple[str, int]]:
        """What tells a change of the folder: of all in it, or of what a reader sees."""
        return sorted(
            (e.name, e.inode()) for e in os.scandir(self.out) if hidden or not e.name.startswith(".")
        )

    def reset(self, backup: Path) -> None:
        shutil.rmtree(self.out)
        shutil.copytree(backup, self.out)

    def kill(self, given: Path, number: int, moment: str, wait: float) -> bool:
        """Kill a writer so many seconds after a moment of `MOMENTS`; returns whether it had not ended before."""
        hidden = moment == "first file"
        before = self._seen(hidden)
        child = self.start(given)

        def runs() -> bool:
            return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

        while moment != "start" and runs() and self._seen(hidden) == before:
            pass
        until = time.monotonic() + wait
        while runs() and time.monotonic() < until:
            time.sleep(0.0002)
        os.kill(child, number)  # not reaped yet, so the number is still its own
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def kill_writers(
    kind: str, output: Output, times: int, draw: random.Random, work: Path, given: tuple[Path, Path]
) -> Outcome:
    """Kill the writer of one kind of output so many times.

    Args:
        kind: its name.
        output: how it is written.
        times: kills.
        draw: draws the moments.
        work: an empty folder is made in it.
        given: inputs of the old output and of the new one.
    """
    place, found = Place(work, kind, output), Outcome(kind)
    backup = place.home / "before"
    if output.replaces:
        place.finish(given[0])
    old = content(place.out)
    shutil.copytree(place.out, backup)
    seconds, first, new = place.finish(given[1])
    if new == old or leftovers(place.out, place.tmp):
        raise SystemExit(
            f"{kind}: the new output is the old one, or {leftovers(place.out, place.tmp)} lie about"
        )
    longest, misses = (seconds, seconds - first, 0.005), 0
    while found.kills < times:
        place.reset(backup)
        which = (found.kills + misses // 10) % 3
        number = (signal.SIGKILL, signal.SIGTERM)[found.kills // 3 % 2]
        wait = draw.uniform(0, longest[which]) * 0.7 ** (misses % 10)
        if not place.kill(given[1], number, MOMENTS[which], wait):
            misses += 1  # it had ended: sooner
            continue
        found.kills += 1
        seen = content(place.out)
        found.during += bool(leftovers(place.out, place.tmp))
        if problem := _problem(seen, old, new):
            found.broken.append(problem)
        elif seen == old:
            found.old += 1
        else:
            found.new += 1
        if place.finish(given[1])[2] != new:
            found.broken.append("the repeat gives other bytes")
        found.leftovers += len(leftovers(place.out, place.tmp))
    return found


def _problem(seen: Content, old: Content, new: Content) -> str | None:
    """Each file of the folder `out` is whole, and so is a folder in it: all of its files are the old or the new."""
    for top in {name.partition("/")[0] for name in (*seen, *old, *new)}:
        one, before, after = (
            {n: b for n, b in c.items() if n.partition("/")[0] == top} for c in (seen, old, new)
        )
        if one not in (before, after):
            return f"{top} is neither the old nor the new"
    return None


def sentences(draw: random.Random, n: int) -> list[str]:
    words = "the a cat dog house river runs sees likes red old small happy fast of in with bird tree"
    return [" ".join(draw.choices(words.split(), k=draw.randint(4, 12))) for _ in range(n)]


def make_inputs(folder: Path, seed: int, backbone: Path) -> Path:
    """What a writer reads: sentences, rated pairs, an encoder, scored runs; of other content for another seed."""
    import torch

    from embedlab.encoders.loading import load

    draw = random.Random(seed)
    folder.mkdir(parents=True)
    texts = sentences(draw, 200)
    (folder / "text.txt").write_text("\n".join(texts) + "\n")
    rows = ["score\tsentence1\tsentence2\tsentence1_tok\tsentence2_tok"]
    rows += [
        f"{draw.uniform(0, 5):.2f}\t{a}\t{b}\t{a}\t{b}" for a, b in zip(texts[::2], texts[1::2], strict=True)
    ]
    (folder / "stsb_test.tsv").write_text("\n".join(rows) + "\n")
    encoder = load(backbone)
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in encoder.parameters():
            weight += 0.01 * torch.randn_like(weight)
    encoder.save(folder / "encoder")
    for n in range(6):
        run = folder / "runs" / str(n)
        run.mkdir(parents=True)
        config = {
            "seed": n % 3,
            "method": {"name": "simcse"},
            "pooling": {"name": "s2sent", "n": n // 3, "m": 4},
        }
        scores = {"sts7/spearman": draw.uniform(60, 80), "stsb/spearman": draw.uniform(60, 80)}
        training = {"seed": n % 3, "device": "cpu", "steps": 3}
        (run / "scores.json").write_text(
            json.dumps({"scores": scores, "config": config, "training": training})
        )
    return folder


def _command(*arguments: str) -> Callable[[Path, Path], None]:
    """A command of embedlab; ``{out}`` and ``{given}`` in its arguments are folders."""

    def write(target: Path, given: Path) -> None:
        from embedlab.cli.main import main

        line = [a.format(out=target, given=given) for a in arguments]
        if status := main(line):
            raise RuntimeError(f"{line} ended with {status}")

    return write


def _cache(target: Path, given: Path) -> None:
    from embedlab.config.data import DataConfig
    from embedlab.data.build import build_token_table
    from embedlab.encoders.loading import load

    config = DataConfig(files=str(given / "text.txt"), cache_dir=str(target))
    tokenization = load(given / "encoder").tokenization
    build_token_table(config, {"sentence": ("sentence", tokenization)}, progress=False)


def _save(target: Path, given: Path) -> None:
    from embedlab.encoders.loading import load

    load(given / "encoder").save(target)


def outputs() -> dict[str, Output]:
    """What is killed, by its kind; what its commands import is imported here, once for all forks."""
    for name in ("cli.encode", "cli.search", "cli.export", "cli.evaluate", "cli.encoders", "corpus.search",
                 "export.card", "export.roundtrip", "evaluation.sts.sts", "report.report", "data.build"):  # fmt: skip
        importlib.import_module(f"embedlab.{name}")
    for name in ("sentence_transformers", "pyarrow.parquet", "matplotlib.pyplot", "scipy.stats"):
        importlib.import_module(name)
    encode = _command(
        "encode", "{given}/text.txt", "{out}", "ckpt={given}/encoder", "batch_size=16", "overwrite=true"
    )
    index = _command(
        "search",
        "index",
        "{given}/text.txt",
        "{out}",
        "ckpt={given}/encoder",
        "batch_size=16",
        "overwrite=true",
    )
    export = {
        to: _command("export", "ckpt={given}/encoder", f"to={to}", "out={out}", "overwrite=true")
        for to in ("hf", "sentence-transformers")
    }
    evaluate = _command(
        "evaluate",
        "ckpt={given}/encoder",
        "suite=sts",
        "tasks=stsb",
        "data_dir={given}",
        "out={out}",
        "overwrite=true",
    )
    return {
        "token cache": Output("cache", _cache, replaces=False),
        "encode, npy": Output("vectors.npy", encode),
        "encode, parquet": Output("vectors.parquet", encode),
        "search index, new": Output("index", index, replaces=False),
        "search index, overwrite": Output("index", index),
        **{f"export {to}, new": Output("export", write, replaces=False) for to, write in export.items()},
        **{f"export {to}, overwrite": Output("export", write) for to, write in export.items()},
        "evaluate": Output("scores.json", evaluate),
        "report": Output(".", _command("report", "{given}/runs", "--out", "{out}", "overwrite=true")),
        "SentenceEncoder.save": Output("saved", _save),
    }
