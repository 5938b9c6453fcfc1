"""Vectors of a data set's texts by a frozen encoder, computed once: half-precision files in the cache."""

from __future__ import annotations

import hashlib
import logging
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from embedlab.config.data import DataConfig
from embedlab.console import progress_bar
from embedlab.data.build import text_hashes
from embedlab.data.cached import Damaged, cached
from embedlab.data.contamination.overlap import Overlap
from embedlab.data.kinds import data_kind
from embedlab.data.rows import read_rows
from embedlab.data.table import TokenTable
from embedlab.encoders.windows import windows
from embedlab.errors import UserError
from embedlab.files import write_header

if TYPE_CHECKING:
    from embedlab.encoders.base import Encoder

log = logging.getLogger(__name__)
Vectors = NDArray[np.float16]
_FILE, _SUM = "vectors.npy", "vectors.crc32"
_LEAST = 2.0**-14  # of half precision: what is smaller has fewer digits, and soon none
_AT_ONCE = 1 << 16  # texts: enough for an encoder to sort by length, little to hold
_BYTES = 1 << 26


def text_vectors(
    encoder: Encoder,
    config: DataConfig,
    table: TokenTable,
    role: str,
    device: torch.device | str,
    overlap: Overlap | None = None,
    identity: str | None = None,
) -> Vectors:
    """The vectors of every row's text, in the order of a table: opened where they are in the cache, else computed.

    Args:
        encoder: of the vectors, whose fingerprint is the key, with a hash of the texts and their ``data.prompts``.
        config: that the table was built from.
        table: rows of tokens.
        role: of the texts that are encoded, and the name of their field.
        device: to encode on.
        overlap: the evaluation sets that ``config.decontaminate`` names.
        identity: the encoder's fingerprint as it is now, where the caller has it: all weights are read for it.

    Returns:
        [n, D], not normalised, mapped into memory.

    Raises:
        UserError: the texts are no longer those of the table, a vector is no number, too large or too small for half
            precision, or the cache cannot be written.
    """
    shape = table.n_rows, encoder.dim
    prompt = data_kind(config.name).prompts_of(config).get(role, "")
    content = f"{identity or encoder.fingerprint()} {table.report['content']} {role}" + (
        prompt and f" {prompt}"
    )
    name = hashlib.blake2b(content.encode(), digest_size=12).hexdigest()

    def build(folder: Path) -> None:
        log.info("The vectors of %s texts are computed once.", f"{shape[0]:,}")
        texts = ([prompt + text for text in block] for block in _texts(config, table, role, overlap))
        _save(folder, shape, _blocks(texts, table, encoder, device, name, config.cache_dir))

    found = cached("vector", name, build, partial(_open, shape), config.cache_dir)
    for block in Path(str(found.filename)).parent.parent.glob(f"{name}-*"):  # which the whole has now
        shutil.rmtree(block, ignore_errors=True) if block.is_dir() else block.unlink(missing_ok=True)
    return found


def _blocks(
    texts: Iterable[list[str]],
    table: TokenTable,
    encoder: Encoder,
    device: torch.device | str,
    name: str,
    cache_dir: str | None,
) -> Iterator[Vectors]:
    """The vectors of blocks of texts, kept one by one where there are many: what a killed run has is the next one's."""
    done = 0
    with progress_bar("teacher", "texts", table.n_rows) as move:
        for block in texts:
            make = partial(_half, encoder, block, device, table, done)
            size = len(block), encoder.dim
            if table.n_rows <= _AT_ONCE:
                yield make()
            else:
                keep = partial(_save_one, make, size)
                yield cached("vector", f"{name}-{done}", keep, partial(_open, size), cache_dir)
            done += len(block)
            move(done, done)


def _save_one(make: Callable[[], Vectors], shape: tuple[int, int], folder: Path) -> None:
    _save(folder, shape, [make()])


def _save(folder: Path, shape: tuple[int, int], blocks: Iterable[Vectors]) -> None:
    """Write blocks of vectors as one array, and the CRC-32 of their bytes."""
    total = 0
    with (folder / _FILE).open("wb") as file:  # written, not mapped: a full disk would end the process
        write_header(file, np.float16, shape)
        for block in blocks:
            file.write(block.data)
            total = zlib.crc32(block.data, total)
    (folder / _SUM).write_text(f"{total}\n", encoding="utf-8")


def _open(shape: tuple[int, int], folder: Path) -> np.memmap[Any, np.dtype[np.float16]]:
    """What `_save` wrote, mapped into memory.

    Raises:
        Damaged: it is not whole.
    """
    try:
        # Copy on write: torch takes no array that is read-only.
        found = np.load(folder / _FILE, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError, EOFError) as bad:
        raise Damaged(f"{folder / _FILE}: {bad}") from bad
    if found.shape != shape or found.dtype != np.float16:
        raise Damaged(f"{folder / _FILE} has vectors of {found.shape}, {found.dtype}")
    try:
        total = (folder / _SUM).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as bad:
        raise Damaged(f"{folder / _SUM}: {bad}") from bad
    if total != str(_sum_of(found)):
        raise Damaged(f"{folder / _FILE} is not as it was written")
    return found


def _sum_of(vectors: Vectors) -> int:
    """CRC-32 of their bytes, which are all read now: the steps take them from memory."""
    total, step = 0, max(1, _BYTES // max(1, vectors[:1].nbytes))
    for at in range(0, len(vectors), step):
        total = zlib.crc32(np.ascontiguousarray(vectors[at : at + step]).data, total)
    return total


def _half(
    encoder: Encoder, texts: list[str], device: torch.device | str, table: TokenTable, before: int
) -> Vectors:
    """The vectors of texts, so many after the first of the table."""
    vectors = encoder.encode(texts, device=device)
    with np.errstate(over="ignore"):
        half = np.ascontiguousarray(vectors.astype(np.float16))
    largest = np.abs(half).max(1)
    bad = ~np.isfinite(largest) | ((largest < _LEAST) & vectors.any(1))
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise _not_kept(vectors[row], table.describe([before + row]))
    return half


def _not_kept(vector: NDArray[np.float32], place: str) -> UserError:
    """Why a text's vector cannot be kept in half precision."""
    if not np.isfinite(vector).all():
        return UserError(f"{place}: the teacher's vector of this text is not finite", fix="another teacher")
    told = f"{place}: the teacher's vector of this text is past the range of half precision"
    value = f"its largest feature is {np.abs(vector).max():.3g}"
    return UserError(f"{told}: {value}", key="method.cached", value="true", fix="method.cached=false")


def _texts(config: DataConfig, table: TokenTable, role: str, overlap: Overlap | None) -> Iterator[list[str]]:
    """The texts of a role, read from the source again and held to the table's hashes."""
    hashes, done = table.fields[role].hashes, 0
    # All that the table has: which rows are kept depends on every text of a row.
    roles = tuple(each for each in data_kind(config.name).roles_of(config) if each in table.fields)
    place = roles.index(role)
    texts = (values[place] for _, _, values, _ in read_rows(config, roles, overlap=overlap))
    for block in windows(texts, _AT_ONCE, _BYTES):
        found = np.frombuffer(text_hashes(block), np.uint64)
        if not np.array_equal(found, hashes[done : done + len(block)]):
            raise _changed(config)
        done += len(block)
        yield block
    if done != table.n_rows:
        raise _changed(config)


def _changed(config: DataConfig) -> UserError:
    fix = "start the run again"
    return UserError("has changed since it was tokenised", file=config.source, key="data", fix=fix)
