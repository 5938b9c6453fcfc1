"""Windows of passages, spans to text and back, and the span decoder against a full search."""

from __future__ import annotations

import itertools

import pytest
import torch

from embedlab.encoders.encoder import SentenceEncoder
from embedlab.errors import UserError
from embedlab.evaluation.finetune.rows import Rows
from embedlab.evaluation.finetune.windows import (
    Passages,
    best_spans,
    bounds,
    read_answers,
    training_spans,
    windows,
)

PASSAGE = "A man is playing a guitar on the stage. The girl reads a book in the quiet library. It rains."


def test_decoder_equals_a_search_over_all_spans() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(20, 17, 2, generator=generator)
    inside = torch.tensor([[3, 12]] * 10 + [[1, 17]] * 10)
    best, first, last = best_spans(scores, inside, longest=4)
    for i in range(20):
        low, high = inside[i].tolist()
        spans = {
            (a, b): float(scores[i, a, 0] + scores[i, b, 1])
            for a in range(low, high)
            for b in range(a, min(a + 4, high))
        }
        wanted = max(spans, key=lambda span: spans[span])
        assert (int(first[i]), int(last[i])) == wanted
        assert float(best[i]) == pytest.approx(spans[wanted])


def test_decoder_by_hand() -> None:
    """The best start (5) has its best end before it; the best end is too far away: 2 to 3 is left."""
    scores = torch.zeros(1, 8, 2)
    scores[0, 5, 0], scores[0, 2, 0] = 3.0, 2.5
    scores[0, 1, 1], scores[0, 3, 1], scores[0, 7, 1] = 9.0, 2.0, 1.0
    best, first, last = best_spans(scores, torch.tensor([[2, 7]]), longest=2)
    assert (float(best), int(first), int(last)) == (4.5, 2, 3)


def test_windows_cover_the_passage_overlap_and_keep_the_answer(encoder: SentenceEncoder) -> None:
    rows = Rows(encoder, 24)
    passages = Passages(rows, [PASSAGE, "It rains."])
    several = windows(rows, ["Who reads a book?", "What is it?"], passages, [0, 1], stride=5)
    first = [w for w in several if w.question == 0]
    assert len(first) > 1
    assert all(len(w.row) <= 24 for w in several)
    assert len([w for w in several if w.question == 1]) == 1
    covered = {t for w in first for t in range(w.start, w.start + w.count)}
    assert covered == set(range(len(passages.ids[0])))
    assert all(a.start + a.count - b.start == 5 for a, b in itertools.pairwise(first))
    for w in several:
        assert w.row[w.at : w.at + w.count] == passages.ids[w.question][w.start : w.start + w.count]

    start = PASSAGE.index("man is")
    span = passages.span(0, start, start + len("man is"))
    assert span is not None
    assert passages.text(0, *span) == "man is"
    targets = training_spans(several, [span, (0, 0)])
    whole = [(w, t) for w, t in zip(first, targets.tolist(), strict=False) if t != [0, 0]]
    assert whole, "a window holds the answer"
    for w, (low, high) in whole:
        assert w.row[low : high + 1] == passages.ids[0][span[0] : span[1] + 1]
    assert len(whole) < len(first), "and one does not"


def test_answers_are_read_from_the_best_window(encoder: SentenceEncoder) -> None:
    rows = Rows(encoder, 24)
    passages = Passages(rows, [PASSAGE])
    several = windows(rows, ["Who?"], passages, [0], stride=4)
    limits = bounds(several)
    n = len(several)
    best = torch.zeros(n)
    best[-1] = 2.0
    places = torch.tensor([[w.at, w.at] for w in several])
    places[-1] = torch.tensor([limits[-1, 1] - 3, limits[-1, 1] - 2])
    found = read_answers(several, best, places[:, 0], places[:, 1], passages, [0])
    tail = len(passages.ids[0])
    assert found == [passages.text(0, tail - 3, tail - 2)]
    lost = read_answers(several, torch.full((n,), float("-inf")), places[:, 0], places[:, 1], passages, [0])
    assert lost == [""]


def test_pairs_are_cut_on_the_longer_side(encoder: SentenceEncoder) -> None:
    rows = Rows(encoder, 12)
    assert rows.pair([1, 2], [3]) == [*rows.first, 1, 2, *rows.separator, 3, *rows.last]
    assert rows.pair(range(100, 120), [3]) == [*rows.first, *range(100, 108), *rows.separator, 3, *rows.last]
    both = rows.pair(range(100, 120), range(200, 220))
    assert len(both) == 12
    assert both.count(rows.separator[0]) == 2
    # Nine places are left, and the second of two equal sides gets the odd one.
    expected = [*rows.first, *range(100, 104), *rows.separator, *range(200, 205), *rows.last]
    assert both == rows.pair(range(100, 110), range(200, 210)) == expected
    longer = rows.pair(range(100, 111), range(200, 210))
    assert longer == [*rows.first, *range(100, 105), *rows.separator, *range(200, 204), *rows.last]
    with pytest.raises(UserError, match="too short for a pair"):
        Rows(encoder, 4)
