"""WhitenedCSE: what its two contrasts are of, two ranks, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embedlab.config.optimizer import OptimizerConfig
from embedlab.errors import UserError
from embedlab.methods.whitenedcse import WhitenedCSE, WhitenedCSEConfig
from embedlab.objectives.info_nce import info_nce
from tests.methods.baselines import Tiny, batch, encoder
from tests.methods.golden import check_golden
from tests.methods.runs import run_of
from tests.ranks import gradients, two_ranks
from tests.support import SENTENCES


def make(tiny: Tiny, **config: Any) -> WhitenedCSE:
    return WhitenedCSE(encoder(tiny), WhitenedCSEConfig(**config), OptimizerConfig()).eval()


def test_golden_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_golden("whitenedcse", tmp_path, monkeypatch)


def standardised(h: Tensor, eps: float) -> Tensor:
    """Groups of one feature."""
    return (h - h.mean(0)) / (h.var(0, correction=0) + eps).sqrt()


def test_the_first_view_meets_the_second_and_the_third_behind_whitening_and_head(tiny: Tiny) -> None:
    method = make(tiny, groups=32, eps=1e-3)
    data = batch(method, (*SENTENCES[:5], SENTENCES[0]))
    view, hashes = data["sentence"], data["sentence"]["hash"]
    z = method.head(standardised(method.encoder(view["input_ids"], view["attention_mask"]), 1e-3))
    expected = info_nce(z, z, 0.05, anchor_hashes=hashes, candidate_hashes=hashes).loss
    found = method.losses(data).losses
    torch.testing.assert_close(found, {"info_nce": expected, "third_view": expected})


def test_each_view_has_a_permutation_of_its_own(tiny: Tiny) -> None:
    method = make(tiny, groups=8, tau=1.0)
    data = batch(method)
    torch.manual_seed(0)
    found = method.losses(data).losses
    # Without dropout the views differ by it alone.
    assert (found["info_nce"] - found["third_view"]).abs() > 1e-4
    assert (method.losses(data).losses["info_nce"] - found["info_nce"]).abs() > 1e-4
    view = data["sentence"]
    h = method.encoder(view["input_ids"], view["attention_mask"])
    torch.manual_seed(0)
    z = [method.head(method.whitened(h, order)) for order in torch.rand(3, 32).argsort(1)]
    for name, other in (("info_nce", z[1]), ("third_view", z[2])):
        expected = info_nce(z[0], other, 1.0, anchor_hashes=view["hash"], candidate_hashes=view["hash"])
        torch.testing.assert_close(found[name], expected.loss)


def test_the_encoder_that_is_kept_has_no_whitening(tiny: Tiny) -> None:
    method = make(tiny, groups=8)
    assert {name.partition(".")[0] for name in method.state_dict()} == {"encoder", "head"}
    x = torch.randn(3, 32)
    assert method.dev_vectors(x, []) is x


def _half(folder: str, case: int, own: slice) -> tuple[Any, dict[str, Any]]:
    """Groups of one feature, which need no permutation."""
    torch.manual_seed(0)
    method = make(lambda *_, **__: Path(folder), groups=32, tau=0.5)
    data = batch(method, (*SENTENCES[:5], SENTENCES[0]))
    view = {name: value[own] for name, value in data["sentence"].items()}
    return method, {"rows": data["rows"][own], "sentence": view}


@pytest.mark.timeout(300)
def test_two_ranks_give_the_gradient_of_one_batch_that_is_whitened_in_two(tiny: Tiny) -> None:
    folder = str(tiny("bert"))
    (found,) = two_ranks(_half, folder, 1, 3)
    method, data = _half(folder, 0, slice(None))
    whole = method.whitened
    method.whitened = lambda h, order: torch.cat([whole(half, order) for half in h.chunk(2)])
    method.total(data)[0].backward()
    expected = gradients(method)
    largest = max(float(g.abs().max()) for g in expected.values())
    assert largest > 1e-3
    for name, gradient in expected.items():
        error = float((found[name] - gradient).abs().max()) / largest
        assert error < 1e-4, f"{name}: {error:.1e} of the largest gradient"


def test_settings_without_meaning_are_named(tiny: Tiny) -> None:
    info = encoder(tiny).backbone.info
    assert WhitenedCSEConfig(groups=8).check(info, run_of()) == []
    wide = run_of(pooling="rep_concat", batch_size=5)  # groups of 8 features, of states of 32
    with pytest.raises(UserError, match=r"8 features .*data\.batch_size=5"):
        WhitenedCSEConfig(groups=8).check(info, wide)
    assert WhitenedCSEConfig(groups=64).check(info, wide) == []
    for change, words in (({"groups": 5}, "groups"), ({"groups": 0}, "groups"), ({"eps": -1.0}, "eps")):
        with pytest.raises(UserError, match=rf"method\.{words}"):
            WhitenedCSEConfig(**change).check(info, run_of())  # type: ignore[arg-type]
    WhitenedCSEConfig(groups=8).check(info, run_of(batch_size=5))
    for run in (run_of(batch_size=4), run_of(drop_last=False)):
        with pytest.raises(UserError, match=r"data\.batch_size=5 or more"):
            WhitenedCSEConfig(groups=8).check(info, run)
    assert "eigenvalues" in str(WhitenedCSEConfig().why_not_captured(run_of().data))
