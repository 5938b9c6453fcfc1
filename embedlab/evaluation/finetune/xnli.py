"""XNLI zero-shot: a classifier trained on English inference pairs, tested on every language there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from embedlab.errors import UserError
from embedlab.evaluation.core.correlation import accuracy
from embedlab.evaluation.core.files import Hub, Labelled, find_file, is_there, names_in, read_labelled
from embedlab.evaluation.core.settings import chosen, folder_of, limit_note, names, row_limit
from embedlab.evaluation.core.suite import Scored, Settings
from embedlab.evaluation.finetune.classify import classify
from embedlab.evaluation.finetune.config import FineTuneConfig, FineTunedSuite

CLASSES = ("entailment", "neutral", "contradiction")
LANGUAGES = ("ar", "bg", "de", "el", "en", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh")
# What published scores are trained on: taken alone where a folder has it.
MULTINLI = "mnli_train"
# Without it, English files with labels by people; of a pair that is in several the first file's label counts, so the
# gold labels come first. MultiNLI's dev file has the labels of one annotator, of which about 12 % are not gold.
TRAINING = (
    "mnli_taxinli_gold", "ling_in_loop_train", "semiauto_nli_train", "snli_dev", "snli_counterfactual_train",
    "mnli_dev_matched_mismatched",
)  # fmt: skip
DEFAULTS = FineTuneConfig(epochs=3, lr=2e-5, batch_size=32, max_length=128)


def load(folder: Path | None, language: str, split: str, stem: str | None = None) -> Labelled:
    """XNLI's `split` (dev, test) in one language: file xnli_{split}_{language}, or `stem`; None: the hub."""
    path = folder and find_file(folder, stem or f"xnli_{split}_{language}")
    hub = Hub("facebook/xnli", language, {"dev": "validation"}.get(split, split), "xnli_test_*.tsv.gz")
    return read_labelled(path, ("premise", "hypothesis"), CLASSES, hub)


def languages(folder: Path | None) -> list[str]:
    """Languages that `folder` has a test file of; the hub's 15."""
    return list(LANGUAGES) if folder is None else names_in(folder, "xnli_test_*")


def load_training(
    folder: Path | None, files: Sequence[str] | None, held_out: Sequence[Labelled], limit: int | None
) -> Labelled:
    """English pairs to train on: `files` (stems; None: `MULTINLI`, else those of `TRAINING` that are there), each once,
    without the pairs of `held_out`; None as folder: MultiNLI's train from the hub.

    limit: rows of each file. Rows without one of the three labels are refused.
    """
    if folder is None:
        return load(None, "en", "train").head(limit)
    usual = (MULTINLI,) if is_there(folder, MULTINLI) else TRAINING
    wanted = list(files) if files is not None else [f for f in usual if is_there(folder, f)]
    if not wanted:
        raise UserError(
            "has no English training pairs",
            file=folder,
            key="data_dir",
            fix=f"files such as {TRAINING[0]}.tsv.gz",
        )
    seen = {pair for data in held_out for pair in zip(data.first, data.second or (), strict=True)}
    pairs: list[tuple[str, str]] = []
    labels: list[int] = []
    for stem in wanted:
        data = load(folder, "en", "train", stem).head(limit)
        for first, second, label in zip(data.first, data.second or (), data.labels.tolist(), strict=True):
            if (first, second) not in seen:
                seen.add((first, second))
                labels.append(label)
                pairs.append((first, second))
    if not pairs:
        fix = "training files of other pairs than those that are scored"
        raise UserError(
            "all training pairs are held out", file=folder, key="train", value=",".join(wanted), fix=fix
        )
    sides = [list(side) for side in zip(*pairs, strict=True)]
    return Labelled(sides[0], sides[1], np.array(labels, dtype=np.int64), ", ".join(wanted))


@dataclass(frozen=True)
class XNLIData:
    """English pairs to train on, English dev where it is there, and the test sets by language."""

    training: Labelled
    dev: Labelled | None
    tests: dict[str, Labelled]


class XNLI(FineTunedSuite):
    """Settings: data_dir (folder of nli/; None: the hub), languages (to test on), train
    (stems of English files, `TRAINING`), limit (rows of each file), finetune.* (`FineTuneConfig`), dtype.

    English dev chooses the weights, where it is there. Scores in percent: "xnli-de/accuracy", ...,
    "xnli/accuracy" (mean over languages), "xnli-zeroshot/accuracy" (mean without English).
    """

    name = "xnli"
    folders = ("nli",)
    keys = ("languages", "train", "limit", "finetune")
    defaults = DEFAULTS

    def load(self, settings: Settings) -> XNLIData:
        """Training, dev and test pairs."""
        self.config(settings)
        folder, limit = folder_of(settings, "nli"), row_limit(settings)
        tested = chosen(names(settings, "languages"), languages(folder), "languages")
        tests = {language: load(folder, language, "test") for language in tested}
        has_dev = folder is None or is_there(folder, "xnli_dev_en")
        dev = load(folder, "en", "dev") if has_dev else None
        held_out = [tests[key] for key in tests if key == "en"] + ([dev] if dev is not None else [])
        training = load_training(folder, names(settings, "train"), held_out, limit)
        tests = {language: data.head(limit) for language, data in tests.items()}
        dev = dev.head(limit) if dev is not None else None
        return XNLIData(training, dev, tests)

    def score(self, encoder: Any, data: XNLIData, settings: Settings) -> Scored:
        """Train on English, and name the labels of each language."""
        config = self.config(settings)
        labels, fitted = classify(
            encoder, data.training, data.tests, len(CLASSES), config, settings, "xnli", data.dev
        )
        found = {language: accuracy(labels[language], test.labels) for language, test in data.tests.items()}
        scores = {"xnli/accuracy": fmean(found.values())}
        if others := [score for language, score in found.items() if language != "en"]:
            scores["xnli-zeroshot/accuracy"] = fmean(others)
        scores |= {f"xnli-{language}/accuracy": score for language, score in found.items()}
        return self.result(
            encoder,
            scores,
            name="xnli_zero_shot",
            aggregation="accuracy; mean over languages",
            data={
                "train": {"source": data.training.source, "rows": len(data.training)},
                "dev": {"source": data.dev.source, "rows": len(data.dev)} if data.dev is not None else None,
                "test": {language: len(test) for language, test in data.tests.items()},
            },
            warnings=limit_note(row_limit(settings)),
            notes=[
                "the weights are those of the best English dev accuracy"
                if data.dev is not None
                else "no dev file: the last weights",
                "encoder template and pooling play no part: the head reads the backbone's last layer",
                *(
                    []
                    if data.training.source in ("hub:facebook/xnli", MULTINLI)
                    else ["not trained on MultiNLI, as published scores are"]
                ),
            ],
            seed=config.seed,
            finetune=config.plain() | fitted,
        )
