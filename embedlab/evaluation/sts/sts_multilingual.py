"""Multilingual STS-B: the test pairs in each language, and across languages (English first, X second).

The translations are row by row those of the English file, so a pair of an English first sentence and a
translated second one keeps its human rating (Reimers & Gurevych 2020 build their cross-lingual STS so).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from embedlab.errors import UserError
from embedlab.evaluation.core import protocol as protocols
from embedlab.evaluation.core.correlation import flat, group_means, pair_cosine, pearson, spearman
from embedlab.evaluation.core.files import find_file, hub_rows, read_tsv
from embedlab.evaluation.core.settings import chosen, limit_note, names, row_limit
from embedlab.evaluation.core.suite import Scored, Settings, Suite
from embedlab.evaluation.core.vectors import Encoder, Vectors
from embedlab.evaluation.sts.sts import STSPairs, all_sentences

LANGUAGES = ("de", "es", "fr", "it", "nl", "pl", "pt", "ru", "zh")
SPLITS = ("test", "dev")
_HUB = "PhilipMay/stsb_multi_mt"
_ROWS = {"test": 1379, "dev": 1500}


def load(
    data_dir: str | Path | None,
    split: str = "test",
    languages: list[str] | None = None,
    limit: int | None = None,
) -> dict[str, STSPairs]:
    """Pairs by language, English ("en") among them where its file is there: stsb_mt_{language}_{split} in
    `data_dir` or its folder sts_multilingual/, English stsb_{split} there or in a folder sts/ beside it;
    None: the hub (`PhilipMay/stsb_multi_mt`).

    Raises UserError for a missing or broken file, or files whose rows are not the same pairs.
    """
    if split not in SPLITS:
        raise UserError("no such split", key="split", value=split, fix="choose test or dev")
    if data_dir is None:
        found = {name: _hub(name, split) for name in chosen(languages, ("en", *LANGUAGES), "languages")}
    else:
        found = _files(Path(data_dir), split, languages)
    sizes = {name: len(pairs) for name, pairs in found.items()}
    if len(set(sizes.values())) > 1:
        raise UserError(
            f"translations of different lengths: {sizes}", file=data_dir, fix="fetch the files again"
        )
    return {name: _head(pairs, limit) for name, pairs in found.items()}


def _files(folder: Path, split: str, languages: list[str] | None) -> dict[str, STSPairs]:
    inner = folder / "sts_multilingual" if (folder / "sts_multilingual").is_dir() else folder
    paths: dict[str, Path] = {}
    for place in (inner, folder / "sts", inner.parent / "sts"):
        for end in (".tsv.gz", ".tsv"):
            if (place / f"stsb_{split}{end}").is_file():
                paths.setdefault("en", place / f"stsb_{split}{end}")
    stems = sorted({path.name.split(".")[0] for path in inner.glob(f"stsb_mt_*_{split}.tsv*")})
    for stem in stems:
        paths[stem.removeprefix("stsb_mt_").removesuffix(f"_{split}")] = find_file(inner, stem)
    if not stems:
        raise UserError(
            f"has no stsb_mt_*_{split}.tsv.gz",
            file=inner,
            key="data_dir",
            fix="give the folder of sts_multilingual/",
        )
    return {name: _file(name, split, paths[name]) for name in chosen(languages, list(paths), "languages")}


def _file(language: str, split: str, path: Path) -> STSPairs:
    table = read_tsv(path, ["score", "sentence1", "sentence2"])
    try:
        gold = np.array([float(value) for value in table["score"]])
    except ValueError as error:
        raise UserError(
            f"rating is not a number ({error})", file=path, key="score", fix="fetch the file again"
        ) from error
    return _pairs(language, split, table["sentence1"], table["sentence2"], gold, str(path))


def _hub(language: str, split: str) -> STSPairs:
    columns = ["sentence1", "sentence2", "similarity_score"]
    rows = hub_rows(_HUB, language, split, columns, "sts_multilingual/stsb_mt_*.tsv.gz")
    gold = np.asarray(rows["similarity_score"], dtype=np.float64)
    return _pairs(language, split, rows["sentence1"], rows["sentence2"], gold, f"hub:{_HUB}")


def _pairs(
    language: str, split: str, first: list[str], second: list[str], gold: Any, source: str
) -> STSPairs:
    return STSPairs(f"stsb-{language}", split, "raw", first, second, gold, None, source, _ROWS[split])


def _head(pairs: STSPairs, limit: int | None) -> STSPairs:
    return replace(pairs, first=pairs.first[:limit], second=pairs.second[:limit], gold=pairs.gold[:limit])


def score(vectors: Vectors, first: STSPairs, second: STSPairs) -> dict[str, float]:
    """Spearman and Pearson x100 of `first`'s first sentences against `second`'s second ones."""
    import torch

    cosine = pair_cosine(vectors.take(first.first), vectors.take(second.second))
    gold = torch.from_numpy(first.gold)
    return {"spearman": 100 * float(spearman(cosine, gold)), "pearson": 100 * float(pearson(cosine, gold))}


class STSMultilingual(Suite):
    """Translated STS-B. Settings: data_dir, languages, split (test, dev), limit.

    Scores: "stsb-de/spearman" (both sentences German), "stsb-en-de/spearman" (English and German), their
    means without English "stsb-monolingual/spearman" and "stsb-crosslingual/spearman".
    """

    name = "sts_multilingual"
    folders = ("sts_multilingual",)
    keys = ("languages", "limit", "split")

    def load(self, settings: Settings) -> dict[str, STSPairs]:
        """Pairs by language."""
        split, languages = settings.get("split") or "test", names(settings, "languages")
        return load(settings.get("data_dir"), split, languages, row_limit(settings))

    def score(self, encoder: Encoder, data: dict[str, STSPairs], settings: Settings) -> Scored:
        """Spearman and Pearson of each language and pair."""
        limit, split = row_limit(settings), settings.get("split") or "test"
        vectors = Vectors(encoder, all_sentences(list(data.values())))
        others = [name for name in data if name != "en"]
        found = {f"stsb-{name}": score(vectors, pairs, pairs) for name, pairs in data.items()}
        means = {"stsb-monolingual": [f"stsb-{name}" for name in others]}
        if "en" in data:
            found |= {f"stsb-en-{name}": score(vectors, data["en"], data[name]) for name in others}
            means["stsb-crosslingual"] = [f"stsb-en-{name}" for name in others]
        scores = group_means(found, means, ("spearman", "pearson"))
        scores |= flat(found)
        counts = [
            f"{p.task} has {len(p)} pairs where STS-B {split} has {p.expected}"
            for p in data.values()
            if limit is None and len(p) != p.expected
        ]
        block = protocols.describe(
            encoder,
            suite=self.name,
            name=f"stsb_multi_mt_{split}",
            aggregation="all pairs of a language; mean over languages but English",
            text="raw",
            sentences=vectors.sentences,
            data={p.task: {"source": p.source, "pairs": len(p)} for p in data.values()},
            warnings=limit_note(limit) + counts + vectors.non_finite_note(),
            notes=["translations by DeepL; ratings of the English pairs"],
        )
        return scores, block
