"""Parquet tables, read in batches of bounded size, whatever their row groups, dictionaries and values hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

from embedlab.data.reader import FileReader, Values

_BATCH_ROWS, _BATCH_BYTES = 256, 1 << 24
_DIFFERENCES = "DELTA_BYTE_ARRAY"
_SMALL_DICTIONARY = 1 << 21  # bytes; that many times the rows of a batch still fit


class ParquetFile(FileReader):
    """A parquet table; columns of structs are named ``outer.inner``."""

    @cached_property
    def columns(self) -> list[str]:
        with self._open() as file:
            names = _flat_schema(file.schema_arrow)
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            fix = "a name of its own for each column"
            raise self.error(f"the schema names {', '.join(sorted(twice))} twice", fix=fix)
        return names

    quick = True

    def count(self, column: str) -> int:
        with self._open() as file:
            return int(file.metadata.num_rows)

    def rows(self, columns: Sequence[str]) -> Iterator[tuple[int, Values]]:
        return self.rows_from(0, columns)

    def rows_from(self, start: int, columns: Sequence[str]) -> Iterator[tuple[int, Values]]:
        import pyarrow as pa

        row, held = start, 0
        try:
            with self._open() as file:
                n_rows = max(1, file.metadata.num_rows)
                for table in self._tables(file, columns, start):
                    # One value at a time: a dictionary may stand for a thousand times its own size.
                    cells = ((value.as_py() for value in table.column(name)) for name in columns)
                    for values in zip(*cells, strict=True):
                        row += 1
                        held += sum(len(value) for value in values if isinstance(value, str))
                        self.check_expansion(held, row)
                        yield row, values
                    self.position = self.size * row // n_rows
        except UnicodeDecodeError:
            raise self.error("a text that is not UTF-8", row + 1, fix="write the column as UTF-8") from None
        except MemoryError:
            told, fix = "its rows do not fit into memory", "smaller row groups, or a .jsonl file"
            raise self.error(told, row + 1, fix=fix) from None
        except (pa.ArrowException, OSError) as bad:
            told = f"the parquet file is damaged after row {row} ({bad})"
            raise self.error(told, fix="another copy of it") from None
        if row == 0:
            raise self._empty()

    def _tables(self, file: Any, columns: Sequence[str], start: int = 0) -> Iterator[Any]:
        """Batches of a bounded size after `start` rows, whatever row groups and values hold; structs are flat."""
        import pyarrow as pa

        def flat(batch: Any) -> Any:
            return pa.Table.from_batches([batch]).flatten()

        names = file.schema_arrow.names
        tops = [n for n in names if n in columns or any(c.startswith(f"{n}.") for c in columns)]
        paths = [file.schema.column(i).path for i in range(file.metadata.num_columns)]
        wanted = [i for i, path in enumerate(paths) if path in tops or path.split(".")[0] in tops]
        groups = [
            [file.metadata.row_group(group).column(i) for i in wanted] for group in range(file.num_row_groups)
        ]
        # pyarrow decodes texts that are stored as differences into no dictionary.
        plain = {c.path_in_schema for chunks in groups for c in chunks if _DIFFERENCES in c.encodings}
        with self._open(read_dictionary=[path for path in paths if path not in plain]) as encoded:
            for group, chunks in enumerate(groups):
                meta = file.metadata.row_group(group)
                if start >= meta.num_rows:
                    start -= meta.num_rows
                    continue
                size = sum(chunk.total_uncompressed_size for chunk in chunks)
                self.check_expansion(size, None, sum(chunk.total_compressed_size for chunk in chunks))
                rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES * meta.num_rows // max(1, size)))
                rows = min(rows, 8) if plain else rows  # each text may repeat the one before it
                one = [flat(batch) for batch in islice(encoded.iter_batches(1, [group], tops), 1)]
                words = [c for table in one for c in table.columns if pa.types.is_dictionary(c.type)]
                large = any(column.chunk(0).dictionary.nbytes > _SMALL_DICTIONARY for column in words)
                for batch in (encoded if large else file).iter_batches(rows, [group], tops):
                    if start < len(batch):
                        yield flat(batch.slice(start))
                    start = max(0, start - len(batch))

    def _open(self, **how: Any) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            if self.size == 0:
                raise self._empty()
            return pq.ParquetFile(self.path, buffer_size=1 << 20, **how)
        except (pa.ArrowException, OSError) as bad:
            raise self.error(f"not a readable parquet file ({bad})", fix="another copy of it") from None


def _flat_schema(schema: Any) -> list[str]:
    import pyarrow as pa

    names = []
    for column in schema:
        if pa.types.is_struct(column.type):
            names += [f"{column.name}.{column.type.field(i).name}" for i in range(column.type.num_fields)]
        else:
            names.append(column.name)
    return names
