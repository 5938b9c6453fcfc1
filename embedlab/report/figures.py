"""Figures, readable in black and white: lines and hatches tell series apart, not colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import pyplot as plt
from numpy.typing import NDArray

from embedlab.evaluation.core.ratings import separation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINES = ("-", "--", "-.", ":", (0, (1, 1)), (0, (5, 1)))
_MARKS = "os^Dvx*P<>hp+"
_HATCHES = ("", "//", "..", "xx", "\\\\", "++")


def _axes(axes: Axes | None) -> Axes:
    return plt.subplots(figsize=(5, 3.2))[1] if axes is None else axes


def cosine_density(
    groups: Mapping[str, NDArray[np.float64]], title: str = "", axes: Axes | None = None
) -> Axes:
    """Density of the cosines of each rating group (S2Sent, figure 8), with the separation in the title."""
    from scipy.stats import gaussian_kde

    axes = _axes(axes)
    x = np.linspace(-0.2, 1.0, 300)
    for i, (name, values) in enumerate(groups.items()):
        if len(values) > 2 and np.ptp(values) > 0:
            axes.plot(
                x, gaussian_kde(values)(x), linestyle=_LINES[i % len(_LINES)], color=str(0.12 * i), label=name
            )
    axes.set(xlabel="cosine", ylabel="density", title=f"{title} separation {separation(groups):.2f}".strip())
    axes.legend(title="rating", fontsize=8)
    return axes


def spectrum(values: Mapping[str, NDArray[np.float64]], axes: Axes | None = None) -> Axes:
    """Singular values, each series divided by its largest: name -> ``[k]``, in descending order."""
    axes = _axes(axes)
    for i, (name, series) in enumerate(values.items()):
        axes.plot(
            np.arange(1, len(series) + 1),
            series / series[0],
            linestyle=_LINES[i % len(_LINES)],
            color="k",
            label=name,
        )
    axes.set(xscale="log", yscale="log", xlabel="index", ylabel="singular value / largest")
    axes.legend(fontsize=8)
    return axes


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
    for i, (name, series) in enumerate(scores.items()):
        axes.plot(
            range(len(series)),
            series,
            linestyle=_LINES[i % len(_LINES)],
            marker=_MARKS[i],
            color="k",
            label=name,
        )
    axes.set(xlabel="layer", ylabel="Spearman x100")
    axes.legend(fontsize=8)
    return axes


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
    axes.figure.savefig(path, dpi=150)
    plt.close(axes.figure)
