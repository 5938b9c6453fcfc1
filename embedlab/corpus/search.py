"""Semantic search over a folder: unit vectors, the texts that they stand for, perhaps lists to search fewer of them.

Layout: index.json (what made it), vectors.npy (float32 [n, D], rows of length one), texts.txt (a text a
line), offsets.npy (int64 [n + 1], where each line of texts.txt begins). An index of vectors that were encoded before
names their .npy files instead, has texts only where they were given, and rows.npy (int64 [n]) where the vectors say
their rows. lists.faiss and lists.json: `embedlab.corpus.approximate`. A folder is complete or not there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from embedlab.config.read import read_record
from embedlab.corpus import approximate
from embedlab.corpus.index_folder import INFO, check_index, check_index_folder
from embedlab.corpus.inputs import Texts
from embedlab.corpus.parts import MANIFEST
from embedlab.corpus.plan import Plan, check_memory, plan
from embedlab.corpus.stored import Part, Source, Stored, gather
from embedlab.corpus.texts import LinesFile
from embedlab.corpus.vector_files import NpyFile, read_ranges, write_ranges
from embedlab.encoders.codes import RANGES, Codes
from embedlab.encoders.folder import same_encoder
from embedlab.encoders.windows import BYTES, ROWS, windows
from embedlab.errors import UserError
from embedlab.evaluation.core.nearest import RESCORE, CodesTopK, TopK, unit
from embedlab.evaluation.core.vectors import Encoder, Prompted, embed
from embedlab.files import sha256, whole_folder
from embedlab.locks import WorkFolder, sole_writer

FILES = (INFO, "vectors.npy", "offsets.npy", "texts.txt")
_OPTIONAL = ("rows.npy", RANGES, *approximate.FILES)
_FORMATS = (1, 2)
"""2: without texts, or of vectors in other places; older versions search what has format 1, exactly."""
_FIX = "build the index again"


@dataclass(frozen=True)
class IndexInfo:
    """index.json. encoder: how to load it again; fingerprint: of its weights and settings ("": not known); source: of
    the texts or vectors; kind: of `embedlab.corpus.plan`, or factory; parts, part_rows: files of vectors in their
    order, and the rows of each (none: vectors.npy); texts: whether there are any; numbered: whether there is rows.npy;
    store: of the vectors; int8 and uint8 are decoded by ranges.npy; manifest: sha256 of that of the parts, which lie
    elsewhere; sample: `Stored.sample` of .npy files elsewhere that have no manifest ("": not known, as in older ones).
    """

    encoder: str
    fingerprint: str
    dim: int
    rows: int
    source: str
    created: str
    format: int = 1
    kind: str = "exact"
    parts: list[str] = field(default_factory=list)
    part_rows: list[int] = field(default_factory=list)
    texts: bool = True
    numbered: bool = False
    store: str = "float32"
    manifest: str = ""
    sample: str = ""


@dataclass(frozen=True)
class Hit:
    """One result. row: of the indexed texts, counted from 0; score: cosine; text: "" where the index has none."""

    row: int
    score: float
    text: str

    def plain(self) -> dict[str, Any]:  # for JSON
        return {"row": self.row + 1, "score": round(self.score, 6), "text": self.text}


@dataclass(frozen=True)
class Layout:
    """What is built over the vectors: arguments of `plan`, and how it is held to a recall.

    rescore: candidates an answer, of which the best are taken by their exact cosines.
    queries: [q, D], of length one, that recall is measured by; None: rows of the index; work: of vectors that were
    encoded before, a folder whose pieces outlive a killed build (None: one that does not), and are gone with its end.
    """

    kind: str = "exact"
    nlist: int | None = None
    m: int | None = None
    train_rows: int | None = None
    factory: str | None = None
    target_recall: float = 0.95
    rescore: int = approximate.RESCORE
    queries: Tensor | None = None
    work: Path | None = None

    @property
    def approximate(self) -> bool:
        return self.kind != "exact" or self.factory is not None

    def plan(self, rows: int, dim: int) -> Plan:
        """The plan for so many vectors; UserError as of `plan` and `check_memory`, and for queries of another width."""
        if self.queries is not None and (width := self.queries.shape[1]) != dim:
            raise UserError(
                f"of width {width}, the vectors of {dim}", key="queries", fix="of the same encoder"
            )
        made = plan(self.kind, rows, dim, self.nlist, self.m, self.train_rows, self.factory)
        check_memory(made)
        return made


EXACT = Layout()


def build_index(
    folder: str | Path,
    texts: Iterable[str],
    encoder: Encoder,
    *,
    reference: str,
    fingerprint: str,
    source: str = "",
    overwrite: bool = False,
    rows: int = ROWS,
    size: int = BYTES,
    layout: Layout = EXACT,
    told: approximate.Told = lambda done, of: None,
) -> IndexInfo:
    """Encode `texts` and write the index; line breaks inside a text become spaces.

    Args:
        folder: to write; it appears when all is written.
        texts: read a window at a time, of at most `rows` texts and `size` bytes.
        encoder: gives the vectors.
        reference: how the encoder is loaded again.
        fingerprint: of the encoder.
        source: of the texts, for messages.
        overwrite: replace an index that is there.
        layout: of an approximate index.
        told: is called while such an index fills.

    Raises:
        UserError: the folder exists (unless it is an index and `overwrite`); there is no text; one (its `index`) is
            too long for the tokenizer; a layout that does not fit the vectors.
    """
    answering = Prompted(encoder, "document")
    with _new_folder(folder, overwrite) as work:
        with LinesFile(work) as told_texts, (work / "vectors.npy").open("wb") as vector_file:
            vectors = NpyFile(vector_file)
            for window in windows(texts, rows, size):
                vectors.add(range(len(window)), _vectors(answering, window, vectors.count))
                told_texts.add(window)
            vectors.close()
        if vectors.count == 0:
            raise UserError(
                "there is no text to index", file=source or None, fix="give a file with sentences"
            )
        info = IndexInfo(reference, fingerprint, vectors.dim, vectors.count, source, _now())
        return _finished(work, info, layout, told)


def build_vector_index(
    folder: str | Path,
    source: Source,
    *,
    texts: Texts | None = None,
    overwrite: bool = False,
    layout: Layout = EXACT,
    told: approximate.Told = lambda done, of: None,
) -> IndexInfo:
    """An index of vectors that were encoded before. Of .npy files it is the index that is written, not a copy.

    Args:
        folder, overwrite, layout, told: as of `build_index`.
        source: the vectors, of any length; cosines are those of their directions.
        texts: of the same rows, or the whole input of ``empty=skip``; line breaks inside a text become spaces.

    Raises:
        UserError: as `build_index` and `gather`; texts of another number than the vectors.
    """
    with _alone(layout.work), _new_folder(folder, overwrite) as work:
        parts, codes, numbered = gather(source, work)
        if codes.calibrated:
            write_ranges(work / RANGES, codes)
        rows = sum(part.rows for part in parts)
        if texts is not None:
            with LinesFile(work) as told_texts:
                numbers = np.load(work / "rows.npy", mmap_mode="r") if numbered else None
                for window in windows(texts.of_vectors(rows, numbers, source.first)):
                    told_texts.add(window)
            if told_texts.count != rows:
                raise UserError(
                    f"{told_texts.count:,} texts for {rows:,} vectors", key="texts", fix="the encoded file"
                )
        info = IndexInfo(
            source.encoder, source.fingerprint, codes.dim, rows, str(source.files[0].parent.resolve()), _now(),
            format=2, parts=[str(part.path) for part in parts], part_rows=[part.rows for part in parts],
            texts=texts is not None, numbered=numbered, store=codes.store,
            manifest="" if numbered else source.manifest,
        )  # fmt: skip
        if not (numbered or source.manifest):
            info = replace(info, sample=_stored(work, info).sample())
        return _finished(work, info, layout, told, source.identity())


@contextmanager
def _new_folder(folder: str | Path, overwrite: bool) -> Iterator[Path]:
    target = Path(folder)
    check_index_folder(target, overwrite)
    with sole_writer(target, "index"), whole_folder(target, replace=overwrite) as work:
        yield work


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _finished(
    work: Path, info: IndexInfo, layout: Layout, told: approximate.Told, identity: str = ""
) -> IndexInfo:
    """Build what `layout` wants over the vectors of the new folder, and write index.json; `identity`: of them."""
    if layout.approximate:
        info = replace(info, kind="factory" if layout.factory else layout.kind)
        stored = _stored(work, info)
        made = layout.plan(info.rows, info.dim)
        with nullcontext(layout.work) if layout.work else _scratch(work) as pieces:
            index = approximate.build(stored, made, pieces, told, identity=identity)
        asked = approximate.questions(stored, layout.queries)
        dial, value, recall = approximate.measure(index, stored, asked, layout.target_recall, layout.rescore)
        facts = {
            "kind": info.kind, "factory": made.factory, "rows": info.rows, "dim": info.dim,
            "trained_on": made.train_rows, "dial": dial, "rescore": layout.rescore, "value": value,
            "target_recall": layout.target_recall, "recall": recall,
        }  # fmt: skip
        approximate.save(index, work, facts)
    (work / INFO).write_text(json.dumps(asdict(info), indent=2) + "\n", encoding="utf-8")
    return info


@contextmanager
def _alone(work: Path | None) -> Iterator[None]:
    """The folder of a build that goes on, which is cleared when it ends well; no other process builds there."""
    if work is None:
        yield
        return
    with WorkFolder(work, approximate.BUILD, approximate.NAMES, kept="*.faiss").held(work, "work"):
        yield


@contextmanager
def _scratch(work: Path) -> Iterator[Path]:
    import shutil

    pieces = work / "pieces"
    try:
        yield pieces
    finally:
        shutil.rmtree(pieces, ignore_errors=True)


def _stored(folder: Path, info: IndexInfo) -> Stored:
    """The vectors of an index; those that it encoded itself have length one."""
    if len(info.parts) != len(info.part_rows) or (info.parts and sum(info.part_rows) != info.rows):
        raise UserError("is damaged (its parts have other rows)", file=folder / INFO, fix=_FIX)
    if info.manifest:
        path = (folder / (info.parts or [""])[0]).with_name(MANIFEST)
        if not path.is_file() or sha256(path) != info.manifest:
            raise UserError("its parts were encoded anew, or moved", file=path, fix=_FIX)
    files = zip(info.parts or ["vectors.npy"], info.part_rows or [info.rows], strict=True)
    calibrated = info.store in ("int8", "uint8")
    ranges = read_ranges(folder / RANGES, info.dim, _FIX) if calibrated else None
    codes = Codes(info.store, info.dim, ranges)  # type: ignore[arg-type]  # checked there
    stored = Stored([Part(folder / path, rows) for path, rows in files], codes, not info.parts)
    if info.sample and stored.sample() != info.sample:
        raise UserError(f"its vectors were encoded anew ({stored.paths[0].parent})", file=folder, fix=_FIX)
    return stored


def _vectors(encoder: Encoder, texts: list[str], before: int) -> NDArray[np.float32]:
    try:
        return unit(embed(encoder, texts)).numpy()
    except UserError as error:
        if error.index is not None:
            error.index += before
        raise


class Index:
    """An index opened for queries; its vectors stay on disk and are read as they are searched.

    Raises UserError when `folder` is no whole index.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.info = _read_info(self.folder)
        for name in (*FILES, *_OPTIONAL):
            if (self.folder / name).is_symlink():  # what it leads to would be printed
                raise UserError("is a link", file=self.folder / name, fix=_FIX)
        self.stored = _stored(self.folder, self.info)
        rows, self._lists, self._rescore = self.info.rows, None, RESCORE
        self._numbers = self._table("rows.npy", rows) if self.info.numbered else None
        if self.info.texts:
            self._offsets = self._table("offsets.npy", rows + 1)
            try:
                size = (self.folder / "texts.txt").stat().st_size
            except OSError as error:
                raise UserError(f"is damaged ({error})", file=self.folder, fix=_FIX) from error
            if self._offsets[0] != 0 or self._offsets[-1] != size or (np.diff(self._offsets) < 1).any():
                raise UserError("is damaged (offsets.npy does not fit texts.txt)", file=self.folder, fix=_FIX)
        if self.info.kind != "exact":
            self._faiss, self._lists = approximate.load(self.folder, rows, self.info.dim)
            self._rescore = self._lists.rescore

    def _table(self, name: str, rows: int) -> NDArray[np.int64]:
        try:
            found: NDArray[np.int64] = np.load(self.folder / name, mmap_mode="r")
        except (OSError, ValueError, EOFError, SyntaxError, TypeError) as error:  # numpy's, of its header
            raise UserError(f"is damaged ({error})", file=self.folder, fix=_FIX) from error
        if found.shape != (rows,) or found.dtype != np.int64:
            raise UserError(f"is damaged ({name} is of another size)", file=self.folder, fix=_FIX)
        return found

    def __len__(self) -> int:
        return self.info.rows

    def check_encoder(self, fingerprint: str) -> None:
        """UserError unless `fingerprint` is that of the encoder that made the index, where that is known."""
        own = self.info.fingerprint
        if own and not same_encoder(own, fingerprint):
            of = ", of the same weights and another config.json" if own[:12] == fingerprint[:12] else ""
            raise UserError(
                f"was made by another encoder ({own[:12]}) than this one ({fingerprint[:12]}{of})",
                file=self.folder,
                key="ckpt",
                fix=f"use ckpt={self.info.encoder} as it was, or build the index again",
            )

    def tune(self, value: int | None = None, rescore: int | None = None) -> None:
        """Search in another way: `value` of the dial (nprobe, efSearch), `rescore` candidates an answer.

        UserError where the index has no such dial, or compares every vector as it is.
        """
        lists = self._lists
        what = "is exact" if lists is None else f"has no such dial ({lists.factory})"
        if value is not None and (lists is None or not lists.dial):
            raise UserError(what, file=self.folder, key="nprobe", value=value, fix="leave it out")
        if rescore is not None and lists is None and not self.stored.codes.packed:
            raise UserError(what, file=self.folder, key="rescore", value=rescore, fix="leave it out")
        if lists is not None and value is not None:
            approximate.turn(self._faiss, lists.dial, value)
        if rescore is not None:
            self._rescore = rescore

    def search(self, encoder: Encoder, queries: Sequence[str], k: int = 10) -> list[list[Hit]]:
        """The `k` nearest texts of each query by cosine, best first."""
        return self.search_vectors(embed(Prompted(encoder, "query"), queries), k)

    def search_vectors(self, vectors: Tensor, k: int = 10) -> list[list[Hit]]:
        """The `k` nearest texts of each of the vectors [q, D] by cosine, best first."""
        if vectors.shape[1] != self.info.dim:
            raise UserError(
                f"holds vectors of width {self.info.dim}, the queries' have {vectors.shape[1]}",
                file=self.folder,
                fix="queries of the encoder that made the index",
            )
        places, scores = self.nearest(unit(vectors), k)
        with (self.folder / "texts.txt").open("rb") if self.info.texts else nullcontext() as stream:
            return [
                [self._hit(stream, place, score) for place, score in zip(*found, strict=True) if place >= 0]
                for found in zip(places.tolist(), scores.tolist(), strict=True)
            ]

    def nearest(self, queries: Tensor, k: int) -> tuple[Any, Any]:
        """Places and scores, [q, k], of the texts nearest to unit vectors; a place below 0 stands for none.

        Exact without lists, but of a bit a feature: there the candidates are the nearest by Hamming distance.
        """
        if self._lists is not None:
            return approximate.nearest(self._faiss, self.stored, queries, k, self._rescore)
        if self.stored.codes.packed:
            bits = CodesTopK(queries, self.stored.codes, k, self._rescore)
            for first, end in self.stored.pieces():
                bits.add(self.stored.held(first, end))
            scores, rows = bits.result()
            return rows, scores / self.info.dim**0.5  # the length of -1 and 1
        top = TopK(queries, k)
        for first, end in self.stored.pieces():
            top.add(self.stored.block(first, end))
        return top.rows, top.scores

    def _hit(self, stream: Any, place: int, score: float) -> Hit:
        row = place if self._numbers is None else int(self._numbers[place])
        return Hit(row, score, "" if stream is None else self._text(stream, place))

    def texts(self, places: Sequence[int]) -> list[str]:
        """The texts at these places."""
        with (self.folder / "texts.txt").open("rb") as stream:
            return [self._text(stream, place) for place in places]

    def blocks(self) -> Iterator[tuple[list[int], Tensor, list[str] | None]]:
        """All rows in their order: numbers as of `Hit`, unit vectors [b, D], texts where there are any."""
        with (self.folder / "texts.txt").open("rb") if self.info.texts else nullcontext() as stream:
            for first, end in self.stored.pieces(ROWS):
                hits = [self._hit(stream, place, 1.0) for place in range(first, end)]
                texts = [hit.text for hit in hits] if self.info.texts else None
                yield [hit.row for hit in hits], self.stored.block(first, end), texts

    def _text(self, stream: Any, row: int) -> str:
        stream.seek(int(self._offsets[row]))
        line: bytes = stream.read(int(self._offsets[row + 1] - self._offsets[row]) - 1)
        try:
            return line.decode("utf-8")
        except UnicodeDecodeError:
            raise UserError("is not UTF-8", file=self.folder / "texts.txt", row=row + 1, fix=_FIX) from None


def _read_info(folder: Path) -> IndexInfo:
    check_index(folder)
    path = folder / INFO
    info = read_record(path, IndexInfo, _FIX)
    if info.format not in _FORMATS:
        raise UserError(f"has format {info.format}, not {_FORMATS[-1]}", file=path, fix=_FIX)
    return info
