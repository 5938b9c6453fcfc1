"""The console command as a process: what it prints, where, and with which status."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

import embedlab
from embedlab.cli import main as cli

# A package `embedlab.cli.train` of one line, in place of the real one, before the command starts.
STUB = """
import sys, types
module = types.ModuleType("embedlab.cli.train")
module.__spec__ = types.SimpleNamespace()
sys.modules["embedlab.cli.train"] = module
{body}
module.main = main
from embedlab.cli.main import main
sys.exit(main(["train", *sys.argv[1:]]))
"""


def call(*argv: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "embedlab", *argv], capture_output=True, text=True, check=False, **options
    )  # type: ignore[call-overload, no-any-return]


def call_stub(body: str, *argv: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", STUB.format(body=body), *argv],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )  # type: ignore[call-overload, no-any-return]


def test_help_is_quick_and_loads_no_framework() -> None:
    code = (
        "import sys; from embedlab.cli.main import main; status = main(['--help']);"
        "heavy = {'torch', 'lightning', 'transformers', 'hydra', 'omegaconf', 'numpy'} & set(sys.modules);"
        "print(sorted(heavy), file=sys.stderr); sys.exit(status)"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert time.perf_counter() - start < 5  # 0.1 s on an idle machine; with torch it would be many times that
    assert done.stderr.strip() == "[]"
    assert done.stdout.startswith("usage: embedlab COMMAND")


@pytest.mark.parametrize("encoding", ["ascii", "latin1", "cp1252", "utf-8"])
@pytest.mark.parametrize("text", ["… ─ ±", "你好", "plain", "\\u2026 é"])
def test_what_the_locale_cannot_write_ends_no_command(encoding: str, text: str) -> None:
    body = f"def main(argv):\n print({text!r})\n return 0"
    code = STUB.format(body=body).replace('main(["train", *sys.argv[1:]])', "main()")
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code, "train"], capture_output=True, check=False, env=env)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.strip() == text.encode(encoding, errors="backslashreplace")


def test_help_lists_exactly_the_commands_that_exist() -> None:
    listed = [line.split()[0] for line in cli.usage().splitlines() if line.startswith("  ")]
    assert listed == list(cli.COMMANDS)
    functions = [cli._command(name) for name in listed]
    assert [getattr(f, "args", (f.__module__.rpartition(".")[2],))[0] for f in functions] == listed


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert cli.main([flag]) == 0
    assert capsys.readouterr().out == f"embedlab {embedlab.__version__}\n"


def test_no_command_shows_the_usage_as_an_error() -> None:
    done = call()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: ")


def test_an_unknown_command_suggests_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "COMMANDS", {"train": "", "encode": ""})
    assert cli.main(["tarin"]) == 2
    assert (
        capsys.readouterr().err
        == "embedlab: there is no command 'tarin'. Fix: did you mean train (of train, encode)?\n"
    )
    assert cli.main(["xyz"]) == 2
    assert capsys.readouterr().err == "embedlab: there is no command 'xyz'. Fix: one of train, encode\n"


def test_arguments_and_status_pass_through() -> None:
    done = call_stub("def main(argv): print(argv); return 7", "a=1", "-m", "--help")
    assert (done.returncode, done.stdout) == (7, "['a=1', '-m', '--help']\n")


def test_bad_input_is_one_line_and_status_2() -> None:
    body = "from embedlab.errors import UserError\ndef main(argv): raise UserError('no rows', file='a.csv', fix='f')"
    done = call_stub(body)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "embedlab: a.csv: no rows. Fix: f\n")


def test_a_failure_is_a_traceback_and_status_1() -> None:
    done = call_stub("def main(argv): raise RuntimeError('boom')")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.rstrip().endswith("RuntimeError: boom")


@pytest.mark.parametrize(
    "body",
    [
        "def main(argv): raise KeyboardInterrupt",
        # what Lightning's trainer does on Ctrl-C
        "def main(argv):\n  try: raise KeyboardInterrupt\n  except KeyboardInterrupt: sys.exit(1)",
    ],
)
def test_interrupt_is_one_line_and_status_130(body: str) -> None:
    done = call_stub(body)
    assert (done.returncode, done.stderr) == (130, "embedlab: interrupted\n")


def test_work_that_is_kept_is_said_to_go_on() -> None:
    done = call_stub(
        "from embedlab.cli.exits import going_on\n"
        "def main(argv):\n  with going_on():\n    raise KeyboardInterrupt"
    )
    assert (done.returncode, done.stderr) == (130, "embedlab: interrupted; the same command goes on\n")


def test_a_closed_pipe_ends_quietly() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "embedlab", "--help"], stdout=write, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_closed_pipe_ends_quietly_under_rich_too() -> None:
    body = "import rich\ndef main(argv):\n  for _ in range(999): rich.print('x' * 999)"
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-c", STUB.format(body=body)], stdout=write, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_another_broken_pipe_is_a_failure() -> None:
    done = call_stub("def main(argv): raise BrokenPipeError('the worker is gone')")
    assert done.returncode == 1
    assert "the worker is gone" in done.stderr


def test_a_missing_extra_is_named() -> None:
    done = call_stub("def main(argv):\n  sys.modules['gensim'] = None\n  import gensim.test")
    assert done.returncode == 2
    assert done.stderr == (
        "embedlab: this needs the package gensim, which is not installed."
        " Fix: pip install 'embedlab[quickstart]'\n"
    )


def test_a_module_missing_otherwise_is_a_failure() -> None:
    done = call_stub("def main(argv): import no_such_module")
    assert done.returncode == 1
    assert "No module named 'no_such_module'" in done.stderr


FORK = """
import os
def main(argv):
    print(os.environ["TOKENIZERS_PARALLELISM"], flush=True)
    child = os.fork()
    if child == 0:
        print(os.environ["TOKENIZERS_PARALLELISM"], flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    return 0
"""


@pytest.mark.parametrize(
    ("given", "expected"), [(None, "true\nfalse\n"), ("true", "true\ntrue\n"), ("0", "0\n0\n")]
)
def test_forked_children_tokenise_in_one_thread(given: str | None, expected: str) -> None:
    """A forked child of a process that has tokenised in threads would wait for them for ever."""
    environment = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    if given is not None:
        environment["TOKENIZERS_PARALLELISM"] = given
    assert call_stub(FORK, env=environment).stdout == expected


GROUP = """
import torch.distributed as dist
def join():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
def main(argv):
    if not dist.is_initialized():
        join()
    return int(argv[0])
import atexit
atexit.register(lambda: print("in a group" if dist.is_initialized() else "alone"))
"""


@pytest.mark.parametrize(
    ("before", "status", "then"),
    [("", 0, "alone"), ("", 3, "in a group"), ("join()", 0, "in a group")],
    ids=["its own", "failed", "the caller's"],
)
def test_a_group_that_a_command_has_joined_is_left_after_success_alone(
    before: str, status: int, then: str
) -> None:
    """A process that exits in a group of gloo may abort; after a failure, leaving would wait for the others."""
    done = call_stub(GROUP + before, str(status))
    assert (done.returncode, done.stdout.strip()) == (status, then), done.stderr
