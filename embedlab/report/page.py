"""`report.html`: one file that needs no network, no script to be read, and prints.

Jinja2 (escapes every value that is not marked as mark-up) fills the page, matplotlib draws; both are dependencies
already, and neither brings scripts to the reader. Content-Security-Policy lets nothing run or load but the page's own
script, so that a text which got through the escape could still do nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from embedlab.errors import printable
from embedlab.evaluation.core.table import Table
from embedlab.report import figures
from embedlab.report.report import TITLES, best_first, verdict
from embedlab.report.runs import Group
from embedlab.report.svg import inline_svg
from embedlab.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = Path(__file__).with_name("page")
_PROTOCOL = ("name", "aggregation", "text", "pooling", "template", "max_length", "dtype", "attention", "device",
             "versions", "warnings", "notes")  # fmt: skip
_TRAINING = (
    "device",
    "precision",
    "step",
    "unpad",
    "steps",
    "selected_step",
    "select",
    "sentences",
    "seconds",
    "held_gib",
)


@dataclass(frozen=True)
class Shown:
    """A figure of the page: its heading, what it shows, and its mark-up."""

    title: str
    caption: str
    svg: Markup


def html_page(
    groups: Sequence[Group],
    table: Table,
    metric: str,
    baseline: Group | None = None,
    unfinished: int = 0,
    csv_text: str = "",
) -> str:
    """The page of a report.

    Args:
        groups: of the table.
        table: `embedlab.report.report.make_report`'s.
        metric: by which the recipes are compared.
        baseline: the group that the others are compared with; None: the forest plot compares with the best.
        unfinished: trials without scores.
        csv_text: every score of every run, for the download.

    Returns: HTML.
    """
    environment = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, finalize=_clean,
    )  # fmt: skip
    css, script = ((FOLDER / name).read_text(encoding="utf-8").strip() for name in ("page.css", "page.js"))
    hashed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    answer, *rest = verdict(groups, metric, baseline, unfinished)
    keys = sorted({key for g in groups for key in g.varied})
    order = _columns(table, TITLES.get(metric, metric))
    return environment.get_template("page.html").render(
        title=table.title,
        css=Markup(css),
        script=Markup(script),
        policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{hashed}'",
        answer=answer,
        rest=rest,
        columns=[table.columns[i] for i in order],
        rows=[[(row[i], _sort_key(row[i])) for i in order] for row in table.rows],
        notes=[note for note in table.caption.split("\n\n") if note],
        figures=list(drawn(groups, metric, baseline)),
        keys=keys,
        recipes=[(g.name, [_short(g.varied.get(key)) for key in keys]) for g in groups],
        protocol=list(_protocol(groups)),
        hardware=list(_hardware(groups)),
        downloads=[
            ("report.csv", _data("text/csv", csv_text)),
            ("report.json", _data("application/json", _as_json(groups, table.title, metric, baseline))),
        ],
        version=__version__,
    )


def drawn(groups: Sequence[Group], metric: str, baseline: Group | None = None) -> Iterator[Shown]:
    """The figures for which the runs have something to show, in the order of the page."""
    ordered = best_first(groups, metric)
    shown = ordered[: figures.MOST]
    if baseline is not None and baseline not in shown:
        shown[-1] = baseline
    heading = TITLES.get(metric, metric)
    picked = "" if baseline else " The best was picked by these same scores, so its lead is flattered."
    and_baseline = "" if baseline is None or baseline in ordered[: figures.MOST] else " with the baseline"
    of = f" The best of {len(ordered)} recipes{and_baseline}." if len(shown) < len(ordered) else ""
    plots = [
        ("Differences", "Paired by seed, with the 95 % interval. Grey: true differences that so many seeds would have "
         f"missed more often than once in five times. Filled: the interval leaves out 0.{picked}",
         lambda: figures.forest(ordered, baseline or ordered[0], metric, heading)),
        ("Learning curves", f"Mean over seeds; the band is from the lowest to the highest.{of}",
         lambda: figures.learning_curves(shown)),
        ("Tasks", f"Mean ± SD over seeds.{of}", lambda: figures.tasks(shown)),
        ("Alignment and uniformity", "Of the unit vectors of STS-B dev: mean squared distance of pairs rated above 4, "
         f"and log mean Gaussian potential of all pairs (Wang and Isola 2020). Lower is better on both.{of}",
         lambda: figures.plane(shown)),
        ("Cosines by rating", "STS-B test, first seed. Separation: spread of the groups' means over the mean spread "
         "inside a group; higher tells ratings apart better.", lambda: figures.densities(shown)),
        ("Swept settings", "Each point is a run; the box has the quartiles.",
         lambda: figures.boxes(groups, metric, heading)),
        ("Sweep surfaces", "Empty: not run.", lambda: figures.surfaces(groups, metric, heading)),
    ]  # fmt: skip
    with figures.drawing():
        for i, (title, caption, draw) in enumerate(plots):
            figure: Figure | None = draw()
            if figure is not None:
                yield Shown(title, caption, Markup(inline_svg(figure, f"f{i}-", title)))


def _clean(value: Any) -> Any:
    """Texts of files without control characters; mark-up of this package as it is."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _columns(table: Table, heading: str) -> list[int]:
    """Recipe, n, what is compared and the comparison first: the rest may lie beyond the edge of a phone."""
    first = [0, 1, table.columns.index(heading)]
    first += [i for i, name in enumerate(table.columns) if name.startswith(f"Δ {heading}")]
    first += [i for i, name in enumerate(table.columns) if name in ("detectable Δ", "verdict")]
    return list(dict.fromkeys([*first, *range(len(table.columns))]))


def _sort_key(cell: str) -> str:
    """The first number of a cell, by which its column is sorted; "": none."""
    found = re.match(r"(?:n=)?([-+]?\d+(?:\.\d+)?)", cell)
    return found[1] if found else ""


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={_short(v)}" for k, v in value.items() if v is not None)
    if isinstance(value, list | tuple):
        return ", ".join(map(_short, value))
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _by_recipe(values: Mapping[str, str]) -> list[tuple[str, str]]:
    """A row a value, with the recipes that have it: "all" where all do; nothing of those without any."""
    recipes: dict[str, list[str]] = {}
    for name, value in values.items():
        if value:
            recipes.setdefault(value, []).append(name)
    return [("all" if len(names) == len(values) else ", ".join(names), v) for v, names in recipes.items()]


def _joined(values: Sequence[Any]) -> str:
    """What the runs of a recipe say: the mean of seconds, or each value once."""
    found = [v for v in values if v not in (None, [], {}, "")]
    if found and all(isinstance(v, float) for v in found):
        return f"{statistics.fmean(found):,.1f}"
    return "; ".join(dict.fromkeys(_short(v) for v in found))


def _hardware(groups: Sequence[Group]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """How the runs were trained: a key, and its value by recipe."""
    for key in _TRAINING:
        values = {g.name: _joined([run.training.get(key) for run in g.runs]) for g in groups}
        if found := _by_recipe(values):
            yield key, found


def _protocol(groups: Sequence[Group]) -> Iterator[tuple[str, list[tuple[str, list[tuple[str, str]]]]]]:
    """How each suite was scored: a key, and its value by recipe."""
    for suite in sorted({suite for g in groups for run in g.runs for suite in run.protocol}):
        rows = []
        for key in _PROTOCOL:
            values = {g.name: _joined([r.protocol.get(suite, {}).get(key) for r in g.runs]) for g in groups}
            if found := _by_recipe(values):
                rows.append((key, found))
        if rows:
            yield suite, rows


def _as_json(groups: Sequence[Group], title: str, metric: str, baseline: Group | None) -> str:
    recipes = [
        {
            "name": g.name,
            "settings": g.label,
            "runs": [
                {
                    "seed": run.seed,
                    "folder": str(run.folder),
                    "scores": {k: None if math.isnan(v) else v for k, v in run.scores.items()},
                }
                for run in g.runs
            ],
        }
        for g in groups
    ]
    content = {"title": title, "metric": metric, "baseline": baseline and baseline.name, "recipes": recipes}
    return json.dumps(content, indent=1)


def _data(kind: str, text: str) -> str:
    return f"data:{kind};charset=utf-8;base64,{base64.b64encode(text.encode()).decode()}"
