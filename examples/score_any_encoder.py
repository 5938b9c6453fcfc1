"""Score an encoder that is not of this project: whatever has `encode(list of texts) -> [n, D]`.

    python examples/score_any_encoder.py STS_DIR

Here it counts words, which is the baseline that every encoder should beat.
"""

import sys
from collections.abc import Sequence

import numpy as np

from embedlab.evaluation.sts.sts import evaluate_sts


class BagOfWords:
    """A vector of word counts, hashed to a fixed width."""

    def __init__(self, width: int = 4096) -> None:
        self.width = width

    def encode(self, sentences: Sequence[str], **_: object) -> np.ndarray:
        """Counts, [n, width]; a word's place is the same in every process."""
        vectors = np.zeros((len(sentences), self.width), dtype=np.float32)
        for row, sentence in zip(vectors, sentences, strict=True):
            for word in sentence.lower().split():
                row[sum(ord(c) * 31**i for i, c in enumerate(word)) % self.width] += 1
        return vectors


if __name__ == "__main__":
    scores = evaluate_sts(BagOfWords(), sys.argv[1], tasks=["stsb"])
    for key, value in scores.items():
        print(f"{key:24} {value:6.2f}")
