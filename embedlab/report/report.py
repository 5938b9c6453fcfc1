"""One table of finished runs: mean ± SD over seeds, paired differences to a baseline, and a box plot of a sweep."""

from __future__ import annotations

import csv
import difflib
import logging
import math
import re
import statistics
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from embedlab.errors import UserError, printable
from embedlab.evaluation.core.ratings import read
from embedlab.evaluation.core.table import HEADLINES, LABELS, Table, mean_and_sd
from embedlab.files import whole_file
from embedlab.report.paired import Difference, paired_difference, relation_to_sts
from embedlab.report.runs import Group, Unfinished

log = logging.getLogger(__name__)
TITLES = {f"{task}/spearman": label for task, label in LABELS.items()} | {
    "sts7/spearman": "Avg. 7",
    "dev/spearman": "STS-B dev",
    "dev/alignment": "align.",
    "dev/uniformity": "unif.",
    "lee/spearman": "Lee",
}
"""Headings of the usual columns, in their order."""


def headline(groups: Sequence[Group]) -> str:
    """The score that recipes are compared by: the first of `HEADLINES` that all of them have.

    Args:
        groups: of the table.

    Returns: its name, such as ``sts7/spearman``.

    Raises:
        UserError: the recipes have no score in common.
    """
    for metric in HEADLINES:
        if all(g.values(metric) for g in groups):
            return metric
    shared = set.intersection(*({k for r in g.runs for k in r.scores} for g in groups))
    if not shared:
        raise UserError(
            "the runs have no score in common", key="metric", fix="score them with the same suites"
        )
    return sorted(shared)[0]


def shown_metrics(groups: Sequence[Group]) -> list[str]:
    """The usual columns, as far as any run has them.

    Args:
        groups: of the table.

    Returns: names of scores, in the order of `TITLES`.
    """
    return [m for m in TITLES if any(g.values(m) for g in groups)]


def find_baseline(groups: Sequence[Group], name: str | None) -> Group | None:
    """The group that is called ``name``, or whose label has all settings of it, or contains it.

    Args:
        groups: to choose from.
        name: a label, settings ``key=value`` in any order, or a part of a label; None: no baseline.

    Returns: the group; None without a name.

    Raises:
        UserError: no group, or several, by this name.
    """
    if name is None:
        return None
    found = [g for g in groups if g.label == name]
    found = found or [g for g in groups if _settings(name) <= _settings(g.label)]
    found = found or [g for g in groups if name in g.label]
    if len(found) != 1:
        labels = "; ".join(g.label for g in groups)
        what = "no recipe" if not found else f"{len(found)} recipes"
        raise UserError(f"{what} by this name", key="baseline", value=name, fix=f"one of: {labels}")
    return found[0]


def _settings(label: str) -> set[str]:
    """The settings of a label, ``key=value`` each; numbers in one form (1e-4 is 0.0001)."""
    found = set()
    for part in re.split(r",\s*(?=[\w.]+=)", label.strip()):
        key, sign, value = part.strip().partition("=")
        with suppress(ValueError):
            value = repr(float(value))
        found.add(f"{key}{sign}{value}")
    return found


def make_report(
    groups: Sequence[Group],
    unfinished: Sequence[Unfinished] = (),
    baseline: Group | None = None,
    metric: str | None = None,
    metrics: Sequence[str] | None = None,
    title: str = "Runs",
) -> Table:
    """The table of the groups, best first.

    Args:
        groups: runs of one recipe each (`embedlab.report.runs.group_runs`).
        unfinished: trials to name below the table.
        baseline: the group that the others are compared with, paired by seed.
        metric: score to sort and compare by; None: `headline`.
        metrics: scores to show; None: `shown_metrics`.
        title: of the table.

    Returns: a row a recipe, best first; the caption says what has to be said of them.

    Raises:
        UserError: no groups, or none of them has the metric.
    """
    if not groups:
        raise UserError(
            "there is no finished run to report", fix="wait for one, or look at the trials' output.log"
        )
    by = metric or headline(groups)
    for key, name in (("metric", by), *(("metrics", m) for m in metrics or ())):
        if not any(g.values(name) for g in groups):
            known = sorted({k for g in groups for r in g.runs for k in r.scores})
            alike = difflib.get_close_matches(name, known, n=3, cutoff=0.3) or known[:3]
            raise UserError(
                "no run has this score",
                key=key,
                value=name,
                fix=f"a column of report.csv, such as {', '.join(alike)}",
            )
    shown = list(metrics or shown_metrics(groups) or [by])
    if by not in shown:
        shown.append(by)
    ordered = sorted(
        groups, key=lambda g: -statistics.fmean(g.values(by).values()) if g.values(by) else math.inf
    )
    columns = ["recipe", "n", *(TITLES.get(m, m) for m in shown)]
    if baseline is not None:
        columns += [f"Δ {TITLES.get(by, by)} [95 % CI]", "detectable Δ", "verdict"]
    rows = []
    for group in ordered:
        n = len(group.runs)
        row = [group.label, f"n={n}", *(_cell(group, m) for m in shown)]
        if baseline is not None:
            row += _difference_cells(group, baseline, by)
        rows.append(tuple(row))
    remarks = _remarks(groups, unfinished, baseline)
    return Table(title, tuple(columns), tuple(rows), "\n\n".join(remarks))


def _remarks(groups: Sequence[Group], unfinished: Sequence[Unfinished], baseline: Group | None) -> list[str]:
    """What has to be said below the table."""
    remarks = []
    if any(len(g.runs) == 1 for g in groups):
        remarks.append("n=1: a single seed. Unsupervised SimCSE spreads by 0.8 points (SD) over seeds.")
    if baseline is not None:
        remarks.append(
            f"Δ: paired by seed against «{baseline.label}». Detectable Δ: the smallest true difference that this n "
            "would have shown in four of five experiments."
        )
    # UserError: too few runs have both scores.
    with suppress(UserError):
        found = relation_to_sts([r.scores for g in groups for r in g.runs])
        if not math.isnan(found.spearman):
            remarks.append(
                f"CLS energy (E1) and the STS average over {found.n} runs: Spearman {found.spearman:+.2f}."
            )
    devices = sorted(
        {str(r.training.get("device")) for g in groups for r in g.runs if r.training.get("device")}
    )
    if devices:
        remarks.append(f"Device: {', '.join(devices)}.")
    return remarks + [
        f"Not in the table: {u.folder.name} ({u.status}) {' '.join(u.overrides)}".rstrip() for u in unfinished
    ]


def _cell(group: Group, metric: str) -> str:
    values = list(group.values(metric).values())
    if not values:
        return "–"
    if len(values) < len(group.runs):
        return f"{statistics.fmean(values):.2f} (n={len(values)})"
    return mean_and_sd(values, 2)


def _difference_cells(group: Group, baseline: Group, metric: str) -> list[str]:
    if group is baseline:
        return ["baseline", "", ""]
    values = group.values(metric)
    if not values:
        return ["not scored", "", ""]
    found: Difference | None = paired_difference(values, baseline.values(metric))
    if found is None:
        return ["no seed in common", "", ""]
    if found.n == 1:
        return [f"{found.text()} (n=1)", "–", found.verdict]
    return [found.text(), f"{found.detectable:.2f}", found.verdict]


def write_csv(groups: Sequence[Group], path: Path) -> None:
    """Every score of every run, one row a run: the data behind the table.

    Args:
        groups: of the table.
        path: of the file, which is put in place whole.
    """
    metrics = sorted({k for g in groups for r in g.runs for k in r.scores})
    settings = sorted({k for g in groups for k in g.varied})
    with whole_file(path) as new, new.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["recipe", "seed", "folder", *map(csv_cell, (*settings, *metrics))])
        for group in groups:
            for run in group.runs:
                scores = [run.scores.get(m, "") for m in metrics]
                row = [
                    group.label,
                    run.seed,
                    str(run.folder),
                    *(group.varied.get(k, "") for k in settings),
                    *scores,
                ]
                writer.writerow(map(csv_cell, row))


def csv_cell(value: object) -> object:
    """A value for a table that a spreadsheet opens: a number, nothing for NaN, or a text that is no formula."""
    if isinstance(value, int | float):
        return "" if value != value else value
    text = printable(str(value))
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def swept_numbers(groups: Sequence[Group]) -> list[str]:
    """Keys that a sweep varied over numbers: what a box plot has on its axis.

    Args:
        groups: of the sweep.

    Returns: dotted keys, such as ``pooling.n``, for which every group has a number and not all the same.
    """
    keys = sorted({k for g in groups for k in g.varied})
    return [
        k
        for k in keys
        if all(
            isinstance(g.varied.get(k), (int, float)) and not isinstance(g.varied[k], bool) for g in groups
        )
        and len({g.varied[k] for g in groups}) > 1
    ]


def _plain(label: str) -> str:
    """A label in which matplotlib reads no formula."""
    return printable(label).replace("$", r"\$")


def density_plot(groups: Sequence[Group], path: Path) -> bool:
    """Density of STS-B test's cosines by rating (S2Sent, figure 8), a panel a recipe (its first seed).

    Args:
        groups: of the table.
        path: of the picture, in the format of its suffix.

    Returns: whether it was drawn; False: no recipe was scored by ``suite=geometry``.
    """
    found = []
    for group in groups:
        lines = group.runs[0].protocol.get("geometry", {}).get("cosines_by_rating")
        if lines:
            try:
                found.append((group.label, {_plain(name): cosines for name, cosines in read(lines).items()}))
            except ValueError as error:
                log.warning("No density of %s: %s", printable(group.label), error)
    if not found:
        return False
    from embedlab.evaluation.core import figures

    figure, panels = figures.grid(len(found), 3, 4.4, sharex=True)
    for panel, (label, cosines) in zip(panels, found, strict=True):
        figures.cosine_density(cosines, f"{_plain(label)}\n", panel)
        panel.title.set_fontsize("small")
    figure.tight_layout()
    figures.save_figure(figure, path)
    return True


def box_plot(groups: Sequence[Group], metric: str, path: Path) -> bool:
    """A panel for each swept number: the scores of all runs with each of its values.

    Args:
        groups: of a sweep.
        metric: the score to draw (x 100 for correlations).
        path: of the picture, in the format of its suffix.

    Returns: whether it was drawn; False: nothing was swept over numbers.
    """
    keys = swept_numbers(groups)
    if not keys:
        return False
    from embedlab.evaluation.core import figures

    figure, panels = figures.grid(len(keys), len(keys), 4, sharey=True)
    for axis, key in zip(panels, keys, strict=True):
        levels = sorted({g.varied[key] for g in groups})
        data = [
            [v for g in groups if g.varied[key] == level for v in g.values(metric).values()]
            for level in levels
        ]
        axis.boxplot(data, medianprops={"color": "black"})
        axis.set_xticks(range(1, len(levels) + 1), [f"{x:g}" for x in levels])
        for at, values in enumerate(data, 1):
            axis.plot([at] * len(values), values, "o", color="0.4", markersize=3, markerfacecolor="none")
        axis.set_xlabel(_plain(key))
    panels[0].set_ylabel(
        _plain(TITLES.get(metric, metric)) + (" x 100" if metric.endswith("spearman") else "")
    )
    runs = sum(len(g.values(metric)) for g in groups)
    figure.suptitle(f"{len(groups)} recipes, {runs} runs; a point is a run", fontsize="small")
    figure.tight_layout()
    figures.save_figure(figure, path)
    return True
