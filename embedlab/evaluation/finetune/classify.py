"""Rows with one label: a classifier is trained on one set and names the labels of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from embedlab.evaluation.core.correlation import accuracy
from embedlab.evaluation.core.files import Labelled
from embedlab.evaluation.finetune.buckets import Buckets
from embedlab.evaluation.finetune.config import FineTuneConfig
from embedlab.evaluation.finetune.fit import Learner
from embedlab.evaluation.finetune.models import Classifier


def classify(
    encoder: object,
    training: Labelled,
    tests: Mapping[str, Labelled],
    classes: int,
    config: FineTuneConfig,
    settings: Mapping[str, Any],
    name: str,
    dev: Labelled | None = None,
) -> tuple[dict[str, NDArray[np.int64]], dict[str, Any]]:
    """Fine-tunes a copy of `encoder` on `training` and predicts each of `tests`.

    dev: accuracy on it chooses the weights (`FineTuneConfig.evaluations` looks); None: the last ones.

    Returns labels [n] by the name of the test set, and what the training was, for the protocol block.
    """
    learner = Learner(
        encoder, config, settings, lambda body: Classifier(body, classes, config.dropout, config.vector)
    )

    def buckets(data: Labelled) -> Buckets:
        rows = learner.rows
        ids = rows.single(data.first) if data.second is None else rows.pairs(data.first, data.second)
        return learner.buckets(ids, label=torch.from_numpy(data.labels))

    def labels(data: Buckets) -> NDArray[np.int64]:
        found = torch.empty(len(data), dtype=torch.int64, device=data.device)
        for batch, logits in learner.predict(data):
            found[batch["rows"]] = logits.argmax(dim=1)
        return found.cpu().numpy()

    look = None
    if dev is not None:
        held, gold = buckets(dev), dev.labels

        def look() -> float:
            return accuracy(labels(held), gold)

    done = learner.fit(buckets(training), name, look)
    return {key: labels(buckets(data)) for key, data in tests.items()}, done
