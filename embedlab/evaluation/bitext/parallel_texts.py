"""Translations to score on: Tatoeba's test pairs, and tables with one column a language (NTREX, Multi30k)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from embedlab.errors import UserError
from embedlab.evaluation.core.files import find_file, hub_rows, read_tsv
from embedlab.evaluation.core.settings import chosen

# XTREME's bitext retrieval (Hu et al. 2020, table 1), by Tatoeba's codes.
XTREME = (
    "afr", "ara", "ben", "bul", "cmn", "deu", "ell", "est", "eus", "fin", "fra", "heb", "hin", "hun", "ind", "ita",
    "jav", "jpn", "kat", "kaz", "kor", "mal", "mar", "nld", "pes", "por", "rus", "spa", "swh", "tam", "tel", "tgl",
    "tha", "tur", "urd", "vie",
)  # fmt: skip
NTREX = "ntrex_newstest2019"
_TATOEBA_HUB = "mteb/tatoeba-bitext-mining"


@dataclass(frozen=True)
class Bitext:
    """Row i of `first` (in `language`) and row i of `second` (in `pivot`) are translations."""

    language: str
    pivot: str
    first: list[str]
    second: list[str]
    source: str

    def __len__(self) -> int:
        return len(self.first)


def tatoeba(
    folder: Path | None, languages: Sequence[str] | None = None, limit: int | None = None
) -> list[Bitext]:
    """LASER's Tatoeba test pairs with English: files tatoeba_{language}-eng in `folder` or its folder
    tatoeba_test/; None: the 36 XTREME languages from the hub.

    Raises UserError for a missing language, a missing or broken file.
    """
    if folder is None:
        return [_tatoeba_hub(language, limit) for language in chosen(languages, XTREME, "languages")]
    inner = folder / "tatoeba_test" if (folder / "tatoeba_test").is_dir() else folder
    stems = sorted({path.name.split(".")[0] for path in inner.glob("tatoeba_*-eng.tsv*")})
    if not stems:
        raise UserError(
            "has no tatoeba_*-eng.tsv.gz", file=inner, key="data_dir", fix="give the folder of tatoeba_test/"
        )
    there = [stem.removeprefix("tatoeba_").removesuffix("-eng") for stem in stems]
    pairs = []
    for language in chosen(languages, there, "languages"):
        path = find_file(inner, f"tatoeba_{language}-eng")
        table = read_tsv(path, [language, "eng"])
        pairs.append(_bitext(language, "eng", table[language], table["eng"], str(path), limit))
    return pairs


def _tatoeba_hub(language: str, limit: int | None) -> Bitext:
    columns = ["sentence1", "sentence2"]
    rows = hub_rows(_TATOEBA_HUB, f"{language}-eng", "test", columns, "tatoeba_test/tatoeba_*-eng.tsv.gz")
    return _bitext(language, "eng", rows["sentence1"], rows["sentence2"], f"hub:{_TATOEBA_HUB}", limit)


def _bitext(
    language: str, pivot: str, first: list[str], second: list[str], source: str, limit: int | None
) -> Bitext:
    if not first:
        raise UserError("has no rows", file=source, fix="fetch the file again")
    return Bitext(language, pivot, first[:limit], second[:limit], source)


@dataclass(frozen=True)
class ParallelTable:
    """Sentences by language, row i meaning the same in each."""

    texts: dict[str, list[str]]
    source: str

    @property
    def languages(self) -> list[str]:
        return list(self.texts)

    def __len__(self) -> int:
        return len(next(iter(self.texts.values())))

    def with_pivot(self, pivot: str) -> list[Bitext]:
        """Every other language paired with `pivot`."""
        return [
            Bitext(language, pivot, texts, self.texts[pivot], self.source)
            for language, texts in self.texts.items()
            if language != pivot
        ]


def parallel_table(
    folder: Path | None, stem: str = NTREX, languages: Sequence[str] | None = None, limit: int | None = None
) -> ParallelTable:
    """The file `stem` of `folder`, whose header names the languages. Rows with an empty cell are left out.

    languages: only these, in the file's order. Raises UserError without a folder (no hub copy of NTREX has
    this form), for a missing file or language, or a table of fewer than two languages.
    """
    if folder is None:
        raise UserError(
            "parallel tables are local files", key="data_dir", fix=f"data_dir=FOLDER with {stem}.tsv.gz"
        )
    path = find_file(folder, stem)
    wanted = chosen(languages, _header(path), "languages")
    if len(wanted) < 2:
        raise UserError("fewer than two languages", file=path, key="languages", value=",".join(wanted))
    table = read_tsv(path, wanted)
    rows = [row for row in zip(*(table[name] for name in wanted), strict=True) if all(c.strip() for c in row)]
    rows = rows[:limit]
    if not rows:
        raise UserError("has no row with all languages", file=path, fix="fetch the file again")
    return ParallelTable(
        {name: list(column) for name, column in zip(wanted, zip(*rows, strict=True), strict=True)}, str(path)
    )


def _header(path: Path) -> list[str]:
    import gzip

    try:
        with (
            gzip.open(path, "rt", encoding="utf-8")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8") as stream
        ):
            return stream.readline().rstrip("\r\n").split("\t")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read ({error})", file=path, fix="fetch the file again") from error
