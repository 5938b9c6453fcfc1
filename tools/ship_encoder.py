"""Makes the folder of a shipped encoder, `embedlab/assets/NAME`, of a run: its weights in a byte each, and its card.

    python tools/ship_encoder.py RUN embedlab/assets/NAME --texts FILE [--max-length 256] [--overlap FILE]
                                 [--teacher TEXT] [--hardware TEXT] [--command TEXT]
    python tools/ship_encoder.py embedlab/assets/NAME embedlab/assets/NAME --scores FILE ...

FILE of --texts has a text a line (plain or .xz); vectors of a thousand of them say whether a byte is enough: where the
least cosine to those of the run's weights is under .999, the weights are stored in half precision. --overlap is that of
tools/distil_text.py. The second form leaves the weights as they are and puts what they score into the card: --scores
are files of `embedlab evaluate ckpt=embedlab/assets/NAME`. The run's scores are other weights', and never in the card.
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
LICENCE = (
    "Apache-2.0 (code, weights, teacher); learned from Wikipedia (CC BY-SA), NLI sets (SNLI CC BY-SA 4.0, MultiNLI "
    "OANC and others, SciTail Apache-2.0, some without a stated licence) and captions of Multi30k, whose source, "
    "Flickr30k, is for research"
)
LIMITS = """## Limits

English only: the body has read nothing else. What the teacher gets wrong, it gets wrong too, and it was not filtered
for bias: like its teacher and its text, it holds some jobs, origins and genders nearer to each other than they are.
Vectors are for cosine similarity; negation and numbers move them little. It reads {length} tokens of a text. Its
teacher searches documents and classifies better: docs/results/box.md."""


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
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return {
        "weights": kind,
        "least cosine to fp32": round(found, 6),
        "texts": len(texts),
        "bytes of weights": size,
    }


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def card_of(encoder: Encoder, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """What the folder says of itself: the run's recipe and time, scores, overlap."""
    card = encoder.card
    told = {key: getattr(args, key) for key in ("teacher", "hardware", "command") if getattr(args, key)}
    training = {**(card.get("training") or {}), **told}
    scores: dict[str, Any] = {}
    protocol: dict[str, Any] = {}
    for file in args.scores:
        content = read(file)
        scores |= content["scores"]
        protocol[content["protocol"]["suite"]] = content["protocol"]
    for data in (data for block in protocol.values() for data in block.get("data", {}).values()):
        data["source"] = ", ".join(Path(source).name for source in data["source"].split(", "))
    config = {key: value for key, value in (card.get("config") or {}).items() if key != "evaluation"}
    config.get("data", {})["files"] = [
        Path(file).name for file in _listed(config.get("data", {}).get("files"))
    ]
    method = config.get("method", {})
    method["teacher"] = [Path(teacher).name for teacher in _listed(method.get("teacher"))]
    found = {"name": name, "training": training, "config": config, "scores": scores, "protocol": protocol}
    overlap = read(args.overlap) if args.overlap else card.get("overlap")
    return {**found, "licence": LICENCE, "overlap": overlap, "stored": card.get("stored")}


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


def write_card(encoder: Encoder, folder: Path) -> None:
    """The card of a shipped folder, in embedlab.json and as text."""
    (folder / "README.md").write_text(readme(encoder, folder.name), encoding="utf-8")
    record = read(folder / "embedlab.json") | {"card": encoder.card}
    (folder / "embedlab.json").write_text(json.dumps(record, indent=2), encoding="utf-8")


def readme(encoder: Encoder, name: str) -> str:
    """The card as text: the export's, the overlap counts, the limits."""
    lines = [model_card(encoder, name), f"## Stored\n\n{_bullets(encoder.card['stored'])}\n"]
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
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--scores", type=Path, nargs="*", default=[])
    parser.add_argument("--overlap", type=Path)
    parser.add_argument("--teacher")
    parser.add_argument("--hardware")
    parser.add_argument("--command")
    args = parser.parse_args()
    encoder = embedlab.load(args.run)
    again = Path(args.run).resolve() == args.folder.resolve()
    if again != bool(args.scores):
        parser.error("--scores: of the shipped folder, which is RUN and FOLDER then")
    if not again and args.texts is None:
        parser.error("--texts: vectors of which texts are to be near?")
    encoder.card = card_of(encoder, args.folder.name, args)
    if not again:
        settings = encoder.tokenization.to_dict() | {"max_length": args.max_length}
        encoder.tokenization = Tokenization.from_dict(encoder.tokenizer, settings)
        encoder.card["stored"] = store(encoder, args.folder, texts_of(args.texts))
    write_card(encoder, args.folder)
    print(json.dumps(encoder.card["stored"], indent=2))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(str(error)) from None
