"""Rows with one label: a classifier is trained on one set and names the labels of others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedlab.evaluation.core.files import Labelled
from embedlab.evaluation.finetune.buckets import Buckets
from embedlab.evaluation.finetune.config import FineTuneConfig
from embedlab.evaluation.finetune.fit import Fitted, predict, train, use_half
from embedlab.evaluation.finetune.models import Classifier, sentence_encoder, trainable_copy
from embedlab.evaluation.finetune.rows import Rows


@dataclass(frozen=True)
class FinetuneResult:
    """predictions: name of a test set -> labels [n]; fitted: the training; max_length: tokens of a row at
    most; half: trained and scored in bfloat16."""

    predictions: dict[str, NDArray[np.int64]]
    fitted: Fitted
    max_length: int
    half: bool

    def plain(self) -> dict[str, Any]:
        """For the protocol block."""
        precision = "bf16-mixed" if self.half else "float32"
        return {"row_tokens": self.max_length, "precision": precision} | self.fitted.plain()


def classify(
    encoder: object,
    training: Labelled,
    tests: Mapping[str, Labelled],
    classes: int,
    config: FineTuneConfig,
    settings: Mapping[str, Any],
    name: str,
    dev: Labelled | None = None,
) -> FinetuneResult:
    """Fine-tunes a copy of `encoder` on `training` and predicts each of `tests`.

    dev: accuracy on it chooses the weights (`FineTuneConfig.evaluations` looks); None: the last ones.
    """
    source = sentence_encoder(encoder)
    device = source.device
    half = use_half(settings, device)
    rows = Rows(source, config.max_length)

    def buckets(data: Labelled) -> Buckets:
        ids = rows.single(data.first) if data.second is None else rows.pairs(data.first, data.second)
        return Buckets(ids, {"label": torch.from_numpy(data.labels)}, rows.pad_id, device)

    # The new head's weights depend on the seed too.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        model = Classifier(trainable_copy(source), classes, config.dropout, config.vector).to(device)
    look = None
    if dev is not None:
        held, gold = buckets(dev), torch.from_numpy(dev.labels)

        def look() -> float:
            return 100 * float((_labels(model, held, half) == gold).double().mean())

    fitted = train(model, buckets(training), config, name=name, half=half, dev=look)
    predictions = {key: _labels(model, buckets(data), half).numpy() for key, data in tests.items()}
    return FinetuneResult(predictions, fitted, rows.max_length, half)


def _labels(model: Classifier, data: Buckets, half: bool) -> Tensor:
    """Predicted labels [n] on the CPU."""
    found = torch.empty(len(data), dtype=torch.int64, device=data.device)
    for batch, logits in predict(model, data, half):
        found[batch["rows"]] = logits.argmax(dim=1)
    return found.cpu()
