"""Figures of a multilingual encoder: spectrum by language, and a map of sentences coloured by language."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embedlab.errors import UserError
from embedlab.evaluation.core.protocol import read_scores
from embedlab.report import figures
from embedlab.report.vectors import project

SENTENCES = 100
"""Of each language in a map (BEPA's authors take as many)."""


def save_spectrum(values: Mapping[str, Sequence[float]], path: str, most: int = 8) -> None:
    """Singular values by language, each divided by its largest; at most `most` of them, "all" first."""
    shown = dict(list(values.items())[:most])
    figures.save(figures.spectrum({name: np.asarray(series) for name, series in shown.items()}), path)


def read_spectra(files: Mapping[str, Path | str], language: str = "all") -> dict[str, list[float]]:
    """Singular values of several encoders in one language, from the score files of the suite `languages`:
    name of the encoder -> file. Give them to `save_spectrum` for the figure before and after.

    Raises UserError for a file of another suite or without the language.
    """
    found = {}
    for name, file in files.items():
        _, block = read_scores(Path(file))
        values = block.get("singular_values") or {}
        if language not in values:
            raise UserError(
                "has no spectrum of this language", file=file, key="language", value=language,
                fix=f"one of {', '.join(values)}" if values else "write it with suite=languages",
            )  # fmt: skip
        found[name] = [float(value) for value in values[language]]
    return found


def save_map(
    vectors: NDArray, languages: Sequence[str], path: str, how: str = "tsne", sentences: int = SENTENCES
) -> None:
    """A t-SNE or UMAP map of the first `sentences` rows of each language, [languages, n, D], one mark a
    language.

    Raises UserError where UMAP is not installed.
    """
    kept = np.asarray(vectors)[:, :sentences]
    labels = [name for name in languages for _ in range(kept.shape[1])]
    figures.save(figures.scatter(project(kept.reshape(-1, kept.shape[-1]), how), labels), path)
