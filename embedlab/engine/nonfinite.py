"""A loss that is no number ends the run and says on which rows."""

from __future__ import annotations

from pathlib import Path


class NonFiniteLoss(RuntimeError):
    """The loss became NaN or infinite. The weights are those before the update; saved checkpoints are good.

    Attributes:
        step: updates made before it.
        rows: of the batch, in the order of the data.
        checkpoint: the newest that is there.
    """

    checkpoint: Path | None = None

    def __init__(self, step: int, rows: list[int], detail: str = "") -> None:
        self.step, self.rows = step, rows
        shown = ", ".join(map(str, rows[:16])) + (f", ... ({len(rows)} in all)" if len(rows) > 16 else "")
        super().__init__(
            f"the loss is not finite at step {step}; rows of the batch: {shown}{': ' + detail if detail else ''}. "
            "Lower optimizer.lr, or look at these rows."
        )

    def __str__(self) -> str:
        kept = "" if self.checkpoint is None else f" The checkpoint {self.checkpoint} is intact."
        return f"{super().__str__()}{kept}"
