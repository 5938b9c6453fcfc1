"""The seven STS tasks by SimCSE's protocol (SentEval, aggregation "all"): `specs/evaluation.md` 5.1.

Vectors are frozen, a pair's score is its cosine, a task's score is Spearman's correlation with the human
ratings, times 100. For STS12-16 three aggregations are in use, and papers mix them up; all three are
computed: `spearman` ("all": the subsets of a year joined, one correlation: the headline), `spearman_mean`
(mean over subsets) and `spearman_wmean` (mean weighted by subset size). STS-B and SICK-R are one set each,
scored by cosine as in SimCSE, not by a trained regressor as in upstream SentEval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from embedlab.errors import UserError
from embedlab.evaluation.core.correlation import pearson, spearman
from embedlab.evaluation.core.files import Hub, find_file, read_tsv
from embedlab.evaluation.core.settings import task_names
from embedlab.evaluation.core.suite import Scored, Settings, Suite
from embedlab.evaluation.core.table import LABELS, Metric, Scores, Table, protocol_line, score_table
from embedlab.evaluation.core.vectors import Encoder, Vectors

Text = Literal["raw", "tok"]
SEVEN: tuple[str, ...] = ("sts12", "sts13", "sts14", "sts15", "sts16", "stsb", "sickr")


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
    tokens (columns sentence1_tok and sentence2_tok). SICK's file has no such columns: there "tok" is the raw
    sentence, lower-cased and split at spaces (its sentences carry next to no punctuation). Pairs without a
    rating are dropped. Raises UserError for an unknown task, a missing or broken file, a hub that cannot be
    reached.
    """
    source = _SOURCES.get((task, split))
    if source is None:
        known = sorted(name if where == "test" else f"{name} ({where})" for name, where in _SOURCES)
        fix = f"choose one of {', '.join(known)}"
        raise UserError("no such STS task", key="task", value=f"{task} ({split})", fix=fix)
    if text not in ("raw", "tok"):
        raise UserError("no such text variant", key="sts_text", value=text, fix="choose raw or tok")
    if data_dir is None and text == "tok":
        raise UserError(
            f"{source.hub} has raw text only",
            key="sts_text",
            value=text,
            fix="give data_dir=FOLDER with SentEval's tokens, or use sts_text=raw",
        )
    columns = [source.gold, "sentence1", "sentence2"]
    if data_dir is None:
        where = f"hub:{source.hub}"
        hub = Hub(
            source.hub, None, source.hub_split, "the STS files (sts12_test.tsv.gz ... sick_test.tsv.gz)"
        )
        table = dict(zip(columns, hub.rows(("score", "sentence1", "sentence2")).values(), strict=True))
    else:
        where = str(path := find_file(data_dir, source.file, "sts"))
        table = read_tsv(path, columns, [*_TOKENS, *filter(None, [source.subset])])
    first, second, notes = _sentences(task, text, table, where)
    kept, gold = rated(table[source.gold], where, source.gold)
    subsets = table.get(source.subset or "")
    return STSPairs(
        task,
        split,
        text,
        [first[i] for i in kept],
        [second[i] for i in kept],
        gold,
        subsets and [subsets[i] for i in kept],
        where,
        source.pairs,
        notes,
    )


_TOKENS = ("sentence1_tok", "sentence2_tok")


def _sentences(
    task: str, text: Text, table: Mapping[str, list[str]], where: str
) -> tuple[list[str], list[str], tuple[str, ...]]:
    """Both sides in a text variant, and a note."""
    if text == "raw":
        return table["sentence1"], table["sentence2"], ()
    notes: tuple[str, ...] = ()
    if all(column in table for column in _TOKENS):
        first, second = (table[column] for column in _TOKENS)
    elif task == "sickr":
        first, second = ([s.lower() for s in table[side]] for side in ("sentence1", "sentence2"))
        notes = ("sickr: no tok columns, raw text lower-cased and split at spaces",)
    else:
        raise UserError(
            "has no columns sentence1_tok and sentence2_tok",
            file=where,
            key="sts_text",
            value=text,
            fix="use sts_text=raw, or add SentEval's tokens as these columns",
        )
    return [" ".join(s.split()) for s in first], [" ".join(s.split()) for s in second], notes


def rated(ratings: Sequence[Any], source: str, column: str) -> tuple[list[int], NDArray[np.float64]]:
    """Which pairs have a rating, and their ratings.

    Args:
        ratings: numbers or their texts, one a pair; an empty text for none.
        source: of the pairs, a file with one header line or the hub.
        column: of the ratings, for messages.

    Raises:
        UserError: a rating that is no number, or ratings with which there is no correlation.
    """
    kept = [i for i, rating in enumerate(ratings) if str(rating).strip()]
    gold = np.empty(len(kept))
    for place, i in enumerate(kept):
        with suppress(ValueError):
            gold[place] = np.nan
            gold[place] = float(ratings[i])
        if not np.isfinite(gold[place]):
            raise UserError(
                "rating is not a number",
                file=source,
                row=i + 2,
                key=column,
                value=ratings[i],
                fix="write a number, or leave the cell empty to drop the pair",
            )
    if len(gold) < 2 or (gold == gold[0]).all():
        what = f"rates all {len(gold)} pairs the same" if len(gold) > 1 else "has one rated pair"
        what = f"{what}: there is no correlation with it" if len(gold) else "has no rated pair"
        raise UserError(what, file=source, fix="give the whole file")
    return kept, gold


def row_count_warnings(tasks: Sequence[STSPairs]) -> list[str]:
    """A sentence for the protocol for each task whose number of pairs is not the published one."""
    return [
        f"{pairs.task} ({pairs.split}, {pairs.source}) has {len(pairs)} pairs where SentEval has "
        f"{pairs.expected}: not comparable with published scores"
        for pairs in tasks
        if pairs.expected not in (None, len(pairs))
    ]


def load_tasks(settings: Settings, text: Text | None = None) -> list[STSPairs]:
    """The tasks that the key ``tasks`` names, all seven by default; `text` None: that of ``sts_text``, raw by default.

    Raises:
        UserError: a wrong setting, a missing or broken file.
    """
    text = text or settings.get("sts_text") or "raw"
    return [load_sts(task, settings.get("data_dir"), text) for task in task_names(settings, SEVEN, "STS")]


def score_pairs(vectors: Vectors, pairs: STSPairs) -> dict[str, float]:
    """The correlations of one task, x100: spearman and pearson over all pairs, and the mean and the weighted
    mean of the subsets' Spearman (`spearman_mean`, `spearman_wmean`); a task of one set has the same value
    three times.

    The two subset aggregations are left out where the source does not name the subsets.
    """
    cosine = vectors.cosine(pairs.first, pairs.second)
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
    for metric in ("spearman", "spearman_mean", "spearman_wmean", "pearson"):
        seven = [scores[key] for task in SEVEN if (key := f"{task}/{metric}") in scores]
        if len(seven) == len(SEVEN):
            scores[f"sts7/{metric}"] = float(np.mean(seven))
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
        main = load_tasks(settings)
        second: Text = "tok" if main[0].text == "raw" else "raw"
        notes = [note for pairs in main for note in pairs.notes]
        other: list[STSPairs] = []
        try:
            other = load_tasks(settings, second)
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
        warnings = row_count_warnings(data.main) + vectors.non_finite_note()
        if len(vectors.matrix) > 1 and bool((vectors.matrix == vectors.matrix[0]).all()):
            warnings.append(
                "all sentence vectors are equal (a collapsed encoder): no correlation, counted as 0"
            )
        published = not warnings and {pairs.task for pairs in data.main} == set(SEVEN)
        return self.result(
            encoder,
            scores,
            name="sts7_senteval" if published else "sts_cosine_spearman",
            aggregation="all",
            text=headline,
            sentences=vectors.sentences,
            data={pairs.task: {"source": pairs.source, "pairs": len(pairs)} for pairs in data.main},
            warnings=warnings,
            notes=data.notes,
        )

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
