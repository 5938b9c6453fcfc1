"""Translations to score on: Tatoeba's test pairs, and tables with one column a language (NTREX, Multi30k)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from embedlab.data.readers import open_reader
from embedlab.errors import UserError
from embedlab.evaluation.core.files import Hub, find_file, inner, names_in, read_columns, read_tsv
from embedlab.evaluation.core.settings import chosen

# XTREME's bitext retrieval (Hu et al. 2020, table 1), by Tatoeba's codes.
XTREME = (
    "afr", "ara", "ben", "bul", "cmn", "deu", "ell", "est", "eus", "fin", "fra", "heb", "hin", "hun", "ind", "ita",
    "jav", "jpn", "kat", "kaz", "kor", "mal", "mar", "nld", "pes", "por", "rus", "spa", "swh", "tam", "tel", "tgl",
    "tha", "tur", "urd", "vie",
)  # fmt: skip
NTREX = "ntrex_newstest2019"


@dataclass(frozen=True)
class Bitext:
    """Row i of `first` (in `language`) and row i of `second` (in `pivot`) are translations.

    dropped: rows of the source that were left out, by the reason.
    """

    language: str
    pivot: str
    first: list[str]
    second: list[str]
    source: str
    dropped: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.first)


def tatoeba(
    folder: Path | None, languages: Sequence[str] | None = None, limit: int | None = None
) -> list[Bitext]:
    """LASER's Tatoeba test pairs with English: files tatoeba_{language}-eng in `folder` or its folder
    tatoeba_test/; None: the 36 XTREME languages from the hub.

    Raises UserError for a missing language, a missing or broken file.
    """
    inside = None if folder is None else inner(folder, "tatoeba_test")
    there = XTREME if inside is None else names_in(inside, "tatoeba_*-eng")
    pairs = []
    for language in chosen(languages, there, "languages"):
        path = inside and find_file(inside, f"tatoeba_{language}-eng")
        (first, second), source = read_columns(
            path,
            [language, "eng"],
            Hub("mteb/tatoeba-bitext-mining", f"{language}-eng", "test", "tatoeba_test/tatoeba_*-eng.tsv.gz",
                ("sentence1", "sentence2")),
        )  # fmt: skip
        pairs.append(Bitext(language, "eng", first[:limit], second[:limit], source))
    return pairs


@dataclass(frozen=True)
class ParallelTable:
    """Sentences by language, row i meaning the same in each; `dropped` as of `Bitext`."""

    texts: dict[str, list[str]]
    source: str
    dropped: Mapping[str, int] = field(default_factory=dict)

    @property
    def languages(self) -> list[str]:
        return list(self.texts)

    def __len__(self) -> int:
        return len(next(iter(self.texts.values())))

    def with_pivot(self, pivot: str) -> list[Bitext]:
        """Every other language paired with `pivot`."""
        return [
            Bitext(language, pivot, texts, self.texts[pivot], self.source, self.dropped)
            for language, texts in self.texts.items()
            if language != pivot
        ]


def parallel_table(
    folder: Path | None, stem: str = NTREX, languages: Sequence[str] | None = None, limit: int | None = None
) -> ParallelTable:
    """The file `stem` of `folder`, whose header names the languages. Rows with an empty cell are left out
    and counted.

    languages: only these, in the file's order. Raises UserError without a folder (no hub copy of NTREX has
    this form), for a missing file or language, or a table of fewer than two languages.
    """
    if folder is None:
        raise UserError(
            "parallel tables are local files", key="data_dir", fix=f"data_dir=FOLDER with {stem}.tsv.gz"
        )
    path = find_file(folder, stem)
    wanted = chosen(languages, open_reader(path).columns or [], "languages")
    if len(wanted) < 2:
        fix = "languages=en,de, or null for all columns"
        raise UserError(
            "fewer than two languages", file=path, key="languages", value=",".join(wanted), fix=fix
        )
    table = read_tsv(path, wanted)
    read = list(zip(*(table[name] for name in wanted), strict=True))
    whole = [row for row in read if all(c.strip() for c in row)]
    dropped = {"an empty cell": len(read) - len(whole)} if len(whole) < len(read) else {}
    rows = whole[:limit]
    if not rows:
        raise UserError("has no row with all languages", file=path, fix="fetch the file again")
    return ParallelTable(
        {name: list(column) for name, column in zip(wanted, zip(*rows, strict=True), strict=True)},
        str(path),
        dropped,
    )
