"""The figures of a report, each of the recipes that its legend names; None where the runs have nothing to show."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from embedlab.errors import printable
from embedlab.evaluation.core.ratings import read
from embedlab.evaluation.core.table import LABELS
from embedlab.report.curves import METRICS, mean_curve, read_curves
from embedlab.report.paired import paired_difference
from embedlab.report.runs import Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)
MOST = 8
"""Recipes in one figure: as many as there are colours; those named first count."""
INK, LINE = "#1f2328", "#c8ccd1"
CURVES = {"dev/spearman": "dev", "train/loss": "training loss"}
_LETTERS = "nmr"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "embedlab", "text.parse_math": False, "font.size": 9.5,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": INK, "axes.labelcolor": INK,
    "text.color": INK, "xtick.color": INK, "ytick.color": INK, "axes.axisbelow": True, "axes.grid": True,
    "grid.color": LINE, "grid.linewidth": 0.6,
}  # fmt: skip


@contextmanager
def drawing() -> Iterator[None]:
    """Text stays text, a name with ``$`` is no formula, and the same figure is the same file; inside."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def _axes(width: float, height: float, **options: Any) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(**options)


def short(name: str, most: int = 46) -> str:
    """A name that a legend has room for."""
    name = printable(name)
    return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-most // 2 :]}"


def short_names(groups: Sequence[Group]) -> list[str]:
    """`short` names of the groups, no two alike."""
    names = [short(g.name) for g in groups]
    return [n if names.count(n) == 1 else f"{n} ({names[:i].count(n) + 1})" for i, n in enumerate(names)]


def forest(groups: Sequence[Group], baseline: Group, metric: str, heading: str) -> Figure | None:
    """Paired differences to the baseline with their 95 % intervals, and the band of what would not have been seen."""
    found = [
        (g, paired_difference(g.values(metric), baseline.values(metric))) for g in groups if g is not baseline
    ]
    rows = [(g, d) for g, d in found if d is not None]
    if not rows:
        return None
    figure, axes = _axes(8, 1.1 + 0.36 * len(rows))
    marks = {"better": ("^", "#009e73"), "worse": ("v", "#d55e00"), "not resolved": ("o", "#555b61")}
    for at, (_, d) in enumerate(rows):
        mark, color = marks[d.verdict]
        if d.n > 1:
            band: dict[str, Any] = {"color": LINE, "alpha": 0.5, "label": "detectable" if at == 0 else None}
            axes.barh(at, 2 * d.detectable, left=-d.detectable, height=0.66, **band)
            axes.plot([d.low, d.high], [at, at], "-", color=color, linewidth=1.6)
        filled = color if d.verdict != "not resolved" else "none"
        axes.plot(d.mean, at, mark, color=color, markerfacecolor=filled, markersize=6)
    axes.axvline(0, color=INK, linewidth=0.9)
    axes.set_yticks(range(len(rows)), [f"{short(g.name)} (n={d.n})" for g, d in rows])
    axes.set(xlabel=f"difference in {heading} to {short(baseline.name)}", ylim=(len(rows) - 0.4, -0.6))
    axes.grid(axis="y", visible=False)
    return figure


def learning_curves(groups: Sequence[Group]) -> Figure | None:
    """Development score and loss by step: the mean over seeds, and the span between the lowest and the highest."""
    from embedlab.evaluation.core import figures

    read_all = [(g, [read_curves(run.folder / METRICS, CURVES) for run in g.runs]) for g in groups]
    shown = [(g, [c for c in curves if c]) for g, curves in read_all if any(curves)][:MOST]
    panels = [name for name in CURVES if any(name in c for _, curves in shown for c in curves)]
    if not panels:
        return None
    figure, grid = _axes(8, 2.9, ncols=len(panels), squeeze=False)
    for axes, name in zip(grid.flat, panels, strict=True):
        for i, (label, (_, curves)) in enumerate(zip(short_names([g for g, _ in shown]), shown, strict=True)):
            points = mean_curve([c[name] for c in curves if name in c])
            if points:
                step, mean, low, high = zip(*points, strict=True)
                axes.plot(step, mean, label=label, linewidth=1.4, **figures.line(i))
                axes.fill_between(step, low, high, color=figures.color(i), alpha=0.15, linewidth=0)
        axes.set(xlabel="step", ylabel=CURVES[name])
        if name.endswith("loss") and min(axes.dataLim.intervaly) > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")  # matplotlib's own writes a formula
            axes.yaxis.set_minor_formatter(lambda *_: "")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def tasks(groups: Sequence[Group]) -> Figure | None:
    """A bar a task, with the standard deviation over seeds."""
    from embedlab.evaluation.core import figures

    named = {f"{task}/spearman": label for task, label in LABELS.items()}
    shown = [m for m in named if any(g.values(m) for g in groups)]
    if len(shown) < 2:
        return None
    means: dict[str, dict[str, float]] = {}
    spread: dict[str, dict[str, float]] = {}
    for label, group in zip(short_names(groups[:MOST]), groups, strict=False):
        values = {named[m]: list(group.values(m).values()) for m in shown if group.values(m)}
        means[label] = {task: statistics.fmean(v) for task, v in values.items()}
        spread[label] = {t: statistics.stdev(v) for t, v in values.items() if len(v) > 1}
    figure, axes = _axes(9, 3.2)
    figures.task_bars(means, axes, spread)
    axes.set_ylabel("Spearman x 100")
    axes.grid(axis="x", visible=False)
    return figure


def plane(groups: Sequence[Group]) -> Figure | None:
    """Alignment and uniformity on STS-B dev: the mean over seeds."""
    from embedlab.evaluation.core import figures

    pair = ("dev/alignment", "dev/uniformity")
    shown = [g for g in groups if all(map(g.values, pair))][:MOST]
    if not shown:
        return None
    align, uniform = ([statistics.fmean(g.values(m).values()) for g in shown] for m in pair)
    figure, axes = _axes(7, 3.4)
    figures.alignment_uniformity(
        dict(zip(short_names(shown), zip(align, uniform, strict=True), strict=True)), axes
    )
    return figure


def densities(groups: Sequence[Group]) -> Figure | None:
    """Density of STS-B test's cosines by rating (S2Sent, figure 8), a panel a recipe (its first seed)."""
    from embedlab.evaluation.core import figures

    found = []
    for group in groups:
        if lines := group.runs[0].protocol.get("geometry", {}).get("cosines_by_rating"):
            try:
                found.append(
                    (group.name, {printable(name): cosines for name, cosines in read(lines).items()})
                )
            except ValueError as error:
                log.warning("No density of %s: %s", printable(group.name), error)
    if not found:
        return None
    down = -(-len(found) // 2)
    figure, grid = _axes(9, 2.9 * down, nrows=down, ncols=min(2, len(found)), squeeze=False)
    panels: list[Any] = list(grid.flat)
    for axes, (name, cosines) in zip(panels, found, strict=False):
        figures.cosine_density(cosines, f"{short(name, 34)}\n", axes)
        axes.title.set_fontsize("small")
    for empty in panels[len(found) :]:
        empty.set_visible(False)
    return figure


def swept_numbers(groups: Sequence[Group]) -> list[str]:
    """Keys that a sweep varied over numbers.

    Args:
        groups: of the sweep.

    Returns: dotted keys, such as ``pooling.n``, for which every group has a number and not all the same.
    """

    def is_number(value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    keys = sorted({k for g in groups for k in g.varied})
    return [
        k
        for k in keys
        if all(is_number(g.varied.get(k)) for g in groups) and len({g.varied[k] for g in groups}) > 1
    ]


def boxes(groups: Sequence[Group], metric: str, heading: str) -> Figure | None:
    """A panel for each swept number: the scores of all runs with each of its values."""
    keys = swept_numbers(groups)[:4]
    if not keys:
        return None
    figure, grid = _axes(max(4.5, 3 * len(keys)), 3, ncols=len(keys), sharey=True, squeeze=False)
    for axes, key in zip(grid.flat, keys, strict=True):
        data = _by_level(groups, metric, key)
        box = {part: {"color": INK} for part in ("medianprops", "boxprops", "whiskerprops", "capprops")}
        axes.boxplot(list(data.values()), showfliers=False, **box)
        axes.set_xticks(range(1, len(data) + 1), [f"{x:g}" for x in data])
        for at, values in enumerate(data.values(), 1):
            axes.plot([at] * len(values), values, "o", color="#0072b2", markersize=3.5, alpha=0.7)
        axes.set_xlabel(printable(key))
        axes.grid(axis="x", visible=False)
    grid.flat[0].set_ylabel(heading)
    return figure


def _by_level(groups: Sequence[Group], metric: str, key: str) -> dict[float, list[float]]:
    levels = sorted({g.varied[key] for g in groups})
    return {
        level: [v for g in groups if g.varied[key] == level for v in g.values(metric).values()]
        for level in levels
    }


def surfaces(groups: Sequence[Group], metric: str, heading: str) -> Figure | None:
    """Mean scores over two swept numbers, a panel for each value of a third; n, m and r first, as in S2Sent."""
    keys = sorted(swept_numbers(groups), key=lambda k: (_LETTERS.find(k.rpartition(".")[2]) % 9, k))[:3]
    if len(keys) < 2:
        return None
    across, up = keys[:2]
    thirds: list[Any] = sorted({g.varied[keys[2]] for g in groups}) if len(keys) > 2 else [None]
    xs, ys = (sorted({g.varied[k] for g in groups}) for k in (across, up))
    cells: dict[Any, list[float]] = {}
    for g in groups:
        third = g.varied[keys[2]] if len(keys) > 2 else None
        cells.setdefault((third, g.varied[across], g.varied[up]), []).extend(g.values(metric).values())
    means = {place: statistics.fmean(v) for place, v in cells.items() if v}
    if len(means) < 3:
        return None
    shown = thirds[:6]
    columns = min(3, len(shown))
    down = -(-len(shown) // columns)
    height = 1 + down * (0.5 + 0.36 * len(ys))
    figure, grid = _axes(max(4.5, 3.1 * columns), height, nrows=down, ncols=columns, squeeze=False)
    panels: list[Any] = list(grid.flat)
    for axes, third in zip(panels, shown, strict=False):
        _surface(
            axes, {(x, y): m for (t, x, y), m in means.items() if t == third}, (xs, ys), list(means.values())
        )
        axes.set(xlabel=printable(across), ylabel=printable(up))
        if third is not None:
            axes.set_title(f"{printable(keys[2])} = {third:g}", fontsize="small")
    for empty in panels[len(shown) :]:
        empty.set_visible(False)
    figure.suptitle(f"{heading}, mean of the runs in a cell", fontsize="small")
    return figure


def _surface(axes: Axes, means: Mapping[Any, float], ticks: Any, every: Sequence[float]) -> None:
    """One panel: a coloured cell a mean, with its number; all panels on one scale."""
    xs, ys = ticks
    table = np.array([[means.get((x, y), np.nan) for x in xs] for y in ys])
    low, high = min(every), max(every)
    axes.pcolormesh(np.ma.masked_invalid(table), cmap="cividis", vmin=low, vmax=high, edgecolors="white")
    for (row, column), value in np.ndenumerate(table):
        if np.isfinite(value):
            dark = value < (low + high) / 2
            at = (column + 0.5, row + 0.5)
            axes.text(
                *at,
                f"{value:.2f}",
                ha="center",
                va="center",
                color="#ffffff" if dark else "#000000",
                fontsize=8,
            )
    axes.set_xticks(np.arange(len(xs)) + 0.5, [f"{x:g}" for x in xs])
    axes.set_yticks(np.arange(len(ys)) + 0.5, [f"{y:g}" for y in ys])
    axes.grid(visible=False)
