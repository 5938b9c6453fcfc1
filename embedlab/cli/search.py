"""``embedlab search index TEXTS INDEX ckpt=…`` and ``embedlab search query INDEX TEXT``: find similar
sentences.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from embedlab.cli.compose import compose, leading_comment
from embedlab.cli.texts import metered, open_texts, placing
from embedlab.data.reader import FileReader
from embedlab.errors import UserError, printable
from embedlab.files import check_writable, conf_dir

if TYPE_CHECKING:
    from embedlab.encoders.base import Encoder

_USAGE = "usage: embedlab search index TEXTS INDEX ckpt=… | embedlab search query INDEX TEXT [k=10]"


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0."""
    actions = {"index": _index, "query": _query}
    if argv and argv[0] in ("-h", "--help"):
        more = "embedlab search index --help and embedlab search query --help show the keys."
        about = (leading_comment(conf_dir() / f"search_{action}.yaml") for action in actions)
        print("\n\n".join((_USAGE, *about, more)))
        return 0
    if not argv or argv[0] not in actions:
        raise UserError(
            f"search wants index or query, not {argv[0]!r}" if argv else "search wants index or query",
            fix=_USAGE,
        )
    return actions[argv[0]](argv[1:])


def _index(argv: Sequence[str]) -> int:
    config = compose("search_index", argv, positional=("input", "index"))
    source = Path(str(config["input"]))
    reader, column = open_texts(source, config)
    check_writable(Path(str(config["index"])), key="index")

    from embedlab.cli.encoders import Configured, load_encoder
    from embedlab.corpus.search import build_index

    start = time.perf_counter()
    encoder = load_encoder(config["ckpt"], config["max_length"], dim=config["dim"])
    with (
        metered(reader, Configured.of(encoder, config)) as metered_encoder,
        placing(reader, lambda place: next(islice(reader.texts(column), place, None))[0]),
    ):
        info = build_index(
            str(config["index"]),
            _texts(reader, column),
            metered_encoder,
            reference=_reference(encoder, str(config["ckpt"])),
            fingerprint=encoder.fingerprint(),
            source=str(source),
            overwrite=bool(config["overwrite"]),
            rows=config["chunk"],
            size=config["window"] << 20,
        )
    print(f"{info.rows:,} texts in {time.perf_counter() - start:.1f} s: {config['index']}")
    return 0


def _query(argv: Sequence[str]) -> int:
    config = compose("search_query", argv, positional=("index", "text"))
    text = str(config["text"])
    if not text.strip():
        raise UserError("the query is empty", key="text", fix='embedlab search query INDEX "some words"')

    from embedlab.cli.encoders import Configured, cut, load_encoder
    from embedlab.corpus.search import Index

    index = Index(str(config["index"]))
    ckpt = str(config["ckpt"] or index.info.encoder)
    encoder = load_encoder(ckpt, config["max_length"])
    cut(encoder, min(index.info.dim, encoder.dim))
    index.check_encoder(encoder.fingerprint())
    start = time.perf_counter()
    (hits,) = index.search(Configured.of(encoder, config), [text], config["k"])
    for hit in hits:
        print(f"{hit.score:.4f}\t{hit.row + 1}\t{printable(hit.text)}")
    print(f"{len(index):,} texts searched in {time.perf_counter() - start:.2f} s", file=sys.stderr)
    return 0


def _texts(reader: FileReader, column: str) -> Iterator[str]:
    for row, text in reader.texts(column):
        if not text.strip():
            raise reader.error("an empty row", row, fix="take empty rows out of the file")
        yield text


def _reference(encoder: Encoder, ckpt: str) -> str:
    """`ckpt` so that it means the same in another working folder, and on a hub that goes on."""
    return encoder.card.get("hub") or str(Path(ckpt).resolve()) if Path(ckpt).exists() else ckpt
