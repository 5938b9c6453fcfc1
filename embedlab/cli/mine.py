"""``embedlab mine IN OUT ckpt=…``: hard negatives for the queries of a table."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedlab.cli.compose import compose
from embedlab.cli.encoders import Configured, check_device, check_encoding, load_encoder, named, placed
from embedlab.cli.exits import going_on
from embedlab.config.mine import MineSettings, check_output
from embedlab.console import print_table, progress_bar
from embedlab.corpus.index_folder import check_index
from embedlab.encoders.folder import same_encoder
from embedlab.errors import UserError, blamed_on
from embedlab.files import check_absent, check_writable, write_whole
from embedlab.locks import WorkFolder, sole_writer

if TYPE_CHECKING:
    from embedlab.corpus.cross_encoder import CrossEncoderScores
    from embedlab.corpus.mine import Judge, Judging, Pairs
    from embedlab.corpus.mined import Statistics
    from embedlab.corpus.search import Index
    from embedlab.data.reader import FileReader

_ROLES = ("anchor", "positive")


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0."""
    config = compose("mine", argv, positional=("input", "output"))
    out = Path(str(config["output"]))
    check_output(out, config["format"])
    settings = _settings(config)
    tables = _Tables(config)
    work = Path(str(config["work"] or f"{out}.work"))
    tables.check_apart(out)
    check_absent(out, config["overwrite"])
    check_writable(out, key="output")
    check_writable(work, key="work")
    names = r"texts|model|teacher|mined-[0-9a-f]{16}"
    folder = WorkFolder(work, "settings.json", names, kept="model/*/*.npy")
    folder.check("work")
    check_encoding(config)
    place = placed(named(config["ckpt"]))
    if config["teacher"] is not None:
        placed(config["teacher"], "teacher")
    if config["search"] != "exact":
        with blamed_on("search", config["search"]):
            check_index(Path(str(config["search"])))

    encoder = Configured.of(load_encoder(place, config["max_length"], dim=config["dim"]), config)
    teacher = _teacher(config)
    index = _index(config, settings, encoder, teacher)
    with going_on(), sole_writer(out, "output"), folder.held(work, "work", stays=config["work"] is not None):
        _check_work(work, tables, encoder, teacher, index)
        _mine(config, settings, tables, work, out, encoder, teacher, index)
    return 0


def _mine(
    config: dict[str, Any], settings: MineSettings, tables: _Tables, work: Path, out: Path, encoder: Configured,
    teacher: Configured | CrossEncoderScores | None, index: Index | None,
) -> None:  # fmt: skip
    from embedlab.corpus.cross_encoder import CrossEncoderScores, CrossJudge
    from embedlab.corpus.mine import Corpus, Indexed, Miner, write_pairs
    from embedlab.corpus.mined import write_mined

    pairs = write_pairs(work / "texts", tables.pairs, tables.corpus)
    model = _judge(work / "model", pairs, encoder)
    candidates = Corpus(model.positives, encoder.encoder.device) if index is None else Indexed(index)
    judge: Judging | None = None
    if isinstance(teacher, CrossEncoderScores):
        judge = CrossJudge(pairs, candidates, teacher)
    elif teacher is not None:
        judge = _judge(work / "teacher", pairs, teacher)
    if index is not None:
        model = model._replace(candidates=candidates.take)
    size = len(pairs.corpus) if index is None else len(index)
    block = config["block"]
    told = json.dumps({"block": block} | vars(settings))
    name = f"mined-{hashlib.sha256(told.encode()).hexdigest()[:16]}"
    miner = Miner(work / name, pairs, candidates, model, settings, block, judge)

    def keep(found: Statistics) -> None:
        write_whole(Path(f"{out}.json"), json.dumps(found.to_dict() | {"corpus": size}, indent=2) + "\n")

    with progress_bar("mining", "queries", len(pairs.queries)) as move:
        kind, on_block = config["format"], lambda done: move(done, done)
        found = write_mined(out, miner, kind, settings.scores, on_block, keep)
    print_table(found.table())
    print("\n".join(found.lines()))
    for warning in found.warnings():
        print(f"embedlab: warning: {warning}", file=sys.stderr)
    print(f"{found.rows:,} rows of {found.queries:,} queries from {size:,} texts: {out}")


def _settings(config: dict[str, Any]) -> MineSettings:
    keys = [field.name for field in fields(MineSettings)]
    return MineSettings(**{key: config[key] for key in keys} | {"teacher": config["teacher"] is not None})


def _teacher(config: dict[str, Any]) -> Configured | CrossEncoderScores | None:
    """The encoder or cross-encoder that ``teacher`` names."""
    from embedlab.corpus.cross_encoder import CrossEncoderScores, cross_encoder_folder

    if config["teacher"] is None:
        return None
    folder = cross_encoder_folder(str(config["teacher"]))
    if folder is not None:
        return CrossEncoderScores(folder, check_device(config["device"]), config["batch_size"])
    try:
        return Configured.of(load_encoder(config["teacher"]), config)
    except UserError as error:
        error.key = "teacher" if error.key == "ckpt" else error.key
        raise


def _index(
    config: dict[str, Any], settings: MineSettings, encoder: Configured,
    teacher: Configured | CrossEncoderScores | None,
) -> Index | None:  # fmt: skip
    """The index that ``search`` names, made by this encoder."""
    from embedlab.corpus.search import Index

    if config["search"] == "exact":
        return None
    if config["corpus"] is not None:
        fix = "leave corpus out, or search=exact"
        raise UserError("the index has its texts", key="corpus", value=config["corpus"], fix=fix)
    if isinstance(teacher, Configured):
        fix = "search=exact, or a cross-encoder"
        told = "it has no vectors of the index's texts"
        raise UserError(told, key="teacher", value=config["teacher"], fix=fix)
    index = Index(str(config["search"]))
    index.check_encoder(encoder.encoder.fingerprint())
    if index.stored.codes.packed and teacher is None and (settings.filtered or settings.scores):
        told = "holds a bit a feature, whose scores are no cosines as those of the positives"
        fix = "teacher=a cross-encoder, an index of 8 bits or floats, or neither filters nor scores"
        raise UserError(told, file=index.folder, key="search", value=config["search"], fix=fix)
    return index


def _judge(folder: Path, pairs: Pairs, encoder: Configured) -> Judge:
    """The encoder's vectors of queries and texts, each with its prompt."""
    from embedlab.corpus.mine import Judge
    from embedlab.corpus.texts import UnitVectors
    from embedlab.evaluation.core.vectors import Prompted

    folder.mkdir(exist_ok=True)
    queries = UnitVectors(folder / "queries", pairs.queries)
    texts = UnitVectors(folder / "corpus", pairs.corpus)
    total = len(queries) + len(texts)
    with progress_bar("encoding", "texts", total) as move:
        queries.encode(Prompted(encoder, "query"), lambda done: move(done, done))
        texts.encode(
            Prompted(encoder, "document"), lambda done: move(len(queries) + done, len(queries) + done)
        )
    return Judge(queries, texts, texts.take)


def _check_work(
    work: Path, tables: _Tables, encoder: Configured, teacher: Configured | CrossEncoderScores | None,
    index: Index | None,
) -> None:  # fmt: skip
    """Holds a working folder to what its texts and vectors were made of; the first run writes that down."""
    from embedlab.config.read import read_values

    ours: dict[str, Any] = tables.identity()
    model = teacher.encoder if isinstance(teacher, Configured) else teacher
    ours |= {"ckpt": encoder.encoder.fingerprint(), "teacher": None if model is None else model.fingerprint()}
    ours["search"] = "exact" if index is None else asdict(index.info)
    ours |= {"dtype": encoder.arguments["dtype"], "batch_size": encoder.arguments["batch_size"]}
    file = work / "settings.json"
    if not file.exists():
        write_whole(file, json.dumps(ours, indent=2) + "\n")
        return
    theirs = read_values(file)
    for key, value in ours.items():
        was = theirs.get(key)
        of_encoder = key in ("ckpt", "teacher") and isinstance(was, str) and value is not None
        if not (same_encoder(was, value) if of_encoder else was == value):
            told = f"was begun with {key} {was}, this run has {value}"
            raise UserError(told, file=work, key="work", fix="the same settings, work=ANOTHER, or remove it")


class _Tables:
    """The pairs and the corpus, checked as far as their headers tell."""

    def __init__(self, config: dict[str, Any]) -> None:
        from embedlab.cli.texts import open_texts
        from embedlab.config.data import DataConfig
        from embedlab.data.kinds import data_kind
        from embedlab.data.sources import open_source

        self.kind = data_kind("pairs")
        with _keys_of_mine():
            self.config = DataConfig(
                name="pairs", files=str(config["input"]), columns=config["columns"], header=config["header"]
            )
            self.readers = open_source(self.config)
            self.kind.groups(self.readers, _ROLES, self.config)
            for reader in self.readers:  # what a header, or a first row, tells before the encoder is loaded
                with closing(reader.rows(self.kind.find_columns(reader, _ROLES, self.config))) as first:  # type: ignore[type-var]
                    next(first, None)
        self._texts: tuple[FileReader, str] | None = None
        if config["corpus"] is not None:
            source = Path(str(config["corpus"]))
            self._texts = open_texts(source, config | {"chunk": 1, "window": 1})

    def check_apart(self, out: Path) -> None:
        """UserError where the output is a file of the input."""
        from embedlab.data.reader import FileReader

        texts = [] if self._texts is None else [self._texts[0]]
        files = [reader.path for reader in (*self.readers, *texts) if isinstance(reader, FileReader)]
        if out.exists() and any(file.samefile(out) for file in files):
            raise UserError("is read, and would be replaced", file=out, key="output", fix="another file")

    def identity(self) -> dict[str, Any]:
        """What tells the texts from any other."""
        columns = [self.kind.find_columns(reader, _ROLES, self.config) for reader in self.readers]
        found: dict[str, Any] = {
            "input": [r.identity() for r in self.readers],
            "columns": columns,
            "corpus": None,
        }
        if self._texts is not None:
            reader, column = self._texts
            found["corpus"] = [reader.identity(), column]
        return found

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Query and positive of every row that has both."""
        from collections import Counter

        for table, row, texts, _ in self.kind.rows(self.readers, _ROLES, self.config, Counter()):
            for role, text in zip(_ROLES, texts, strict=True):
                if not isinstance(text, str | None):
                    told, fix = (
                        f"the {role} is {text!r:.60}, not text",
                        f"columns.{role}=NAME of a column of texts",
                    )
                    raise self.readers[table].error(told, row, fix=fix)
            query, positive = (str(text or "") for text in texts)
            if query.strip() and positive.strip():
                yield query, positive

    def corpus(self) -> Iterator[str]:
        """Every further text that is not empty."""
        if self._texts is not None:
            reader, column = self._texts
            yield from (text for _, text in reader.texts(column) if text.strip())


@contextmanager
def _keys_of_mine() -> Iterator[None]:
    """Names the keys of this command in errors about those of data."""
    try:
        yield
    except UserError as error:
        for theirs, ours in (("data.files", "input"), ("data.columns", "columns"), ("data.header", "header")):
            error.key = error.key and error.key.replace(theirs, ours)
            error.fix = error.fix.replace(theirs, ours)
        raise
