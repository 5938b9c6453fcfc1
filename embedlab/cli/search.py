"""``embedlab search index|query|serve|export``: an index of texts or vectors, what is nearest in it, its rows."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedlab.cli.compose import compose, leading_comment
from embedlab.cli.encoders import Configured, check_encoding, cut, load_encoder, named, placed, reference
from embedlab.cli.texts import metered, no_texts, open_texts, placing
from embedlab.console import progress_bar
from embedlab.corpus.index_folder import check_index, check_index_folder
from embedlab.corpus.plan import KINDS
from embedlab.data.reader import FileReader
from embedlab.data.sources import find_files
from embedlab.encoders.folder import same_encoder
from embedlab.encoders.place import Place, recorded
from embedlab.errors import UserError, one_of, printable
from embedlab.files import check_absent, check_writable, conf_dir, write_whole

if TYPE_CHECKING:
    from torch import Tensor

    from embedlab.corpus.search import Index, IndexInfo, Layout

_USAGE = (
    "usage: embedlab search index TEXTS INDEX [ckpt=…] | embedlab search index VECTORS INDEX"
    " | embedlab search query INDEX TEXT|queries=FILE [k=10] [out=FILE.json] | embedlab search serve INDEX"
    " | embedlab search export INDEX OUT.parquet"
)
_VECTORS = "a .npy file that embedlab encode wrote"
_COUNTS = ("nlist", "m", "train_rows", "nprobe", "rescore")


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0."""
    actions = {"index": _index, "query": _query, "serve": _serve, "export": _export}
    if argv and argv[0] in ("-h", "--help"):
        more = "embedlab search index --help (query, serve, export) shows the keys."
        about = (leading_comment(conf_dir() / f"search_{action}.yaml") for action in actions)
        print("\n\n".join((_USAGE, *about, more)))
        return 0
    if not argv or argv[0] not in actions:
        wanted = "search wants index, query, serve or export"
        fix = one_of(argv[0], actions, "embedlab search ") if argv else _USAGE
        raise UserError(f"{wanted}, not {argv[0]!r}" if argv else wanted, fix=fix)
    return actions[argv[0]](argv[1:])


def _index(argv: Sequence[str]) -> int:
    config = compose("search_index", argv, positional=("input", "index"))
    _check_numbers(config)
    source, target = Path(str(config["input"])), Path(str(config["index"]))
    if config["kind"] not in KINDS:
        raise UserError("no such kind", key="kind", value=config["kind"], fix=one_of(config["kind"], KINDS))
    if not source.exists():
        raise no_texts(source)
    check_index_folder(target, bool(config["overwrite"]))
    check_writable(target, key="index")
    check_encoding(config)
    place = None if config["ckpt"] is None else placed(config["ckpt"])

    from embedlab.corpus.stored import find_vectors

    start = time.perf_counter()
    if (vectors := find_vectors(source)) is not None:
        info = _of_vectors(vectors, config, place)
    else:
        info = _of_texts(source, config, place)
    what = "texts" if info.texts else "vectors"
    print(f"{info.rows:,} {what} in {time.perf_counter() - start:.1f} s: {config['index']}")
    if info.kind != "exact":
        _print_recall(Path(str(config["index"])))
    return 0


def _check_numbers(config: Mapping[str, Any]) -> None:
    for key in _COUNTS:
        value = config.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise UserError("must be a positive whole number", key=key, value=value, fix=f"{key}=64, or null")
    target = config.get("target_recall", 1)
    if isinstance(target, bool) or not isinstance(target, int | float) or not 0 < target <= 1:
        raise UserError(
            "must be above 0 and at most 1", key="target_recall", value=target, fix="target_recall=0.95"
        )


def _of_texts(source: Path, config: dict[str, Any], place: Place | str | None) -> IndexInfo:
    reader, column = open_texts(source, config)
    if config["work"] is not None:
        fix = "embedlab encode first, whose parts go on, then index them"
        raise UserError("texts are encoded anew each time", key="work", value=config["work"], fix=fix)
    if config["texts"] is not None:
        raise UserError("the input holds the texts", key="texts", value=config["texts"], fix="leave it out")

    from embedlab.corpus.search import build_index

    ckpt = named(config["ckpt"])
    encoder = load_encoder(place or ckpt, config["max_length"], dim=config["dim"])
    configured = Configured.of(encoder, config)
    layout = _layout(config, configured)
    with (
        metered(reader, configured) as metered_encoder,
        placing(reader, lambda place: next(islice(reader.texts(column), place, None))[0]),
        progress_bar("filling the lists", "rows", 1) as move,
    ):
        return build_index(
            str(config["index"]),
            _texts(reader, column),
            metered_encoder,
            reference=reference(encoder, ckpt),
            fingerprint=encoder.fingerprint(),
            source=str(source),
            overwrite=bool(config["overwrite"]),
            rows=config["chunk"],
            size=config["window"] << 20,
            layout=layout,
            told=lambda done, of: move(done, done / of),
        )


def _of_vectors(vectors: Any, config: dict[str, Any], place: Place | str | None) -> IndexInfo:
    """An index of encoded vectors; their encoder is what they say, or `ckpt`."""
    from dataclasses import replace

    from embedlab.corpus.search import build_vector_index

    encoder = None
    if place is not None:
        loaded = load_encoder(place, config["max_length"], dim=config["dim"])
        if vectors.fingerprint and not same_encoder(vectors.fingerprint, loaded.fingerprint()):
            fix = "leave ckpt out, or encode again"
            raise UserError("made none of these vectors", key="ckpt", value=config["ckpt"], fix=fix)
        known = vectors.fingerprint or loaded.fingerprint()
        vectors = replace(vectors, encoder=reference(loaded, str(config["ckpt"])), fingerprint=known)
        encoder = Configured.of(loaded, config)
    texts = None
    if config["texts"] is not None:
        from embedlab.corpus.inputs import Texts

        texts = Texts(
            [open_texts(file, config) for file in sorted(find_files(str(config["texts"]), "texts"))]
        )
    with progress_bar("filling the lists", "rows", 1) as move:
        return build_vector_index(
            str(config["index"]),
            vectors,
            texts=texts,
            overwrite=bool(config["overwrite"]),
            layout=_layout(config, encoder),
            told=lambda done, of: move(done, done / of),
        )


def _layout(config: Mapping[str, Any], encoder: Any) -> Layout:
    from embedlab.corpus.approximate import import_faiss
    from embedlab.corpus.search import Layout

    keys = ("kind", "nlist", "m", "train_rows", "factory", "target_recall")
    if config["kind"] == "exact" and config["factory"] is None:
        for key in ("nlist", "m", "train_rows", "rescore", "queries", "work"):
            if config[key] is not None:
                fix = "kind=ivf_pq, or leave it out"
                raise UserError("an exact index has no such thing", key=key, value=config[key], fix=fix)
        return Layout()
    import_faiss()  # before anything is encoded
    queries = None if config["queries"] is None else _queries(config, encoder)[1]
    work = None if config["work"] is None else Path(str(config["work"]))
    given = {key: config[key] for key in (*keys, "rescore") if config[key] is not None}
    return Layout(**given, queries=queries, work=work)


def _queries(config: Mapping[str, Any], encoder: Any) -> tuple[list[int], Tensor]:
    """Row numbers and unit vectors [q, D] of ``queries=``: a .npy file, or texts, which `encoder` reads."""
    import numpy as np
    import torch

    from embedlab.corpus.stored import Part, Stored
    from embedlab.encoders.codes import Codes
    from embedlab.evaluation.core.nearest import unit
    from embedlab.evaluation.core.vectors import Prompted, embed

    path = Path(str(config["queries"]))
    if path.suffix.lower() == ".npy":
        try:
            shape = np.load(path, mmap_mode="r").shape
        except (OSError, ValueError, EOFError, SyntaxError, TypeError) as error:
            raise UserError(f"cannot be read ({error})", file=path, key="queries", fix=_VECTORS) from None
        if len(shape) != 2 or not shape[0]:
            told = f"is no table of vectors, but an array {shape}"
            raise UserError(told, file=path, key="queries", fix=_VECTORS)
        stored = Stored([Part(path, shape[0])], Codes("float32", shape[1]), fix="encode it again")
        return list(range(1, shape[0] + 1)), torch.cat([stored.block(*piece) for piece in stored.pieces()])
    reader, column = open_texts(path, config)
    if encoder is None:
        raise UserError(
            "texts want the encoder of the vectors", key="ckpt", fix="ckpt=…, or queries=FILE.npy"
        )
    rows, texts = [], []
    for row, text in reader.texts(column):
        if not text.strip():
            raise reader.error("an empty row", row, fix="take empty rows out of the file")
        rows.append(row)
        texts.append(text)
    if not texts:
        raise reader.error("no row with text", key="queries", fix="a file with a question a line")
    with placing(reader, rows.__getitem__):
        return rows, unit(embed(Prompted(encoder, "query"), texts))


def _print_recall(folder: Path) -> None:
    from embedlab.config.read import read_record
    from embedlab.corpus.approximate import TARGET, Lists

    lists = read_record(folder / "lists.json", Lists)
    columns = [key for key in (lists.recall[0] if lists.recall else {}) if key.startswith("recall")]
    print(f"{lists.factory}, trained on {lists.trained_on:,} rows")
    print("  ".join([f"{lists.dial or 'as it is':>9}", *(f"{key:>10}" for key in columns), "ms a query"]))
    for point in lists.recall:
        cells = [f"{point['value']:>9.0f}", *(f"{point[key]:>10.4f}" for key in columns)]
        mark = "  kept" if point["value"] == lists.value else ""
        print("  ".join([*cells, f"{point.get('ms', 0):>10.3f}"]) + mark)
    kept = next((point for point in lists.recall if point["value"] == lists.value), {})
    if kept.get(f"recall@{TARGET}", 1) < lists.target_recall:
        print(
            f"embedlab: warning: recall@{TARGET} stays under target_recall={lists.target_recall}: a larger m= or"
            " rescore=, or kind=ivf_flat",
            file=sys.stderr,
        )


def _query(argv: Sequence[str]) -> int:
    config = compose("search_query", argv, positional=("index", "text"))
    out = None if config["out"] is None else Path(str(config["out"]))
    _check_numbers(config)
    _check_asked(config, out)
    _check(config)

    from embedlab.corpus.search import Index

    index = Index(str(config["index"]))
    index.tune(config["nprobe"], config["rescore"])
    encoder: Any = None
    if not str(config["queries"]).lower().endswith(".npy"):
        encoder = _encoder(index, config)
    start = time.perf_counter()
    rows: list[int] | None = None
    if config["queries"] is None:
        found = index.search(encoder, [str(config["text"])], config["k"])
    else:
        rows, vectors = _queries(config, encoder)
        found = index.search_vectors(vectors, config["k"])
    for place, hits in enumerate(found):
        before = "" if rows is None else f"{rows[place]}\t"
        for hit in hits:
            print(f"{before}{hit.score:.4f}\t{hit.row + 1}\t{printable(hit.text)}".rstrip("\t"))
    asked = "" if rows is None else f" for {len(rows):,} queries"
    what = "texts" if index.info.texts else "vectors"
    print(f"{len(index):,} {what} searched{asked} in {time.perf_counter() - start:.2f} s", file=sys.stderr)
    if out is not None:
        answers: dict[str, Any] = {} if rows is None else {"queries": rows}
        answers |= {"hits": [[hit.plain() for hit in hits] for hits in found]}
        write_whole(out, json.dumps(answers, ensure_ascii=False) + "\n")
    return 0


def _check_asked(config: Mapping[str, Any], out: Path | None) -> None:
    """UserError unless a text or a file of queries is asked for, and where the answers cannot be written."""
    text, queries = config["text"], config["queries"]
    fix = 'embedlab search query INDEX "some words", or queries=FILE'
    if text is None and queries is None:
        raise UserError("a query is missing", key="text", fix=fix)
    if text is not None and queries is not None:
        raise UserError(
            "the queries are those of a file", key="text", value=text, fix="leave it or queries= out"
        )
    if text is not None and not str(text).strip():
        raise UserError("the query is empty", key="text", fix=fix)
    if out is not None:
        check_absent(out, config["overwrite"])
        check_writable(out)


def _check(config: Mapping[str, Any]) -> None:
    """UserError for what is wrong with an index's place and its encoder's, before torch is loaded."""
    check_index(Path(str(config["index"])))
    check_encoding(config)
    if config["ckpt"] is not None:
        placed(config["ckpt"])


def _encoder(index: Index, config: Mapping[str, Any]) -> Any:
    """The encoder of the index, which must be the one that made it."""
    ckpt = str(config["ckpt"] or recorded(index.info.encoder))
    if not ckpt:
        fix = "ckpt=…, or queries=FILE.npy"
        raise UserError(
            "its vectors do not say what encoder made them", file=index.folder, key="ckpt", fix=fix
        )
    encoder = load_encoder(ckpt, config["max_length"])
    cut(encoder, min(index.info.dim, encoder.dim))
    index.check_encoder(encoder.fingerprint())
    return Configured.of(encoder, config)


def _serve(argv: Sequence[str]) -> int:
    config = compose("search_serve", argv, positional=("index",))
    _check_numbers(config)
    port = config["port"]
    if type(port) is not int or not 0 <= port < 1 << 16:
        raise UserError("must be a whole number up to 65535", key="port", value=port, fix="port=8000")
    _check(config)

    from embedlab.corpus.search import Index
    from embedlab.corpus.serve import server

    index = Index(str(config["index"]))
    index.tune(config["nprobe"], config["rescore"])
    with server(index, _encoder(index, config), port) as serving:
        print(f"{len(index):,} rows: POST http://localhost:{serving.server_address[1]}/search", flush=True)
        serving.serve_forever()
    return 0


def _export(argv: Sequence[str]) -> int:
    config = compose("search_export", argv, positional=("index", "output"))
    out = Path(str(config["output"]))
    if out.suffix.lower() != ".parquet":
        raise UserError("unknown kind of output", file=out, fix="end its name in .parquet")
    check_absent(out, config["overwrite"])
    check_index(Path(str(config["index"])))

    from embedlab.corpus.search import Index
    from embedlab.corpus.vector_files import ParquetFile, vector_file

    index = Index(str(config["index"]))
    with vector_file(out) as target, progress_bar("exporting", "rows", len(index)) as move:
        assert isinstance(target, ParquetFile)
        for rows, vectors, texts in index.blocks():
            target.texts = texts
            target.add([row + 1 for row in rows], vectors.numpy())
            move(target.count, target.count)
    print(f"{target.count:,} rows (row, vector{', text' if index.info.texts else ''}): {out}")
    return 0


def _texts(reader: FileReader, column: str) -> Iterator[str]:
    for row, text in reader.texts(column):
        if not text.strip():
            raise reader.error("an empty row", row, fix="take empty rows out of the file")
        yield text
