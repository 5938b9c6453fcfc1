"""Writes docs/results/NAME.md from docs/results/readings/NAME.md and the scores in docs/runs.

    python tools/results.py [--check]

A reading is Markdown with blocks ```` ```table ````: YAML that says which runs a table is of (`Block`). Its text may
state a number only if a table of its page has it; other numbers say where they are from: *76.25* is a paper's,
0.77 (no JSON) was read off a run whose files are gone. docs/results.md is held to the same: a number of its column
"ours" stands in a table of the page that its row links to. With ``--check`` nothing is written, and the status is 1
where a page is not that of its sources.
"""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from embedlab.errors import UserError
from embedlab.evaluation.core.table import Metric, Table, score_table
from embedlab.report.paired import STS, paired_difference, relation_to_sts
from embedlab.report.report import make_report
from embedlab.report.runs import SCORES, Group, Run, find_runs

ROOT = Path(__file__).resolve().parents[1]
RUNS, PAGES, SUMMARY = (ROOT / "docs" / name for name in ("runs", "results", "results.md"))
BLOCK = re.compile(r"```table\n(.*?)```\n", re.DOTALL)
FREE = re.compile(
    r"```.*?```|`[^`]*`|\]\([^)]*\)|(?<!\*)\*[\d.,]+( %)?\*(?!\*)|[-+]?[\d.,]+( ± [\d.]+)?\s+\(no\s+JSON\)",
    re.DOTALL,
)
"""What may hold numbers that are no result: code, addresses, published figures, and those marked as untraced."""
NUMBER = re.compile(r"(?<![\w.])\d*\.\d+(?![\w.]*\d|e)")


@dataclass(frozen=True)
class Block:
    """A table of a reading.

    Args:
        title: of the table.
        rows: label to runs, as patterns below docs/runs with blanks between them: folders of runs (``mini/*``), or
            files of scores (``*.json``, or ``*.csv``, whose last values count), which are taken together by seed.
            Scores of a run's last weights, beside those of the selected ones, are called ``last/…``.
        metrics: scores to show, with their headings; none: those that `embedlab report` shows.
        digits: after the point (of pairs two, if not given); given, rows keep their order and only pairs are compared.
        baseline: the row that all others are compared with.
        metric: to sort and compare by; none: as `embedlab report`.
        pairs: rows to compare by each of the metrics, first minus second; of a second without a seed (a start), its one
            score.
        correlate: scores to hold against the STS average over all runs; one of the last weights, against theirs.
        records, columns: instead of rows: a file's list (``FILE:KEY``), and its columns as heading, scale and digits.
    """

    title: str
    rows: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, str] = field(default_factory=dict)
    digits: int | None = None
    baseline: str | None = None
    metric: str | None = None
    pairs: tuple[tuple[str, str], ...] = ()
    correlate: Mapping[str, str] = field(default_factory=dict)
    records: str | None = None
    columns: Mapping[str, tuple[str, float, int]] = field(default_factory=dict)

    def table(self) -> Table:
        """Of the scores as they stand in docs/runs.

        Raises:
            UserError: a row without runs, or without the score.
        """
        if self.records:
            return self._of_records(self.records)
        groups = {label: group(label, patterns) for label, patterns in self.rows.items()}
        known = {key for g in groups.values() for run in g.runs for key in run.scores}
        if absent := [key for key in self.metrics if key not in known]:
            raise UserError(
                "no run has it", key=self.title, value=", ".join(absent), fix="score the runs with it"
            )
        if self.pairs:
            found = self._differences(groups)
        elif self.correlate:
            found = self._correlations(groups)
        elif self.digits is not None:
            shown = [Metric(key, heading, digits=self.digits) for key, heading in self.metrics.items()]
            found = score_table({k: [r.scores for r in g.runs] for k, g in groups.items()}, shown, self.title)
        else:
            baseline, keys = groups[self.baseline] if self.baseline else None, list(self.metrics) or None
            found = make_report(list(groups.values()), (), baseline, self.metric, keys, self.title)
        return replace(found, columns=tuple(map(self._heading, found.columns)))

    def _heading(self, column: str) -> str:
        for key, heading in self.metrics.items():
            column = column.replace(key, heading)
        return column

    def _differences(self, groups: Mapping[str, Group]) -> Table:
        rows, digits = [], 2 if self.digits is None else self.digits
        for one, other in self.pairs:
            for key, heading in self.metrics.items():
                found = paired_difference(*_by_seed(groups[one].values(key), groups[other].values(key)))
                if found is None:
                    raise UserError(
                        f"no seed in common: {one}, {other}", key=key, fix="runs of the same seeds"
                    )
                detectable = "–" if math.isnan(found.detectable) else f"{found.detectable:.{digits}f}"
                shown = (heading, found.text(digits), str(found.n), detectable, found.verdict)
                rows.append((one, other, *shown))
        columns = ("", "minus", "score", "difference [95 % CI]", "n", "detectable", "verdict")
        return Table(self.title, columns, tuple(rows), "Paired by seed.", left=3)

    def _correlations(self, groups: Mapping[str, Group]) -> Table:
        scores = [run.scores for g in groups.values() for run in g.runs]
        found = {
            heading: relation_to_sts(scores, key, f"last/{STS}" if key.startswith("last/") else STS)
            for key, heading in self.correlate.items()
        }
        rows = tuple((heading, f"{c.spearman:+.2f}", str(c.n)) for heading, c in found.items())
        return Table(self.title, ("", "Spearman's correlation with the STS average", "encoders"), rows)

    def _of_records(self, place: str) -> Table:
        file, _, name = place.partition(":")
        records = json.loads((RUNS / file).read_text(encoding="utf-8"))[name]
        form = {key: (scale, digits) for key, (_, scale, digits) in self.columns.items()}
        rows = [tuple(_scaled(r.get(key, ""), *of) for key, of in form.items()) for r in records]
        return Table(self.title, tuple(heading for heading, _, _ in self.columns.values()), tuple(rows))

    def sources(self) -> str:
        """Links to the folders behind the table."""
        patterns = " ".join([*self.rows.values(), self.records or ""]).split()
        names = dict.fromkeys(pattern.split("/")[0] for pattern in patterns)
        return "From " + ", ".join(f"[docs/runs/{name}](../runs/{name})" for name in names) + ".\n"


def _by_seed(values: Mapping[int, float], baseline: Mapping[int, float]) -> tuple[Mapping[int, float], ...]:
    """Scores and those of the baseline; an encoder without a seed, such as a start, stands against each of them."""
    if baseline.keys() == {-1}:
        baseline = dict.fromkeys(values, baseline[-1])
    return values, baseline


def _scaled(value: str | float, scale: float, digits: int) -> str:
    return value if isinstance(value, str) else f"{value * scale:,.{digits}f}"


def group(label: str, patterns: str) -> Group:
    """The runs of one row, one a seed.

    Raises:
        UserError: a pattern that matches nothing.
    """
    runs: dict[int, Run] = {}
    for pattern in patterns.split():
        places = sorted(RUNS.glob(pattern))
        if not places:
            raise UserError(
                "nothing in docs/runs", key=label, value=pattern, fix="a pattern of folders there"
            )
        for place in places:
            found = _read(place)
            seed = _seed(found)
            scores = {**(runs[seed].scores if seed in runs else {}), **found.scores}
            runs[seed] = replace(found, scores=scores, training={**found.training, "seed": seed})
    return Group(label, {}, tuple(run for _, run in sorted(runs.items())))


def _read(place: Path) -> Run:
    if place.is_dir():
        (run,), _ = find_runs([place])
        last = json.loads((run.folder / SCORES).read_text(encoding="utf-8")).get("last", {"scores": {}})
        return replace(run, scores={**run.scores, **{f"last/{k}": v for k, v in last["scores"].items()}})
    if place.suffix == ".csv":
        scores: dict[str, float] = {}
        with place.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                scores |= {key: float(value) for key, value in row.items() if value}
        return Run(place.parent, scores, {}, {})
    return Run(place.parent, json.loads(place.read_text(encoding="utf-8"))["scores"], {}, {})


def _seed(run: Run) -> int:
    """By the folder's name: a tower of JTCSE is trained with another seed than its arm's."""
    named = re.search(r"(?:-|/seed)(\d+)(?:/stage1_.)?$", run.folder.as_posix())
    return int(named[1]) if named else run.seed


def page(reading: Path) -> tuple[str, list[str]]:
    """The reading with its tables made, and these.

    Raises:
        UserError: a table that cannot be made, or a number in the text that no table has.
    """
    source = reading.read_text(encoding="utf-8")
    tables: list[str] = []

    def made(match: re.Match[str]) -> str:
        block = Block(**yaml.safe_load(match[1]))
        tables.append(block.table().markdown())
        return f"{tables[-1]}\n{block.sources()}"

    text = BLOCK.sub(made, source)
    hold(BLOCK.sub("", source), tables, reading)
    note = f"<!-- Generated by tools/results.py from readings/{reading.name} and docs/runs. -->\n"
    return note + text, tables


def hold(text: str, tables: Sequence[str], place: Path) -> None:
    """That each number of a text with a decimal point stands in one of the tables.

    Raises:
        UserError: one does not.
    """
    known = {number.lstrip("0") for table in tables for number in NUMBER.findall(table)}
    missing = [n for n in NUMBER.findall(FREE.sub(" ", text)) if n.lstrip("0") not in known]
    if missing:
        raise UserError(
            "no table of the page has them", file=place, key="numbers", value=", ".join(missing),
            fix="write (no JSON) after one that has no file, and a published one as *0.12*",
        )  # fmt: skip


def hold_summary(pages: Mapping[str, Sequence[str]]) -> None:
    """That docs/results.md states the pages' numbers: a row those of the pages that it links to.

    Raises:
        UserError: a row without a page, or a number that is not there.
    """
    text = []
    for line in SUMMARY.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) < 3:
            text.append(line)
        elif cells[0].startswith("["):
            linked = re.findall(r"\(results/(\w+)\.md\)", cells[0])
            hold(cells[2] + cells[4], [table for name in linked for table in pages[name]], SUMMARY)
        elif any(map(NUMBER.search, cells)):
            fix = "[claim](results/PAGE.md) in its first cell"
            raise UserError(
                "a row without a link to its page", file=SUMMARY, key="claim", value=cells[0], fix=fix
            )
    hold("\n".join(text), [table for tables in pages.values() for table in tables], SUMMARY)


def main(arguments: list[str]) -> int:
    """Write the pages, or hold them to their sources."""
    pages = {reading.stem: page(reading) for reading in sorted((PAGES / "readings").glob("*.md"))}
    hold_summary({name: tables for name, (_, tables) in pages.items()})
    stale = []
    for name, (text, _) in pages.items():
        place = PAGES / f"{name}.md"
        if "--check" not in arguments:
            place.write_text(text, encoding="utf-8")
        elif not place.is_file() or place.read_text(encoding="utf-8") != text:
            stale.append(str(place))
    if stale:
        print(f"{', '.join(stale)}: not of its sources: python tools/results.py", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"results: {error}", file=sys.stderr)
        raise SystemExit(2) from None
