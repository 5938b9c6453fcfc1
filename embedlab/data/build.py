"""Building the token cache: once for each text, tokenizer and setting, whoever comes first."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embedlab.config.data import DataConfig
from embedlab.data.kinds import DataKind, data_kind
from embedlab.data.report import Tally, progress_bar
from embedlab.data.rows import Row, RowStream, read_rows
from embedlab.data.sources import Source, open_source
from embedlab.data.table import FORMAT, DamagedTable, TableWriter, TokenTable
from embedlab.data.tokenise import Chunk, FieldJob, Tokeniser, tokenised
from embedlab.errors import UserError
from embedlab.files import cache_dir, locked, whole_folder

if TYPE_CHECKING:
    from embedlab.encoders.tokenization import Tokenization

log = logging.getLogger(__name__)
FieldSpec = tuple[str, "Tokenization"]
"""The role of the text (`DataKind.roles`), and how it is tokenised."""

_CHUNK = 2048
_ALONE = 32  # chunks before worker processes pay for their start, which is mostly the import of transformers
_OF_CONTENT = (
    "name", "columns", "limit", "min_chars", "max_chars", "overlong", "duplicates",
    "languages", "pairs", "pivot", "pair_limit", "pair_sample",
)  # fmt: skip


def build_token_table(
    config: DataConfig, fields: Mapping[str, FieldSpec], progress: bool = True
) -> TokenTable:
    """The token table of a configuration: opened where it is in the cache, else built first.

    The cache key holds the content of the files (or the state of the hub data set), every setting that
    decides which rows are kept, and the fingerprint of every tokenisation. A build writes beside its place
    and moves there when it is whole; a lock keeps a second run waiting for the first; what a killed build
    left is removed.

    Args:
        config: source, rows and cache folder.
        fields: name -> (role, tokenisation). With `config.pack` texts are not cut, and stored for
            `PackedTable`.
        progress: show a bar on a terminal.

    Raises:
        UserError: bad input with its file and row; a cache folder that cannot be written. Nothing is left
            behind.
    """
    _check(config, fields)
    source = open_source(config)
    root = Path(config.cache_dir).expanduser() if config.cache_dir else cache_dir() / "tokens"
    key = _key(config, fields, source)
    try:
        return TokenTable.open(root / key)
    except DamagedTable as bad:
        if (root / key).exists():
            log.warning("The token cache is built anew: %s", bad)
    try:
        with locked(root / f"{key}.lock", doing="is building this token cache"):
            try:
                return TokenTable.open(root / key)  # another run has built it meanwhile
            except DamagedTable:
                with whole_folder(root / key) as folder:
                    _fill(folder, config, fields, source, progress)
            return TokenTable.open(root / key)
    except OSError as bad:
        raise UserError(
            f"the token cache cannot be written: {bad.strerror or bad}",
            file=root,
            key="data.cache_dir",
            value=config.cache_dir,
            fix="free space there, or a folder on another disk",
        ) from None


def _check(config: DataConfig, fields: Mapping[str, FieldSpec]) -> None:
    kind = data_kind(config.name)
    for name, (role, _) in fields.items():
        if name in kind.numbers:
            raise ValueError(f"{name} is a number of data={config.name}: the view needs another name")
        if role not in kind.roles:
            raise UserError(
                f"{name} needs the text {role!r}, and data={config.name} has {', '.join(kind.roles)}",
                key="data",
                value=config.name,
                fix="data of another kind, or another method",
            )


def _key(config: DataConfig, fields: Mapping[str, FieldSpec], source: Source) -> str:
    content = {
        "format": FORMAT,
        "source": source.identity,
        "settings": {name: getattr(config, name) for name in _OF_CONTENT} | {"columns": config.chosen},
        "packed": config.pack is not None,
        "numbers": _dtypes(data_kind(config.name)),
        "fields": {name: [role, tokenization.fingerprint] for name, (role, tokenization) in fields.items()},
    }
    if config.pair_limit is not None:
        content["pair_seed"] = config.pair_seed
    text = json.dumps(content, sort_keys=True)
    return f"{config.name}-{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}"


def _dtypes(kind: DataKind) -> dict[str, str]:
    return {name: "f4" if as_type is float else "i8" for name, as_type in kind.numbers.items()}


def _fill(
    folder: Path, config: DataConfig, fields: Mapping[str, FieldSpec], source: Source, progress: bool
) -> None:
    started = time.monotonic()
    roles = tuple(
        role for role in data_kind(config.name).roles if role in {role for role, _ in fields.values()}
    )
    stream = read_rows(config, roles, source)
    frame = None if config.pack is None else _frame(next(iter(fields.values()))[1].tokenizer)
    jobs, described = [], {}
    for name, (role, tokenization) in fields.items():
        greatest = max(tokenization.tokenizer.get_vocab().values())
        dtype = "uint16" if greatest < 1 << 16 else "uint32"
        jobs.append(FieldJob(roles.index(role), tokenization, dtype, frame[1] if frame else None))
        described[name] = {
            "role": role,
            "dtype": dtype,
            "pad_id": tokenization.pad_id,
            "fingerprint": tokenization.fingerprint,
        }
    writer = TableWriter(folder, roles, described, bool(stream.groups), _dtypes(stream.kind))
    tally = Tally(stream, list(fields), roles, [role for role, _ in fields.values()])
    try:
        chunks = tokenised(_chunks(stream), Tokeniser(tuple(jobs)), config.processes, _ALONE)
        # Closed in any case: worker processes end with it, and an exception would keep it.
        with closing(chunks), progress_bar(source.readers, progress) as advance:
            for chunk, tokens in chunks:
                writer.add(chunk.tables, chunk.rows, chunk.groups, chunk.hashes, tokens, chunk.numbers)
                tally.add(chunk, tokens)
                advance(writer.n_rows)
        if writer.n_rows == 0:
            raise _nothing_left(config, stream)
        report = tally.report(config, writer, time.monotonic() - started)
        names = [reader.name for reader in source.readers]
        writer.finish(names, stream.groups, frame, report)
    finally:
        writer.close()


def _frame(tokenizer: Any) -> tuple[int | None, int]:
    """What packed rows begin and end with: [CLS] and [SEP]; or None and the token that parts texts."""
    if tokenizer.cls_token_id is not None and tokenizer.sep_token_id is not None:
        return tokenizer.cls_token_id, tokenizer.sep_token_id
    last = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    if last is None:
        raise UserError("the tokenizer has no token to end a text with, which packing needs", key="data.pack")
    return None, last


def _chunks(stream: RowStream) -> Iterator[Chunk]:
    rows, roles, dtypes = iter(stream), len(stream.roles), _dtypes(stream.kind)
    while taken := list(islice(rows, _CHUNK)):
        columns = [[row[2][i] for row in taken] for i in range(roles)]
        hashes = [_hashes(stream, taken, column) for column in columns]
        numbers = [
            np.array([row[2][i] for row in taken], dtype) for i, dtype in enumerate(dtypes.values(), roles)
        ]
        tables, places, groups = [r[0] for r in taken], [r[1] for r in taken], [r[3] for r in taken]
        yield Chunk(tables, places, groups, columns, hashes, numbers)


def _hashes(stream: RowStream, rows: list[Row], texts: list[str]) -> bytes:
    digest = hashlib.blake2b
    try:
        return b"".join([digest(text.encode(), digest_size=8).digest() for text in texts])
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can write
        at = next(i for i, text in enumerate(texts) if not _is_unicode(text))
        reader = stream.source.readers[rows[at][0]]
        raise reader.error("a text that is not Unicode (half a surrogate pair)", rows[at][1]) from None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _nothing_left(config: DataConfig, stream: RowStream) -> UserError:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in stream.dropped.items())
    return UserError(
        f"no row is left of {stream.dropped.total():,}" + (f" ({reasons})" if reasons else ""),
        file=config.source,
        key="data",
        value=config.name,
        fix="look at the columns and at data.min_chars",
    )
