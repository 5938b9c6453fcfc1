"""Two ranks give BEPA's gradients of one big batch, for losses by pairs and for statistics of the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from embedlab.backbones import load_backbone
from embedlab.config.backbone import BackboneConfig
from embedlab.config.optimizer import OptimizerConfig
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.tokenization import Tokenization
from embedlab.methods.bepa import BEPA, BEPAConfig
from embedlab.pooling import build_pooling
from tests.ranks import gradients, two_ranks

REPEATED = [("The girl reads.", "a lake"), ("Two dogs run", "the tide"), ("Rain.", "is it open")]
REPEATED += [REPEATED[0]] * 3
"""On the second rank every text comes again, and its anchors have no negative of their own rank."""
SKIPPED = [("Rain.", "Rain."), ("a lake", "a lake"), ("Rain.", "Rain."), *[("Rain.", "a lake")] * 3]
"""The second rank's anchors have no negative anywhere: the mean is over those of the first."""
CASES = [
    (BEPAConfig(lam=2.0), REPEATED),
    (BEPAConfig(lam=2.0), SKIPPED),
    (
        BEPAConfig(lam=2.0, mlm_pack="bi", align_input="packed_blockmask", loss="vicreg", predictor="mlp"),
        REPEATED,
    ),
    (BEPAConfig(lam=2.0, loss="cosine", target="ema", predictor="linear"), REPEATED),
]


def _method(folder: str, config: BEPAConfig) -> BEPA:
    backbone, tokenizer = load_backbone(
        BackboneConfig(source="local", path=folder, dropout=0.0), head="masked_lm"
    )
    encoder = SentenceEncoder(backbone, build_pooling("cls", backbone.info), Tokenization(tokenizer))
    torch.manual_seed(0)
    method = BEPA(encoder, config, OptimizerConfig())
    # Masks are drawn by each rank anew: the alignment is what gathers.
    method.prediction.forward = lambda backbone, ids, mask, *rest: _still(backbone, ids, mask)  # type: ignore[method-assign]
    return method.train()


def _still(backbone: nn.Module, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """In place of the masked language modelling: a mean over rows that goes through body and head."""
    logits = backbone.head(backbone(ids, mask)[-1][:, 0])
    return logits.logsumexp(-1).mean(), logits.new_zeros(())


def _batch(method: BEPA, pairs: list[tuple[str, str]], rows: slice) -> dict[str, Any]:
    words = method.encoder.tokenization
    known = sorted({text for pair in pairs for text in pair})
    made = {}
    for view, texts in zip(("source", "target"), zip(*pairs, strict=True), strict=True):
        tokens = words.pad(words.ids(texts), 8)
        tokens["hash"] = torch.tensor([known.index(t) for t in texts])
        made[view] = {k: v[rows] for k, v in tokens.items()}
    return made


def _half(folder: str, case: int, rows: slice) -> tuple[BEPA, dict[str, Any]]:
    config, pairs = CASES[case]
    method = _method(folder, config)
    return method, _batch(method, pairs, rows)


@pytest.mark.timeout(240)
def test_two_ranks_give_the_gradient_of_one_big_batch(tiny: Callable[..., Path]) -> None:
    folder = str(tiny("xlm-roberta"))
    found = two_ranks(_half, folder, len(CASES), 3)
    for case, ((config, _), halves) in enumerate(zip(CASES, found, strict=True)):
        method, batch = _half(folder, case, slice(None))
        method.total(batch)[0].backward()
        expected = gradients(method)
        assert halves.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                halves[name],
                value,
                atol=2e-5,
                rtol=1e-3,
                msg=f"{config.loss} {name}",
            )


def test_the_stand_in_is_called(tiny: Callable[..., Path]) -> None:
    """Guards the test above: with another name of the inner call it would compare what is drawn at random."""
    method = _method(str(tiny("xlm-roberta")), CASES[0][0])
    torch.manual_seed(0)
    first = method.total(_batch(method, REPEATED, slice(None)))[0]
    torch.manual_seed(1)
    assert torch.equal(first, method.total(_batch(method, REPEATED, slice(None)))[0])
