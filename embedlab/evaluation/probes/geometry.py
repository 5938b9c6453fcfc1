"""The suite `geometry`: alignment, uniformity, rank and separation of ratings over the whole of STS-B."""

from __future__ import annotations

from embedlab.evaluation.core.geometry import POSITIVE_RATING, geometry_metrics, summary
from embedlab.evaluation.core.ratings import RatedCosines, separation, written
from embedlab.evaluation.core.suite import Scored, Settings, Suite
from embedlab.evaluation.core.table import Metric
from embedlab.evaluation.core.vectors import Encoder, Vectors
from embedlab.evaluation.sts.sts import STSPairs, Text, all_sentences, load_sts, row_count_warnings


class Geometry(Suite):
    """The whole STS-B (train, dev and test), as SimCSE's authors describe it.

    Positives: pairs rated above 4; sentences: every distinct sentence once. ``separation`` is of STS-B test (S2Sent,
    figure 8): the spread of the mean cosines of five rating groups over that inside a group; its cosines are in the
    protocol. Settings: data_dir (None: the hub), sts_text.
    """

    name = "geometry"
    folders = ("sts",)
    keys = ("sts_text",)
    quantities = (
        *geometry_metrics(),
        Metric("geometry/separation", "separation of rating groups, STS-B test", "higher"),
    )

    def load(self, settings: Settings) -> list[STSPairs]:
        """The three splits."""
        text: Text = settings.get("sts_text") or "raw"
        return [load_sts("stsb", settings.get("data_dir"), text, split) for split in ("train", "dev", "test")]

    def score(self, encoder: Encoder, data: list[STSPairs], settings: Settings) -> Scored:
        """ "geometry/alignment" and so on."""
        vectors = Vectors(encoder, all_sentences(data))
        rated = [row for p in data for row in zip(p.first, p.second, p.gold, strict=True)]
        close = [(x, y) for x, y, rating in rated if rating > POSITIVE_RATING]
        first, second = [x for x, _ in close], [y for _, y in close]
        values = summary(vectors.matrix, vectors.take(first), vectors.take(second))
        test = data[-1]
        groups = RatedCosines(vectors.cosine(test.first, test.second).numpy(), test.gold).groups()
        values["separation"] = separation(groups)
        scores = {f"geometry/{name}": value for name, value in values.items()}
        return self.result(
            encoder,
            scores,
            name="alignment_uniformity_stsb",
            aggregation=f"whole STS-B: {len(close)} pairs rated above 4, {len(vectors.sentences)} sentences",
            text=data[0].text,
            sentences=vectors.sentences,
            data={f"stsb_{pairs.split}": pairs.counts() for pairs in data},
            warnings=row_count_warnings(data),
            notes=[
                "alignment_ratio, uniformity_ratio: this project's reconstruction, not CSE-SFP's formula",
                *(note for pairs in data for note in pairs.notes),
            ],
            cosines_by_rating=written(groups),
        )
