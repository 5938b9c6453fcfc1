"""Retrieval collections in the folder layout of BEIR: corpus.jsonl, queries.jsonl and relevance
judgements.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from embedlab.errors import UserError
from embedlab.evaluation.core.files import read_tsv


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
    return _jsonl(folder, "corpus") is not None


def load_collection(folder: Path, split: str = "test", codes: str = "binary") -> Collection:
    """Read corpus.jsonl, queries.jsonl (.gz or not) and the judgements of `split`.

    A document is its title, a space and its text, as in BEIR. Judgements: qrels_SPLIT.tsv, qrels/SPLIT.tsv or
    qrels.tsv (.gz or not) with columns query-id, corpus-id and score; or `code` in place of score for
    Cranfield's codes (1: a complete answer ... 4: minimum interest; anything else: not relevant), read as
    gains 1 (`codes` "binary") or 4 ... 1 ("graded"). Raises UserError for a missing or broken file, a row
    without id or text, an id twice, no usable judgement.
    """
    documents = _texts(_file(folder, "corpus"), title=True)
    queries = _texts(_file(folder, "queries"), title=False)
    path = _qrels_file(folder, split)
    qrels: dict[str, dict[str, int]] = {}
    dangling = 0
    for query, document, gain in _judgements(path, codes):
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


def _jsonl(folder: Path, stem: str) -> Path | None:
    found = (folder / f"{stem}.jsonl{suffix}" for suffix in ("", ".gz"))
    return next((path for path in found if path.is_file()), None)


def _file(folder: Path, stem: str) -> Path:
    path = _jsonl(folder, stem)
    if path is None:
        raise UserError(f"has no {stem}.jsonl", file=folder, fix=f"give a BEIR folder with {stem}.jsonl")
    return path


def _qrels_file(folder: Path, split: str) -> Path:
    for stem in (f"qrels_{split}", f"qrels/{split}", "qrels"):
        for suffix in (".tsv", ".tsv.gz"):
            path = folder / f"{stem}{suffix}"
            if path.is_file():
                return path
    raise UserError(
        f"has no judgements for split {split!r}",
        file=folder,
        key="split",
        value=split,
        fix=f"add qrels/{split}.tsv with columns query-id, corpus-id, score",
    )


def _texts(path: Path, title: bool) -> dict[str, str]:
    texts: dict[str, str] = {}
    for number, line in _lines(path):
        try:
            row = json.loads(line)
            name, text = row["_id"], row["text"]
            head = (row.get("title") or "") if title else ""
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"is not a JSON object with _id and text ({type(error).__name__}: {error})",
                file=path,
                row=number,
            ) from error
        if not all(isinstance(part, str) for part in (name, text, head)):
            raise UserError("_id, title and text must be strings", file=path, row=number, fix="quote them")
        if name in texts:
            raise UserError("this _id came before", file=path, row=number, key="_id", value=name)
        texts[name] = f"{head} {text}".strip()
    if not texts:
        raise UserError("has no rows", file=path, fix="fetch the file again")
    return texts


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            for number, raw in enumerate(stream, start=1):
                if raw.strip():
                    yield number, raw.decode("utf-8")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(
            f"is not a whole gzip file ({error})", file=path, fix="fetch the file again"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError("is not UTF-8", file=path, row=number, fix="convert the file to UTF-8") from error


def _judgements(path: Path, codes: str) -> Iterator[tuple[str, str, int]]:
    table = read_tsv(path, ["query-id", "corpus-id"], optional=["score", "code"])
    column = "score" if "score" in table else "code"
    if column not in table:
        raise UserError("has neither a column score nor code", file=path, fix="name it in the first line")
    if codes not in ("binary", "graded"):
        raise UserError("no such reading of codes", key="codes", value=codes, fix="choose binary or graded")
    rows = zip(table["query-id"], table["corpus-id"], table[column], strict=True)
    for number, (query, document, cell) in enumerate(rows, start=1):
        try:
            value = int(cell)
        except ValueError as error:
            raise UserError("is not a whole number", file=path, row=number, key=column, value=cell) from error
        if column == "code":
            value = (1 if codes == "binary" else 5 - value) if 1 <= value <= 4 else 0
        yield query, document, value
