"""A tokenising process: ``python -m embedlab.data.worker``, spoken to by `embedlab.data.tokenise`.

Reads a pickled tokeniser from its standard input, then chunks of texts, and answers each on its standard
output with arrays or with the exception. It ends when its input does, so never later than the process that
started it.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not mix with the answers
    questions = sys.stdin.buffer
    tokeniser = pickle.load(questions)
    while True:
        try:
            columns = pickle.load(questions)
        except EOFError:
            return
        try:
            answer = tokeniser(columns)
        except Exception as bad:
            answer = bad
        pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()


if __name__ == "__main__":
    main()
