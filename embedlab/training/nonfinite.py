"""A loss that is no number ends the run and says on which rows."""

from __future__ import annotations


class NonFiniteLoss(RuntimeError):
    """The loss became NaN or infinite. The weights are those before the update; saved checkpoints are good.

    Attributes:
        step: updates made before it.
        rows: of the batch, in the order of the data.
    """

    def __init__(self, step: int, rows: list[int], detail: str = "") -> None:
        self.step, self.rows = step, rows
        shown = ", ".join(map(str, rows[:16])) + (f", ... ({len(rows)} in all)" if len(rows) > 16 else "")
        super().__init__(
            f"the loss is not finite at step {step}; rows of the batch: {shown}{': ' + detail if detail else ''}. "
            "The last checkpoint is intact. Lower optimizer.lr, or look at these rows."
        )
