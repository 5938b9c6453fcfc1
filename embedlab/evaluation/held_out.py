"""The texts of evaluation sets, which training text is held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from embedlab.data.contamination.overlap import HeldOut
from embedlab.errors import UserError, one_of
from embedlab.evaluation.core.vectors import unique
from embedlab.evaluation.retrieval.retrieval import Retrieval
from embedlab.evaluation.sts.sts import SEVEN, load_sts

DataDir = str | Path | None


def held_out(
    suites: Sequence[str], data_dir: DataDir, keys: tuple[str, str] = ("against", "data_dir")
) -> list[HeldOut]:
    """The evaluation sets of some suites.

    Args:
        suites: of ``sts`` (both sentences of every pair of the seven test sets, and of STS-B dev) and ``retrieval``
            (queries and the documents that are relevant to one).
        data_dir: folder of the suites' files; ``hub`` for STS of the hub.
        keys: what the caller calls `suites` and `data_dir`, for messages.

    Raises:
        UserError: an unknown suite, no `data_dir`, a missing or broken file.
    """
    for name in suites:
        if name not in SUITES:
            raise UserError("no such evaluation texts", key=keys[0], value=name, fix=one_of(name, SUITES))
    if data_dir is None:
        raise UserError(f"{keys[1]} is not set, where the evaluation texts lie", key=keys[0], value=",".join(suites),
                        fix=f"{keys[1]}=FOLDER")  # fmt: skip
    return [held for name in dict.fromkeys(suites) for held in SUITES[name](data_dir)]


def _sts(data_dir: DataDir) -> list[HeldOut]:
    found = []
    for task, split in [*((task, "test") for task in SEVEN), ("stsb", "dev")]:
        pairs = load_sts(task, None if data_dir == "hub" else data_dir, split=split)
        texts, place = unique([*pairs.first, *pairs.second])
        sides = zip(pairs.first, pairs.second, strict=True)
        both = [(place[first], place[second]) for first, second in sides]
        found.append(HeldOut(task if split == "test" else f"{task}_{split}", "sts", texts, both))
    return found


def _retrieval(data_dir: DataDir) -> list[HeldOut]:
    found = []
    for collection in Retrieval().load({"data_dir": data_dir}):
        judged = {name for gains in collection.qrels.values() for name in gains}
        documents, _ = unique(text for name, text in collection.documents.items() if name in judged)
        queries, _ = unique(collection.queries.values())
        found += [
            HeldOut(f"{collection.name} queries", "retrieval", queries),
            HeldOut(f"{collection.name} documents", "retrieval", documents),
        ]
    return found


SUITES: dict[str, Callable[[DataDir], list[HeldOut]]] = {"sts": _sts, "retrieval": _retrieval}
"""Suites whose texts are known, and how they are read."""
