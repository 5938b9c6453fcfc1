"""Bitext retrieval over emoji names in 14 languages: a cross-lingual score that needs no data but a package.

Unicode CLDR's short names of the emoji that `data.package=emoji-train` leaves out. They are phrases of one to six
words, and share words with those of other emoji ("flag", "face", "woman"): a sign that alignment works, no benchmark.
"""

from __future__ import annotations

from statistics import fmean
from typing import ClassVar

from embedlab.data.packages import EMOJI_LANGUAGES, emoji_names, is_held_out
from embedlab.evaluation.bitext.bitext import DIRECTIONS, bitext_accuracy
from embedlab.evaluation.core import geometry
from embedlab.evaluation.core.correlation import flat, group_means
from embedlab.evaluation.core.suite import Scored, Settings, Suite
from embedlab.evaluation.core.table import Metric
from embedlab.evaluation.core.vectors import Encoder, Vectors


def held_out_names() -> dict[str, list[str]]:
    """Language -> names; the lists are parallel."""
    rows = [names for names in emoji_names() if is_held_out(names[0])]
    return {language: [row[i] for row in rows] for i, language in enumerate(EMOJI_LANGUAGES)}


class Emoji(Suite):
    """Accuracy@1 in percent of each language against English, and the geometry of all names.

    Scores: "emoji-de/forward" (German names looking for their English one), "/backward", "/mean"; "emoji/mean" and
    the other two over 13 languages; "emoji/related" and "/unrelated", mean cosine of translations and of all pairs;
    "emoji/rankme" and "/pc1_share" of all names.
    """

    name = "emoji"
    packages: ClassVar = {"emoji": "emoji"}
    optional = True
    metrics = (
        Metric("emoji/forward", "emoji names to English, accuracy@1", "higher"),
        Metric("emoji/backward", "English to emoji names, accuracy@1", "higher"),
        Metric("emoji/mean", "emoji bitext accuracy@1, mean of 13 languages", "higher"),
        Metric("emoji/related", "cosine of translations", None, 3),
        Metric("emoji/unrelated", "cosine of all pairs", None, 3),
        Metric("emoji/rankme", "RankMe", "higher", 1),
        Metric("emoji/pc1_share", "PC1 share of variance", "lower", 3),
    )

    def load(self, settings: Settings) -> dict[str, list[str]]:
        """Names by language."""
        return held_out_names()

    def score(self, encoder: Encoder, data: dict[str, list[str]], settings: Settings) -> Scored:
        """Accuracies, cosines and rank."""
        vectors = Vectors(encoder, [name for each in data.values() for name in each])
        english = vectors.take(data["en"])
        found = {
            language: bitext_accuracy(vectors.take(each), english)
            for language, each in data.items()
            if language != "en"
        }
        scores = group_means(found, {"emoji": found}, DIRECTIONS)
        related = [
            float((geometry.unit(vectors.take(data[language])) * geometry.unit(english)).sum(-1).mean())
            for language in found
        ]
        scores["emoji/related"] = fmean(related)
        scores["emoji/unrelated"] = float(geometry.mean_cosine(vectors.matrix))
        scores["emoji/rankme"] = float(geometry.rankme(vectors.matrix))
        scores["emoji/pc1_share"] = float(geometry.pc1_share(vectors.matrix))
        scores |= flat(found, "emoji-")
        return self.result(
            encoder,
            scores,
            name="emoji_bitext_accuracy_at_1",
            aggregation="cosine, nearest of the other language's names; mean over 13 languages",
            sentences=vectors.sentences,
            data={"emoji": {"source": "emoji", "languages": len(data), "names": len(data["en"])}},
            notes=["names of held-out emoji share words with names that were trained on"],
        )
