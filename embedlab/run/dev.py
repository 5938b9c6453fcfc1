"""The development set of a run: what is scored while training, selects the weights and stops early."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from lightning.pytorch import Callback

from embedlab.config.data import DataConfig
from embedlab.config.trainer import ScoringConfig
from embedlab.data.kinds import data_config
from embedlab.data.rows import read_rows
from embedlab.errors import UserError
from embedlab.evaluation.core.files import is_there
from embedlab.evaluation.core.suite import keys_named
from embedlab.evaluation.retrieval.beir import is_collection, load_collection
from embedlab.evaluation.retrieval.dev import DevRetrieval
from embedlab.evaluation.sts.dev import DevSet
from embedlab.evaluation.sts.sts import STSPairs, load_sts

log = logging.getLogger(__name__)
KEYS = {"data_dir": "evaluation.sts_dir", "sts_text": "evaluation.sts_text"}
"""A suite's keys by the names that a run has for them."""
Dev = DevSet | DevRetrieval
_SPLITS = ("dev", "test")


def sts_folder(scoring: ScoringConfig) -> str | None:
    """Where the STS files are; None: the hub."""
    return None if scoring.sts_dir == "hub" else scoring.sts_dir


def load_dev(scoring: ScoringConfig, data: DataConfig | None = None) -> Dev | None:
    """One's own dev set, or STS-B dev, where the run has STS files.

    None also where it does not select and the folder does not hold it.

    Args:
        scoring: of the run.
        data: that it trains on: its prompts stand before the texts of one's own dev set, too.

    Raises:
        UserError: they are not where ``evaluation.dev`` or ``evaluation.sts_dir`` says, or are none.
    """
    if scoring.dev is not None:
        return _own(Path(scoring.dev).expanduser(), dict((data and data.prompts) or {}))
    if scoring.sts_dir is None:
        return None
    folder = Path(sts_folder(scoring) or "")
    there = any(is_there(place, "stsb_dev") for place in (folder, folder / "sts"))
    if scoring.selection != "dev" and scoring.sts_dir != "hub" and folder.is_dir() and not there:
        log.info("No STS-B dev in %s: it is not scored, and selects nothing.", folder)
        return None
    with keys_named(KEYS, "evaluation.sts_dir=hub"):
        return DevSet(load_sts("stsb", sts_folder(scoring), scoring.sts_text, split="dev"))


def _own(place: Path, prompts: Mapping[str, str | None]) -> Dev:
    if place.is_dir():
        if not is_collection(place):
            raise UserError(
                "the folder holds no corpus.jsonl", key="evaluation.dev", value=str(place),
                fix="a folder of corpus.jsonl, queries.jsonl and qrels/dev.tsv, or a file of scored pairs",
            )  # fmt: skip
        split = next((s for s in _SPLITS if _has_split(place, s)), "dev")
        return DevRetrieval(
            load_collection(place, split), prompts.get("anchor") or "", prompts.get("positive") or ""
        )
    if not place.is_file():
        raise UserError("no such file or folder", key="evaluation.dev", value=str(place))
    rows = [row[2] for row in read_rows(data_config({"name": "scored", "files": str(place)}))]
    first, second = (
        [(prompts.get(role) or "") + row[side] for row in rows]
        for side, role in enumerate(("first", "second"))
    )
    gold = np.array([row[2] for row in rows], np.float64)
    if len(set(gold.tolist())) < 2:
        raise UserError("all scores are the same, which orders nothing", key="evaluation.dev", file=place)
    pairs = STSPairs(place.name.partition(".")[0], "dev", "raw", first, second, gold, None, str(place))
    # Four fifths of the scale, as 4 of STS-B's 5.
    return DevSet(pairs, positive=float(gold.min() + 0.8 * (gold.max() - gold.min())))


def _has_split(folder: Path, split: str) -> bool:
    stems = (f"qrels_{split}", f"qrels/{split}")
    return any((folder / f"{stem}.tsv{end}").is_file() for stem in stems for end in ("", ".gz"))


def early_stopping(dev: Dev | None, patience: int) -> Callback:
    """Ends a run after so many scorings of the dev set without a better one.

    Raises:
        UserError: there is no dev set.
    """
    from lightning.pytorch.callbacks import EarlyStopping

    if dev is None:
        raise UserError(
            "early stopping watches the dev score",
            key="callbacks.early_stopping",
            fix="evaluation.dev=FILE of scored pairs, or evaluation.sts_dir",
        )
    return EarlyStopping(f"dev/{dev.metric}", mode="max", patience=patience, strict=False)
