"""Questions with their passages and answers by language: XQuAD, MLQA, and a training set (TyDiQA, SQuAD)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any

from embedlab.errors import UserError, one_of
from embedlab.evaluation.core.files import Hub, find_file, inner, is_there, names_in, read_tsv
from embedlab.evaluation.core.settings import chosen, folder_of, names, row_limit

TASKS = ("xquad", "mlqa")
LANGUAGES = {
    "xquad": ("ar", "de", "el", "en", "es", "hi", "ro", "ru", "th", "tr", "vi", "zh"),
    "mlqa": ("ar", "de", "en", "es", "hi", "vi", "zh"),
}
_STEMS = {"xquad": ("xquad",), "mlqa": ("mlqa_test", "mlqa_dev")}
SQUAD = "squad_train"
_HUB_COLUMNS = ("context", "question", "answers")


@dataclass(frozen=True)
class Questions:
    """Questions in one language on passages in one language.

    passages: distinct texts; gold [q]: the passage of each question; answers: the right answers of each, all
    in the passages' language; pool: passages before a limit.
    """

    passage_language: str
    question_language: str
    passages: list[str]
    questions: list[str]
    gold: list[int]
    answers: list[list[str]]
    source: str
    pool: int | None = None

    def __len__(self) -> int:
        return len(self.questions)

    def head(self, limit: int, passages: int) -> Questions:
        """The first `limit` questions and the first `passages`, at least those up to the last that is asked of."""
        gold = self.gold[:limit]
        return replace(
            self,
            passages=self.passages[: max([passages, *(place + 1 for place in gold)])],
            questions=self.questions[:limit],
            gold=gold,
            answers=self.answers[:limit],
            pool=len(self.passages),
        )


Grid = dict[tuple[str, str], Questions]
"""(passage language, question language) -> questions."""


def load_grid(
    task: str, folder: Path | None, languages: Sequence[str] | None = None, limit: int | None = None
) -> Grid:
    """Every pair of languages of `task`: "xquad" (files xquad_{language}_passages and _questions, in `folder`
    or its folder xquad/), "mlqa" (mlqa_test_{language}_..., folder mlqa_test/; else mlqa_dev); None: the hub (MLQA's
    test).

    limit: questions of all pairs of languages together, and passages of all languages, an equal share of each
    and at least one. Raises UserError for a missing or broken file, or a question
    whose passage is not there.
    """
    if task not in TASKS:
        raise UserError("no such task", key="tasks", value=task, fix=one_of(task, TASKS))
    if folder is None:
        grid = _hub_grid(task, languages)
    else:
        stem = (_stems(task, folder) or _STEMS[task])[0]
        inside = inner(folder, stem)
        there = names_in(inside, f"{stem}_*_passages")
        grid = _files_grid(task, stem, inside, chosen(languages, there, "languages"))
    if limit is None:
        return grid
    each = ceil(limit / len(grid)), ceil(limit / len({of for of, _ in grid}))
    return {pair: questions.head(*each) for pair, questions in grid.items()}


def _stems(task: str, folder: Path) -> list[str]:
    """Of `_STEMS`, those with files in a folder."""
    return [stem for stem in _STEMS[task] if any(inner(folder, stem).glob(f"{stem}_*_passages.tsv*"))]


def _files_grid(task: str, stem: str, folder: Path, names: Sequence[str]) -> Grid:
    # XQuAD has a file of questions a language, row by row the same; MLQA one a passage language.
    columns = ["pid", "question", "answer", "qid" if task == "xquad" else "question_lang"]
    passages, questions = {}, {}
    for name in names:
        passages[name] = read_tsv(find_file(folder, f"{stem}_{name}_passages"), ["pid", "passage"])
        path = find_file(folder, f"{stem}_{name}_questions")
        questions[name] = path, read_tsv(path, columns)
    grid = {}
    for of, asked in product(names, names):
        path, table = questions[asked if task == "xquad" else of]
        gold = _gold(path, table["pid"], passages[of]["pid"])
        answers, rows = table["answer"], list(range(len(gold)))
        if task == "xquad":
            own = questions[of][1]
            answer = dict(zip(own["qid"], own["answer"], strict=True))
            if missing := [qid for qid in table["qid"] if qid not in answer]:
                fix = "files of one release"
                raise UserError(f"asks what {of} does not", file=path, key="qid", value=missing[0], fix=fix)
            answers = [answer[qid] for qid in table["qid"]]
        else:
            rows = [i for i in rows if table["question_lang"][i] == asked]
        if rows:
            grid[of, asked] = Questions(
                of, asked, passages[of]["passage"], [table["question"][i] for i in rows],
                [gold[i] for i in rows], [[answers[i]] for i in rows], str(path),
            )  # fmt: skip
    return grid


def _gold(path: Path, asked: Sequence[str], pids: Sequence[str]) -> list[int]:
    position = {pid: i for i, pid in enumerate(pids)}
    for row, pid in enumerate(asked, start=2):
        if pid not in position:
            fix = "questions and passages of one release"
            raise UserError("no passage has this pid", file=path, row=row, key="pid", value=pid, fix=fix)
    return [position[pid] for pid in asked]


def _hub_grid(task: str, wanted: Sequence[str] | None) -> Grid:
    names = chosen(wanted, LANGUAGES[task], "languages")
    pairs = list(product(names, names))
    if task == "xquad":
        # The rows of all languages are the same questions in the same order.
        sets = {name: Hub("google/xquad", f"xquad.{name}", "validation", "xquad_*.tsv.gz") for name in names}
        rows = {name: hub.rows(_HUB_COLUMNS) for name, hub in sets.items()}
        tables = {(of, asked): rows[of] | {"question": rows[asked]["question"]} for of, asked in pairs}
    else:
        hubs = {
            (of, asked): Hub("facebook/mlqa", f"mlqa.{of}.{asked}", "test", "mlqa_dev_*.tsv.gz", (), True)
            for of, asked in pairs
        }
        tables = {pair: hub.rows(_HUB_COLUMNS) for pair, hub in hubs.items()}
    grid = {}
    for (of, asked), table in tables.items():
        position: dict[str, int] = {}
        gold = [position.setdefault(context, len(position)) for context in table["context"]]
        answers = [list(answer["text"]) for answer in table["answers"]]
        source = "hub:google/xquad" if task == "xquad" else "hub:facebook/mlqa"
        grid[of, asked] = Questions(of, asked, list(position), table["question"], gold, answers, source)
    return grid


@dataclass(frozen=True)
class Located:
    """A training question: the answer is passage[start : start + len(answer)]."""

    question: str
    passage: str
    answer: str
    start: int


@dataclass(frozen=True)
class TrainingQuestions:
    """Questions to train on; `dropped`: rows whose answer is not in their passage."""

    rows: list[Located]
    dropped: int
    source: str


def load_training(
    folder: Path | None, name: str | None = None, limit: int | None = None
) -> TrainingQuestions:
    """Questions to train on: file `name` in `folder` or its folder tydiqa_goldp_train/ (None: squad_train, else
    TyDiQA's en), columns question, passage, answer; None as folder: SQuAD v1.1 from the hub.

    An answer is looked for in the passage as it stands and its first occurrence taken. limit: rows read.
    Raises UserError for a missing or broken file, or when no answer was found.
    """
    if folder is None:
        squad = Hub("rajpurkar/squad", None, "train", "tydiqa_goldp_train/en.tsv.gz")
        rows = squad.rows(_HUB_COLUMNS)
        kept = [
            Located(question, context, answers["text"][0], answers["answer_start"][0])
            for context, question, answers in zip(*(rows[c][:limit] for c in _HUB_COLUMNS), strict=True)
        ]
        return TrainingQuestions(kept, 0, "hub:rajpurkar/squad")
    squad_here = name is None and is_there(folder, SQUAD)
    path = (
        find_file(folder, SQUAD)
        if squad_here
        else find_file(inner(folder, "tydiqa_goldp_train"), name or "en")
    )
    table = read_tsv(path, ["question", "passage", "answer"])
    triples = list(zip(*(table[c][:limit] for c in ("question", "passage", "answer")), strict=True))
    located = [Located(q, p, a, p.find(a)) for q, p, a in triples if a]
    kept = [row for row in located if row.start >= 0]
    if not kept:
        raise UserError(
            "no answer is found in its passage", file=path, fix="columns question, passage, answer"
        )
    return TrainingQuestions(kept, len(triples) - len(kept), str(path))


def grid_limit_note(limit: int | None, grids: Mapping[str, Grid]) -> list[str]:
    """A warning for the protocol when questions and passages were left out: how many are left."""
    if limit is None:
        return []
    kept = {}
    for task, grid in grids.items():
        pools = {q.passage_language: (len(q.passages), q.pool) for q in grid.values()}
        passages, of = (sum(n or 0 for n in side) for side in zip(*pools.values(), strict=True))
        kept[task] = f"{task} {sum(map(len, grid.values()))} questions, {passages} of {of} passages"
    return [
        f"limit={limit}: a quick look, with {'; '.join(kept.values())}: among fewer passages the right one is found"
        " more often, so that this is not comparable with scores of the whole"
    ]


def load_grids(settings: Mapping[str, Any]) -> dict[str, Grid]:
    """The grids of the key ``tasks``, by default of those that are there.

    Raises UserError for an unknown task or language, a missing or broken file.
    """
    folder, limit = folder_of(settings, "retrieval"), row_limit(settings)
    wanted = names(settings, "tasks")
    tasks = chosen(wanted, TASKS, "tasks")
    if wanted is None and folder is not None:
        tasks = [task for task in TASKS if _stems(task, folder)] or tasks
    return {task: load_grid(task, folder, names(settings, "languages"), limit) for task in tasks}
