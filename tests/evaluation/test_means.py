"""Means over groups, by hand."""

from __future__ import annotations

from embedlab.evaluation.core.correlation import group_means, of_pairs


def test_a_group_has_the_mean_of_its_members() -> None:
    found = {"a": {"x": 1.0, "y": 0.0}, "b": {"x": 3.0, "y": 8.0}, "c": {"x": 100.0, "y": 100.0}}
    assert group_means(found, {"ab": ["a", "b"], "none": []}, ("x", "y")) == {"ab/x": 2.0, "ab/y": 4.0}


def test_pairs_of_one_language_and_of_two() -> None:
    pairs = [("de", "de"), ("de", "en"), ("en", "de")]
    assert of_pairs(pairs, "same", "cross") == {"same": [("de", "de")], "cross": [("de", "en"), ("en", "de")]}
