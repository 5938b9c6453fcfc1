"""Triples of anchor, positive and hard negative, from triple tables or from labelled sentence pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from embedlab.config.data import NLI_COLUMNS, ROLES, DataConfig
from embedlab.data.layout import find_columns, has_columns
from embedlab.data.readers import Reader

_NO_GOLD = ("-", "")
_Hypothesis = tuple[int, int, str]  # table, row, text


def triples(
    readers: Sequence[Reader], roles: tuple[str, ...], config: DataConfig, dropped: Counter[str]
) -> Iterator[tuple[int, int, tuple[object, ...], int]]:
    """Rows with the texts of `roles`: from tables that have them, then from all labelled pairs.

    Labelled pairs (premise, hypothesis, label) are gathered by premise, over all tables: its i-th entailed
    hypothesis meets its i-th contradicted one, and the shorter list is gone through again, so that every
    hypothesis is used. SNLI and MultiNLI have mostly one of each label for a premise, which gives the triples
    of SimCSE (section 4). A premise without both is dropped, and counted.

    Raises:
        UserError: a table that is neither; a label that is not one of three.
    """
    labelled = []
    for table, reader in enumerate(readers):
        if _is_labelled(reader, roles, config):
            labelled.append(table)
            continue
        for row, values in reader.rows(find_columns(reader, roles, config)):
            yield table, row, values, 0
    if labelled:
        yield from _from_labels(readers, labelled, roles, config, dropped)


def _is_labelled(reader: Reader, roles: tuple[str, ...], config: DataConfig) -> bool:
    if any(name in config.chosen for name in NLI_COLUMNS):
        return True
    if has_columns(reader, roles, config) or any(name in config.chosen for name in ROLES["nli"]):
        return False
    if not has_columns(reader, NLI_COLUMNS, config):
        raise reader.error(
            f"neither the columns of triples (sent0, sent1, hard_neg) nor those of labelled pairs"
            f" ({', '.join(NLI_COLUMNS)}); there are: {reader.listed()}",
            key="data.columns",
            fix="data.columns.anchor=NAME data.columns.positive=NAME data.columns.negative=NAME",
        )
    return True


def _from_labels(
    readers: Sequence[Reader],
    tables: list[int],
    roles: tuple[str, ...],
    config: DataConfig,
    dropped: Counter[str],
) -> Iterator[tuple[int, int, tuple[object, ...], int]]:
    found: dict[object, tuple[list[_Hypothesis], list[_Hypothesis]]] = {}
    for table in tables:
        reader = readers[table]
        for row, (premise, hypothesis, label) in reader.rows(find_columns(reader, NLI_COLUMNS, config)):
            match label.strip().lower() if isinstance(label, str) else label:
                case "entailment":
                    found.setdefault(premise, ([], []))[0].append((table, row, hypothesis))
                case "contradiction":
                    found.setdefault(premise, ([], []))[1].append((table, row, hypothesis))
                case "neutral":
                    found.setdefault(premise, ([], []))
                case None | "-" | "":
                    dropped["no gold label"] += 1
                case other:
                    raise reader.error(
                        f"the label {other!r} is not entailment, neutral or contradiction",
                        row,
                        fix="name the column of such labels with data.columns.label=NAME",
                    )
    for premise, (entailed, contradicted) in found.items():
        if "negative" not in roles:
            contradicted = contradicted or entailed
        if not entailed or not contradicted:
            dropped["premise without both labels"] += 1
            continue
        for i in range(max(len(entailed), len(contradicted)) if "negative" in roles else len(entailed)):
            table, row, positive = entailed[i % len(entailed)]
            texts = {
                "anchor": premise,
                "positive": positive,
                "negative": contradicted[i % len(contradicted)][2],
            }
            yield table, row, tuple(texts[role] for role in roles), 0
