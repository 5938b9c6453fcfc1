"""Makes the folder of a shipped encoder, `embedlab/assets/NAME`, of a run: its weights in a byte each, and its card.

    python tools/ship_encoder.py RUN embedlab/assets/NAME --texts FILE [--max-length 256] [--scores FILE ...]
                                 [--overlap FILE] [--teacher TEXT] [--hardware TEXT]

FILE of --texts has a text a line (plain or .xz); vectors of a thousand of them say whether a byte is enough: where the
least cosine to those of the run's weights is under .999, the weights are stored in half precision. --scores are files
of `embedlab evaluate`, --overlap is that of tools/distil_text.py.
"""

from __future__ import annotations

import argparse
import json
import lzma
from itertools import islice
from pathlib import Path
from typing import Any

import embedlab
from embedlab.backbones.int8_rows import write_int8
from embedlab.encoders.base import Encoder
from embedlab.encoders.tokenization import Tokenization
from embedlab.errors import UserError
from embedlab.export.card import model_card

ENOUGH = 0.999
LICENCE = "Apache-2.0 (code and weights); learned from Wikipedia text, CC BY-SA 4.0, and sets of sentences named below"
LIMITS = """## Limits

English only: the body has read nothing else. What the teacher gets wrong, it gets wrong too, and it was not filtered
for bias: like its teacher and its text, it holds some jobs, origins and genders nearer to each other than they are.
Vectors are for cosine similarity; negation and numbers move them little. It reads {length} tokens of a text."""


def texts_of(path: Path, count: int = 1000) -> list[str]:
    """The first lines of a file."""
    with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as file:
        return [line.strip() for line in islice(file, count)]


def least_cosine(one: Encoder, other: Encoder, texts: list[str]) -> float:
    """The smallest cosine between the vectors that two encoders give a text."""
    a, b = (encoder.encode(texts, normalize=True) for encoder in (one, other))
    return float((a * b).sum(1).min())


def store(encoder: Encoder, folder: Path, texts: list[str]) -> dict[str, Any]:
    """Write the folder; how its weights are stored, and how near its vectors are to the encoder's."""
    encoder.save(folder)
    write_int8(folder)
    kind, found = "int8 rows", least_cosine(encoder, embedlab.load(folder), texts)
    if found < ENOUGH:
        encoder.save(folder, dtype="float16")
        kind, found = "float16", least_cosine(encoder, embedlab.load(folder), texts)
    size = sum(file.stat().st_size for file in folder.iterdir())
    return {"weights": kind, "least cosine to fp32": round(found, 6), "texts": len(texts), "bytes": size}


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def card_of(encoder: Encoder, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """What the folder says of itself: the run's recipe and time, scores, overlap."""
    card = encoder.card
    training = {**(card.get("training") or {}), "teacher": args.teacher, "hardware": args.hardware}
    scores, protocol = dict(card.get("scores") or {}), dict(card.get("protocol") or {})
    for file in args.scores:
        content = read(file)
        scores |= content["scores"]
        protocol[content["protocol"]["suite"]] = content["protocol"]
    config = {key: value for key, value in (card.get("config") or {}).items() if key != "evaluation"}
    config.get("data", {})["files"] = [
        Path(file).name for file in _listed(config.get("data", {}).get("files"))
    ]
    method = config.get("method", {})
    method["teacher"] = [Path(teacher).name for teacher in _listed(method.get("teacher"))]
    found = {"name": name, "training": training, "config": config, "scores": scores, "protocol": protocol}
    return {**found, "licence": LICENCE, "overlap": read(args.overlap) if args.overlap else None}


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


def readme(encoder: Encoder, name: str, stored: dict[str, Any]) -> str:
    """The card as text: the export's, the overlap counts, the limits."""
    lines = [model_card(encoder, name), f"## Stored\n\n{_bullets(stored)}\n"]
    if overlap := encoder.card.get("overlap"):
        lines.append("## Text and its overlap with the evaluation sets\n")
        lines += [f"{source}:\n\n{_bullets(counts)}\n" for source, counts in overlap["training"].items()]
    return "\n".join([*lines, LIMITS.format(length=encoder.tokenization.row_limit)]) + "\n"


def _bullets(values: dict[str, Any]) -> str:
    return "\n".join(
        f"- {key}: {value:,}" if isinstance(value, int) else f"- {key}: {value}"
        for key, value in values.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--scores", type=Path, nargs="*", default=[])
    parser.add_argument("--overlap", type=Path)
    parser.add_argument("--teacher")
    parser.add_argument("--hardware")
    args = parser.parse_args()
    encoder = embedlab.load(args.run)
    settings = encoder.tokenization.to_dict() | {"max_length": args.max_length}
    encoder.tokenization = Tokenization.from_dict(encoder.tokenizer, settings)
    encoder.card = card_of(encoder, args.folder.name, args)
    stored = store(encoder, args.folder, texts_of(args.texts))
    (args.folder / "README.md").write_text(readme(encoder, args.folder.name, stored), encoding="utf-8")
    print(json.dumps(stored, indent=2))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(str(error)) from None
