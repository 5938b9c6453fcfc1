"""PAWS-X: paraphrase or not, where both sentences have the same words (Yang et al. 2019, arXiv 1908.11828).

Word overlap says nothing here, so that it checks what STS scores may owe to it. Scored as pair classification is in
MTEB: the average precision of the cosine, without training; and the area under the ROC curve, for which chance is 50
whatever the share of paraphrases.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from embedlab.errors import UserError
from embedlab.evaluation.core.correlation import flat, group_means, ranks
from embedlab.evaluation.core.files import Hub, Labelled, find_file, inner, read_labelled
from embedlab.evaluation.core.settings import chosen, limit_note, names, row_limit
from embedlab.evaluation.core.suite import Scored, Settings, Suite
from embedlab.evaluation.core.vectors import Encoder, Vectors

LANGUAGES = ("de", "en", "es", "fr", "ja", "ko", "zh")
SPLITS = ("dev", "test")
_HUB = "google-research-datasets/paws-x"


def load(
    data_dir: str | Path | None,
    split: str = "dev",
    languages: list[str] | None = None,
    limit: int | None = None,
) -> dict[str, Labelled]:
    """Pairs by language, labelled 1 for a paraphrase: pawsx_{split}_{language}.tsv[.gz] in `data_dir` or its folder
    nli/ (columns label, sentence1, sentence2); None: the hub. English alone unless `languages` names others.

    Raises UserError for a missing or broken file, a label that is neither 0 nor 1, or labels all the same.
    """
    if split not in SPLITS:
        raise UserError("no such split", key="split", value=split, fix="choose dev or test")
    folder = None if data_dir is None else inner(data_dir, "nli")
    found = {}
    for language in chosen(languages or ["en"], LANGUAGES, "languages"):
        path = folder and find_file(folder, f"pawsx_{split}_{language}")
        hub = Hub(_HUB, language, "validation" if split == "dev" else split, "nli/pawsx_dev_*.tsv.gz")
        pairs = read_labelled(path, ("sentence1", "sentence2"), ("0", "1"), hub).head(limit)
        if len(set(pairs.labels.tolist())) < 2:
            raise UserError(
                "needs paraphrases and others", file=pairs.source, key="label", fix="a larger limit"
            )
        found[language] = pairs
    return found


def score(cosine: Tensor, labels: Tensor) -> dict[str, float]:
    """average_precision and roc_auc, x100, of cosine [n] for labels [n], of both kinds; in float64.

    Pairs of equal cosine stand at one threshold: the first takes the precision at its end, the second counts half of
    them.
    """
    right = labels == 1
    falling, place = (-cosine.double()).unique(return_inverse=True)
    hits = torch.zeros_like(falling).index_add_(0, place, right.double())
    seen = torch.zeros_like(falling).index_add_(0, place, torch.ones_like(cosine, dtype=torch.float64))
    precision = hits.cumsum(0) / seen.cumsum(0)
    positive, negative = int(right.sum()), int((~right).sum())
    above = ranks(cosine)[right].sum() - positive * (positive + 1) / 2  # pairs in order, of one of each label
    return {
        "average_precision": 100 * float((precision * hits).sum()) / positive,
        "roc_auc": 100 * float(above) / (positive * negative),
    }


class PAWSX(Suite):
    """Paraphrase or not. Settings: data_dir, languages (English), split (dev, test), limit.

    Scores: "pawsx-en/average_precision" and so on; with several languages their mean "pawsx/...".
    """

    name = "pawsx"
    folders = ("nli",)
    keys = ("languages", "limit", "split")

    def load(self, settings: Settings) -> dict[str, Labelled]:
        """Pairs by language."""
        split, languages = settings.get("split") or "dev", names(settings, "languages")
        return load(settings.get("data_dir"), split, languages, row_limit(settings))

    def score(self, encoder: Encoder, data: dict[str, Labelled], settings: Settings) -> Scored:
        """Average precision and ROC area of the cosine."""
        limit, split = row_limit(settings), settings.get("split") or "dev"
        vectors = Vectors(encoder, [text for pairs in data.values() for text in pairs.texts()])
        found = {
            f"pawsx-{language}": score(vectors.cosine(p.first, p.second or []), torch.from_numpy(p.labels))
            for language, p in data.items()
        }
        scores = flat(found)
        if len(found) > 1:
            scores |= group_means(found, {"pawsx": found}, ("average_precision", "roc_auc"))
        return self.result(
            encoder,
            scores,
            name=f"pawsx_{split}",
            aggregation="average precision and ROC area of the cosine",
            sentences=vectors.sentences,
            data={
                f"pawsx-{language}": {
                    "source": p.source,
                    "pairs": len(p.labels),
                    "paraphrases": int(p.labels.sum()),
                }
                for language, p in data.items()
            },
            warnings=limit_note(limit),
            notes=["average precision at chance is the share of paraphrases"],
        )
