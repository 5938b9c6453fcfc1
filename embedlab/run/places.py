"""Whether what a configuration names lies on this machine; asked before torch is loaded, which takes seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from embedlab.backbones.resolve import donor_config, resolve
from embedlab.config.backbone import BackboneConfig
from embedlab.config.trainer import ScoringConfig
from embedlab.data.rows import check_first_rows
from embedlab.errors import UserError
from embedlab.files import existing_folder
from embedlab.run.run_folder import given_checkpoint


def check_places(shared: Mapping[str, Any], purpose: str = "fit") -> None:
    """See that the checkpoint, the text, the backbone and the folder of STS files are there, and what the text begins
    with; no hub is asked.

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
    if purpose in ("fit", "predict"):
        check_first_rows(shared["data"])
    _check_backbone(shared["backbone"])
    if scoring.sts_dir not in (None, "hub"):
        fix = "give the folder that holds stsb_dev.tsv.gz, or evaluation.sts_dir=hub"
        existing_folder(scoring.sts_dir, fix, "evaluation.sts_dir")


def _check_backbone(backbone: BackboneConfig) -> None:
    if backbone.source in ("local", "shipped"):
        resolve(backbone, weights=False)
    elif backbone.source == "fresh" and (donor := (backbone.fresh or {}).get("init_from")) is not None:
        resolve(donor_config(str(donor)), weights=False)
