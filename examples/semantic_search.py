"""Find the nearest of a file's lines to a question.

python examples/semantic_search.py LINES.txt "a question" [ENCODER]
"""

import sys
from pathlib import Path

import embedlab


def nearest(
    lines: list[str], question: str, name: str = "mini-sentence", most: int = 3
) -> list[tuple[float, str]]:
    """The lines with the highest cosines to the question, best first."""
    encoder = embedlab.load(name)
    # Models that were trained with prompts have one for each side; without any the two are the same.
    passages = encoder.encode_document(lines, normalize=True)
    query = encoder.encode_query(question, normalize=True)
    cosines = passages @ query
    return [(float(cosines[i]), lines[i]) for i in cosines.argsort()[::-1][:most]]


if __name__ == "__main__":
    file, question, *encoder = sys.argv[1:]
    texts = [line for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()]
    for cosine, line in nearest(texts, question, *encoder):
        print(f"{cosine:.3f}  {line}")
