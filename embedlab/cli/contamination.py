"""``embedlab contamination FILES against=sts,retrieval data_dir=…``: what training text holds of evaluation sets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from embedlab.cli.compose import compose
from embedlab.console import print_table, progress_bar, table
from embedlab.data.reader import Layout
from embedlab.data.readers import open_reader
from embedlab.data.sources import find_files
from embedlab.errors import UserError, printable
from embedlab.files import check_absent, check_writable, existing_folder, write_whole


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0, whatever was found."""
    files = [a for a in argv if "=" not in a and not a.startswith("-")]
    rest = [a for a in argv if a not in files]
    # Lists of one item for Hydra, which would split at commas.
    rest = [f"against=[{a[8:]}]" if a.startswith("against=") and "[" not in a else a for a in rest]
    config = compose("contamination", [*rest, *([files[0]] if files else [])], positional=("files",))
    given = [config["files"]] if isinstance(config["files"], str) else list(config["files"])
    n, out, data = config["n"], config["out"] and Path(str(config["out"])), config["data_dir"]
    if type(n) is not int or n < 5:
        raise UserError("must be a whole number from 5 up", key="n", value=n, fix="n=13")
    if out:
        check_absent(out, config["overwrite"])
        check_writable(out)
    if data not in (None, "hub"):
        existing_folder(data, "give the folder of the suites' data", "data_dir")
    columns = config["columns"]
    columns = [columns] if isinstance(columns, str) else columns and [str(name) for name in columns]
    layout = Layout(config["header"], tuple(columns or ()))
    readers = [open_reader(path, layout) for path in find_files(given + files[1:], "files")]

    from embedlab.data.contamination.count import contamination
    from embedlab.data.contamination.overlap import Overlap
    from embedlab.evaluation.held_out import held_out

    suites = [config["against"]] if isinstance(config["against"], str) else config["against"]
    sets = held_out([str(name) for name in suites], data)
    with progress_bar("reading", "rows", sum(reader.size for reader in readers)) as move:
        report = contamination(readers, Overlap(sets, n), columns, move)
    _print(report)
    if out:
        write_whole(out, json.dumps(report, ensure_ascii=False, indent=2) + "\n")
        print(f"Written to {out}")
    return 0


def _print(report: Mapping[str, Any]) -> None:
    """Tables of counts, and where the examples stand; their texts are in ``out`` alone."""
    share = report["rows_hit"] / max(1, report["rows"])
    print(
        f"{report['rows_hit']:,} of {report['rows']:,} rows ({share:.2%}) hold a text of these sets, or a window of it"
    )
    rows = []
    for one in report["sets"]:
        counts = [f"{one[key]:,}" for key in ("equal", "pairs", "both")]
        hit = f"{one['hit'] / max(1, one['texts']):.2%}"
        rows.append((one["set"], f"{one['texts']:,}", f"{one['hit']:,}", hit, *counts))
    print_table(table(("set", "texts", "hit", "share", "equal", "pairs", "both in one row"), rows))
    for name, counts in report["roles"].items():
        print(f"{printable(name)}: {counts['hit']:,} of {counts['texts']:,} texts")
    for one in report["examples"]:
        how = "equal" if one["equal"] else "a window"
        print(f"{one['set']}: {printable(one['file'])}:{one['row']} ({printable(one['role'])}, {how})")
