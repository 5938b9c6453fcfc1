"""Triples of anchor, positive and hard negative, from triple tables or from labelled sentence pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import ClassVar

from embedlab.config.data import DataConfig
from embedlab.data.kinds import DataKind, RawRow
from embedlab.data.reader import Reader

_LABELLED = ("premise", "hypothesis", "label")
_Hypothesis = tuple[int, int, str]  # table, row, text


class Nli(DataKind):
    """``data=nli``. Column names are those of SimCSE's file (`princeton-nlp/datasets-for-simcse`) and of SNLI."""

    name = "nli"
    roles = ("anchor", "positive", "negative")
    usual: ClassVar = {
        "anchor": ("sent0", "anchor"),
        "positive": ("sent1", "positive"),
        "negative": ("hard_neg", "negative"),
        **{name: (name,) for name in _LABELLED},
    }

    has_negatives = True

    def reads(self, reader: Reader, config: DataConfig) -> set[str]:
        roles = _LABELLED if self._is_labelled(reader, self.roles[:2], config) else self.roles
        return {column for role in roles if (column := self._column(reader, role, config)) is not None}

    def groups(
        self, readers: Sequence[Reader], roles: tuple[str, ...], config: DataConfig
    ) -> dict[str, tuple[str, str]]:
        return {}  # rows() finds out which of two layouts each table has

    def rows(
        self, readers: Sequence[Reader], roles: tuple[str, ...], config: DataConfig, dropped: Counter[str]
    ) -> Iterator[RawRow]:
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
            if self._is_labelled(reader, roles, config):
                labelled.append(table)
                continue
            for row, values in reader.rows(self.find_columns(reader, roles, config)):
                yield table, row, values, 0
        if labelled:
            yield from self._from_labels(readers, labelled, roles, config, dropped)

    def _is_labelled(self, reader: Reader, roles: tuple[str, ...], config: DataConfig) -> bool:
        if any(name in config.chosen for name in _LABELLED):
            return True
        if self.has_columns(reader, roles, config) or any(name in config.chosen for name in self.roles):
            return False
        if not self.has_columns(reader, _LABELLED, config):
            raise reader.error(
                f"neither the columns of triples (sent0, sent1, hard_neg) nor those of labelled pairs"
                f" ({', '.join(_LABELLED)}); there are: {reader.listed()}",
                key="data.columns",
                fix="data.columns.anchor=NAME data.columns.positive=NAME data.columns.negative=NAME",
            )
        return True

    def _from_labels(
        self,
        readers: Sequence[Reader],
        tables: list[int],
        roles: tuple[str, ...],
        config: DataConfig,
        dropped: Counter[str],
    ) -> Iterator[RawRow]:
        hypotheses: dict[object, tuple[list[_Hypothesis], list[_Hypothesis]]] = {}
        for table in tables:
            reader = readers[table]
            for row, (premise, hypothesis, label) in reader.rows(
                self.find_columns(reader, _LABELLED, config)
            ):
                match label.strip().lower() if isinstance(label, str) else label:
                    case "entailment" | "contradiction" | "neutral" as named:
                        lists = hypotheses.setdefault(premise, ([], []))
                        if named != "neutral":
                            lists[named == "contradiction"].append((table, row, hypothesis))
                    case None | "-" | "":
                        dropped["no gold label"] += 1
                    case other:
                        raise reader.error(
                            f"the label {other!r} is not entailment, neutral or contradiction",
                            row,
                            fix="name the column of such labels with data.columns.label=NAME",
                        )
        for premise, (entailed, contradicted) in hypotheses.items():
            if "negative" not in roles:
                contradicted = contradicted or entailed
            if not entailed or not contradicted:
                dropped["premise without both labels"] += 1
                continue
            for i in range(max(len(entailed), len(contradicted)) if "negative" in roles else len(entailed)):
                table, row, positive = entailed[i % len(entailed)]
                negative = contradicted[i % len(contradicted)][2]
                texts = {"anchor": premise, "positive": positive, "negative": negative}
                yield table, row, tuple(texts[role] for role in roles), 0
