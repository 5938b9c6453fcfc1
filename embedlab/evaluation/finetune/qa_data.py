"""Questions with their passages and answers by language: XQuAD, MLQA, and a training set (TyDiQA, SQuAD)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from embedlab.errors import UserError
from embedlab.evaluation.core.files import find_file, hub_rows, is_there, read_tsv
from embedlab.evaluation.core.settings import chosen, folder_of, names, row_limit

TASKS = ("xquad", "mlqa")
SQUAD = "squad_train"
XQUAD_LANGUAGES = ("ar", "de", "el", "en", "es", "hi", "ro", "ru", "th", "tr", "vi", "zh")
MLQA_LANGUAGES = ("ar", "de", "en", "es", "hi", "vi", "zh")


@dataclass(frozen=True)
class Questions:
    """Questions in one language on passages in one language.

    passages: distinct texts; gold [q]: the passage of each question; answers: the right answers of each, all
    in the passages' language.
    """

    passage_language: str
    question_language: str
    passages: list[str]
    questions: list[str]
    gold: list[int]
    answers: list[list[str]]
    source: str

    def __len__(self) -> int:
        return len(self.questions)

    def head(self, limit: int | None) -> Questions:
        """The first `limit` questions, and the passages up to the last that they ask of."""
        if limit is None:
            return self
        gold = self.gold[:limit]
        return replace(
            self,
            passages=self.passages[: max(gold, default=-1) + 1],
            questions=self.questions[:limit],
            gold=gold,
            answers=self.answers[:limit],
        )


Grid = dict[tuple[str, str], Questions]
"""(passage language, question language) -> questions."""


def load_grid(
    task: str, folder: Path | None, languages: Sequence[str] | None = None, limit: int | None = None
) -> Grid:
    """Every pair of languages of `task`: "xquad" (files xquad_{language}_passages and _questions, in `folder`
    or its folder xquad/), "mlqa" (mlqa_test_{language}_..., folder mlqa_test/; else mlqa_dev); None: the hub (MLQA's
    test).

    limit: questions of each pair of languages. Raises UserError for a missing or broken file, or a question
    whose passage is not there.
    """
    if task not in TASKS:
        raise UserError("no such task", key="tasks", value=task, fix=f"choose from {', '.join(TASKS)}")
    if folder is None:
        grid = _xquad_hub(languages) if task == "xquad" else _mlqa_hub(languages)
    elif task == "xquad":
        grid = _xquad_files(folder, languages)
    else:
        grid = _mlqa_files(folder, languages)
    return {pair: questions.head(limit) for pair, questions in grid.items()}


def there(task: str, folder: Path | None) -> bool:
    """Whether `folder` has the files of `task`; the hub has all."""
    return folder is None or bool(_stems(folder, task)[2])


def _stems(folder: Path, task: str) -> tuple[Path, str, list[str]]:
    """The folder of a task's files, how their names begin, and the languages it has; MLQA's test before its dev."""
    for name in {"xquad": ("xquad",), "mlqa": ("mlqa_test", "mlqa_dev")}[task]:
        inner = folder / name if (folder / name).is_dir() else folder
        found = {path.name.split(".")[0] for path in inner.glob(f"{name}_*_passages.tsv*")}
        if found:
            break
    return inner, name, sorted(stem.removeprefix(f"{name}_").removesuffix("_passages") for stem in found)


def _languages(folder: Path, task: str, wanted: Sequence[str] | None) -> tuple[Path, str, list[str]]:
    inner, name, found = _stems(folder, task)
    if not found:
        raise UserError(
            f"has no {task} files",
            file=inner,
            key="data_dir",
            fix=f"give the folder of {task}_*_passages.tsv.gz",
        )
    return inner, name, chosen(wanted, found, "languages")


def _passages(folder: Path, stem: str) -> tuple[list[str], dict[str, int]]:
    table = read_tsv(find_file(folder, f"{stem}_passages"), ["pid", "passage"])
    return table["passage"], {pid: i for i, pid in enumerate(table["pid"])}


def _gold(path: Path, pids: Sequence[str], position: dict[str, int]) -> list[int]:
    for row, pid in enumerate(pids, start=2):
        if pid not in position:
            raise UserError("no passage has this pid", file=path, row=row, key="pid", value=pid)
    return [position[pid] for pid in pids]


def _xquad_files(folder: Path, wanted: Sequence[str] | None) -> Grid:
    inner, _, names = _languages(folder, "xquad", wanted)
    passages, questions = {}, {}
    for name in names:
        passages[name] = _passages(inner, f"xquad_{name}")
        path = find_file(inner, f"xquad_{name}_questions")
        questions[name] = path, read_tsv(path, ["qid", "pid", "question", "answer"])
    grid = {}
    for of, asked in product(names, names):
        texts, position = passages[of]
        path, table = questions[asked]
        answer = dict(zip(questions[of][1]["qid"], questions[of][1]["answer"], strict=True))
        if missing := [qid for qid in table["qid"] if qid not in answer]:
            raise UserError(f"asks what {of} does not", file=path, key="qid", value=missing[0])
        grid[of, asked] = Questions(
            of, asked, texts, table["question"], _gold(path, table["pid"], position),
            [[answer[qid]] for qid in table["qid"]], str(path),
        )  # fmt: skip
    return grid


def _mlqa_files(folder: Path, wanted: Sequence[str] | None) -> Grid:
    inner, stem, names = _languages(folder, "mlqa", wanted)
    grid = {}
    for of in names:
        texts, position = _passages(inner, f"{stem}_{of}")
        path = find_file(inner, f"{stem}_{of}_questions")
        table = read_tsv(path, ["question_lang", "pid", "question", "answer"])
        gold = _gold(path, table["pid"], position)
        for asked in names:
            rows = [i for i, language in enumerate(table["question_lang"]) if language == asked]
            if rows:
                grid[of, asked] = Questions(
                    of, asked, texts, [table["question"][i] for i in rows], [gold[i] for i in rows],
                    [[table["answer"][i]] for i in rows], str(path),
                )  # fmt: skip
    return grid


def _xquad_hub(wanted: Sequence[str] | None) -> Grid:
    names = chosen(wanted, XQUAD_LANGUAGES, "languages")
    columns = ["context", "question", "answers"]
    rows = {
        name: hub_rows("google/xquad", f"xquad.{name}", "validation", columns, "xquad_*.tsv.gz")
        for name in names
    }
    # The rows of all languages are the same questions in the same order.
    return {
        (of, asked): _from_rows(of, asked, rows[of]["context"], rows[asked]["question"], rows[of]["answers"],
                                "hub:google/xquad")
        for of, asked in product(names, names)
    }  # fmt: skip


def _mlqa_hub(wanted: Sequence[str] | None) -> Grid:
    names = chosen(wanted, MLQA_LANGUAGES, "languages")
    grid = {}
    for of, asked in product(names, names):
        columns = ["context", "question", "answers"]
        rows = hub_rows(
            "facebook/mlqa", f"mlqa.{of}.{asked}", "test", columns, "mlqa_dev_*.tsv.gz", converted=True
        )
        grid[of, asked] = _from_rows(
            of, asked, rows["context"], rows["question"], rows["answers"], "hub:facebook/mlqa"
        )
    return grid


def _from_rows(
    of: str,
    asked: str,
    contexts: list[str],
    questions: list[str],
    answers: list[dict[str, list[str]]],
    source: str,
) -> Questions:
    position: dict[str, int] = {}
    gold = [position.setdefault(context, len(position)) for context in contexts]
    return Questions(of, asked, list(position), questions, gold, [list(a["text"]) for a in answers], source)


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
        columns = ["context", "question", "answers"]
        rows = hub_rows("rajpurkar/squad", None, "train", columns, "tydiqa_goldp_train/en.tsv.gz")
        kept = [
            Located(question, context, answers["text"][0], answers["answer_start"][0])
            for context, question, answers in zip(*(rows[c][:limit] for c in columns), strict=True)
        ]
        return TrainingQuestions(kept, 0, "hub:rajpurkar/squad")
    inner = folder / "tydiqa_goldp_train" if (folder / "tydiqa_goldp_train").is_dir() else folder
    squad = name is None and is_there(folder, SQUAD)
    path = find_file(folder, SQUAD) if squad else find_file(inner, name or "en")
    table = read_tsv(path, ["question", "passage", "answer"])
    triples = list(zip(*(table[c][:limit] for c in ("question", "passage", "answer")), strict=True))
    located = [Located(q, p, a, p.find(a)) for q, p, a in triples if a]
    kept = [row for row in located if row.start >= 0]
    if not kept:
        raise UserError(
            "no answer is found in its passage", file=path, fix="columns question, passage, answer"
        )
    return TrainingQuestions(kept, len(triples) - len(kept), str(path))


def load_grids(settings: Mapping[str, Any]) -> dict[str, Grid]:
    """The grids of the key ``tasks``, by default of those that are there.

    Raises UserError for an unknown task or language, a missing or broken file.
    """
    folder, limit = folder_of(settings, "retrieval"), row_limit(settings)
    wanted = names(settings, "tasks")
    tasks = chosen(wanted, TASKS, "tasks")
    tasks = [task for task in tasks if wanted is not None or there(task, folder)] or list(TASKS)
    return {task: load_grid(task, folder, names(settings, "languages"), limit) for task in tasks}
