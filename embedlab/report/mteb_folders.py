"""Two folders of mteb's results compared: task by task, over the tasks of a type and over all, and query by query.

A difference is resolved where its bootstrap interval leaves out 0 and Wilcoxon's signed-rank test agrees; of fewer than
six pairs the test cannot reach 5 %, and nothing is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from embedlab.config.read import read_values
from embedlab.console import markdown_text
from embedlab.errors import UserError
from embedlab.evaluation.core.files import read_tsv
from embedlab.evaluation.mteb.mteb import task_type
from embedlab.evaluation.retrieval.retrieval import ndcg_by_query
from embedlab.files import existing_folder
from embedlab.report.paired import CONFIDENCE

FEWEST = 6
_RESAMPLES = 10_000
_AT_ONCE = 1 << 22
_PREDICTIONS = "_predictions.json"
_TIE = 1e-9


@dataclass(frozen=True)
class Result:
    """A TASK.json: scores x100 by split and subset."""

    task: str
    revision: str
    version: str
    scores: Mapping[tuple[str, str], float]
    file: Path


@dataclass(frozen=True)
class Paired:
    """The second minus the first over n pairs, x100.

    mean: of the differences; low, high: 95 % bootstrap interval; p: of Wilcoxon's signed-rank test; NaN where there are
    fewer than `FEWEST` pairs. wins, ties, losses: of the second.
    """

    n: int
    mean: float
    low: float
    high: float
    p: float
    wins: int
    ties: int
    losses: int

    @property
    def verdict(self) -> str:
        """``better`` or ``worse`` where interval and test agree, else ``not resolved``."""
        if self.n < FEWEST or self.low <= 0 <= self.high or not self.p < 1 - CONFIDENCE:
            return "not resolved"
        return "better" if self.mean > 0 else "worse"


@dataclass(frozen=True)
class Row:
    """A task, the tasks of a type, or all: mean scores of both, and the comparison (of a task: over its queries)."""

    name: str
    kind: str
    first: float
    second: float
    paired: Paired | None


@dataclass(frozen=True)
class Comparison:
    """Two folders compared; left_out: what is in them and was not compared, and why."""

    names: tuple[str, str]
    tasks: list[Row]
    types: list[Row]
    all: Row
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """For JSON: every row with its verdict."""

        def told(row: Row) -> dict[str, Any]:
            found = asdict(row)
            if row.paired is not None:
                numbers = asdict(row.paired).items()
                known = {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in numbers}
                found["paired"] = {**known, "verdict": row.paired.verdict}
            return found

        rows = {"tasks": [*map(told, self.tasks)], "types": [*map(told, self.types)], "all": told(self.all)}
        return {
            "first": self.names[0],
            "second": self.names[1],
            **rows,
            "left_out": self.left_out,
            "notes": self.notes,
        }

    def markdown(self) -> str:
        """The tables."""
        first, second = map(markdown_text, self.names)
        head = f"| | n | {first} | {second} | difference | 95 % | p | wins/ties/losses | verdict |"
        lines = ["# MTEB results compared", "", "x100; the second minus the first.", ""]
        lines += ["## Over tasks", "", head, "| :-- | --: | --: | --: | --: | :-- | --: | :-- | :-- |"]
        lines += [_line(row) for row in (self.all, *self.types)]
        lines += ["", "## Task by task", "", "| task | type | first | second | difference | over queries |"]
        lines += ["| :-- | :-- | --: | --: | --: | :-- |"]
        lines += [_task_line(row) for row in self.tasks]
        for title, told in (("Left out", self.left_out), ("Notes", self.notes)):
            lines += ["", f"## {title}", "", *(f"- {markdown_text(one)}" for one in told)] if told else []
        return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    paired = row.paired
    assert paired is not None
    p = "" if math.isnan(paired.p) else f"{paired.p:.3f}"
    counts = f"{paired.wins}/{paired.ties}/{paired.losses}"
    cells = [
        markdown_text(row.name),
        paired.n,
        f"{row.first:.2f}",
        f"{row.second:.2f}",
        f"{paired.mean:+.2f}",
    ]
    return "| " + " | ".join(map(str, [*cells, _interval(paired).strip(), p, counts, paired.verdict])) + " |"


def _interval(paired: Paired) -> str:
    """After a mean; "" of too few pairs for one."""
    return "" if math.isnan(paired.low) else f" [{paired.low:+.2f}, {paired.high:+.2f}]"


def _task_line(row: Row) -> str:
    told = ""
    if (paired := row.paired) is not None:
        told = f"{paired.mean:+.2f}{_interval(paired)}, n={paired.n}: {paired.verdict}"
    scores = f"{row.first:.2f} | {row.second:.2f} | {row.second - row.first:+.2f}"
    return f"| {markdown_text(row.name)} | {row.kind} | {scores} | {told} |"


def compare(first: Path, second: Path, qrels: Path | None = None) -> Comparison:
    """Compare two result folders on the tasks that both have, of equal data set revisions.

    Args:
        first, second: folders with one TASK.json a task, at any depth, as mteb writes for one model.
        qrels: a folder with TASK.tsv (query-id, corpus-id, score): a task is compared query by query too, by nDCG@10 of
            the TASK_predictions.json of both folders (mteb's ``prediction_folder``).

    Raises:
        UserError: a folder that is not there, has no results, two of a task, or a damaged file; no task in common; one
            folder given twice.
    """
    ours, theirs = read_results(first), read_results(second)
    if first.resolve() == second.resolve():
        raise UserError("is compared with itself", file=second, fix="two folders")
    left_out, notes, tasks = [], [], []
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours or name not in theirs:
            left_out.append(f"{name}: only in {first if name in ours else second}")
            continue
        a, b = ours[name], theirs[name]
        if a.revision != b.revision:
            left_out.append(f"{name}: of two data set revisions, {a.revision[:12]} and {b.revision[:12]}")
            continue
        both = [key for key in a.scores if key in b.scores]
        if not both:
            left_out.append(f"{name}: no split and subset in common")
            continue
        if len(both) < len(a.scores.keys() | b.scores.keys()):
            notes.append(f"{name}: over the {len(both)} splits and subsets that both have")
        if a.version != b.version:
            notes.append(f"{name}: scored by mteb {a.version} and {b.version}")
        ours_mean, theirs_mean = (float(np.mean([one.scores[key] for key in both])) for one in (a, b))
        tasks.append(
            Row(
                name,
                task_type(name) or "unknown",
                ours_mean,
                theirs_mean,
                _by_query(name, first, second, qrels),
            )
        )
    if not tasks:
        raise UserError(
            f"has no task of {first} with the same revision", file=second, fix="results of the same tasks"
        )
    kinds = sorted({row.kind for row in tasks})
    types = [_mean(kind, kind, [row for row in tasks if row.kind == kind]) for kind in kinds]
    return Comparison((str(first), str(second)), tasks, types, _mean("all tasks", "", tasks), left_out, notes)


def _mean(name: str, kind: str, rows: Sequence[Row]) -> Row:
    first, second = (np.array([getattr(row, side) for row in rows]) for side in ("first", "second"))
    return Row(name, kind, float(first.mean()), float(second.mean()), paired(second - first))


def paired(differences: np.ndarray[Any, np.dtype[np.float64]]) -> Paired:
    """The comparison of so many pairs by their differences [n]."""
    n = len(differences)
    ties = int((np.abs(differences) <= _TIE).sum())
    wins = int((differences > _TIE).sum())
    low = high = p = math.nan
    if n >= FEWEST:
        from scipy.stats import wilcoxon

        draw, step = np.random.default_rng(0), max(1, _AT_ONCE // n)
        means = [
            differences[draw.integers(n, size=(min(step, _RESAMPLES - at), n))].mean(axis=1)
            for at in range(0, _RESAMPLES, step)
        ]
        tails = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
        low, high = (float(x) for x in np.quantile(np.concatenate(means), tails))
        p = float(wilcoxon(differences).pvalue) if ties < n else 1.0
    return Paired(n, float(differences.mean()), low, high, p, wins, ties, n - wins - ties)


def read_results(folder: Path) -> dict[str, Result]:
    """The results of one model by task.

    Raises:
        UserError: no such folder, none in it, two of a task, a damaged file.
    """
    existing_folder(folder, "a folder of mteb's results", "mteb")
    found: dict[str, Result] = {}
    for path in sorted(folder.rglob("*.json")):
        if path.name.endswith(_PREDICTIONS):
            continue
        values = read_values(path, any_value=True)
        if not isinstance(values, dict) or not {"task_name", "scores"} <= values.keys():
            continue  # model_meta.json, and other files
        result = _result(path, values)
        if result.task in found:
            what = f"holds {result.task} twice, as in {found[result.task].file}"
            raise UserError(what, file=path, fix="the folder of one model and revision")
        found[result.task] = result
    if not found:
        raise UserError(
            "holds no results of mteb", file=folder, key="mteb", fix="a folder with TASK.json files"
        )
    return found


def _result(path: Path, values: Mapping[str, Any]) -> Result:
    scores: dict[tuple[str, str], float] = {}
    try:
        for split, entries in values["scores"].items():
            for entry in entries:
                score = entry["main_score"]
                if isinstance(score, bool) or not math.isfinite(score):
                    raise ValueError(f"main_score is {score}")
                scores[split, str(entry["hf_subset"])] = 100 * float(score)
        if not scores:
            raise ValueError("no scores")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"is no result of mteb ({error})", file=path, fix="score the task again") from None
    revision, version = (str(values.get(key)) for key in ("dataset_revision", "mteb_version"))
    return Result(str(values["task_name"]), revision, version, scores, path)


def _by_query(task: str, first: Path, second: Path, qrels: Path | None) -> Paired | None:
    """The comparison over the queries of a task; None without judgements or predictions."""
    if qrels is None or not (path := qrels / f"{task}.tsv").is_file():
        return None
    files = [next(iter(sorted(folder.rglob(f"{task}{_PREDICTIONS}"))), None) for folder in (first, second)]
    if None in files:
        return None
    judged: dict[str, dict[str, int]] = {}
    table = read_tsv(path, ["query-id", "corpus-id", "score"])
    cells = zip(*(table[name] for name in ("query-id", "corpus-id", "score")), strict=True)
    for row, (query, document, gain) in enumerate(cells, start=2):
        try:
            judged.setdefault(query, {})[document] = int(gain)
        except ValueError:
            fix = "a gain from 0 on in each row"
            raise UserError(
                "is not a whole number", file=path, row=row, key="score", value=gain, fix=fix
            ) from None
    ours, theirs = (ndcg_by_query(dict(_run(file, judged)), judged) for file in files if file is not None)
    queries = sorted(ours.keys() & theirs.keys())
    return paired(np.array([theirs[query] - ours[query] for query in queries])) if queries else None


def _run(path: Path, judged: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    """Judged queries of a predictions file ({subset: {split: {query: {document: score}}}}) with their documents."""
    values = read_values(path)
    try:
        for subset, splits in values.items():
            for queries in splits.values() if subset != "mteb_model_meta" else ():
                for query, documents in queries.items():
                    if query in judged:
                        yield query, {str(name): float(score) for name, score in documents.items()}
    except (AttributeError, TypeError, ValueError) as error:
        fix = "a file of mteb's predictions"
        raise UserError(f"holds no ranking of documents ({error})", file=path, fix=fix) from None
