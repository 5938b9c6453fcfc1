"""Retrieval collections in the folder layout of BEIR: corpus.jsonl, queries.jsonl and relevance
judgements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedlab.data.readers import JsonLines
from embedlab.errors import UserError
from embedlab.evaluation.core.files import read_tsv

_GAIN = "a small whole number, such as 0 or 1, in each row"
_LARGEST = 1 << 24  # gains are summed in fp32, which has all whole numbers up to here


@dataclass(frozen=True)
class Collection:
    """documents and queries: id -> text; qrels: query id -> document id -> gain (above 0: relevant).

    Queries are those that have a relevant document. `dangling`: judgements whose document or query is
    missing.
    """

    name: str
    source: str
    split: str
    documents: dict[str, str]
    queries: dict[str, str]
    qrels: dict[str, dict[str, int]]
    dangling: int


def is_collection(folder: Path) -> bool:
    """Whether `folder` has a corpus.jsonl or corpus.jsonl.gz."""
    return any((folder / f"corpus.jsonl{end}").is_file() for end in ("", ".gz"))


def load_collection(folder: Path, split: str = "test", codes: str = "binary") -> Collection:
    """Read corpus.jsonl, queries.jsonl (.gz or not) and the judgements of `split`.

    A document is its title, a space and its text, as in BEIR. Judgements: qrels_SPLIT.tsv, qrels/SPLIT.tsv or
    qrels.tsv (.gz or not) with columns query-id, corpus-id and score; or `code` in place of score for
    Cranfield's codes (1: a complete answer ... 4: minimum interest; anything else: not relevant), read as
    gains 1 (`codes` "binary") or 4 ... 1 ("graded"). Raises UserError for a missing or broken file, a row
    without id or text, an id twice, two judgements of a pair that differ, no usable judgement.
    """
    documents, queries = _texts(folder, "corpus", True), _texts(folder, "queries", False)
    fix = f"add qrels/{split}.tsv with columns query-id, corpus-id, score"
    stems = (f"qrels_{split}", f"qrels/{split}", "qrels")
    path = _file(folder, stems, ".tsv", key="split", value=split, fix=fix)
    qrels: dict[str, dict[str, int]] = {}
    dangling = 0
    seen: dict[tuple[str, str], int] = {}
    for row, query, document, gain in _judgements(path, codes):
        if seen.setdefault((query, document), gain) != gain:
            raise UserError(
                f"{query} and {document} are judged twice, and not alike", file=path, row=row, fix="keep one"
            )
        if query not in queries or document not in documents:
            dangling += 1
        elif gain > 0:
            qrels.setdefault(query, {})[document] = gain
    if not qrels:
        raise UserError(
            f"judges no document of corpus.jsonl as relevant ({dangling} of its rows name unknown ids)",
            file=path,
            fix="check that the ids are those of corpus.jsonl and queries.jsonl",
        )
    judged = {query: text for query, text in queries.items() if query in qrels}
    return Collection(folder.name, str(folder), split, documents, judged, qrels, dangling)


def _file(folder: Path, stems: Sequence[str], kind: str, **fix: Any) -> Path:
    """The first of the files `stems`, .gz or not; UserError where there is none."""
    for path in (folder / f"{stem}{kind}{end}" for stem in stems for end in ("", ".gz")):
        if path.is_file():
            return path
    raise UserError(f"has no {stems[0]}{kind}", file=folder, **fix)


def _texts(folder: Path, stem: str, title: bool) -> dict[str, str]:
    path = _file(folder, [stem], ".jsonl", fix=f"give a BEIR folder with {stem}.jsonl")
    texts: dict[str, str] = {}
    for row, record in JsonLines(path).records():
        head = (record.get("title") or "") if title else ""
        name, text = record.get("_id"), record.get("text")
        if not all(isinstance(part, str) for part in (name, text, head)):
            raise UserError("_id, title and text must be strings", file=path, row=row, fix="quote them")
        if name in texts:
            fix = "an _id of its own for each"
            raise UserError("this _id came before", file=path, row=row, key="_id", value=name, fix=fix)
        texts[str(name)] = f"{head} {text}".strip()
    if not texts:
        raise UserError("has no rows", file=path, fix="fetch the file again")
    return texts


def _judgements(path: Path, codes: str) -> Iterator[tuple[int, str, str, int]]:
    """Row, query, document and gain."""
    table = read_tsv(path, ["query-id", "corpus-id"], optional=["score", "code"])
    column = "score" if "score" in table else "code"
    if column not in table:
        raise UserError("has neither a column score nor code", file=path, fix="name it in the first line")
    if codes not in ("binary", "graded"):
        raise UserError("no such reading of codes", key="codes", value=codes, fix="choose binary or graded")
    rows = zip(table["query-id"], table["corpus-id"], table[column], strict=True)
    for number, (query, document, cell) in enumerate(rows, start=2):
        try:
            value = int(cell)
        except ValueError as error:
            problem = "is not a whole number"
            raise UserError(problem, file=path, row=number, key=column, value=cell, fix=_GAIN) from error
        if abs(value) >= _LARGEST:
            problem = "is no gain of a judgement"
            raise UserError(problem, file=path, row=number, key=column, value=cell, fix=_GAIN)
        if column == "code":
            value = (1 if codes == "binary" else 5 - value) if 1 <= value <= 4 else 0
        yield number, query, document, value
