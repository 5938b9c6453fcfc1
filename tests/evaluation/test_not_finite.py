"""One rule for vectors that are not finite: no suite scores them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import embedlab
from embedlab.errors import UserError
from embedlab.evaluation.core.suite import suite, suite_names
from tests.evaluation.everything import every_kind


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [name for name in suite_names() if name != "mteb"])
def test_every_suite_refuses_an_encoder_without_finite_vectors(
    name: str, value: float, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    one = suite(name)
    encoder = embedlab.load(tiny("bert"))
    with torch.no_grad():
        encoder.backbone.model.get_input_embeddings().weight.fill_(value)
    settings = {"data_dir": one.folder(every_kind(tmp_path / "data")), "device": "cpu"}
    if "finetune" in one.keys:
        settings["finetune"] = {"steps": 2, "batch_size": 2, "max_length": 32, "stride": 8}
    with pytest.raises(UserError, match="not finite"):
        one.run(encoder, settings)
