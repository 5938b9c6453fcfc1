"""One table of finished runs: mean ± SD over seeds, paired differences to a baseline, and the verdict in words."""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
from collections.abc import Sequence
from contextlib import suppress

from embedlab.errors import UserError, nearest, printable
from embedlab.evaluation.core.table import HEADLINES, LABELS, Table, mean_and_sd
from embedlab.report.paired import Difference, paired_difference, relation_to_sts
from embedlab.report.runs import Group, Unfinished

TITLES = {f"{task}/spearman": label for task, label in LABELS.items()} | {
    "sts7/spearman": "Avg. 7",
    "dev/spearman": "dev",
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
        name: of an arm, a label, settings ``key=value`` in any order, or a part of a label; None: no baseline.

    Returns: the group; None without a name.

    Raises:
        UserError: no group, or several, by this name.
    """
    if name is None:
        return None
    found = [g for g in groups if name in (g.name, g.label)]
    found = found or [g for g in groups if _settings(name) <= _settings(g.label)]
    found = found or [g for g in groups if name in g.name or name in g.label]
    if len(found) != 1:
        labels = "; ".join(g.name for g in groups)
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
            alike = nearest(name, known, n=3, cutoff=0.3) or known[:3]
            raise UserError(
                "no run has this score",
                key=key,
                value=name,
                fix=f"a column of report.csv, such as {', '.join(alike)}",
            )
    shown = list(metrics or shown_metrics(groups) or [by])
    if by not in shown:
        shown.append(by)
    ordered = best_first(groups, by)
    columns = ["recipe", "n", *(TITLES.get(m, m) for m in shown)]
    if baseline is not None:
        columns += [f"Δ {TITLES.get(by, by)} [95 % CI]", "detectable Δ", "verdict"]
    rows = []
    for group in ordered:
        n = len(group.runs)
        row = [group.name, f"n={n}", *(_cell(group, m) for m in shown)]
        if baseline is not None:
            row += _difference_cells(group, baseline, by)
        rows.append(tuple(row))
    remarks = _remarks(groups, unfinished, baseline)
    return Table(title, tuple(columns), tuple(rows), "\n\n".join(remarks))


def best_first(groups: Sequence[Group], metric: str) -> list[Group]:
    """By the mean of the score; those without it come last."""
    return sorted(
        groups, key=lambda g: -statistics.fmean(g.values(metric).values()) if g.values(metric) else math.inf
    )


def verdict(groups: Sequence[Group], metric: str, baseline: Group | None, unfinished: int) -> list[str]:
    """What the runs say, in sentences; the first is the answer.

    Args:
        groups: of the table.
        metric: by which they are compared.
        baseline: the group that the others are compared with; None: the best two are compared.
        unfinished: trials without scores.
    """
    label = TITLES.get(metric, metric)
    best, *others = (g for g in best_first(groups, metric) if g.values(metric))
    found = [f"{best.name} is highest on {label}: {_cell(best, metric)} (n={len(best.values(metric))})."]
    if baseline is not None:
        against = {g.name: g.values(metric) for g in groups if g is not baseline and g.values(metric)}
        differences = {n: paired_difference(v, baseline.values(metric)) for n, v in against.items()}
        for word in ("better", "worse", "not resolved"):
            if names := [n for n, d in differences.items() if d is not None and d.verdict == word]:
                found.append(f"Against {baseline.name}, {len(names)} {word}: {_named(names)}.")
    elif others:
        second = others[0]
        difference = paired_difference(best.values(metric), second.values(metric))
        if difference is None:
            found.append(f"It shares no seed with the next, {second.name}.")
        else:
            word = "not resolved" if difference.verdict == "not resolved" else "resolved"
            found.append(f"Ahead of the next, {second.name}, by {difference.text()}: {word}.")
            if difference.n > 1:
                found.append(
                    f"So many seeds would have shown a difference of {difference.detectable:.2f} in four of five "
                    "experiments."
                )
    if any(len(g.values(metric)) == 1 for g in groups):
        found.append("A recipe with a single seed resolves nothing.")
    if unfinished:
        found.append(f"{unfinished} trials have no scores; they are named below.")
    return found


def arms(groups: Sequence[Group]) -> str:
    """The settings behind the names of the arms, for a page that does not show them otherwise; "" without arms."""
    named = [f"{g.arm}: {g.label}" for g in groups if g.arm]
    return f"Recipes: {'; '.join(named)}." if named else ""


def _named(names: Sequence[str], most: int = 3) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def _remarks(groups: Sequence[Group], unfinished: Sequence[Unfinished], baseline: Group | None) -> list[str]:
    """What has to be said below the table."""
    remarks = []
    if any(len(g.runs) == 1 for g in groups):
        remarks.append("n=1: a single seed. Unsupervised SimCSE spreads by 0.8 points (SD) over seeds.")
    if baseline is not None:
        remarks.append(
            f"Δ: paired by seed against «{baseline.name}». Detectable Δ: the smallest true difference that this n "
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


def csv_text(groups: Sequence[Group]) -> str:
    """Every score of every run, one row a run: the data behind the table.

    Args:
        groups: of the table.
    """
    metrics = sorted({k for g in groups for r in g.runs for k in r.scores})
    settings = sorted({k for g in groups for k in g.varied})
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow(["recipe", "seed", "folder", *map(csv_cell, (*settings, *metrics))])
    for group in groups:
        for run in group.runs:
            scores = [run.scores.get(m, "") for m in metrics]
            varied = [group.varied.get(k, "") for k in settings]
            writer.writerow(map(csv_cell, [group.name, run.seed, str(run.folder), *varied, *scores]))
    return file.getvalue()


def csv_cell(value: object) -> object:
    """A value for a table that a spreadsheet opens: a number, nothing for NaN, or a text that is no formula."""
    if isinstance(value, int | float):
        return "" if value != value else value
    text = printable(str(value))
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text
