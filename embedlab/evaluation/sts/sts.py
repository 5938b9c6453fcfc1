"""The seven STS tasks by SimCSE's protocol (SentEval, aggregation "all"): `specs/evaluation.md` 5.1.

Vectors are frozen, a pair's score is its cosine, a task's score is Spearman's correlation with the human
ratings, times 100. For STS12-16 three aggregations are in use, and papers mix them up; all three are
computed: `spearman` ("all": the subsets of a year joined, one correlation: the headline), `spearman_mean`
(mean over subsets) and `spearman_wmean` (mean weighted by subset size). STS-B and SICK-R are one set each,
scored by cosine as in SimCSE, not by a trained regressor as in upstream SentEval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from embedlab.errors import UserError
from embedlab.evaluation.core import protocol as protocols
from embedlab.evaluation.core.correlation import pair_cosine, pearson, spearman
from embedlab.evaluation.core.files import find_file, hub_rows, read_tsv
from embedlab.evaluation.core.settings import task_names
from embedlab.evaluation.core.suite import Scored, Settings, Suite
from embedlab.evaluation.core.table import Metric, Scores, Table, protocol_line, score_table
from embedlab.evaluation.core.vectors import Encoder, Vectors

Text = Literal["raw", "tok"]
SEVEN: tuple[str, ...] = ("sts12", "sts13", "sts14", "sts15", "sts16", "stsb", "sickr")
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


@dataclass(frozen=True)
class _Source:
    """Where a task's pairs come from: local file stem, hub data set and split, and the known number of
    pairs."""

    file: str
    hub: str
    hub_split: str
    pairs: int
    gold: str = "score"
    subset: str | None = None


# The hub's SICK-R has train, trial and test in one split (9,927 pairs): not comparable with SentEval's 4,927,
# which the row count warning says.
_SOURCES: dict[tuple[str, str], _Source] = {
    ("sts12", "test"): _Source("sts12_test", "mteb/sts12-sts", "test", 3108, subset="subset"),
    ("sts13", "test"): _Source("sts13_test", "mteb/sts13-sts", "test", 1500, subset="subset"),
    ("sts14", "test"): _Source("sts14_test", "mteb/sts14-sts", "test", 3750, subset="subset"),
    ("sts15", "test"): _Source("sts15_test", "mteb/sts15-sts", "test", 3000, subset="subset"),
    ("sts16", "test"): _Source("sts16_test", "mteb/sts16-sts", "test", 1186, subset="subset"),
    ("stsb", "train"): _Source("stsb_train", "mteb/stsbenchmark-sts", "train", 5749),
    ("stsb", "dev"): _Source("stsb_dev", "mteb/stsbenchmark-sts", "validation", 1500),
    ("stsb", "test"): _Source("stsb_test", "mteb/stsbenchmark-sts", "test", 1379),
    ("sickr", "test"): _Source("sick_test", "mteb/sickr-sts", "test", 4927, gold="relatedness"),
}


@dataclass(frozen=True)
class STSPairs:
    """Sentence pairs with human ratings.

    first, second: the sentences; gold: float64 [n] (0-5, SICK 1-5); subsets: the sub-data-set of each pair,
    or None where the source does not tell them apart; expected: the published number of pairs.
    """

    task: str
    split: str
    text: Text
    first: list[str]
    second: list[str]
    gold: NDArray[np.float64]
    subsets: list[str] | None
    source: str
    expected: int | None = None
    notes: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.first)

    def __post_init__(self) -> None:
        if not len(self.first) == len(self.second) == len(self.gold):
            raise ValueError("first, second and gold differ in length")


def load_sts(
    task: str, data_dir: str | Path | None = None, text: Text = "raw", split: str = "test"
) -> STSPairs:
    """Pairs of one task (`SEVEN`), from `data_dir` or its folder sts/ (files sts12_test.tsv.gz ... stsb_dev,
    sick_test), or the hub.

    split: "test", for stsb also "dev" and "train". text: "raw" as published, "tok" SentEval's lower-cased
    tokens (columns sentence1_tok and sentence2_tok). SentEval reads SICK as it is and splits it at spaces, case kept:
    so does "tok" here. Pairs without a rating are dropped. Raises UserError for an unknown task, a missing or broken
    file, a hub that cannot be reached.
    """
    source = _SOURCES.get((task, split))
    if source is None:
        known = ", ".join(
            sorted({name if where == "test" else f"{name} ({where})" for name, where in _SOURCES})
        )
        raise UserError(
            "no such STS task", key="task", value=f"{task} ({split})", fix=f"choose one of {known}"
        )
    if text not in ("raw", "tok"):
        raise UserError("no such text variant", key="sts_text", value=text, fix="choose raw or tok")
    if data_dir is None:
        return _from_hub(task, split, text, source)
    return _from_file(task, split, text, source, find_file(data_dir, source.file, "sts"))


def _from_file(task: str, split: str, text: Text, source: _Source, path: Path) -> STSPairs:
    tokenised = ("sentence1_tok", "sentence2_tok")
    optional = [source.subset] if source.subset else []
    table = read_tsv(path, [source.gold, "sentence1", "sentence2"], optional=[*optional, *tokenised])
    notes: tuple[str, ...] = ()
    first, second = table["sentence1"], table["sentence2"]
    if text == "tok":
        if all(column in table for column in tokenised):
            first, second = table["sentence1_tok"], table["sentence2_tok"]
        elif task == "sickr":
            notes = ("sickr: raw text split at spaces, case kept, as SentEval has it",)
        else:
            raise UserError(
                "has no columns sentence1_tok and sentence2_tok",
                file=path,
                key="sts_text",
                value=text,
                fix="use sts_text=raw, or add SentEval's tokens as these columns",
            )
        first, second = [" ".join(s.split()) for s in first], [" ".join(s.split()) for s in second]
    kept = [i for i, rating in enumerate(table[source.gold]) if rating.strip()]
    gold = np.empty(len(kept), dtype=np.float64)
    for position, i in enumerate(kept):
        try:
            gold[position] = float(table[source.gold][i])
        except ValueError:
            gold[position] = np.nan
        if not np.isfinite(gold[position]):
            raise UserError(
                "rating is not a number",
                file=path,
                row=i + 2,
                key=source.gold,
                value=table[source.gold][i],
                fix="write a number, or leave the cell empty to drop the pair",
            )
    _check_ratings(gold, path)
    subsets = table.get(source.subset) if source.subset else None
    return STSPairs(
        task=task,
        split=split,
        text=text,
        first=[first[i] for i in kept],
        second=[second[i] for i in kept],
        gold=gold,
        subsets=[subsets[i] for i in kept] if subsets is not None else None,
        source=str(path),
        expected=source.pairs,
        notes=notes,
    )


def _check_ratings(gold: NDArray[np.float64], source: str | Path) -> None:
    """UserError where no correlation with `gold` exists."""
    if len(gold) == 0:
        raise UserError("has no rated pair", file=source, fix="fetch the file again")
    if len(gold) == 1 or (gold == gold[0]).all():
        what = "has one rated pair" if len(gold) == 1 else f"rates all {len(gold)} pairs the same"
        raise UserError(f"{what}: there is no correlation with it", file=source, fix="give the whole file")


def _from_hub(task: str, split: str, text: Text, source: _Source) -> STSPairs:
    if text == "tok":
        raise UserError(
            f"{source.hub} has raw text only",
            key="sts_text",
            value=text,
            fix="give data_dir=FOLDER with SentEval's tokens, or use sts_text=raw",
        )
    columns = ["score", "sentence1", "sentence2"]
    files = "the STS files (sts12_test.tsv.gz ... sick_test.tsv.gz)"
    rows = hub_rows(source.hub, None, source.hub_split, columns, files)
    gold = np.asarray(rows["score"], dtype=np.float64)
    _check_ratings(gold, f"hub:{source.hub}")
    return STSPairs(
        task=task,
        split=split,
        text=text,
        first=[str(s) for s in rows["sentence1"]],
        second=[str(s) for s in rows["sentence2"]],
        gold=gold,
        subsets=None,
        source=f"hub:{source.hub}",
        expected=source.pairs,
    )


def row_count_warning(pairs: STSPairs) -> str | None:
    """A sentence for the protocol when the number of pairs is not the published one, else None."""
    if pairs.expected is None or len(pairs) == pairs.expected:
        return None
    return (
        f"{pairs.task} ({pairs.split}, {pairs.source}) has {len(pairs)} pairs where SentEval has "
        f"{pairs.expected}: not comparable with published scores"
    )


def score_pairs(vectors: Vectors, pairs: STSPairs) -> dict[str, float]:
    """The correlations of one task, x100: spearman and pearson over all pairs, and the mean and the weighted
    mean of the subsets' Spearman (`spearman_mean`, `spearman_wmean`); a task of one set has the same value
    three times.

    The two subset aggregations are left out where the source does not name the subsets.
    """
    cosine = pair_cosine(vectors.take(pairs.first), vectors.take(pairs.second))
    gold = torch.from_numpy(pairs.gold)
    whole = 100 * float(spearman(cosine, gold))
    scores = {"spearman": whole, "pearson": 100 * float(pearson(cosine, gold))}
    if _SOURCES[(pairs.task, pairs.split)].subset is None:
        return scores | {"spearman_mean": whole, "spearman_wmean": whole}
    if pairs.subsets is not None:
        names = np.asarray(pairs.subsets)
        each, sizes = [], []
        for name in dict.fromkeys(pairs.subsets):
            chosen = torch.from_numpy(names == name)
            each.append(100 * float(spearman(cosine[chosen], gold[chosen])))
            sizes.append(int(chosen.sum()))
        scores["spearman_mean"] = float(np.mean(each))
        scores["spearman_wmean"] = float(np.average(each, weights=sizes))
    return scores


def score_tasks(vectors: Vectors, tasks: Sequence[STSPairs]) -> dict[str, float]:
    """Flat scores "sts12/spearman", ... and, when the seven tasks are all there, their means "sts7/spearman",
    ..."""
    scores: dict[str, float] = {}
    for pairs in tasks:
        scores |= {f"{pairs.task}/{metric}": value for metric, value in score_pairs(vectors, pairs).items()}
    if set(SEVEN) <= {pairs.task for pairs in tasks}:
        for metric in ("spearman", "spearman_mean", "spearman_wmean", "pearson"):
            values = [scores.get(f"{task}/{metric}") for task in SEVEN]
            present = [value for value in values if value is not None]
            if len(present) == len(SEVEN):
                scores[f"sts7/{metric}"] = float(np.mean(present))
    return scores


def evaluate_sts(
    encoder: Encoder, data_dir: str | Path | None = None, text: Text = "raw", tasks: Sequence[str] = SEVEN
) -> dict[str, float]:
    """Scores of the test splits of `tasks` for one text variant, x100: "sts12/spearman" (aggregation "all"),
    "sts12/spearman_mean", "sts12/spearman_wmean", "sts12/pearson", ..., "sts7/spearman" (mean of the seven).
    """
    loaded = [load_sts(task, data_dir, text) for task in tasks]
    return score_tasks(Vectors(encoder, all_sentences(loaded)), loaded)


def all_sentences(tasks: Sequence[STSPairs]) -> list[str]:
    """Every sentence of `tasks`, repeats included."""
    return [sentence for pairs in tasks for side in (pairs.first, pairs.second) for sentence in side]


class STS(Suite):
    """The seven STS tasks.

    Settings: data_dir (None: the hub), sts_text (raw, tok: the headline), tasks (default SEVEN).

    The headline variant has the plain names ("sts7/spearman"); the other one, where the source has it, is scored from
    the same call of the encoder under "sts7_tok/spearman" (or "sts7_raw/...").
    """

    name = "sts"
    folders = ("sts",)
    keys = ("tasks", "sts_text")
    metrics = tuple(Metric(f"{t}/spearman", LABELS[t], "higher") for t in (*SEVEN, "sts7"))

    def load(self, settings: Settings) -> Variants:
        """The tasks as the headline has them, and in the other text variant."""
        headline: Text = settings.get("sts_text") or "raw"
        tasks = task_names(settings, SEVEN, "STS")
        main = [load_sts(task, settings.get("data_dir"), headline) for task in tasks]
        second: Text = "tok" if headline == "raw" else "raw"
        notes = [note for pairs in main for note in pairs.notes]
        other: list[STSPairs] = []
        try:
            other = [load_sts(task, settings.get("data_dir"), second) for task in tasks]
            notes += [note for pairs in other for note in pairs.notes]
        except UserError:
            notes.append(f"text variant {second} is not in this source, so it was not scored")
        return Variants(main, other, notes)

    def score(self, encoder: Encoder, data: Variants, settings: Settings) -> Scored:
        """ "sts12/spearman" and so on."""
        vectors = Vectors(encoder, all_sentences([*data.main, *data.other]))
        scores = score_tasks(vectors, data.main)
        headline = data.main[0].text
        for key, value in score_tasks(vectors, data.other).items():
            task, metric = key.split("/")
            scores[f"{task}_{data.other[0].text}/{metric}"] = value
        warnings = [warning for pairs in data.main if (warning := row_count_warning(pairs))]
        warnings += vectors.non_finite_note()
        if len(vectors.matrix) > 1 and bool((vectors.matrix == vectors.matrix[0]).all()):
            warnings.append(
                "all sentence vectors are equal (a collapsed encoder): no correlation, counted as 0"
            )
        seven = "sts7_senteval_tok" if headline == "tok" else "sts7_raw"
        published = not warnings and {pairs.task for pairs in data.main} == set(SEVEN)
        block = protocols.describe(
            encoder,
            suite=self.name,
            name=seven if published else "sts_cosine_spearman",
            aggregation="all",
            text=headline,
            sentences=vectors.sentences,
            data={pairs.task: {"source": pairs.source, "pairs": len(pairs)} for pairs in data.main},
            warnings=warnings,
            notes=data.notes,
        )
        return scores, block

    def tables(self, name: str, scores: Scores, protocol: Mapping[str, Any]) -> list[Table]:
        """One row a text variant."""
        headline = str(protocol["text"])
        rows = {f"{name} ({headline})": [scores]}
        for other in {"raw", "tok"} - {headline}:
            mark = f"_{other}/"
            second = {key.replace(mark, "/"): value for key, value in scores.items() if mark in key}
            rows |= {f"{name} ({other})": [second]} if second else {}
        return [score_table(rows, self.metrics, self.title(name), protocol_line(protocol))]


@dataclass(frozen=True)
class Variants:
    """STS tasks in the headline's text variant and in the other one, which may not be there."""

    main: list[STSPairs]
    other: list[STSPairs]
    notes: list[str]
