"""Whether a checkpoint leaves anything to do, before the run that goes on from it touches its folder."""

from __future__ import annotations

import logging
from pathlib import Path

from embedlab.config.read import record
from embedlab.config.run import RunConfig
from embedlab.config.run_files import Training, read_scores_of_run
from embedlab.errors import UserError
from embedlab.run.callbacks.checkpoints import read_checkpoint
from embedlab.run.folder import AFTER

log = logging.getLogger(__name__)


def finished(config: RunConfig, folder: Path, checkpoint: Path) -> dict[str, float] | None:
    """The scores of the run in `folder` when `checkpoint` is its end and it has been scored; None: work is left.

    Raises:
        UserError: the checkpoint has more updates, or more passes over the data, behind it than are asked for.
    """
    content = read_checkpoint(checkpoint)
    step, passes = content.global_step, content.passes
    asked = (("max_steps", config.trainer.max_steps, step), ("max_epochs", config.trainer.max_epochs, passes))
    for name, most, done in asked:
        if 0 <= most < done:
            where = f"step {step}" if name == "max_steps" else f"step {step}, after {passes} epochs"
            raise UserError(
                f"nothing is left to train, {checkpoint} is at {where}",
                key=f"trainer.{name}",
                value=most,
                fix=f"trainer.{name}={done} or more, or another hydra.run.dir for a shorter run",
            )
    reached = [f"trainer.{name}={most}" for name, most, done in asked if most == done]
    path = folder / AFTER
    # No file, or one of an earlier step: stopped between its last step and its scores.
    scores = _scores(path, step) if reached else None
    if scores is None:
        return None
    log.info(
        "Finished: %s is at step %d, the end by %s; %s stays as it is. To train on, raise %s; to score again, "
        "embedlab evaluate ckpt=%s.",
        checkpoint, step, " and ".join(reached), path, " and ".join(r.split("=")[0] for r in reached), folder,
    )  # fmt: skip
    return scores


def _scores(path: Path, step: int) -> dict[str, float] | None:
    """The scores of a run at its end; None: no such file, or another's, which the run may replace."""
    try:
        found = read_scores_of_run(path)
        training = record(Training, found.training, path, "training") if found is not None else None
    except UserError:
        return None
    return found.numbers if found is not None and training is not None and training.steps == step else None
