"""Sentences of news stories: what is read, counted and how far it is to be believed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from embedlab.evaluation.core.suite import suite
from embedlab.evaluation.sts.stories import accuracy, hits, stories
from tests.evaluation.helpers import HashedWords

pytest.importorskip("gensim")


def test_every_sentence_stands_once_and_has_another_of_its_story() -> None:
    texts, story = stories()
    assert len(texts) == len(set(texts)) == len(story) > 2500
    assert len(set(story.tolist())) > 300
    assert np.unique(story, return_counts=True)[1].min() > 1


def test_hits_and_their_interval_are_counted_by_hand() -> None:
    story = np.array([0, 0, 1, 1, 1])
    vectors = torch.tensor([[1.0, 0], [2.0, 0.1], [1.0, 0.2], [0, 1.0], [0.1, 3.0]])
    hit = hits(vectors, story)
    assert hit.tolist() == [True, True, False, True, True]
    found = accuracy(hit, story, 2000)
    assert found["accuracy"] == pytest.approx(80)
    # Two stories, drawn twice: 2 of 2, 2 of 3, or both.
    assert found["accuracy_low"] == pytest.approx(200 / 3)
    assert found["accuracy_high"] == 100


def test_an_encoder_of_words_finds_more_than_chance_and_scores_repeat() -> None:
    scores, protocol = suite("stories").run(HashedWords(512), {"resamples": 50})
    assert (
        3 < scores["stories/accuracy_low"] < scores["stories/accuracy"] < scores["stories/accuracy_high"] < 60
    )
    assert protocol["data"]["lee"]["sentences"] == len(stories()[0])
    assert suite("stories").run(HashedWords(512), {"resamples": 50})[0] == scores
