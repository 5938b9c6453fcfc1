"""Whether a run may go on from a checkpoint, and whether that leaves anything to do."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from embedlab.config.read import read_values, record
from embedlab.config.run import SAME_RECIPE, RunConfig, differences
from embedlab.config.run_files import Training, read_scores_of_run
from embedlab.errors import UserError
from embedlab.run.callbacks.checkpoints import read_checkpoint
from embedlab.run.run_folder import AFTER, CONFIG

log = logging.getLogger(__name__)
MAY_CHANGE = SAME_RECIPE | {
    "stages",
    "trainer.max_steps",
    "trainer.max_epochs",
    "trainer.accelerator",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.deterministic",
    "evaluation.every",
    "step",
    "unpad",
    "backbone.trust_remote_code",
    "data.files",
}
"""Sections and keys with which a run may go on as it began: its length, the machine, how it is watched, how a step is
computed; the caller's permission, which no file keeps; and where the text is, whose content the data compare."""


def check_recipe(checkpoint: Path, values: dict[str, Any]) -> None:
    """Refuse to go on from the checkpoint of another recipe.

    One of before recipes were kept in checkpoints is known by the `config.yaml` beside it, or not at all.

    Raises:
        UserError: naming the key and both values.
    """
    saved = read_checkpoint(checkpoint).recipe
    beside = checkpoint.parent / CONFIG
    if saved is None and beside.is_file():
        saved = read_values(beside)
    if not isinstance(saved, dict):
        return
    for key, was, now in differences(saved, values):
        parts = key.split(".")
        above = {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
        # A key that the record lacks is of a later version.
        if above & MAY_CHANGE or (was is None and not holds(saved, parts)):
            continue
        if (key, was, now) == (
            "trainer.precision",
            "bf16-mixed",
            "auto",
        ):  # what trainer=gpu, ddp and fsdp said
            continue
        was, now = ("null" if value is None else value for value in (was, now))
        raise UserError(
            f"the checkpoint is of another recipe: it was trained with {key}={was}",
            file=checkpoint,
            key=key,
            value=now,
            fix=f"{key}={was} to go on; to begin another recipe with its weights, backbone=local backbone.path=EXPORT",
        )


def holds(values: Any, parts: list[str]) -> bool:
    """Whether nested dictionaries have a key, whatever its value."""
    for part in parts:
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True


def finished(config: RunConfig, folder: Path, checkpoint: Path | None) -> dict[str, float] | None:
    """The scores of the run in `folder` when `checkpoint` is its end and it has been scored; None: work is left.

    Raises:
        UserError: the checkpoint has more updates, or more passes over the data, behind it than are asked for.
    """
    if checkpoint is None:
        return None
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
