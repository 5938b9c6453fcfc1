"""One encoder read in several ways, without training: which layer and which token knows most?

python examples/compare_poolings.py [ENCODER]
"""

import sys

import embedlab
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.evaluation.sts.lee import load_lee, score
from embedlab.pooling import build_pooling

POOLINGS = {
    "the first token": "cls",
    "mean of the last block": "mean",
    "mean of first and last": "first_last",
    "average of the last 3": {"name": "last_n", "n": 3},
    "average of the last 6": {"name": "last_n", "n": 6},
}


def scores(name: str = "mini") -> dict[str, float]:
    """Spearman x 100 against people's ratings of 50 news texts (the Lee documents of gensim), by pooling."""
    base, lee = embedlab.load(name), load_lee()
    found = {}
    for label, pooling in POOLINGS.items():
        read = build_pooling(pooling, base.backbone.info)
        encoder = SentenceEncoder(base.backbone, read, base.tokenization).eval()
        found[label] = score(encoder.encode(lee.documents, output="tensor"), lee)["spearman"]
    return found


if __name__ == "__main__":
    for label, value in sorted(scores(*sys.argv[1:]).items(), key=lambda item: -item[1]):
        print(f"{value:6.2f}  {label}")
