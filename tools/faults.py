"""Kills writers and training runs at random moments, and says what was left.

    python tools/faults.py [--kills 100] [--only WORDS] [--seed 0] [--steps 120] [--json OUT] [--markdown OUT]

**Outputs** (`tools/kills.py`): each is killed at random moments. Then what a reader sees must be the old output or the
new one, whole; the repeat must give, dates aside, the bytes of a writer that nobody touched, and leave no hidden file
of the dead one, beside the output or among the temporary files.

**Training**, in four ways: SIGKILL to one of two ranks, SIGKILL to all processes of a run on two ranks, SIGKILL to a
run of one process, and SIGTERM to it, as a scheduler does. Runs are `embedlab train` on the CPU (gloo) with a random
two-layer BERT, a checkpoint every 5 steps, dropout on; each kind of run is killed again and again, resumed with
``ckpt_path=auto`` in between, until its kills are used up, and then runs to its end. For each kill: the step that was
logged last, the step that the next try goes on from, what was lost, and whether the losses that were logged up to the
kill are those of the untouched run, digit for digit. At the end: whether weights and AdamW's moments
are equal bit for bit, and whether nothing but the run's own files is left.

**Sweeps** (`embedlab train -m`, two trials one after the other): the launcher is killed at a random moment, and
started again at once, three times before it may end. At each kill: whether its trials end with it (a trial writes its
checkpoint first), and whether each record of a trial is whole. At the end: as of training, for every trial.

The kills are shared out evenly among the kinds. Exit status 1 if anything is broken.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}

import torch
from kills import Outcome, kill_writers, leftovers, make_inputs, outputs, sentences

from embedlab.errors import UserError
from embedlab.run.sweep import status_of

EVERY = 5
WAYS = ("kill -9 of one rank", "kill -9 of all ranks", "kill -9 of the run", "SIGTERM to the run")
SWEEP = "sweep"
TRIALS = ("0", "1")
RANKS = {WAYS[0]: 2, WAYS[1]: 2, WAYS[2]: 1, WAYS[3]: 1}


@dataclass
class Kill:
    way: str
    ranks: int
    last_logged: int
    resumed_from: int
    lost: int
    exit: int
    losses_equal: bool


def backbone(folder: Path) -> Path:
    from transformers import AutoTokenizer, BertConfig, BertModel

    from embedlab.files import assets_dir

    tokenizer = AutoTokenizer.from_pretrained(assets_dir() / "mini")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=len(tokenizer), **shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def command(work: Path, run: Path, ranks: int, steps: int) -> list[str]:
    return [
        sys.executable, "-m", "embedlab", "train", "backbone=local", f"backbone.path={work / 'backbone'}",
        f"data.files={work / 'text.txt'}", f"data.cache_dir={work / 'cache'}", f"data.batch_size={8 // ranks}",
        "data.report=false", "trainer=cpu", f"trainer.devices={ranks}",
        f"trainer.strategy={'ddp' if ranks > 1 else 'auto'}", f"trainer.max_steps={steps}", "trainer.max_epochs=99",
        "trainer.log_every_n_steps=1", "optimizer.lr=1e-3", "callbacks.progress=none", "evaluation.final=[]",
        "evaluation.before=false", f"callbacks.checkpoint.every_steps={EVERY}",
        "callbacks.checkpoint.every_minutes=null", "ckpt_path=auto", f"hydra.run.dir={run}",
    ]  # fmt: skip


def sweep_command(work: Path, folder: Path, steps: int) -> list[str]:
    one = [a for a in command(work, folder, 1, steps) if not a.startswith(("hydra.run.dir", "ckpt_path"))]
    at = one.index("train") + 1
    return [*one[:at], "-m", *one[at:], "method.tau=0.05,0.1", f"hydra.sweep.dir={folder}"]


def start(work: Path, run: Path, ranks: int, steps: int) -> subprocess.Popen[bytes]:
    """A run on so many ranks, or a sweep (0)."""
    line = command(work, run, ranks, steps) if ranks else sweep_command(work, run, steps)
    with (run.parent / f"{run.name}.log").open("ab") as log:
        return subprocess.Popen(line, stdout=log, stderr=log, start_new_session=True)


def logged(run: Path) -> dict[int, str]:
    """Losses by step, as their digits stand in metrics.csv."""
    try:
        with (run / "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError:
        return {}
    return {int(r["step"]): r["train/loss"] for r in rows if r.get("train/loss") and r["step"].isdigit()}


def last_step(run: Path) -> int:
    return max(logged(run), default=0)


def checkpoint_step(run: Path) -> int:
    from embedlab.run.callbacks.checkpoints import find_checkpoint, step_of

    path = find_checkpoint("auto", run)
    return 0 if path is None else step_of(path)


def workers(parent: int | None = None, folder: Path | None = None) -> list[int]:
    """The processes for ranks or trials: those that a process started, or those that work in a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parts = (entry / "stat").read_text().rpartition(")")[2].split()
            name = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        of_folder = folder is not None and os.fsencode(folder) in name
        if (of_folder or int(parts[1]) == parent) and b"embedlab\0worker" in name:
            found.append(int(entry.name))
    return sorted(found)


def strike(way: str, process: subprocess.Popen[bytes], draw: random.Random) -> None:
    if way == WAYS[0]:
        os.kill(draw.choice(workers(process.pid)), signal.SIGKILL)
    elif way == WAYS[3]:
        os.kill(process.pid, signal.SIGTERM)
    else:
        os.killpg(process.pid, signal.SIGKILL)


def wait_for(process: subprocess.Popen[bytes], run: Path, step: int) -> None:
    """Until this process logs a step (what the one before it logged may go further)."""
    file = run / "metrics.csv"
    before = file.stat().st_mtime_ns if file.exists() else 0
    while process.poll() is None:
        time.sleep(0.01)
        if file.exists() and file.stat().st_mtime_ns > before and last_step(run) >= step:
            return


def killed(way: str, work: Path, times: int, steps: int, draw: random.Random) -> tuple[list[Kill], bool]:
    """Kill one run so many times, let it end, and compare it; returns the kills, and whether the end is equal."""
    ranks = RANKS[way]
    reference, run = work / f"untouched-{ranks}", work / way.replace(" ", "-")
    if not (reference / "scores.json").exists():
        print(f"an untouched run on {ranks} rank{'s' * (ranks > 1)} …", file=sys.stderr)
        assert start(work, reference, ranks, steps).wait() == 0, f"see {reference}.log"
    expected, kills = logged(reference), []
    at = sorted(draw.sample(range(2, steps - 2), times))
    for step in at:
        process = start(work, run, ranks, steps)
        wait_for(process, run, step)
        if process.poll() is not None:
            raise SystemExit(f"the run ended by itself before step {step}: see {run}.log")
        strike(way, process, draw)
        status = process.wait()
        losses = logged(run)
        reached, whole = max(losses, default=0), checkpoint_step(run)
        equal = all(expected[s] == loss for s, loss in losses.items())
        kills.append(Kill(way, ranks, reached, whole, max(0, reached - whole), status, equal))
        print(kills[-1], file=sys.stderr)
    assert start(work, run, ranks, steps).wait() == 0, f"see {run}.log"
    left = [p for p in run.rglob("*") if p.suffix in (".new", ".old")]
    return kills, logged(run) == expected and same(run, reference) and not left


def killed_sweep(work: Path, times: int, steps: int, draw: random.Random) -> Outcome:
    """Kill launchers so many times; every third time the sweep may end, and is compared with an untouched one."""
    reference, found = work / "sweep-untouched", Outcome(SWEEP)
    begin = time.monotonic()
    assert start(work, reference, 0, steps).wait() == 0, f"see {reference}.log"
    seconds, folder = time.monotonic() - begin, work / "sweep-0"
    while found.kills < times:
        process = start(work, folder, 0, steps)
        with suppress(subprocess.TimeoutExpired):
            process.wait(draw.uniform(0, seconds))
        if process.poll() is None:
            process.send_signal((signal.SIGKILL, signal.SIGTERM)[found.kills % 2])
            process.wait()
            found.kills += 1
            found.broken += after_kill(folder)
            found.during += bool(leftovers(folder))
            ended = {status_of(folder / trial) for trial in TRIALS} == {"finished"}
            found.old, found.new = found.old + (not ended), found.new + ended
            if found.kills % 3 and found.kills < times:
                continue
            assert start(work, folder, 0, steps).wait() == 0, f"see {folder}.log"
        for trial in TRIALS:
            one, other = folder / trial, reference / trial
            if not (logged(one) == logged(other) and same(one, other)):
                found.broken.append(f"trial {trial} ends otherwise")
        found.leftovers += len(leftovers(folder))
        folder = work / f"sweep-{found.kills}-{draw.random()}"
    return found


def after_kill(sweep: Path) -> list[str]:
    """What is wrong when the launcher of a sweep has just been killed."""
    from embedlab.config.read import read_values
    from embedlab.run.processes import GRACE_SECONDS

    until = time.monotonic() + GRACE_SECONDS
    while (left := workers(folder=sweep)) and time.monotonic() < until:
        time.sleep(0.1)
    wrong = [f"trial {process} outlives its launcher" for process in left]
    for path in (*sweep.rglob("*.json"), *sweep.rglob("trial.yaml"), *sweep.rglob("config.yaml")):
        try:
            read_values(path)
        except UserError as error:
            wrong.append(str(error))
    return wrong


def same(run: Path, reference: Path) -> bool:
    """Weights, AdamW's moments and its step counts, bit for bit."""
    one, other = (torch.load(f / "last.ckpt", weights_only=True) for f in (run, reference))
    a, b = one["state_dict"], other["state_dict"]
    moments = [s["optimizer_states"][0]["state"] for s in (one, other)]
    return (
        a.keys() == b.keys()
        and all(torch.equal(a[k], b[k]) for k in a)
        and moments[0].keys() == moments[1].keys()
        and all(torch.equal(moments[0][p][k], moments[1][p][k]) for p in moments[0] for k in moments[0][p])
        and one["global_step"] == other["global_step"]
    )


def table(kills: list[Kill], ends: dict[str, bool]) -> str:
    lines = [
        "| # | way | ranks | last step logged | goes on from | lost | losses so far equal | exit |",
        "|---" * 8 + "|",
    ]
    for i, k in enumerate(kills, 1):
        lines.append(f"| {i} | {k.way} | {k.ranks} | {k.last_logged} | {k.resumed_from} | {k.lost} | "
                     f"{'yes' if k.losses_equal else 'NO'} | {k.exit} |")  # fmt: skip
    lost = [k.lost for k in kills]
    lines += ["", f"{len(kills)} kills, a checkpoint every {EVERY} steps: {sum(lost) / len(lost):.1f} steps lost on "
              f"average, {max(lost)} at most."]  # fmt: skip
    lines += [
        f"- {way}: all losses, final weights and AdamW's moments {'equal bit for bit' if ok else 'DIFFER'}"
        for way, ok in ends.items()
    ]
    return "\n".join(lines)


def summary(outcomes: list[Outcome]) -> str:
    lines = [
        "| kind | kills | whole | old | new | hidden files at the kill | after the next run |",
        "|---" * 7 + "|",
    ]
    rows = [(o.kind, o.kills, o.whole, o.old, o.new, o.during, o.leftovers) for o in outcomes]
    total = ("all", *(sum(column) for column in list(zip(*rows, strict=True))[1:]))
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in (*rows, total)]
    return "\n".join(lines + [f"- {o.kind}: {problem}" for o in outcomes for problem in o.broken])


def options_of(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100, help="in all")
    parser.add_argument(
        "--only", default="", help="kinds with a word of this in their name, such as search,export"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=120, help="of a training run")
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = options_of(argv)
    writers = outputs()
    kinds = [
        k
        for k in (*writers, SWEEP, *(f"training, {way}" for way in WAYS))
        if any(word in k for word in options.only.split(","))
    ]
    assert kinds, f"no kind has {options.only} in its name"
    draw, kills, ends, outcomes = random.Random(options.seed), [], {}, []
    with tempfile.TemporaryDirectory() as name:
        work = (options.folder or Path(name)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        (work / "text.txt").write_text("\n".join(sentences(random.Random(0), 400)) + "\n")
        tiny = backbone(work / "backbone")
        given = (make_inputs(work / "old", 0, tiny), make_inputs(work / "new", 1, tiny))
        for i, kind in enumerate(kinds):
            times = options.kills // len(kinds) + (i < options.kills % len(kinds))
            if not times:
                continue
            if kind in writers:
                outcomes.append(kill_writers(kind, writers[kind], times, draw, work, given))
            elif kind == SWEEP:
                outcomes.append(killed_sweep(work, times, min(options.steps, 40), draw))
            else:
                way = kind.removeprefix("training, ")
                found, ends[way] = killed(way, work, times, options.steps, draw)
                kills += found
            print(f"{kind}: {times} kills", file=sys.stderr)
    tables = ([summary(outcomes)] if outcomes else []) + ([table(kills, ends)] if kills else [])
    shown = "\n\n".join(tables)
    print(shown)
    record: dict[str, Any] = {
        "outputs": [asdict(o) for o in outcomes],
        "kills": [asdict(k) for k in kills],
        "equal": ends,
        "every": EVERY,
        "seed": options.seed,
    }
    if options.json:
        options.json.write_text(json.dumps(record, indent=1))
    if options.markdown:
        options.markdown.write_text(shown + "\n")
    whole = all(ends.values()) and all(k.losses_equal for k in kills)
    return 0 if whole and not any(o.broken or o.leftovers for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
