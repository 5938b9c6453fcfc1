"""The development set of a run: what is scored while training, selects the weights and stops early."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from lightning.pytorch import Callback

from embedlab.config.data import DataConfig
from embedlab.config.trainer import ScoringConfig
from embedlab.data.kinds import data_config, data_kind
from embedlab.data.rows import read_rows
from embedlab.errors import UserError
from embedlab.evaluation.core.files import is_there
from embedlab.evaluation.core.suite import keys_named
from embedlab.evaluation.retrieval.beir import is_collection, load_collection
from embedlab.evaluation.retrieval.dev import DevRetrieval
from embedlab.evaluation.sts.dev import DevSet
from embedlab.evaluation.sts.sts import STSPairs, load_sts
from embedlab.files import like

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
        return _own(Path(scoring.dev).expanduser(), {} if data is None else _prompts(data))
    if scoring.sts_dir is None:
        return None
    folder = Path(sts_folder(scoring) or "")
    there = any(is_there(place, "stsb_dev") for place in (folder, folder / "sts"))
    if scoring.selection != "dev" and scoring.sts_dir != "hub" and folder.is_dir() and not there:
        log.info("No STS-B dev in %s: it is not scored, and selects nothing.", folder)
        return None
    with keys_named(KEYS, "evaluation.sts_dir=hub"):
        return DevSet(load_sts("stsb", sts_folder(scoring), scoring.sts_text, split="dev"))


def _prompts(data: DataConfig) -> dict[str, str]:
    """What stands before the texts of each role; of a mix that of all sets which have the role."""
    sets = [one.config for one in data.sets.values()] or [data]
    found: dict[str, set[str]] = {}
    for one in sets:
        kind = data_kind(one.name)
        given = kind.prompts_of(one)
        for role in kind.roles_of(one):
            found.setdefault(role, set()).add(given.get(role, ""))
    for role, several in found.items():
        if len(several) > 1:
            log.warning(
                "The sets have several prompts for the %s; evaluation.dev is scored without one.", role
            )
    return {role: several.pop() for role, several in found.items() if len(several) == 1}


def _own(place: Path, prompts: Mapping[str, str]) -> Dev:
    if place.is_dir():
        if not is_collection(place):
            raise UserError(
                "the folder holds no corpus.jsonl", key="evaluation.dev", value=str(place),
                fix="a folder of corpus.jsonl, queries.jsonl and qrels/dev.tsv, or a file of scored pairs",
            )  # fmt: skip
        split = next((s for s in _SPLITS if _has_split(place, s)), "dev")
        with _named():
            collection = load_collection(place, split)
        if collection.dangling:
            log.warning("%s: %d judgements name texts that are not there", place, collection.dangling)
        return DevRetrieval(collection, prompts.get("anchor", ""), prompts.get("positive", ""))
    if not place.is_file():
        fix = like(place) or "a file of pairs or a folder of retrieval, or null"
        raise UserError("no such file or folder", key="evaluation.dev", value=str(place), fix=fix)
    scored = data_config({"name": "scored", "files": str(place), "overlong": "truncate"})
    with _named():
        stream = read_rows(scored)
        rows = [row[2] for row in stream]
    if stream.dropped:
        log.warning(
            "%s: rows left out: %s", place, ", ".join(f"{n:,} {why}" for why, n in stream.dropped.items())
        )
    first, second = (
        [prompts.get(role, "") + row[side] for row in rows] for side, role in enumerate(("first", "second"))
    )
    gold = np.array([row[2] for row in rows], np.float64)
    if len(set(gold.tolist())) < 2:
        fix = "pairs of different scores"
        raise UserError(
            "all scores are the same, which orders nothing", key="evaluation.dev", file=place, fix=fix
        )
    name = place.name.partition(".")[0]
    pairs = STSPairs(name, "dev", "raw", first, second, gold, None, str(place), dropped=stream.dropped)
    # Four fifths of the scale, as 4 of STS-B's 5.
    return DevSet(pairs, positive=float(gold.min() + 0.8 * (gold.max() - gold.min())))


@contextmanager
def _named() -> Iterator[None]:
    """An error inside names the dev set, and not the keys of the training data, which are not for it."""
    try:
        yield
    except UserError as error:
        if error.key is not None and error.key.startswith("data.columns"):
            error.fix = "columns called first, second and score"
        if (error.key or "data").startswith(("data", "split")):  # others name a column of the file
            error.key, error.value = "evaluation.dev", None
        raise


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
