"""MixCSE: its objective on two dropout views, its released form, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from embedlab.config.optimizer import OptimizerConfig
from embedlab.errors import UserError
from embedlab.methods.contrast import Matryoshka
from embedlab.methods.mixcse import MixCSE, MixCSEConfig
from embedlab.objectives.more_negatives import mix_nce, released_mix_nce
from tests.methods.baselines import Tiny, batch, encoder
from tests.methods.golden import check_golden
from tests.methods.runs import run_of
from tests.support import SENTENCES


def make(tiny: Tiny, **config: Any) -> MixCSE:
    return MixCSE(encoder(tiny), MixCSEConfig(**config), OptimizerConfig()).eval()


def test_golden_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_golden("mixcse", tmp_path, monkeypatch)


def test_both_forms_with_a_text_that_comes_again(tiny: Tiny) -> None:
    data = batch(make(tiny), (*SENTENCES[:5], SENTENCES[0]))
    hashes, ring = data["sentence"]["hash"], torch.arange(6).roll(-1)
    for form, lam in (("paper", 0.2), ("paper", 0.5), ("released", 0.2)):
        method = make(tiny, form=form, lam=lam)
        z = method.head(method.encoder(data["sentence"]["input_ids"], data["sentence"]["attention_mask"]))
        expected = (
            mix_nce(z, z, ring, 0.05, lam, anchor_hashes=hashes, candidate_hashes=hashes)
            if form == "paper"
            else released_mix_nce(z, z, z, ring, 0.05, lam)
        )
        torch.testing.assert_close(method.losses(data).losses["mix_nce"], expected.loss)


@pytest.mark.parametrize("form", ["paper", "released"])
def test_nested_widths_are_added_up(tiny: Tiny, form: Any) -> None:
    method = make(tiny, form=form, matryoshka=Matryoshka((32, 8), (1.0, 0.5)))
    data = batch(method)
    hashes, ring = data["sentence"]["hash"], torch.arange(6).roll(-1)
    z = method.head(method.encoder(data["sentence"]["input_ids"], data["sentence"]["attention_mask"]))
    parts = [
        mix_nce(v, v, ring, 0.05, 0.2, anchor_hashes=hashes, candidate_hashes=hashes).loss
        if form == "paper"
        else released_mix_nce(v, v, v, ring, 0.05, 0.2).loss
        for v in (z, z[:, :8])
    ]
    torch.testing.assert_close(method.losses(data).losses["mix_nce"], parts[0] + parts[1] / 2)


def test_only_the_release_scores_with_the_head(tiny: Tiny) -> None:
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    assert make(tiny).dev_vectors(x, []) is x
    released = make(tiny, form="released")
    torch.testing.assert_close(released.dev_vectors(x, []), released.head(x))


def test_settings_without_meaning_are_named(tiny: Tiny) -> None:
    info = encoder(tiny).backbone.info
    assert MixCSEConfig().check(info, run_of()) == []
    for lam in (-0.1, 1.1, float("nan")):
        with pytest.raises(UserError, match=r"method\.lam"):
            MixCSEConfig(lam=lam).check(info, run_of())
