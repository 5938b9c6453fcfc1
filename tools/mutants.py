"""Do the tests see a wrong number? Writes small faults into the code one at a time and runs the tests on each.

``python tools/mutants.py --seed 0 --json docs/runs/mutants/seed0.json`` draws a random sample of faults in what makes
a number (objectives, poolings, methods, scores, paired statistics) and runs, for each, the mirrored tests that ran
its lines before, fastest first, until one fails. What survives is either no fault (``equivalent.json`` beside the
result says why) or wants a test; ``--again`` runs what was not killed in a result once more.

Needs ``pip install -e '.[test,dev]'``. All tests of a fault run in a fork of one process that has imported the
libraries, on a copy of the checkout; one at a time. Tests that take over 10 s, and any after the first minute of a
fault's tests, are left out, so that the share of killed faults is a lower bound.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import gc
import hashlib
import importlib
import json
import os
import py_compile
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}

from mutations import Site, difference, sites  # noqa: E402

TIMEOUT = 180.0
"""Seconds that a fault's tests may take."""
LONGEST, TOGETHER = 10.0, 60.0
"""Seconds of the processor that one test may take, and all of a fault."""
# fmt: off
LIBRARIES = (
    "pytest", "hypothesis", "coverage", "torch", "torch.utils.tensorboard", "torch._dynamo", "lightning", "peft",
    "torchmetrics", "tokenizers", "datasets", "transformers.models.auto.modeling_auto", "hydra", "jsonargparse",
    "transformers.models.bert.modeling_bert", "transformers.models.llama.modeling_llama", "sentence_transformers",
    "transformers.models.roberta.modeling_roberta", "mteb", "ir_measures", "scipy.stats", "sklearn.linear_model",
)
# fmt: on
_OTHER_PROCESSES = ("_ddp.py", "test_parts.py")  # tests in other processes: their lines are not counted


@dataclass(frozen=True)
class Area:
    """What is sampled together.

    Args:
        sources: files and folders of the package.
        tests: files and folders that mirror it.
        share: of the sample.
        without: sources that make no number.
    """

    sources: tuple[str, ...]
    tests: tuple[str, ...]
    share: float
    without: tuple[str, ...] = ()


_COMPARE, _PAIRED = "evaluation/sts/compare.py", "report/paired.py"
AREAS = {
    "objectives": Area(("objectives",), ("objectives",), 0.2),
    "pooling": Area(("pooling",), ("pooling", "kernels/test_s2sent.py"), 0.2),
    "methods": Area(("methods",), ("methods",), 0.2),
    "scores": Area(
        ("evaluation",),
        ("evaluation",),
        0.3,
        ("evaluation/core/figures.py", "evaluation/core/table.py", "evaluation/core/files.py", _COMPARE),
    ),
    "compare": Area((_COMPARE,), ("evaluation/test_compare.py",), 0.05),
    "paired": Area((_PAIRED,), ("report",), 0.05),
}


@dataclass(frozen=True)
class Test:
    """A test that passes: how long it takes, and which lines of the sources it runs."""

    name: str
    seconds: float
    lines: dict[str, list[int]]

    @property
    def file(self) -> str:
        return self.name.split("::")[0]


class Copy:
    """The tracked files of a checkout, where faults are written.

    Args:
        folder: of it; results about unchanged test files are kept beside it.
    """

    def __init__(self, folder: Path) -> None:
        self.root, self.known = folder / "copy", folder / "tests"
        self.known.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.root, ignore_errors=True)
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        # By content: a fault can have the size and the second of what it replaces.
        checked = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(self.root / "embedlab", quiet=2, invalidation_mode=checked)
        self.version = _digest(sorted((self.root / "embedlab").rglob("*.py")))

    def files(self, names: Iterable[str], below: str, pattern: str = "*.py") -> list[str]:
        """Paths below the copy of the files that the names stand for."""
        found: list[Path] = []
        for name in names:
            path = self.root / below / name
            found += [path] if path.is_file() else sorted(path.rglob(pattern))
        return [str(path.relative_to(self.root)) for path in found]

    def tests(self, area: Area) -> list[Test]:
        """The tests of an area, each run once; of files that have not changed since, from memory."""
        found = []
        for path in self.files(area.tests, "tests", "test_*.py"):
            if path.endswith(_OTHER_PROCESSES):
                continue
            known = self.known / f"{_digest([self.root / path])}-{self.version}.json"
            if not known.exists():
                print(f"  running {path}", flush=True)
                log = known.with_suffix(".log")
                self.fork(lambda path=path, known=known: _cover(path, known), log, 20 * TIMEOUT)  # type: ignore[misc]
            found += [Test(**test) for test in json.loads(known.read_text())] if known.exists() else []
        return found

    def fork(self, call: Callable[[], int], log: Path, seconds: float) -> int:
        """Calls in a child with the copy as its folder; its status, or -1 where it took too long."""
        sys.stdout.flush()
        child = os.fork()
        if not child:
            status = 70
            try:
                os.setsid()
                to = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
                os.dup2(to, 1)
                os.dup2(to, 2)
                os.chdir(self.root)
                sys.path.insert(0, str(self.root))
                os.environ["PYTHONPATH"] = str(self.root)
                status = call()
            finally:
                sys.stdout.flush()
                os._exit(status)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                _end_group(child)
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        _end_group(child)
        os.waitpid(child, 0)
        return -1

    def outcome(self, site: Site, source: str, tests: Sequence[Test]) -> dict[str, Any]:
        """Writes a fault and runs the tests that can see it."""
        seeing = sorted(_seeing(tests, site), key=lambda test: test.seconds)
        names: list[str] = []
        total = 0.0
        for test in seeing:
            total += test.seconds
            if total > TOGETHER:
                break
            names.append(test.name)
        was, becomes = difference(site.module.code, source)
        fault = {
            "path": site.path,
            "line": site.first,
            "operator": site.operator,
            "was": was,
            "becomes": becomes,
        }
        start, target = time.monotonic(), self.root / site.path
        target.write_text(source, encoding="utf-8")
        try:
            status = self.fork(lambda: _run(names), self.known / "last.log", TIMEOUT) if names else 0
        finally:
            target.write_text(site.module.code, encoding="utf-8")
        outcome = "survived" if status == 0 else "timeout" if status == -1 else "killed"
        return fault | {
            "outcome": outcome,
            "tests": len(names),
            "seconds": round(time.monotonic() - start, 1),
        }


def _end_group(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


def _digest(paths: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def _seeing(tests: Sequence[Test], site: Site) -> list[Test]:
    """Tests that run the lines of a fault; of one outside of functions, all of the files that run the module."""
    if site.inside:
        lines = range(site.first, site.last + 1)
        return [test for test in tests if any(line in lines for line in test.lines.get(site.path, ()))]
    files = {test.file for test in tests if site.path in test.lines}
    return [test for test in tests if test.file in files]


_OPTIONS = ("-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--durations=0", "--hypothesis-seed=0")


def _run(names: Sequence[str]) -> int:
    import pytest

    sys.dont_write_bytecode = True
    return int(pytest.main([*_OPTIONS, "-x", *names]))


def _cover(path: str, result: Path) -> int:
    """Runs a file of tests and writes what each test that passes runs."""
    import coverage
    import pytest

    measured = coverage.Coverage(data_file=None, include=["*/embedlab/*"], concurrency="thread")
    seconds: dict[str, float] = {}
    failed = set()

    class Plugin:
        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
            measured.switch_context(item.nodeid)
            start = time.process_time()  # not the wall's: other work on the machine must leave no test out
            try:
                return (yield)
            finally:
                seconds[item.nodeid] = time.process_time() - start

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if not report.passed:
                failed.add(report.nodeid)

    measured.start()
    pytest.main([*_OPTIONS, path], plugins=[Plugin()])
    measured.stop()
    data = measured.get_data()
    lines: dict[str, dict[str, list[int]]] = {name: {} for name in seconds}
    for file in data.measured_files():
        name = str(Path(file).relative_to(Path.cwd()))
        for line, contexts in data.contexts_by_lineno(file).items():
            for context in contexts:
                if context in lines:
                    lines[context].setdefault(name, []).append(line)
    passed = [n for n in seconds if n not in failed and seconds[n] <= LONGEST]
    result.write_text(json.dumps([{"name": n, "seconds": seconds[n], "lines": lines[n]} for n in passed]))
    return 0


def sample(copy: Copy, seed: int, count: int) -> dict[str, tuple[int, list[Site]]]:
    """Area to the number of its faults and a random sample of them."""
    draw = random.Random(seed)
    found = {}
    for name, area in AREAS.items():
        without = {f"embedlab/{path}" for path in area.without}
        paths = [path for path in copy.files(area.sources, "embedlab") if path not in without]
        everything = [site for path in paths for site in sites(copy.root, path)]
        found[name] = (
            len(everything),
            draw.sample(everything, min(len(everything), round(count * area.share))),
        )
    return found


def _key(fault: dict[str, Any]) -> str:
    return f"{fault['path']}: {fault['was']} -> {fault['becomes']}"


def summary(faults: Sequence[dict[str, Any]], equivalent: dict[str, str]) -> dict[str, Any]:
    """Counts by area, and the share of killed ones among those that are faults."""
    counts = {}
    for area in [*dict.fromkeys(fault["area"] for fault in faults), "all"]:
        mine = [fault for fault in faults if area in (fault["area"], "all")]
        killed = sum(fault["outcome"] == "killed" for fault in mine)
        same = sum(fault["outcome"] != "killed" and _key(fault) in equivalent for fault in mine)
        share = round(100 * killed / max(1, len(mine) - same), 1)
        counts[area] = {"sample": len(mine), "killed": killed, "equivalent": same, "killed_percent": share}
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--json", type=Path, required=True, help="result; equivalent.json stands beside it")
    parser.add_argument("--again", action="store_true", help="only what is neither killed nor equivalent")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "embedlab-mutants")
    options = parser.parse_args()
    for library in LIBRARIES:
        importlib.import_module(library)
    gc.freeze()  # or each fork's collector copies every page
    copy = Copy(options.folder)
    old = json.loads(options.json.read_text()) if options.again else {"faults": []}
    before = {_key(fault): fault for fault in old["faults"]}
    listed = options.json.with_name("equivalent.json")
    equivalent = json.loads(listed.read_text()) if listed.exists() else {}
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    versions = {name: version(name) for name in ("mutmut", "libcst", "torch", "transformers", "hypothesis")}
    result: dict[str, Any] = {"seed": options.seed, "commit": commit.stdout.strip(), "versions": versions}
    result |= {"possible": {}, "counts": {}, "faults": []}
    if options.again:
        result["first"] = old.get("first", old["counts"])  # before tests were written for this sample
    options.json.parent.mkdir(parents=True, exist_ok=True)
    for name, (total, drawn) in sample(copy, options.seed, options.count).items():
        tests = copy.tests(AREAS[name])
        result["possible"][name] = total
        for site in drawn:
            if (source := site.source()) is None:
                continue
            was, becomes = difference(site.module.code, source)
            fault = before.get(_key({"path": site.path, "was": was, "becomes": becomes}))
            if fault is None or (fault["outcome"] != "killed" and _key(fault) not in equivalent):
                fault = {"area": name} | copy.outcome(site, source, tests)
                print(
                    f"{fault['outcome']:9} {fault['seconds']:5.1f} s  {fault['tests']:4} {_key(fault)}",
                    flush=True,
                )
            result["faults"].append(fault)
        result["counts"] = summary(result["faults"], equivalent)
        options.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    for name, row in result["counts"].items():
        print(name, row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
