"""``embedlab quantize VECTORS OUT store=…``: vectors in fewer bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from embedlab.cli.compose import compose
from embedlab.corpus.parts import check_folder
from embedlab.corpus.quantize import Source, calibration, quantize
from embedlab.corpus.vector_files import check_place, vector_file
from embedlab.encoders.codes import check_store
from embedlab.errors import UserError
from embedlab.files import check_absent, check_writable


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0."""
    config = compose("quantize", argv, positional=("input", "output"))
    store, out, path = str(config["store"]), Path(str(config["output"])), Path(str(config["input"]))
    check_store(store)
    source = Source(path)
    if out.exists() and out.samefile(path):
        raise UserError("input and output are the same", file=out, fix="write elsewhere")
    if source.parts is None:
        vector_file(out)
        if out.suffix.lower() != path.suffix.lower():
            told = f"is no {path.suffix} file as the input: rows have numbers in .parquet alone"
            raise UserError(told, file=out, key="output", fix=f"end its name in {path.suffix}")
        check_absent(out, config["overwrite"])
        check_place(out)
    else:
        check_folder(out, config["overwrite"])
        check_writable(out, key="output")
    given = config["calibration"]
    ranges = None if given is None else calibration(Path(str(given)))
    found = quantize(source, out, store, ranges)  # type: ignore[arg-type]
    print(
        f"{found.rows:,} vectors: {out}, {found.after:,} bytes in place of {found.before:,}; "
        f"mean cosine with the floats {found.cosine:.4f}"
    )
    return 0
