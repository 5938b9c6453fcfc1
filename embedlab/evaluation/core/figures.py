"""Figures in colours that the colour-blind tell apart; lines, marks and hatches do the same in black and white."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from numpy.typing import NDArray

from embedlab.errors import UserError, one_of
from embedlab.evaluation.core.protocol import read_scores
from embedlab.evaluation.core.ratings import separation
from embedlab.files import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555b61", "#332288")
"""Okabe and Ito's colours without yellow and black, which white and dark pages swallow; a grey and an indigo more."""
_LINES = ("-", "--", "-.", ":", (0, (1, 1)), (0, (5, 1)))
_MARKS = "os^Dvx*P<>hp+"
_HATCHES = ("", "//", "..", "xx", "\\\\", "++")


Array = NDArray[np.float64]
Scores = Mapping[str, float]


def _axes(axes: Axes | None) -> Axes:
    return plt.subplots(figsize=(5, 3.2))[1] if axes is None else axes


def color(i: int) -> str:
    """Of the i-th series."""
    return PALETTE[i % len(PALETTE)]


def mark(i: int) -> str:
    """Of the i-th series."""
    return _MARKS[i % len(_MARKS)]


def line(i: int) -> dict[str, Any]:
    """Colour and line style of the i-th series."""
    return {"color": color(i), "linestyle": _LINES[i % len(_LINES)]}


def legend(axes: Axes, **options: Any) -> None:
    """Beside the axes, where it covers nothing."""
    if axes.get_legend_handles_labels()[0]:
        beside: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1), "borderaxespad": 0}
        axes.legend(fontsize=8, frameon=False, **beside, **options)


def _lines(axes: Axes, series: Mapping[str, tuple[Any, Any]], marked: bool = False) -> Axes:
    """A line for each name: its x and y."""
    for i, (name, (x, y)) in enumerate(series.items()):
        axes.plot(x, y, marker=mark(i) if marked else "", markersize=4, label=name, **line(i))
    legend(axes)
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
    """Density of the cosines of each rating group (S2Sent, figure 8), over the cosines that there are; the title has
    their separation."""
    from scipy.stats import gaussian_kde

    axes = _axes(axes)
    shown = {name: v for name, v in groups.items() if len(v) > 2 and np.ptp(v) > 1e-6}
    if shown:
        every = np.concatenate(list(shown.values()))
        margin = 0.08 * np.ptp(every)
        x = np.linspace(every.min() - margin, every.max() + margin, 300)
        axes.set_xlim(x[0], x[-1])
    for i, (name, values) in enumerate(groups.items()):
        if name in shown:
            axes.plot(x, gaussian_kde(values)(x), label=name, **line(i))
    axes.set(xlabel="cosine", ylabel="density", title=f"{title} separation {separation(groups):.2f}".strip())
    legend(axes, title="rating")
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
        axes.plot(uniform, align, mark(i), color=color(i), label=name)
    axes.set(xlabel="uniformity (lower: vectors spread out)", ylabel="alignment (lower: pairs close)")
    legend(axes)
    return axes


def task_bars(
    scores: Mapping[str, Mapping[str, float]],
    axes: Axes | None = None,
    spread: Mapping[str, Mapping[str, float]] | None = None,
) -> Axes:
    """A group of bars a task: name of the encoder -> task -> score, and -> standard deviation where there is one."""
    axes = _axes(axes)
    tasks = list(dict.fromkeys(t for series in scores.values() for t in series))
    width = 0.8 / max(1, len(scores))
    for i, (name, series) in enumerate(scores.items()):
        at = np.arange(len(tasks)) + (i - (len(scores) - 1) / 2) * width
        heights = [series.get(t, np.nan) for t in tasks]
        hatch = _HATCHES[i % len(_HATCHES)]
        axes.bar(
            at, heights, width, label=name, color=color(i), edgecolor="white", linewidth=0.4, hatch=hatch
        )
        if spread and (deviation := spread.get(name)):
            error = [deviation.get(t, np.nan) for t in tasks]
            axes.errorbar(at, heights, error, fmt="none", ecolor=axes.xaxis.label.get_color(), elinewidth=0.8)
    axes.set_xticks(range(len(tasks)), tasks, rotation=30, ha="right")
    legend(axes)
    return axes


def layer_line(scores: Mapping[str, Sequence[float]], axes: Axes | None = None) -> Axes:
    """Score by layer, 0 being the embeddings: name -> one score a layer."""
    axes = _axes(axes)
    axes.set(xlabel="layer", ylabel="Spearman x100")
    return _lines(axes, {name: (range(len(s)), s) for name, s in scores.items()}, marked=True)


def scatter(points: NDArray[np.float64], labels: Sequence[str], axes: Axes | None = None) -> Axes:
    """A map of ``[n, 2]`` points, one mark a label (a language, say)."""
    axes = _axes(axes)
    for i, name in enumerate(dict.fromkeys(labels)):
        chosen = np.array([label == name for label in labels])
        axes.plot(*points[chosen].T, mark(i), markersize=4, color=color(i), alpha=0.8, label=name)
    axes.set(xticks=[], yticks=[])
    legend(axes)
    return axes


def weight_map(weights: NDArray[np.float64], axes: Axes | None = None) -> Axes:
    """Weights of S2Sent's blocks by feature, ``[N, D]``: rows are blocks, the oldest on top; 1 / N is even."""
    axes = _axes(axes)
    image = axes.imshow(weights, aspect="auto", cmap="cividis", interpolation="nearest")
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
                fix=one_of(language, values) if values else "write it with suite=languages",
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
    for i, (name, scores) in enumerate(runs.items()):
        layers = range(1, len(by_layer(scores, "E1")) + 1)
        style: dict[str, Any] = {"marker": mark(i), "markersize": 3, "label": name, **line(i)}
        energy.plot(layers, by_layer(scores, "E1"), **style)
        mass.plot(layers, by_layer(scores, "A_CLS"), **style)
        excess = [a - d for a, d in zip(by_layer(scores, "A_CLS"), by_layer(scores, "deficit"), strict=True)]
        mass.plot(layers, excess, linestyle=":", linewidth=1, color=color(i))
    energy.axhline(1.0, color="grey", linewidth=0.8, linestyle=":")
    energy.set(title="CLS energy E1 (1: as the other tokens)", xlabel="layer")
    mass.set(title="attention received by CLS (dotted: 1 / n)", xlabel="layer", ylim=(0, None))
    name, scores = next(reversed(list(runs.items())))
    labels = ("CLS", "SEP", "punct", "other")
    values = [by_layer(scores, f"A_{kind}") for kind in labels]
    kinds.stackplot(range(1, len(values[0]) + 1), *values, labels=labels, colors=PALETTE)
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
