"""Multilingual STS-B: the test pairs in each language, and across languages (English first, X second).

The translations are row by row those of the English file, so a pair of an English first sentence and a
translated second one keeps its human rating (Reimers & Gurevych 2020 build their cross-lingual STS so).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from embedlab.errors import UserError
from embedlab.evaluation.core.correlation import flat, group_means, pearson, spearman
from embedlab.evaluation.core.files import Hub, find_file, inner, is_there, names_in, read_columns
from embedlab.evaluation.core.settings import chosen, limit_note, names, row_limit
from embedlab.evaluation.core.suite import Scored, Settings, Suite
from embedlab.evaluation.core.vectors import Encoder, Vectors
from embedlab.evaluation.sts.sts import STSPairs, all_sentences, rated_pairs

LANGUAGES = ("de", "es", "fr", "it", "nl", "pl", "pt", "ru", "zh")
SPLITS = ("test", "dev")
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
    paths: dict[str, Path | None] = dict.fromkeys(("en", *LANGUAGES))
    if data_dir is not None:
        inside = inner(data_dir, "sts_multilingual")
        paths = {}
        for place in (inside, Path(data_dir, "sts"), inside.parent / "sts"):
            if is_there(place, f"stsb_{split}"):
                paths.setdefault("en", find_file(place, f"stsb_{split}"))
        for name in names_in(inside, f"stsb_mt_*_{split}"):
            paths[name] = find_file(inside, f"stsb_mt_{name}_{split}")
    found = {name: _read(name, split, paths[name]) for name in chosen(languages, list(paths), "languages")}
    sizes = {name: len(pairs) for name, pairs in found.items()}
    if len(set(sizes.values())) > 1:
        raise UserError(
            f"translations of different lengths: {sizes}",
            file=data_dir,
            fix="fetch the files again; sets that are no translations: suite=sts tasks=[FILE.tsv,…]",
        )
    return {
        name: replace(pairs, first=pairs.first[:limit], second=pairs.second[:limit], gold=pairs.gold[:limit])
        for name, pairs in found.items()
    }


def _read(language: str, split: str, path: Path | None) -> STSPairs:
    hub = Hub("PhilipMay/stsb_multi_mt", language, split, "sts_multilingual/stsb_mt_*.tsv.gz",
              ("similarity_score", "sentence1", "sentence2"))  # fmt: skip
    (ratings, first, second), source = read_columns(path, ["score", "sentence1", "sentence2"], hub)
    unrated = np.zeros(len(first))
    name, rows = f"stsb-{language}", _ROWS[split]
    return rated_pairs(STSPairs(name, split, "raw", first, second, unrated, None, source, rows), ratings)


def score(vectors: Vectors, first: STSPairs, second: STSPairs) -> dict[str, float]:
    """Spearman and Pearson x100 of `first`'s first sentences against `second`'s second ones."""
    cosine = vectors.cosine(first.first, second.second)
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
        return self.result(
            encoder,
            scores,
            name=f"stsb_multi_mt_{split}",
            aggregation="all pairs of a language; mean over languages but English",
            sentences=vectors.sentences,
            data={p.task: p.counts() for p in data.values()},
            warnings=limit_note(limit) + counts,
            notes=[
                "translations by DeepL; ratings of the English pairs",
                *(note for p in data.values() for note in p.notes),
            ],
        )
