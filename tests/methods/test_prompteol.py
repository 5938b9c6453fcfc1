"""PromptEOL: two dropout passes of one prompt, read at the last token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from embedlab.config.adapter import AdapterConfig
from embedlab.config.template import Template
from embedlab.errors import UserError
from embedlab.methods.prompteol import PromptEOL, PromptEOLConfig
from tests.methods.golden import check_golden
from tests.methods.test_csesfp import TEXTS, _batch, _by_hand, _check, _method, _rows, _vectors


def test_golden_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_golden("prompteol", tmp_path, monkeypatch)


def _two_passes(method: Any) -> Tensor:
    """Cosines of the two views of each sentence in training mode."""
    method.train()
    torch.manual_seed(0)
    padded = method.encoder.tokenization.pad(_rows(method), 8)
    with torch.no_grad():
        one, two = method.encoder(*(torch.cat([x, x]) for x in padded.values())).chunk(2)
    return cosine_similarity(one, two)


def test_t9_two_passes_are_one_view_until_b_leaves_zero(tiny: Callable[..., Path]) -> None:
    adapter = AdapterConfig("lora", r=4, dropout=0.3)
    method = _method(tiny("llama"), cls=PromptEOL, adapter=adapter)
    torch.testing.assert_close(_two_passes(method), torch.ones(len(TEXTS)), atol=1e-6, rtol=0)
    with torch.no_grad():
        for name, p in method.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.3)
    assert (_two_passes(method) < 0.9999).all()


def test_t9_two_passes_of_opt_differ_from_the_start(tiny: Callable[..., Path]) -> None:
    assert (_two_passes(_method(tiny("opt"), cls=PromptEOL, dropout=0.1)) < 0.9999).all()


@pytest.mark.parametrize("tau", [0.05, 0.5])
def test_prompteol_sets_one_pass_against_the_other(
    tiny: Callable[..., Path], tau: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = Template('It : "{sentence}" means', "text")
    method = _method(tiny("llama"), pooling="last", cls=PromptEOL, template=prompt, tau=tau)
    first, second = (v.requires_grad_() for v in _vectors(len(TEXTS)))
    seen: list[Tensor] = []

    def passes(ids: Tensor, mask: Tensor, capacity: int | None = None) -> Tensor:
        seen.append(ids)
        return torch.cat([first, second])

    monkeypatch.setattr(method.encoder, "forward", passes)
    loss = method.losses(_batch(method)).losses["info_nce"]
    (ids,) = seen
    assert torch.equal(*ids.chunk(2))
    want = _by_hand(first, second, tau)
    torch.testing.assert_close(loss, want)
    found, wanted = (torch.autograd.grad(x, (first, second)) for x in (loss, want))
    torch.testing.assert_close(found, wanted)


def test_what_stands_before_the_last_token_is_read_through_it_alone(tiny: Callable[..., Path]) -> None:
    """The prompt's end has seen the sentence: other sentences of one length give other vectors at the same token."""
    method = _method(tiny("llama"), pooling="last", cls=PromptEOL)
    one, two = (method.encoder.encode([text]) for text in ("Two dogs run", "Two cats run"))
    assert abs(one - two).max() > 1e-3
    assert method.forward_passes == 2.0


def test_a_prompt_is_needed() -> None:
    with pytest.raises(UserError, match=r"PromptEOL needs a prompt \(template\)"):
        _check(PromptEOLConfig(), template=None)
