"""Rows of a data set on the model hub, or one line that says what to give instead."""

from __future__ import annotations

from typing import Any

from embedlab.console import quiet
from embedlab.errors import UserError


def hub_rows(
    name: str, config: str | None, split: str, columns: list[str], files: str, converted: bool = False
) -> dict[str, list[Any]]:
    """The named columns of one split as lists.

    files: the local files to name in the error's fix. converted: read the hub's own Parquet copy (a branch
    with a folder for each configuration), for data sets that are scripts, which `datasets` 4 no longer runs.

    Raises UserError when the hub cannot be reached or the data set has no such column.
    """
    try:
        from datasets import load_dataset

        with quiet("huggingface_hub"):  # it reports every retry, and the error below says it all
            if converted:
                rows = load_dataset(name, data_dir=config, revision="refs/convert/parquet", split=split)
            else:
                rows = load_dataset(name, config, split=split)
    except ImportError as error:
        raise UserError(
            "the package datasets is missing",
            fix=f"pip install datasets, or give data_dir=FOLDER with {files}",
        ) from error
    except Exception as error:  # the hub client raises a dozen unrelated types when it is offline
        reason = str(error).strip().splitlines()
        raise UserError(
            f"cannot load {name} from the hub ({reason[0] if reason else type(error).__name__})",
            key="data_dir",
            fix=f"give data_dir=FOLDER with {files}",
        ) from error
    missing = [column for column in columns if column not in rows.column_names]
    if missing:
        raise UserError(
            f"has no column {missing[0]!r} (it has {', '.join(rows.column_names)})",
            file=f"hub:{name}",
            fix=f"give data_dir=FOLDER with {files}",
        )
    return {column: list(rows[column]) for column in columns}
