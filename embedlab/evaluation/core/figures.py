"""Figures, readable in black and white: lines and hatches tell series apart, not colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from numpy.typing import NDArray

from embedlab.errors import UserError
from embedlab.evaluation.core.protocol import read_scores
from embedlab.evaluation.core.ratings import separation
from embedlab.files import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINES = ("-", "--", "-.", ":", (0, (1, 1)), (0, (5, 1)))
_MARKS = "os^Dvx*P<>hp+"
_HATCHES = ("", "//", "..", "xx", "\\\\", "++")


Array = NDArray[np.float64]
Scores = Mapping[str, float]


def _axes(axes: Axes | None) -> Axes:
    return plt.subplots(figsize=(5, 3.2))[1] if axes is None else axes


def _lines(axes: Axes, series: Mapping[str, tuple[Any, Any]], marks: str = " ") -> Axes:
    """A line for each name: its x and y."""
    for i, (name, (x, y)) in enumerate(series.items()):
        style: dict[str, Any] = {"linestyle": _LINES[i % len(_LINES)], "marker": marks[i % len(marks)]}
        axes.plot(x, y, color="k", label=name, **style)
    axes.legend(fontsize=8)
    return axes


def grid(panels: int, across: int, width: float, **shared: Any) -> tuple[Figure, list[Axes]]:
    """A figure with `panels`, at most `across` in a row, each `width` inches wide; without a display.

    shared: ``sharex`` or ``sharey``.
    """
    across = min(across, panels)
    down = -(-panels // across)
    figure = Figure(figsize=(width * across, 3.2 * down))
    axes = figure.subplots(down, across, squeeze=False, **shared)
    for empty in axes.flat[panels:]:
        empty.set_visible(False)
    return figure, list(axes.flat[:panels])


def cosine_density(
    groups: Mapping[str, NDArray[np.float64]], title: str = "", axes: Axes | None = None
) -> Axes:
    """Density of the cosines of each rating group (S2Sent, figure 8), with the separation in the title."""
    from scipy.stats import gaussian_kde

    axes = _axes(axes)
    x = np.linspace(-0.2, 1.0, 300)
    for i, (name, values) in enumerate(groups.items()):
        if len(values) > 2 and np.ptp(values) > 1e-6:
            style: dict[str, Any] = {"linestyle": _LINES[i % len(_LINES)], "color": str(0.12 * i)}
            axes.plot(x, gaussian_kde(values)(x), label=name, **style)
    axes.set(xlabel="cosine", ylabel="density", title=f"{title} separation {separation(groups):.2f}".strip())
    axes.legend(title="rating", fontsize=8)
    return axes


def spectrum(values: Mapping[str, NDArray[np.float64]], axes: Axes | None = None) -> Axes:
    """Singular values, each series divided by its largest: name -> ``[k]``, in descending order."""
    axes = _axes(axes)
    axes.set(xscale="log", yscale="log", xlabel="index", ylabel="singular value / largest")
    return _lines(axes, {name: (np.arange(1, len(s) + 1), s / s[0]) for name, s in values.items()})


def alignment_uniformity(points: Mapping[str, tuple[float, float]], axes: Axes | None = None) -> Axes:
    """The plane of Wang and Isola: name -> (alignment, uniformity); lower is better on both."""
    axes = _axes(axes)
    for i, (name, (align, uniform)) in enumerate(points.items()):
        axes.plot(uniform, align, _MARKS[i % len(_MARKS)], color="k", markerfacecolor="none", label=name)
    axes.set(xlabel="uniformity", ylabel="alignment")
    axes.legend(fontsize=8)
    return axes


def task_bars(scores: Mapping[str, Mapping[str, float]], axes: Axes | None = None) -> Axes:
    """A group of bars a task: name of the encoder -> task -> score."""
    axes = _axes(axes)
    tasks = list(dict.fromkeys(t for series in scores.values() for t in series))
    width = 0.8 / max(1, len(scores))
    for i, (name, series) in enumerate(scores.items()):
        at = np.arange(len(tasks)) + (i - (len(scores) - 1) / 2) * width
        heights = [series.get(t, np.nan) for t in tasks]
        axes.bar(
            at, heights, width, label=name, color="white", edgecolor="k", hatch=_HATCHES[i % len(_HATCHES)]
        )
    axes.set_xticks(range(len(tasks)), tasks, rotation=30, ha="right")
    axes.legend(fontsize=8)
    return axes


def layer_line(scores: Mapping[str, Sequence[float]], axes: Axes | None = None) -> Axes:
    """Score by layer, 0 being the embeddings: name -> one score a layer."""
    axes = _axes(axes)
    axes.set(xlabel="layer", ylabel="Spearman x100")
    return _lines(axes, {name: (range(len(s)), s) for name, s in scores.items()}, _MARKS)


def scatter(points: NDArray[np.float64], labels: Sequence[str], axes: Axes | None = None) -> Axes:
    """A map of ``[n, 2]`` points, one mark a label (a language, say)."""
    axes = _axes(axes)
    for i, name in enumerate(dict.fromkeys(labels)):
        chosen = np.array([label == name for label in labels])
        axes.plot(*points[chosen].T, _MARKS[i % len(_MARKS)], markersize=4, color=str(0.7 * (i % 4) / 4),
                  markerfacecolor="none", label=name)  # fmt: skip
    axes.set(xticks=[], yticks=[])
    axes.legend(fontsize=7, ncols=2)
    return axes


def weight_map(weights: NDArray[np.float64], axes: Axes | None = None) -> Axes:
    """Weights of S2Sent's blocks by feature, ``[N, D]``: rows are blocks, the oldest on top; 1 / N is even."""
    axes = _axes(axes)
    image = axes.imshow(weights, aspect="auto", cmap="gray", interpolation="nearest")
    axes.set(xlabel="feature", ylabel="block", yticks=range(len(weights)))
    axes.figure.colorbar(image, ax=axes, label="weight")
    return axes


def save(axes: Any, path: str) -> None:
    """Write the figure of some axes, and close it."""
    axes.figure.tight_layout()
    save_figure(axes.figure, path)


def save_figure(figure: Figure, path: Path | str) -> None:
    """Write a figure in one piece (its format by the suffix, PNG where there is none), and close it."""
    path = Path(path)
    path = path if path.suffix else path.with_name(f"{path.name}.png")
    with whole_file(path) as new:
        figure.savefig(new, dpi=150, format=path.suffix[1:])
    plt.close(figure)


def project(vectors: Array, how: str = "tsne", seed: int = 42) -> Array:
    """Two coordinates of each vector, ``[n, D]`` -> ``[n, 2]``, by t-SNE or UMAP on the first 50 components.

    The papers' setting: perplexity 30 (less where there are few vectors), fixed seed.

    Raises UserError for another name, and where UMAP is not installed.
    """
    from sklearn.decomposition import PCA

    n, width = vectors.shape
    reduced = PCA(min(50, n, width), random_state=seed).fit_transform(vectors)
    if how == "tsne":
        from sklearn.manifold import TSNE

        return np.asarray(TSNE(perplexity=min(30, (n - 1) / 3), random_state=seed).fit_transform(reduced))
    if how == "umap":
        try:
            from umap import UMAP
        except ImportError as error:
            raise UserError(
                "UMAP is not installed",
                key="projection",
                value=how,
                fix="pip install 'embedlab[plot]', or tsne",
            ) from error
        return np.asarray(UMAP(n_neighbors=min(15, n - 1), random_state=seed).fit_transform(reduced))
    raise UserError("no such projection", key="projection", value=how, fix="choose tsne or umap")


SENTENCES = 100
"""Of each language in a map (BEPA's authors take as many)."""


def save_spectrum(values: Mapping[str, Sequence[float]], path: str, most: int = 8) -> None:
    """Singular values by language, each divided by its largest; at most `most` of them, "all" first."""
    shown = dict(list(values.items())[:most])
    save(spectrum({name: np.asarray(series) for name, series in shown.items()}), path)


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
    save(scatter(project(kept.reshape(-1, kept.shape[-1]), how), labels), path)


def by_layer(scores: Scores, metric: str) -> list[float]:
    """A quantity of the suite at layers 1, 2, ..."""
    found: list[float] = []
    while (key := f"layer{len(found) + 1:02d}/{metric}") in scores:
        found.append(float(scores[key]))
    if not found:
        raise UserError(f"these scores have no {metric} by layer", fix="scores of suite=cls_energy")
    return found


def profile_figure(runs: Mapping[str, Scores]) -> Figure:
    """Energy, attention received by the first token, and by kind of token, each by layer; a line an encoder.

    Args:
        runs: scores of `cls_energy` by the name of the encoder, such as before and after.
    """
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    energy, mass, kinds = figure.subplots(1, 3)
    for name, scores in runs.items():
        layers = range(1, len(by_layer(scores, "E1")) + 1)
        energy.plot(layers, by_layer(scores, "E1"), marker="o", markersize=3, label=name)
        (line,) = mass.plot(layers, by_layer(scores, "A_CLS"), marker="o", markersize=3, label=name)
        excess = [a - d for a, d in zip(by_layer(scores, "A_CLS"), by_layer(scores, "deficit"), strict=True)]
        mass.plot(layers, excess, linestyle=":", linewidth=1, color=line.get_color())
    energy.axhline(1.0, color="grey", linewidth=0.8, linestyle=":")
    energy.set(title="CLS energy E1 (1: as the other tokens)", xlabel="layer")
    mass.set(title="attention received by CLS (dotted: 1 / n)", xlabel="layer", ylim=(0, None))
    name, scores = next(reversed(list(runs.items())))
    labels = ("CLS", "SEP", "punct", "other")
    values = [by_layer(scores, f"A_{kind}") for kind in labels]
    kinds.stackplot(range(1, len(values[0]) + 1), *values, labels=labels)
    kinds.set(title=f"attention by kind of token: {name}", xlabel="layer", ylim=(0, 1))
    for axes in (energy, kinds):
        axes.legend(fontsize=8)
    return figure


def save_profile(runs: Mapping[str, Scores], path: Path) -> None:
    """Draw `profile_figure` into a file (.png, .svg or .pdf)."""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError("a figure is a .png, .svg or .pdf file", key="figure", value=path, fix=f"{path}.png")
    figure = profile_figure(runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path)
