"""Vectors of a data set's texts by a frozen encoder, computed once: half-precision files in the cache."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

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
_FILE = "vectors.npy"
_AT_ONCE = 1 << 16  # texts: enough for an encoder to sort by length, little to hold
_BYTES = 1 << 26


def text_vectors(
    encoder: Encoder,
    config: DataConfig,
    table: TokenTable,
    role: str,
    device: torch.device | str,
    overlap: Overlap | None = None,
) -> Vectors:
    """The vectors of every row's text, in the order of a table: opened where they are in the cache, else computed.

    Args:
        encoder: of the vectors, whose hash and that of the texts (with their prompt, ``data.prompts``) are the key.
        config: that the table was built from.
        table: rows of tokens.
        role: of the texts that are encoded, and the name of their field.
        device: to encode on.
        overlap: the evaluation sets that ``config.decontaminate`` names.

    Returns:
        [n, D], not normalised, mapped into memory.

    Raises:
        UserError: the texts are no longer those of the table, a vector is too large for half precision, or the cache
            cannot be written.
    """
    shape = table.n_rows, encoder.dim
    prompt = data_kind(config.name).prompts_of(config).get(role, "")
    content = f"{encoder.fingerprint()} {table.report['content']} {role}" + (prompt and f" {prompt}")
    digest = hashlib.blake2b(content.encode(), digest_size=12)

    def build(folder: Path) -> None:
        log.info("The vectors of %s texts are computed once.", f"{shape[0]:,}")
        texts = ([prompt + text for text in block] for block in _texts(config, table, role, overlap))
        with (folder / _FILE).open("wb") as file:  # written, not mapped: a full disk would end the process
            write_header(file, np.float16, shape)
            _fill(file, shape[0], encoder, texts, device)

    def read(folder: Path) -> Vectors:
        try:
            # Copy on write: torch takes no array that is read-only.
            found = np.load(folder / _FILE, mmap_mode="c", allow_pickle=False)
        except (OSError, ValueError, EOFError) as bad:
            raise Damaged(f"{folder / _FILE}: {bad}") from bad
        if found.shape != shape or found.dtype != np.float16:
            raise Damaged(f"{folder / _FILE} has vectors of {found.shape}, {found.dtype}")
        return found

    return cached("vector", digest.hexdigest(), build, read, config.cache_dir)


def _fill(
    file: IO[bytes], rows: int, encoder: Encoder, texts: Iterator[list[str]], device: torch.device | str
) -> None:
    done = 0
    with progress_bar("teacher", "texts", rows) as move:
        for block in texts:
            with np.errstate(over="ignore"):
                half = encoder.encode(block, device=device).astype(np.float16)
            if not np.isfinite(half).all():
                raise UserError("a vector is past the range of half precision", fix="method.cached=false")
            file.write(np.ascontiguousarray(half).data)
            done += len(block)
            move(done, done)


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
