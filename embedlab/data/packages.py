"""Text inside installed packages, for machines that reach a package registry and no model hub."""

from __future__ import annotations

import bz2
import importlib.util
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

EMOJI_LANGUAGES = ("en", "ar", "de", "es", "fa", "fr", "id", "it", "ja", "ko", "pt", "ru", "tr", "zh")
_WIKIPEDIA = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
_LEE = ("lee_background.cor", "lee.cor")
_SKIN_TONES = frozenset(map(chr, range(0x1F3FB, 0x1F400)))


def gensim_file(name: str) -> Path:
    """A file of gensim's test data. gensim itself is not imported: that takes seconds."""
    spec = importlib.util.find_spec("gensim")
    assert spec is not None
    return Path(str(spec.origin)).parent / "test" / "test_data" / name


def gensim_wikipedia() -> Iterator[tuple[str]]:
    """Sentences of the 105 articles ("A" to "Algorithm", edition of 2016) of gensim's Wikipedia extract."""
    from gensim.corpora.wikicorpus import extract_pages, filter_wiki

    with bz2.open(gensim_file(_WIKIPEDIA)) as dump:
        for title, wikitext, _ in extract_pages(dump, ("0",)):
            if title.startswith("Wikipedia:") or wikitext.lstrip()[:9].lower() == "#redirect":
                continue
            for paragraph in prose(filter_wiki(wikitext)):
                for sentence in split_sentences(paragraph):
                    yield (sentence,)


def lee_sentences() -> Iterator[tuple[str, int]]:
    """Sentences of the Lee news documents, the 300 of the background corpus and the 50 with human scores, each with the
    number of its document."""
    documents = [
        text for name in _LEE for text in gensim_file(name).read_text(encoding="latin-1").split("\n")
    ]
    for number, document in enumerate(documents):
        for sentence in split_sentences(document):
            yield sentence, number


def gensim_lee() -> Iterator[tuple[str]]:
    """The sentences of `lee_sentences`."""
    return ((sentence,) for sentence, _ in lee_sentences())


def emoji_names() -> Iterator[tuple[str, ...]]:
    """Unicode CLDR's short names of emoji in 14 languages, English first; skin-tone variants are left out."""
    import emoji

    emoji.config.load_language(list(EMOJI_LANGUAGES))
    for sign, names in emoji.EMOJI_DATA.items():
        if names["status"] != emoji.STATUS["fully_qualified"] or _SKIN_TONES & set(sign):
            continue
        yield tuple(names.get(code, "").strip(":").replace("_", " ") for code in EMOJI_LANGUAGES)


_VARIANTS = frozenset(
    ["man", "men", "woman", "women", "person", "people", "boy", "girl", "facing", "right", "left"]
)


def is_held_out(name: str) -> bool:
    """Whether an emoji, by its English name, is for evaluation: one in eight, all variants of a motif together."""
    motif = " ".join(word for word in name.lower().split() if word.strip(":,") not in _VARIANTS)
    return zlib.crc32(motif.encode()) % 8 == 0


def emoji_training_names() -> Iterator[tuple[str, ...]]:
    """`emoji_names` without the emoji that are held out."""
    return (names for names in emoji_names() if not is_held_out(names[0]))


def emoji_phrases() -> Iterator[tuple[str]]:
    """The same names one by one, as sentences of 14 languages."""
    for names in emoji_training_names():
        for name in names:
            yield (name,)


# ---- from running English text to sentences, by rule: enough for training text, and nothing to download

_ABBREVIATIONS = frozenset(
    """
    mr mrs ms dr prof st sr jr vs e.g i.e cf ca c b d fl approx no nos vol vols pp p ed eds est al inc ltd co
    corp u.s u.k u.n gen col lt capt sgt rev hon gov sen rep pres jan feb mar apr jun jul aug sep sept oct nov
    dec fig ch sec r v op cit viz lit trans
    """.split()  # noqa: SIM905
)
# A stop with its closing quotes and brackets, a space, and what may start a sentence.
_STOP = re.compile(r"""([.!?]+["'”’)\]]*)\s+(?=["'“‘(\[]*[A-Z0-9])""")
_LAST_WORD = re.compile(r"([\w.]+)\.+[\"'”’)\]]*$")
_INITIALS = re.compile(r"(?:[A-Z]\.)*[A-Z]")
_MARKUP = re.compile(r"[{}|<>\[\]]|https?:|thumb|\bpx\b|==|^\W*$")
_SPACE = re.compile(r"\s+")
_EMPTY_BRACKETS = re.compile(r"\s*\((?:[\s,;:]|or|and)*\)")
_SPACE_BEFORE = re.compile(r"\s+([,.;:!?)])")


def prose(wikitext: str) -> Iterator[str]:
    """The paragraphs of running text of an article whose markup `gensim`'s filter has taken out.

    Headings, lists, tables and lines with markup left in them are skipped.
    """
    for line in wikitext.splitlines():
        if not line or line[0] in "*#:;=|!{}-" or line.startswith(("File:", "Image:", "Category:")):
            continue
        text = line.replace("'''", "").replace("''", '"')
        text = _EMPTY_BRACKETS.sub("", text)
        text = _SPACE_BEFORE.sub(r"\1", _SPACE.sub(" ", text)).strip()
        if len(text) >= 60 and not _MARKUP.search(text):
            yield text


def split_sentences(text: str, shortest: int = 30, longest: int = 500) -> Iterator[str]:
    """The sentences of a paragraph that end as sentences and have `shortest` to `longest` characters.

    A stop after an abbreviation or an initial does not end one.
    """
    start = 0
    for stop in [*_STOP.finditer(text), None]:
        end = len(text) if stop is None else stop.end(1)
        if stop is not None and _is_abbreviation(text[start:end]):
            continue
        sentence = text[start:end].strip()
        start = end
        whole = sentence.rstrip("\"'”’)]")[-1:] in (".", "!", "?") and not sentence[:1].islower()
        if whole and shortest <= len(sentence) <= longest:
            yield sentence


def _is_abbreviation(text: str) -> bool:
    word = _LAST_WORD.search(text)
    if word is None:
        return False
    return word[1].lower() in _ABBREVIATIONS or _INITIALS.fullmatch(word[1]) is not None


# name -> columns, rows, package, and a number to raise when the rows of this function change
TEXTS: dict[str, tuple[list[str], Callable[[], Iterator[tuple[str, ...]]], str, int]] = {
    "gensim-wikipedia": (["sentence"], gensim_wikipedia, "gensim", 1),
    "gensim-lee": (["sentence"], gensim_lee, "gensim", 1),
    "emoji": (list(EMOJI_LANGUAGES), emoji_names, "emoji", 1),
    "emoji-train": (list(EMOJI_LANGUAGES), emoji_training_names, "emoji", 1),
    "emoji-phrases": (["sentence"], emoji_phrases, "emoji", 1),
}
