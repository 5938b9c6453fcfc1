"""Whether what a configuration names lies on this machine; asked before torch is loaded, which takes seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from embedlab.backbones.resolve import donor_config, resolve
from embedlab.config.backbone import BackboneConfig
from embedlab.config.trainer import ScoringConfig, TrainerConfig
from embedlab.data.rows import check_first_rows
from embedlab.distributed.devices import device_count
from embedlab.errors import UserError
from embedlab.files import existing_folder
from embedlab.run.run_folder import given_checkpoint


def check_places(shared: Mapping[str, Any], purpose: str = "fit") -> None:
    """See that the checkpoint, the backbone, the folder of STS files and the text are there, and what the text begins
    with: of a small file, whether it has a batch. No hub is asked.

    Args:
        shared: the sections of `parse_shared`.
        purpose: ``fit``, or ``validate``, which needs a development set, ``test`` or ``predict``.

    Raises:
        UserError: one of them is not.
    """
    scoring: ScoringConfig = shared["evaluation"]
    if purpose == "validate" and not scoring.has_dev:
        raise UserError(
            "validation scores a development set",
            key="evaluation.sts_dir",
            fix="name the folder of the STS files, or evaluation.dev=FILE of scored pairs",
        )
    if shared["ckpt_path"] is not None:  # a run that goes on may have nothing left to read
        given_checkpoint(shared["ckpt_path"])
        return
    _check_backbone(shared["backbone"])
    if scoring.sts_dir not in (None, "hub"):
        fix = "give the folder that holds stsb_dev.tsv.gz, or evaluation.sts_dir=hub"
        existing_folder(scoring.sts_dir, fix, "evaluation.sts_dir")
    if purpose in ("fit", "predict"):
        check_first_rows(shared["data"], _devices(shared) if purpose == "fit" else 0)


def _devices(shared: Mapping[str, Any]) -> int:
    """At least how many devices train; 0: none, as far as is known without torch."""
    trainer: TrainerConfig = shared["trainer"]
    try:
        if shared["method"].idle:
            return 0
    except (AttributeError, NameError):  # what the text of its file alone does not say
        return 0
    return (1 if trainer.devices in ("auto", -1, "-1") else device_count(trainer)) * trainer.num_nodes


def _check_backbone(backbone: BackboneConfig) -> None:
    if backbone.source in ("local", "shipped"):
        resolve(backbone, weights=False)
    elif backbone.source == "fresh" and (donor := (backbone.fresh or {}).get("init_from")) is not None:
        resolve(donor_config(str(donor)), weights=False)
