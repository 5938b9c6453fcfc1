"""The seven STS tasks by SimCSE's protocol (SentEval, aggregation "all"): `specs/evaluation.md` 5.1.

Vectors are frozen, a pair's score is its cosine, a task's score is Spearman's correlation with the human
ratings, times 100. For STS12-16 three aggregations are in use, and papers mix them up; all three are
computed: `spearman` ("all": the subsets of a year joined, one correlation: the headline), `spearman_mean`
(mean over subsets) and `spearman_wmean` (mean weighted by subset size). STS-B and SICK-R are one set each,
scored by cosine as in SimCSE, not by a trained regressor as in upstream SentEval.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from embedlab.errors import UserError, one_of
from embedlab.evaluation.core.correlation import pearson, spearman
from embedlab.evaluation.core.files import Hub, find_file, read_tsv
from embedlab.evaluation.core.settings import names, task_names
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
    pairs: int | None
    gold: str = "score"
    subset: str | None = None
    scale: tuple[float, float] = (0, 5)


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
    ("sickr", "test"): _Source("sick_test", "mteb/sickr-sts", "test", 4927, gold="relatedness", scale=(1, 5)),
}
_OWN = _Source("", "", "", None, scale=(-np.inf, np.inf))


@dataclass(frozen=True)
class STSPairs:
    """Sentence pairs with human ratings.

    first, second: the sentences; gold: float64 [n] (0-5, SICK 1-5, one's own: any); subsets: the sub-data-set of each
    pair, or None where the source does not tell them apart; expected: the published number of pairs; dropped: pairs
    that were read and left out, by the reason.
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
    dropped: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.first)

    def counts(self) -> dict[str, Any]:
        """For the protocol: what was read, dropped and why."""
        read = len(self) + sum(self.dropped.values())
        return {"source": self.source, "read": read, "dropped": dict(self.dropped), "pairs": len(self)}

    def __post_init__(self) -> None:
        if not len(self.first) == len(self.second) == len(self.gold):
            raise ValueError("first, second and gold differ in length")


def load_sts(
    task: str, data_dir: str | Path | None = None, text: Text = "raw", split: str = "test"
) -> STSPairs:
    """Pairs of one task (`SEVEN`), from `data_dir` or its folder sts/ (files sts12_test.tsv.gz ... stsb_dev,
    sick_test), or the hub; or of one's own file, with the columns score, sentence1 and sentence2.

    split: "test", for stsb also "dev" and "train". text: "raw" as published, "tok" SentEval's lower-cased
    tokens (columns sentence1_tok and sentence2_tok). SentEval reads SICK as it is and splits it at spaces, case kept:
    so does "tok" here. Pairs without a rating are dropped and counted. Raises UserError for an unknown task, a missing
    or broken file, a rating outside the task's scale, a hub that cannot be reached.
    """
    source = _OWN if is_own(task) else _SOURCES.get((task, split))
    if source is None:
        known = sorted(name if where == "test" else f"{name} ({where})" for name, where in _SOURCES)
        asked = task if split == "test" else f"{task} ({split})"
        raise UserError("no such STS task", key="task", value=f"{task} ({split})", fix=one_of(asked, known))
    if text not in ("raw", "tok"):
        raise UserError("no such text variant", key="sts_text", value=text, fix="choose raw or tok")
    if data_dir is None and text == "tok" and source is not _OWN:
        raise UserError(
            f"{source.hub} has raw text only",
            key="sts_text",
            value=text,
            fix="give data_dir=FOLDER with SentEval's tokens, or use sts_text=raw",
        )
    columns = [source.gold, "sentence1", "sentence2"]
    if source is _OWN:
        where = str(path := _own_file(task, data_dir))
        table = read_tsv(path, columns, _TOKENS)
        task = own_name(task)
    elif data_dir is None:
        where = f"hub:{source.hub}"
        hub = Hub(
            source.hub, None, source.hub_split, "the STS files (sts12_test.tsv.gz ... sick_test.tsv.gz)"
        )
        table = dict(zip(columns, hub.rows(("score", "sentence1", "sentence2")).values(), strict=True))
    else:
        where = str(path := find_file(data_dir, source.file, "sts"))
        table = read_tsv(path, columns, [*_TOKENS, *filter(None, [source.subset])])
    first, second, notes = _sentences(task, text, table, where)
    pairs = rated_pairs(
        STSPairs(task, split, text, first, second, np.zeros(len(first)), None, where, source.pairs, notes),
        table[source.gold], source.gold, source.scale, table.get(source.subset or ""),
    )  # fmt: skip
    if source is _OWN:
        notes = (
            *pairs.notes,
            f"{task}: a file of one's own, rated {pairs.gold.min():g} to {pairs.gold.max():g}",
        )
        return replace(pairs, notes=notes)
    return pairs


def is_own(task: str) -> bool:
    """Whether a task is named as a file of one's own."""
    return Path(task).suffix != ""


def own_name(task: str) -> str:
    """What the scores of one's own file are called."""
    return Path(task).name.partition(".")[0]


def _own_file(task: str, data_dir: str | Path | None) -> Path:
    places = [Path(task).expanduser(), *([Path(data_dir, task)] if data_dir is not None else [])]
    for path in places:
        if path.is_file():
            return path
    raise UserError("no such file", file=task, key="tasks", fix=f"a file of pairs, or {one_of(task, SEVEN)}")


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
        first, second = table["sentence1"], table["sentence2"]
        notes = ("sickr: raw text split at spaces, case kept, as SentEval has it",)
    else:
        raise UserError(
            "has no columns sentence1_tok and sentence2_tok",
            file=where,
            key="sts_text",
            value=text,
            fix="use sts_text=raw, or add SentEval's tokens as these columns",
        )
    return [" ".join(s.split()) for s in first], [" ".join(s.split()) for s in second], notes


def rated_pairs(
    pairs: STSPairs,
    ratings: Sequence[Any],
    column: str = "score",
    scale: tuple[float, float] = (0, 5),
    subsets: list[str] | None = None,
) -> STSPairs:
    """The pairs that have a rating, with it; what is dropped is counted, and what is odd noted.

    Args:
        pairs: as they were read.
        ratings: numbers or their texts, one a pair; an empty text for none.
        column: of the ratings, for messages.
        scale: lowest and highest rating.
        subsets: of the pairs, where they are known.

    Raises:
        UserError: a rating that is no number of the scale, or ratings with which there is no correlation.
    """
    kept, gold = _rated(ratings, pairs.source, column, scale)
    sides = list(zip(pairs.first, pairs.second, strict=True))
    out = set(range(len(sides))) - set(kept)
    blank = sum(not any(map(str.strip, sides[i])) for i in out)
    dropped = {why: n for why, n in (("no rating", len(out) - blank), ("blank line", blank)) if n}
    notes = [f"{pairs.task}: {n} of {len(sides)} rows dropped ({why})" for why, n in dropped.items()]
    if empty := sum(not all(map(str.strip, sides[i])) for i in kept):
        notes.append(f"{pairs.task}: {empty} pairs have an empty sentence, and are scored")
    return replace(
        pairs,
        first=[sides[i][0] for i in kept],
        second=[sides[i][1] for i in kept],
        gold=gold,
        subsets=subsets and [subsets[i] for i in kept],
        notes=(*pairs.notes, *notes),
        dropped=dropped,
    )


def _rated(
    ratings: Sequence[Any], source: str, column: str, scale: tuple[float, float]
) -> tuple[list[int], NDArray[np.float64]]:
    """Which pairs have a rating, and their ratings."""
    kept = [i for i, rating in enumerate(ratings) if str(rating).strip()]
    gold = np.empty(len(kept))
    for place, i in enumerate(kept):
        with suppress(TypeError, ValueError):  # a hub's null is no text
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
        if not scale[0] <= gold[place] <= scale[1]:
            raise UserError(
                f"rating is not on the scale of {scale[0]:g} to {scale[1]:g}",
                file=source,
                row=i + 2,
                key=column,
                value=ratings[i],
                fix="ratings on another scale are for a file of your own: tasks=[FILE.tsv]",
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


def load_tasks(
    settings: Settings, text: Text | None = None, variants: Iterable[str] = ("raw", "tok")
) -> list[STSPairs]:
    """The tasks that the key ``tasks`` names, all seven by default.

    Args:
        settings: of the suite.
        text: None: that of ``sts_text``, raw by default.
        variants: of each task that is scored too, as "TASK_VARIANT".

    Raises:
        UserError: a wrong setting, a missing or broken file.
    """
    text = text or settings.get("sts_text") or "raw"
    own = [task for task in names(settings, "tasks") or () if is_own(task)]
    called = [own_name(task) for task in own]
    taken = {*SEVEN, "sts7", "sts"}
    taken |= {f"{task}_{variant}" for task in (*taken, *called) for variant in variants}
    for task, name in zip(own, called, strict=True):
        if name in taken:
            raise UserError(f"other scores are called {name}", key="tasks", value=task, fix="rename the file")
        taken.add(name)
    known = (*SEVEN, *own) if own else SEVEN
    return [load_sts(task, settings.get("data_dir"), text) for task in task_names(settings, known, "STS")]


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
    if _SOURCES.get((pairs.task, pairs.split), _OWN).subset is None:
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

    Settings: data_dir (None: the hub), sts_text (raw, tok: the headline), tasks (default SEVEN; also files of one's
    own, of any scale, with the columns score, sentence1 and sentence2).

    The headline variant has the plain names ("sts7/spearman"); the other one, where the source has it, is scored from
    the same call of the encoder under "sts7_tok/spearman" (or "sts7_raw/...").
    """

    name = "sts"
    folders = ("sts",)
    keys = ("tasks", "sts_text")
    metrics = tuple(Metric(f"{t}/spearman", LABELS[t], "higher") for t in (*SEVEN, "sts7"))

    def local(self, settings: Settings) -> Any:
        """As of every suite; files of one's own are no data of the hub."""
        wanted = names(settings, "tasks")
        return self.load(settings) if wanted and all(map(is_own, wanted)) else super().local(settings)

    def load(self, settings: Settings) -> Variants:
        """The tasks as the headline has them, and in the other text variant."""
        main = load_tasks(settings)
        second: Text = "tok" if main[0].text == "raw" else "raw"
        notes = list(dict.fromkeys(note for pairs in main for note in pairs.notes))
        other: list[STSPairs] = []
        try:
            other = load_tasks(settings, second)
            notes += [note for pairs in other for note in pairs.notes if note not in notes]
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
        warnings = row_count_warnings(data.main)
        if len(vectors.matrix) > 1 and bool((vectors.matrix == vectors.matrix[0]).all()):
            warnings.append(
                "all sentence vectors are equal (a collapsed encoder): no correlation, counted as 0"
            )
        seven = "sts7_senteval_tok" if headline == "tok" else "sts7_raw"
        published = not warnings and {pairs.task for pairs in data.main} == set(SEVEN)
        return self.result(
            encoder,
            scores,
            name=seven if published else "sts_cosine_spearman",
            aggregation="all",
            text=headline,
            sentences=vectors.sentences,
            data={pairs.task: pairs.counts() for pairs in data.main},
            warnings=warnings,
            notes=data.notes,
        )

    def tables(self, name: str, scores: Scores, protocol: Mapping[str, Any]) -> list[Table]:
        """One row a text variant."""
        headline = str(protocol["text"])
        rows = {f"{name} ({headline})": [scores]}
        for other in {"raw", "tok"} - {headline}:
            tasks = {f"{task}_{other}": task for task in (*protocol["data"], "sts7")}
            parts = {key: key.split("/") for key in scores}
            second = {f"{tasks[t]}/{m}": scores[key] for key, (t, m) in parts.items() if t in tasks}
            rows |= {f"{name} ({other})": [second]} if second else {}
        own = [Metric(f"{t}/spearman", t, "higher") for t in protocol["data"] if t not in SEVEN]
        return [score_table(rows, [*own, *self.metrics], self.title(name), protocol_line(protocol))]


@dataclass(frozen=True)
class Variants:
    """STS tasks in the headline's text variant and in the other one, which may not be there."""

    main: list[STSPairs]
    other: list[STSPairs]
    notes: list[str]
