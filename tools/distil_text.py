"""The text of `experiment=distil_mini`, without any that stands in the sets on which its result is scored.

    python tools/distil_text.py DATA OUT [--paragraphs 250000] [--questions 150000]
                                         [--technical 0] [--technical-questions 0]

DATA has the folders sentences/, nli/, parallel/, glue/, retrieval/ and pretrain/ to take text from, and sts/,
transfer/ and retrieval/ to hold it against (docs/data.md). Questions are those of QNLI and TyDi QA, and some that
tools/questions.py makes of Wikipedia's sentences. OUT gets sentences.txt.xz, paragraphs.txt.xz and overlap.json: what
was left out, as `embedlab.data.contamination` finds it (equal texts, windows of 13 words), and what it was held
against.

--technical adds texts of pretrain/'s technical articles (tools/technical.py): all their paragraphs, and pieces cut from
them elsewhere, to so many in all; --technical-questions adds questions of 8 to 20 words made of their sentences.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import json
import lzma
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import technical
from questions import questions

from embedlab.data.contamination.overlap import HeldOut, Overlap, words_of
from embedlab.encoders.windows import windows

SENTENCES = ("sentences/wiki_en_*.txt.gz",)
NLI = (
    *("nli_triples_en", "snli_dev", "mnli_*", "snli_counterfactual_*", "ling_in_loop_*", "semiauto_nli_*"),
    *("joci_*", "mpe_*", "scitail_dev"),
)
"""English ones of nli/; those left out are evaluation sets (PAWS-X, XNLI)."""
CAPTIONS = ("parallel/multi30k_train.tsv.gz", "parallel/multi30k_val.tsv.gz")
ASKED = (("glue/qnli_dev.tsv.gz", "premise"), ("retrieval/tydiqa_goldp_train/en.tsv.gz", "question"))
PARAGRAPHS = ("pretrain/wiki_paragraphs_0?.txt.xz",)
SIDES = ("premise", "hypothesis", "sent0", "sent1", "hard_neg", "en")
SCORED = {
    "sts": ("sts/*.tsv.gz",),
    "transfer": ("transfer/*.tsv.gz",),
    "scifact": ("retrieval/scifact/corpus.jsonl.gz", "retrieval/scifact/queries.jsonl.gz"),
    "cranfield": ("retrieval/cranfield/corpus.jsonl.gz", "retrieval/cranfield/queries.jsonl.gz"),
}
SCORED_COLUMNS = ("sentence", "sentence1", "sentence2", "sentence1_tok", "sentence2_tok", "question")
LONGEST = 1400
"""Characters of a paragraph that are kept: 256 tokens and a few more."""
LONG_QUESTION = (8, 20)
"""Words of a technical one: who looks for a paper says more than who asks for a fact."""


def clean(texts: Iterable[str], overlap: Overlap, seen: set[bytes], counts: Counter[str]) -> Iterator[str]:
    """Texts that are in no evaluation set and have not come before, whatever their case and punctuation."""
    for block in windows(texts):
        for text, hits in zip(block, overlap.find(block), strict=True):
            words = " ".join(words_of(text)).encode()
            key = hashlib.blake2b(words, digest_size=16).digest()
            counts["read"] += 1
            kinds = {(overlap.sets[hit.held].suite, "equal" if hit.equal else "a window") for hit in hits}
            counts.update(f"{kind} of {suite}" for suite, kind in sorted(kinds))
            if hits:
                counts["left out: in an evaluation set"] += 1
            elif not words or key in seen:
                counts["left out: empty or a repeat"] += 1
            else:
                seen.add(key)
                counts["kept"] += 1
                yield text


def lines(root: Path, patterns: Iterable[str]) -> Iterator[str]:
    """Lines of packed text files, without blank ones."""
    return (text for line in all_lines(root, patterns) if (text := line.strip()))


def all_lines(root: Path, patterns: Iterable[str]) -> Iterator[str]:
    """Lines of packed text files, and a blank one after each file."""
    for pattern in patterns:
        for path in sorted(root.glob(pattern)):
            unpack = lzma.open if path.suffix == ".xz" else gzip.open
            with unpack(path, "rt", encoding="utf-8") as file:
                yield from file
                yield "\n"


def columns(root: Path, patterns: Iterable[str], wanted: Iterable[str]) -> Iterator[str]:
    """Columns of .tsv.gz files that have them; premises of several captions (`` ||| ``) by themselves."""
    for pattern in patterns:
        for path in sorted(root.glob(pattern)):
            with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
                for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
                    for column in wanted:
                        yield from filter(None, (row.get(column) or "").split(" ||| "))


def documents(root: Path, patterns: Iterable[str]) -> Iterator[str]:
    """Titles and texts of BEIR files."""
    for record in map(json.loads, lines(root, patterns)):
        yield from filter(None, (record.get("title"), record["text"]))


def asked(root: Path, count: int, seed: int = 42) -> Iterator[str]:
    """Questions that people asked, and a random sample of those made of Wikipedia's sentences."""
    for file, column in ASKED:
        yield from columns(root, [file], [column])
    yield from sample(list(questions(lines(root, SENTENCES), seed)), count, seed)


def sample(texts: list[str], count: int, seed: int = 42) -> list[str]:
    """A random sample."""
    return random.Random(seed).sample(texts, min(count, len(texts)))


def cut(texts: Iterable[str]) -> Iterator[str]:
    """Texts of at most so many characters as are kept, cut at a space."""
    return (text if len(text) <= LONGEST else text[:LONGEST].rsplit(" ", 1)[0] for text in texts)


def technical_texts(root: Path, texts: int, asked: int) -> tuple[set[str], list[str], list[str]]:
    """Paragraphs of technical articles, texts made of these, and questions made of their sentences."""
    if not texts and not asked:
        return set(), [], []
    articles = technical.articles(all_lines(root, PARAGRAPHS))
    found = [article for article in articles if technical.share(article) >= technical.TECHNICAL]
    told = [sentence for article in found for sentence in technical.sentences(article)]
    least, longest = LONG_QUESTION
    made = [text for text in questions(told, longest=longest) if len(text.split()) >= least]
    return {text for article in found for text in article}, technical.prose(found, texts), sample(made, asked)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--paragraphs", type=int, default=250_000)
    parser.add_argument("--questions", type=int, default=150_000, help="made ones")
    parser.add_argument("--technical", type=int, default=0)
    parser.add_argument("--technical-questions", type=int, default=0)
    args = parser.parse_args()
    root: Path = args.data
    held = {
        name: documents(root, patterns)
        if patterns[0].endswith("jsonl.gz")
        else columns(root, patterns, SCORED_COLUMNS)
        for name, patterns in SCORED.items()
    }
    overlap = Overlap([HeldOut(name, name, list(dict.fromkeys(texts))) for name, texts in held.items()])
    of_articles, prose, long_questions = technical_texts(root, args.technical, args.technical_questions)
    paragraphs = sample(list(lines(root, PARAGRAPHS)), args.paragraphs)
    if args.technical:
        paragraphs = [text for text in paragraphs if text not in of_articles]
    nli = columns(root, [f"nli/{name}.tsv.gz" for name in NLI], SIDES)
    sources: dict[str, dict[str, Iterable[str]]] = {
        "sentences": {
            "wikipedia": lines(root, SENTENCES),
            "nli": nli,
            "captions": columns(root, CAPTIONS, SIDES),
            "questions": asked(root, args.questions),
        },
        "paragraphs": {"wikipedia paragraphs": cut(paragraphs)},
    }
    if args.technical_questions:
        sources["sentences"]["technical questions"] = long_questions
    if args.technical:
        sources["paragraphs"]["technical"] = cut(prose)
    seen: set[bytes] = set()
    counts: dict[str, Counter[str]] = {}
    args.out.mkdir(parents=True, exist_ok=True)
    for name, parts in sources.items():
        with lzma.open(args.out / f"{name}.txt.xz", "wt", encoding="utf-8", preset=6) as file:
            for source, texts in parts.items():
                counts[source] = Counter()
                file.writelines(f"{text}\n" for text in clean(texts, overlap, seen, counts[source]))
    report = json.dumps({"scored": overlap.facts(), "training": counts}, indent=2)
    (args.out / "overlap.json").write_text(report + "\n", encoding="utf-8")
    print(report)


if __name__ == "__main__":
    main()
