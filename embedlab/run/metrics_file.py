"""`metrics.csv`: one row a record, appended, and carried over a resume."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from embedlab.errors import UserError
from embedlab.files import whole_file, writing


class MetricsFile(Logger):
    """Lightning's own CSV logger deletes the file of the run that it resumes; this one goes on.

    Args:
        path: of the file. Its columns grow as new names appear.
        after: when resuming, the step of the checkpoint: later rows, which will be made again, are dropped.

    Raises:
        UserError: the file to go on with is no table.
    """

    def __init__(self, path: Path, after: int | None = None) -> None:
        super().__init__()
        self.path = Path(path)
        self._columns: list[str] = ["step"]
        self._opened = False
        rows = self._read() if after is not None and self.path.exists() else []
        self._kept = [r for r in rows if (r.get("step") or "").isdecimal() and int(r["step"]) <= (after or 0)]

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """The run's configuration is in config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if not self._opened:
            self._open()
        row = {"step": step, **{k: float(v) for k, v in metrics.items() if k != "epoch"}}
        if new := [k for k in row if k not in self._columns]:
            rows = self._read()
            self._columns += sorted(new)
            self._rewrite(rows)
        with writing(self.path), self.path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    def _open(self) -> None:
        self._opened = True
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._rewrite(self._kept)

    def _read(self) -> list[dict[str, str]]:
        try:
            with self.path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                # Cells beyond the columns, of a line that a kill has cut, have no name.
                rows = [{k: v for k, v in row.items() if k is not None} for row in reader]
                self._columns = list(reader.fieldnames or ["step"])
        except (csv.Error, ValueError) as error:
            fix = "move it away: the run goes on without its earlier rows"
            raise UserError(f"is no table ({error})", file=self.path, fix=fix) from error
        return rows

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        with whole_file(self.path) as new, new.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)
