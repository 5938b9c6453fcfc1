"""Questions with the windows of their passages as rows of tokens, and spans of tokens back as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embedlab.evaluation.finetune.rows import Rows

_QUESTION = 64  # tokens of a question at most, as in BERT's SQuAD script
_ANSWER = 30  # tokens of an answer at most, as there


@dataclass(frozen=True)
class Window:
    """One window of one passage behind one question.

    question: its number; row: token ids; at: position in the row of the window's first passage token; start
    and count: which of the passage's tokens these are.
    """

    question: int
    row: list[int]
    at: int
    start: int
    count: int


class Passages:
    """Tokenised passages: ids and where in the text each token stands."""

    def __init__(self, rows: Rows, texts: Sequence[str]) -> None:
        self.texts = list(texts)
        encoded = rows.encode(self.texts)
        self.ids: list[list[int]] = [e.ids for e in encoded]
        self.offsets: list[list[tuple[int, int]]] = [e.offsets for e in encoded]

    def text(self, passage: int, first: int, last: int) -> str:
        """What tokens `first` to `last` (inclusive) of a passage stand for, without spaces at its ends."""
        offsets = self.offsets[passage]
        return self.texts[passage][offsets[first][0] : offsets[last][1]].strip()

    def span(self, passage: int, start: int, end: int) -> tuple[int, int] | None:
        """First and last token that share a character with text[start:end]; None where no token does."""
        inside = [
            i
            for i, (low, high) in enumerate(self.offsets[passage])
            if low < end and high > start and high > low
        ]
        return (inside[0], inside[-1]) if inside else None


def question_tokens(rows: Rows) -> int:
    """Tokens of a question at most: a third of a short row."""
    return min(_QUESTION, (rows.max_length - rows.overhead) // 3)


def windows(
    rows: Rows, questions: Sequence[str], passages: Passages, gold: Sequence[int], stride: int
) -> list[Window]:
    """Each question with all windows of its passage, which overlap by `stride` tokens (less in short rows)."""
    asked = [e.ids for e in rows.encode(questions)]
    longest = question_tokens(rows)
    found = []
    for number, (question, passage) in enumerate(zip(asked, gold, strict=True)):
        head = [*rows.first, *question[:longest], *rows.separator]
        room = rows.max_length - len(head) - len(rows.last)
        step = max(1, room - min(stride, room // 2))
        ids = passages.ids[passage]
        start = 0
        while True:
            part = ids[start : start + room]
            found.append(Window(number, [*head, *part, *rows.last], len(head), start, len(part)))
            if start + room >= len(ids):
                break
            start += step
    return found


def training_spans(several: Sequence[Window], spans: Sequence[tuple[int, int]]) -> Tensor:
    """Positions in the row of the answer's first and last token, [windows, 2]; 0 and 0 where the window does
    not hold the whole answer.

    spans: of each question, in tokens of its passage.
    """
    found = []
    for window in several:
        first, last = spans[window.question]
        whole = window.start <= first and last < window.start + window.count
        found.append([p - window.start + window.at for p in (first, last)] if whole else [0, 0])
    return torch.tensor(found, dtype=torch.int64).reshape(-1, 2)


def bounds(several: Sequence[Window]) -> Tensor:
    """Position of the first passage token in each row, and one past the last, [windows, 2]."""
    return torch.tensor([[w.at, w.at + w.count] for w in several], dtype=torch.int64).reshape(-1, 2)


def best_spans(scores: Tensor, inside: Tensor, longest: int = _ANSWER) -> tuple[Tensor, Tensor, Tensor]:
    """The span of each row with the highest sum of start and end score.

    scores [B, L, 2]; inside [B, 2]: the positions that a span may have (first, one past the last); longest:
    tokens of a span. Exact: every start with every end is looked at. Returns the sum [B] (-inf where no
    position is allowed), first and last position [B].
    """
    length = scores.shape[1]
    positions = torch.arange(length, device=scores.device)
    allowed = (positions >= inside[:, :1]) & (positions < inside[:, 1:])
    start, end = scores.masked_fill(~allowed.unsqueeze(-1), float("-inf")).unbind(dim=-1)
    padded = torch.nn.functional.pad(end, (0, longest - 1), value=float("-inf"))
    sums = start.unsqueeze(-1) + padded.unfold(1, longest, 1)  # [B, L, longest]
    best, where = sums.flatten(1).max(dim=1)
    first = where // longest
    return best, first, first + where % longest


def read_answers(
    several: Sequence[Window],
    best: Tensor,
    first: Tensor,
    last: Tensor,
    passages: Passages,
    gold: Sequence[int],
) -> list[str]:
    """The text of each question's best window; best, first, last [windows] as `best_spans` gives them."""
    chosen: dict[int, tuple[float, str]] = {}
    values: list[tuple[Any, ...]] = list(zip(best.tolist(), first.tolist(), last.tolist(), strict=True))
    for window, (score, low, high) in zip(several, values, strict=True):
        if window.count == 0 or score == float("-inf"):
            chosen.setdefault(window.question, (float("-inf"), ""))
        elif window.question not in chosen or score > chosen[window.question][0]:
            low, high = (p - window.at + window.start for p in (low, high))
            chosen[window.question] = score, passages.text(gold[window.question], low, high)
    return [chosen[question][1] for question in range(len(gold))]
