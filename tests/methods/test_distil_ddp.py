"""Two ranks give the gradient of one big batch: every row is compared with those of all devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from embedlab.backbones import load_backbone
from embedlab.config.backbone import BackboneConfig
from embedlab.config.optimizer import OptimizerConfig
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.tokenization import Tokenization
from embedlab.methods.distil import Distil, DistilConfig
from embedlab.pooling import build_pooling
from tests.ranks import gradients, two_ranks
from tests.support import SENTENCES

TEXTS = [*SENTENCES[:5], SENTENCES[1]]
CASES = [
    DistilConfig(k1=None, cosine=1.0, similarity=5.0, kl=0.2),
    DistilConfig(k1=None, similarity=5.0, kl=0.2, cached=True, mask_duplicates=False),
]


def _encoder(folder: str) -> SentenceEncoder:
    config = BackboneConfig(source="local", path=folder, dropout=0.0)
    backbone, tokenizer = load_backbone(config)
    return SentenceEncoder(backbone, build_pooling("mean", backbone.info), Tokenization(tokenizer))


def _half(folder: str, case: int, rows: slice) -> tuple[Distil, dict[str, Any]]:
    torch.manual_seed(0)
    method = Distil(_encoder(folder), CASES[case], OptimizerConfig(), _encoder(folder + "2")).train()
    if CASES[case].cached:
        vectors = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
        method.teachers[0]._roles["sentence"] = "sentence"  # type: ignore[attr-defined]
        method.teachers[0]._vectors["sentence"] = vectors, torch.zeros(1, dtype=torch.long)  # type: ignore[attr-defined]
    batch: dict[str, Any] = {"rows": torch.arange(6)[rows]}
    for name, (_, words) in method.views({"sentence": ("sentence", None)}, None).items():
        view = words.pad(words.ids(TEXTS), 8)
        view["hash"] = torch.tensor([TEXTS.index(text) for text in TEXTS])
        batch[name] = {key: value[rows] for key, value in view.items()}
    return method, batch


@pytest.mark.timeout(240)
def test_two_ranks_give_the_gradient_of_one_big_batch(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.symlink_to(tiny("bert"))
    (tmp_path / "model2").symlink_to(tiny("roberta", seed=1))
    found = two_ranks(_half, str(folder), len(CASES), 3)
    for case, halves in enumerate(found):
        method, batch = _half(str(folder), case, slice(None))
        method.total(batch)[0].backward()
        expected = gradients(method)
        assert halves.keys() == expected.keys()
        for name, grad in expected.items():
            torch.testing.assert_close(halves[name], grad, rtol=1e-4, atol=1e-6)
