"""Score tables for the terminal (Rich), Markdown and LaTeX, from the same rows.

A mean without its number of seeds is no result, so a table of scores cannot be built without one: it always
says n.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Literal

from embedlab.console import markdown_text, print_table, table
from embedlab.errors import one_line, printable

Scores = Mapping[str, float]
Better = Literal["higher", "lower"] | None
HEADLINES = ("sts7/spearman", "dev/spearman", "lee/spearman")
"""Scores that recipes are compared by: the first that there is."""
LABELS: dict[str, str] = {
    "sts12": "STS12",
    "sts13": "STS13",
    "sts14": "STS14",
    "sts15": "STS15",
    "sts16": "STS16",
    "stsb": "STS-B",
    "sickr": "SICK-R",
    "sts7": "Avg",
}
"""Headings of the STS tasks and of their mean."""


@dataclass(frozen=True)
class Metric:
    """One quantity of a table: its key in the scores, its heading, which way is better, digits after the
    point."""

    key: str
    label: str
    better: Better = None
    digits: int = 2


def mean_and_sd(values: Sequence[float], digits: int) -> str:
    """ "75.11 ± 0.84" for a table that says n elsewhere in the row."""
    if len(values) == 1:
        return number(values[0], digits)
    return f"{number(statistics.fmean(values), digits)} ± {number(statistics.stdev(values), digits)}"


def number(value: float, digits: int = 2) -> str:
    """A fixed number of digits; "-" for NaN (undefined)."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


_TEX = str.maketrans({
    **{c: f"\\{c}" for c in "_%&#${}"},
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "±": r"$\pm$", "Δ": r"$\Delta$", "–": "--", "…": r"\dots{}",
})  # fmt: skip


@dataclass(frozen=True)
class Table:
    """A titled table of strings.

    Args:
        title: of the table.
        columns: headings.
        rows: of cells.
        caption: paragraphs below the table, with blank lines between them.
        left: how many columns are labels (left-aligned), the rest being numbers.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    left: int = 1

    def __post_init__(self) -> None:
        """Labels and captions come from files: nothing in them ends a line or reaches a terminal as a command."""
        clean = {
            "title": printable(self.title),
            "columns": tuple(map(printable, self.columns)),
            "rows": tuple(tuple(map(printable, row)) for row in self.rows),
            "caption": "\n\n".join(map(one_line, self.caption.split("\n\n"))),
        }
        for name, value in clean.items():
            object.__setattr__(self, name, value)

    def markdown(self) -> str:
        """The table in GitHub's Markdown, with title and caption as paragraphs."""
        rule = [":--" if i < self.left else "--:" for i in range(len(self.columns))]
        rows = [[markdown_text(cell) for cell in row] for row in (self.columns, *self.rows)]
        lines = ["| " + " | ".join(cells) + " |" for cells in (rows[0], rule, *rows[1:])]
        notes = [markdown_text(note) for note in self.caption.split("\n\n") if note]
        parts = [f"**{markdown_text(self.title)}**", "\n".join(lines), *notes]
        return "\n\n".join(parts) + "\n"

    def latex(self) -> str:
        """A tabular environment; title and caption are comments."""
        header, *rows = (
            " & ".join(cell.translate(_TEX) for cell in cells) + r" \\"
            for cells in (self.columns, *self.rows)
        )
        notes = [f"% {note.translate(_TEX)}" for note in self.caption.split("\n\n") if note]
        align = "l" * self.left + "r" * (len(self.columns) - self.left)
        begin = rf"\begin{{tabular}}{{{align}}}"
        body = [begin, r"\hline", header, r"\hline", *rows, r"\hline", r"\end{tabular}"]
        return "\n".join([f"% {self.title.translate(_TEX)}", *body, *notes, ""])

    def print(self, file: IO[str] | None = None) -> None:
        """Prints to `file` (default: standard output)."""
        print_table(table(self.columns, self.rows, self.left), self.title, self.caption, file)


def score_table(
    runs: Mapping[str, Sequence[Scores]], metrics: Sequence[Metric], title: str, caption: str = ""
) -> Table:
    """One row an encoder: mean ± SD over its seeds, and n.

    Args:
        runs: name of the encoder to the scores of each seed.
        metrics: columns; those that no run has are left out.
        title, caption: of the table.

    Returns: the table; "-" where a seed lacks a metric that others have.

    Raises:
        ValueError: an encoder without any scores.
    """
    shown = [m for m in metrics if any(m.key in scores for seeds in runs.values() for scores in seeds)]
    rows = []
    for name, seeds in runs.items():
        if not seeds:
            raise ValueError(f"{name!r} has no scores, so there is no n to state")
        cells = []
        for metric in shown:
            values = [scores[metric.key] for scores in seeds if metric.key in scores]
            # A seed that lacks a metric would make the row's n a lie.
            cells.append(mean_and_sd(values, metric.digits) if len(values) == len(seeds) else "-")
        rows.append((name, *cells, str(len(seeds))))
    return Table(title, ("encoder", *(m.label for m in shown), "n"), tuple(rows), caption)


def suite_table(
    scores: Scores, n: int, title: str, metrics: Sequence[Metric] | None = None, caption: str = ""
) -> Table:
    """One row a metric: for suites with many quantities. `n` is the number of training seeds behind the
    scores."""
    known = metrics or [Metric(key, key) for key in scores]
    rows = [(m.label, _with_interval(scores, m)) for m in known if m.key in scores]
    return Table(_with_seeds(title, n), ("metric", "score"), tuple(rows), caption)


def _with_seeds(title: str, n: int) -> str:
    if n < 1:
        raise ValueError("a score without its number of seeds is not shown: n must be at least 1")
    return f"{title} (n={n})"


def before_after_table(
    before: Sequence[Scores],
    after: Sequence[Scores],
    metrics: Sequence[Metric],
    title: str,
    caption: str = "",
    names: tuple[str, str] = ("before", "after"),
) -> Table:
    """One row a metric: before, after, change and, where each side has several seeds, whether that is better. Each side
    has the scores of its seeds; a single run shows its interval where the scores have one (`key_low`, `key_high`), and
    its change is "not resolved" where each score lies in the interval of the other.

    The heading of each side says its n.
    """
    if not before or not after:
        raise ValueError("both sides need at least one run")
    rows = []
    for metric in metrics:
        sides = [[s[metric.key] for s in side if metric.key in s] for side in (before, after)]
        if len(sides[0]) != len(before) or len(sides[1]) != len(after):
            continue
        cells = [
            _with_interval(side[0], metric) if len(side) == 1 else mean_and_sd(values, metric.digits)
            for side, values in zip((before, after), sides, strict=True)
        ]
        change = statistics.fmean(sides[1]) - statistics.fmean(sides[0])
        verdict = _verdict(change, metric)
        if verdict and min(len(before), len(after)) == 1:
            # Another seed may turn a single difference round.
            overlap = len(before) == len(after) and _overlap(before[0], after[0], metric.key)
            verdict = "not resolved" if overlap else ""
        rows.append((metric.label, *cells, f"{change:+.{metric.digits}f}", verdict))
    heads = [f"{name} (n={len(side)})" for name, side in zip(names, (before, after), strict=True)]
    return Table(title, ("metric", *heads, "change", ""), tuple(rows), caption)


def _with_interval(scores: Scores, metric: Metric) -> str:
    text = number(scores[metric.key], metric.digits)
    low, high = scores.get(f"{metric.key}_low"), scores.get(f"{metric.key}_high")
    if low is None or high is None:
        return text
    return f"{text} [{number(low, metric.digits)}, {number(high, metric.digits)}]"


def _overlap(one: Scores, other: Scores, key: str) -> bool:
    """Whether each score lies in the interval of the other; False where one has none."""
    if not all(f"{key}_{end}" in side for side in (one, other) for end in ("low", "high")):
        return False
    return all(
        side[f"{key}_low"] <= value[key] <= side[f"{key}_high"]
        for side, value in ((one, other), (other, one))
    )


def _verdict(change: float, metric: Metric) -> str:
    if metric.better is None or math.isnan(change) or round(change, metric.digits) == 0:
        return ""
    return "better" if (change > 0) == (metric.better == "higher") else "worse"


def task_table(scores: Scores, n: int, title: str, caption: str = "") -> Table:
    """One row a task, one column a metric, from keys "task/metric"; `n` is the number of training seeds."""
    keys = [key.rpartition("/") for key in scores]
    metrics = tuple(dict.fromkeys(metric for _, _, metric in keys))
    rows = tuple(
        (task, *(number(scores[f"{task}/{m}"]) if f"{task}/{m}" in scores else "" for m in metrics))
        for task in dict.fromkeys(task for task, _, _ in keys)
    )
    return Table(_with_seeds(title, n), ("task", *metrics), rows, caption)


def protocol_line(protocol: Mapping[str, Any]) -> str:
    """The protocol block in a line or two, for a caption."""
    template, limit, cut = protocol["template"], protocol["max_length"], protocol["truncated"]
    parts = [
        f"{protocol['name']}, aggregation: {protocol['aggregation']}",
        f"text: {protocol['text']}" if protocol["text"] is not None else "",
        f"pooling: {_short(protocol['pooling'])}",
        f"template: {_short(template)}" if template is not None else "no template",
        f"max length: {limit}" if limit is not None else "no length limit",
        f"{cut:,} texts cut" if cut is not None else "",
        f"{protocol['dtype']}, {protocol['attention']}, {protocol['device']}",
        f"checkpoint {str(protocol['checkpoint'])[:12]}",
        f"training seed {protocol['seed']}" if protocol["seed"] is not None else "",
    ]
    return "; ".join(part for part in parts if part)


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        name = str(value.get("name") or value.get("text") or "")
        rest = [f"{k}={v}" for k, v in value.items() if k not in ("name", "text", "join") and v is not None]
        return f"{name} ({', '.join(rest)})" if rest else name
    return str(value)
