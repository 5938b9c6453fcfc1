"""Text inside installed packages, for machines that reach a package registry and no model hub."""

from __future__ import annotations

import bz2
import importlib.util
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from embedlab.data.sentences import prose, split_sentences

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


def gensim_lee() -> Iterator[tuple[str]]:
    """Sentences of the Lee news documents: the 300 of the background corpus and the 50 with human scores."""
    for name in _LEE:
        for document in gensim_file(name).read_text(encoding="latin-1").split("\n"):
            for sentence in split_sentences(document):
                yield (sentence,)


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


# name -> columns, rows, package, and a number to raise when the rows of this function change
TEXTS: dict[str, tuple[list[str], Callable[[], Iterator[tuple[str, ...]]], str, int]] = {
    "gensim-wikipedia": (["sentence"], gensim_wikipedia, "gensim", 1),
    "gensim-lee": (["sentence"], gensim_lee, "gensim", 1),
    "emoji": (list(EMOJI_LANGUAGES), emoji_names, "emoji", 1),
    "emoji-train": (list(EMOJI_LANGUAGES), emoji_training_names, "emoji", 1),
    "emoji-phrases": (["sentence"], emoji_phrases, "emoji", 1),
}
