"""Building the token cache: once for each text, tokenizer and setting, whoever comes first."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embedlab.config.data import DataConfig
from embedlab.console import progress_bar
from embedlab.data.cached import cached
from embedlab.data.contamination.overlap import Overlap
from embedlab.data.kinds import data_kind
from embedlab.data.reader import Reader
from embedlab.data.report import Tally
from embedlab.data.rows import RowStream, read_rows
from embedlab.data.sources import open_source
from embedlab.data.table import FORMAT, TableWriter, TokenTable
from embedlab.data.tokenise import Chunk, FieldJob, Tokeniser, tokenised
from embedlab.encoders.windows import windows
from embedlab.errors import UserError

if TYPE_CHECKING:
    from embedlab.encoders.tokenization import Tokenization

FieldSpec = tuple[str, "Tokenization"]
"""The role of the text (`DataKind.roles`), and how it is tokenised."""

_CHUNK, _CHUNK_BYTES = 2048, 1 << 24
_ALONE = 32  # chunks before worker processes pay for their start, which is mostly the import of transformers
_OF_CONTENT = (
    "name", "columns", "limit", "min_chars", "max_chars", "overlong", "duplicates",
    "languages", "pairs", "pivot", "pair_limit", "pair_sample",
)  # fmt: skip
_OF_KINDS = ("negatives", "scores", "score_range")


def build_token_table(
    config: DataConfig,
    fields: Mapping[str, FieldSpec],
    progress: bool = True,
    overlap: Overlap | None = None,
) -> TokenTable:
    """The token table of a configuration: opened where it is in the cache, else built first.

    The cache key holds the content of the files (or the state of the hub data set), every setting that
    decides which rows are kept, and the fingerprint of every tokenisation (`embedlab.data.cached`).

    Args:
        config: source, rows and cache folder.
        fields: name -> (role, tokenisation). With `config.pack` texts are not cut, and stored for
            `PackedTable`.
        progress: show a bar on a terminal.
        overlap: the evaluation sets that ``config.decontaminate`` names.

    Raises:
        UserError: bad input with its file and row; a cache folder that cannot be written. Nothing is left
            behind.
    """
    _check(config, fields, overlap)
    readers = open_source(config)
    most = {name: _highest_id(tokenization) for name, (_, tokenization) in fields.items()}

    def build(folder: Path) -> None:
        _fill(folder, config, fields, readers, progress, overlap)

    def read(folder: Path) -> TokenTable:
        table = TokenTable.open(folder)
        table.check_ids(most)
        return table

    return cached("token", _key(config, fields, readers, overlap), build, read, config.cache_dir)


def _check(config: DataConfig, fields: Mapping[str, FieldSpec], overlap: Overlap | None) -> None:
    kind = data_kind(config.name)
    if bool(config.decontaminate) != (overlap is not None):
        raise ValueError(f"decontaminate={config.decontaminate} needs the texts of these evaluation sets")
    for name, (role, _) in fields.items():
        if name in kind.numbers_of(config):
            raise ValueError(f"{name} is a number of data={config.name}: the view needs another name")
        if role not in (roles := kind.roles_of(config)):
            raise UserError(
                f"{name} needs the text {role!r}, and data={config.name} has {', '.join(roles)}",
                key="data",
                value=config.name,
                fix="data of another kind, or another method",
            )


def _key(
    config: DataConfig, fields: Mapping[str, FieldSpec], readers: list[Reader], overlap: Overlap | None
) -> str:
    import tokenizers  # slow to import, as torch is, which the next one brings

    from embedlab.encoders.tokenization import TOKENIZERS

    content = {
        "format": FORMAT,
        "source": [reader.identity() for reader in readers],
        "settings": {name: getattr(config, name) for name in _OF_CONTENT} | {"columns": config.chosen},
        "packed": config.pack is not None,
        "numbers": _dtypes(config),
        "fields": {name: [role, tokenization.fingerprint] for name, (role, tokenization) in fields.items()},
    }
    if overlap is not None:
        content["apart_from"] = overlap.identity
    if tokenizers.__version__ != TOKENIZERS:  # whose ids may differ
        content["tokenizers"] = tokenizers.__version__
    # Only where they are set: tables of before there were these stay found.
    content |= {name: value for name in _OF_KINDS if (value := getattr(config, name)) is not None}
    if prompts := data_kind(config.name).prompts_of(config):
        content["prompts"] = prompts
    if config.pair_limit is not None:
        content["pair_seed"] = config.pair_seed
    text = json.dumps(content, sort_keys=True)
    return f"{config.name}-{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}"


def _dtypes(config: DataConfig) -> dict[str, str]:
    numbers = data_kind(config.name).numbers_of(config)
    return {name: "f4" if as_type is float else "i8" for name, as_type in numbers.items()}


def _fill(
    folder: Path,
    config: DataConfig,
    fields: Mapping[str, FieldSpec],
    readers: list[Reader],
    progress: bool,
    overlap: Overlap | None,
) -> None:
    started = time.monotonic()
    wanted = {role for role, _ in fields.values()}
    roles = tuple(role for role in data_kind(config.name).roles_of(config) if role in wanted)
    stream = read_rows(config, roles, readers, overlap)
    prompts = stream.kind.prompts_of(config)
    frame = None if config.pack is None else _frame(next(iter(fields.values()))[1].tokenizer)
    jobs = {
        name: FieldJob(
            role,
            roles.index(role),
            tokenization,
            _ids_dtype(tokenization),
            frame and frame[1],
            prompts.get(role, ""),
        )
        for name, (role, tokenization) in fields.items()
    }
    writer = TableWriter(folder, roles, jobs, bool(stream.groups), _dtypes(config))
    tally = Tally(stream, jobs)
    try:
        names = [reader.name for reader in readers]
        tokeniser = Tokeniser(tuple(jobs.values()))
        chunks = tokenised(_chunks(stream), tokeniser, config.processes, _ALONE, names)
        size = sum(reader.size for reader in readers)
        bar = progress_bar("tokenising", "rows", size, None if progress else False)
        # Closed in any case: worker processes end with it, and an exception would keep it.
        with closing(chunks), bar as move:
            for chunk, tokens in chunks:
                writer.add(chunk, tokens)
                tally.add(chunk, tokens)
                move(writer.n_rows, sum(reader.position for reader in readers))
        if writer.n_rows == 0:
            raise _nothing_left(config, stream)
        report = tally.report(config, writer, time.monotonic() - started)
        writer.finish(names, stream.groups, frame, report)
    finally:
        writer.close()


def _ids_dtype(tokenization: Tokenization) -> str:
    return "uint16" if _highest_id(tokenization) < 1 << 16 else "uint32"


def _highest_id(tokenization: Tokenization) -> int:
    return int(max(tokenization.tokenizer.get_vocab().values()))


def _frame(tokenizer: Any) -> tuple[int | None, int]:
    """What packed rows begin and end with: [CLS] and [SEP]; or None and the token that parts texts."""
    if tokenizer.cls_token_id is not None and tokenizer.sep_token_id is not None:
        return tokenizer.cls_token_id, tokenizer.sep_token_id
    last = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    if last is None:
        problem = "the tokenizer has no token to end a text with, which packing needs"
        raise UserError(problem, key="data.pack", fix="data.pack=null, or another backbone")
    return None, last


def _chunks(stream: RowStream) -> Iterator[Chunk]:
    roles, dtypes = len(stream.roles), _dtypes(stream.config)
    for taken in windows(stream, _CHUNK, _CHUNK_BYTES, lambda row: max(row[2][:roles], key=len)):
        columns = [[row[2][i] for row in taken] for i in range(roles)]
        hashes = [text_hashes(column) for column in columns]
        numbers = [
            np.array([row[2][i] for row in taken], dtype) for i, dtype in enumerate(dtypes.values(), roles)
        ]
        tables, places, groups = [r[0] for r in taken], [r[1] for r in taken], [r[3] for r in taken]
        yield Chunk(tables, places, groups, columns, hashes, numbers)


def text_hashes(texts: Sequence[str]) -> bytes:
    """Eight bytes for each text: equal for equal texts, in every table."""
    return b"".join([hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts])


def _nothing_left(config: DataConfig, stream: RowStream) -> UserError:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in stream.dropped.items())
    return UserError(
        f"no row is left of {stream.dropped.total():,}" + (f" ({reasons})" if reasons else ""),
        file=config.source,
        key="data",
        value=config.name,
        fix="look at the columns and at data.min_chars",
    )
