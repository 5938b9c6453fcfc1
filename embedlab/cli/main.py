"""The console command: ``embedlab COMMAND …`` hands over to a module of this package.

A command is a function ``(argv: Sequence[str]) -> int`` with a line in `COMMANDS` and a case in `_command`.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial

import embedlab
from embedlab.cli.exits import guarded
from embedlab.console import KERNEL_HINTS
from embedlab.errors import UserError, one_of

COMMANDS = {
    "train": "train an encoder, or a sweep of them with -m",
    "evaluate": "score an encoder: STS, transfer, retrieval, …",
    "encode": "turn a file of sentences into vectors",
    "mine": "find hard negatives for the queries of a table",
    "quantize": "write vectors in 8 bits or one bit a feature",
    "export": "write an encoder in another format",
    "benchmark": "measure how long an encoder takes, in torch and ONNX",
    "report": "gather the scores of finished runs in one table",
    "search": "index a file of sentences, and find those nearest to a text",
    "contamination": "count what training text holds of evaluation sets",
    "tune": "search over configurations, with pruning (Optuna)",
    "fit": "train from one file with LightningCLI (--config FILE)",
    "validate": "score the dev set of a LightningCLI run",
    "test": "score the test sets of a LightningCLI run",
    "predict": "encode the data of a LightningCLI run",
}
WORKER = "worker"
"""The command that starts a rank or a trial; this program's own, and not listed."""


def usage() -> str:
    """The text of ``embedlab --help``."""
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: embedlab COMMAND key=value …",
            "",
            "Train, score and inspect sentence encoders.",
            "",
            "commands:",
            *(f"  {name:<{width}}  {line}" for name, line in COMMANDS.items()),
            "",
            "embedlab COMMAND --help shows a command's keys and their defaults; --version the version.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns the exit status: 0, 2 for bad input, 130 after Ctrl-C. A failure that is not the user's stays the
    exception that it is, with which Python exits 1.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None and isinstance(sys.stdout, io.TextIOWrapper):
        # As of standard error: where the locale has no sign for a line of a table, a run must not end for it.
        sys.stdout.reconfigure(errors="backslashreplace")
    return guarded(lambda: _dispatch(arguments))


def _dispatch(argv: list[str]) -> int:
    name, rest = (argv[0], argv[1:]) if argv else ("", [])
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name in ("-V", "--version"):
        print(f"embedlab {embedlab.__version__}")
        return 0
    if not name:
        print(usage(), file=sys.stderr)
        return 2
    if name not in (*COMMANDS, WORKER):
        raise UserError(f"there is no command {name!r}", fix=one_of(name, COMMANDS))
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the working folder is no longer there", fix="cd to one that is") from None
    _set_environment()
    from embedlab.cli.encoders import notices

    notices.clear()
    joined = _in_gloo_group()
    status = _command(name)(rest)
    if not status and not joined and _in_gloo_group():
        from embedlab.distributed.gather import leave

        # Lightning leaves groups of NCCL alone. After a failure others may wait for this rank, and leaving would hang.
        leave()
    for notice in notices:
        print(notice, file=sys.stderr)
    return status


def _in_gloo_group() -> bool:
    # Not imported here: `embedlab --help` does without torch.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return False
    return bool(distributed.get_backend() == "gloo")


def _command(name: str) -> Callable[[Sequence[str]], int]:
    """Imported when it is called, so that `embedlab --help` does not wait for torch."""
    match name:
        case "train":
            from embedlab.cli.train import main
        case "evaluate":
            from embedlab.cli.evaluate import main
        case "encode":
            from embedlab.cli.encode import main
        case "export":
            from embedlab.cli.export import main
        case "benchmark":
            from embedlab.cli.benchmark import main
        case "mine":
            from embedlab.cli.mine import main
        case "quantize":
            from embedlab.cli.quantize import main
        case "report":
            from embedlab.cli.report import main
        case "search":
            from embedlab.cli.search import main
        case "contamination":
            from embedlab.cli.contamination import main
        case "tune":
            from embedlab.cli.tune import main
        case "worker":
            from embedlab.cli.train import worker as main
        case _:
            from embedlab.cli.fit import main as of_file

            return partial(of_file, name)
    return main


def _set_environment() -> None:
    """Defaults of the libraries below, where the user has not chosen."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    # W&B prints thirty lines at the end of a run; where it records stands in the log (embedlab/run/loggers.py).
    os.environ.setdefault("WANDB_SILENT", "true")
    logging.getLogger(KERNEL_HINTS).setLevel(logging.ERROR)
    if "TOKENIZERS_PARALLELISM" not in os.environ:
        # Said outright, tokenizers neither warns nor turns itself off when a process is started later. The
        # danger that it warns of, a deadlock, is in a forked child only.
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        os.register_at_fork(after_in_child=_tokenize_in_one_thread)


def _tokenize_in_one_thread() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


if __name__ == "__main__":
    sys.exit(main())
