"""InfoCSE: its parts and their gradients, what reads the vector, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from embedlab.config.backbone import BackboneConfig
from embedlab.config.optimizer import OptimizerConfig
from embedlab.errors import UserError
from embedlab.methods.conditioned import with_head
from embedlab.methods.infocse import InfoCSE, InfoCSEConfig
from embedlab.methods.simcse import SimCSE, SimCSEConfig
from tests.methods.baselines import Tiny, batch, encoder
from tests.methods.golden import check_golden
from tests.methods.runs import run_of


def make(tiny: Tiny, model_type: str = "bert", **config: Any) -> InfoCSE:
    torch.manual_seed(0)
    start, _ = with_head(BackboneConfig(source="local", path=str(tiny(model_type)), dropout=0.0))
    return InfoCSE(encoder(tiny, model_type), InfoCSEConfig(**config), OptimizerConfig(), start).eval()


def test_golden_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_golden("infocse", tmp_path, monkeypatch)


def test_without_the_prediction_it_is_simcse_with_the_projector(tiny: Tiny) -> None:
    method = InfoCSE(encoder(tiny), InfoCSEConfig(weight=0.0), OptimizerConfig()).eval()
    simcse = SimCSE(encoder(tiny), SimCSEConfig(mlp="bn2"), OptimizerConfig()).eval()
    simcse.head.load_state_dict(method.head.state_dict())
    data = batch(method)
    torch.testing.assert_close(method.total(data)[0], simcse.total(data)[0])


@pytest.mark.parametrize("model_type", ["bert", "roberta", "distilbert"])
def test_the_lower_half_is_frozen_and_the_blocks_behind_it_are_new(tiny: Tiny, model_type: str) -> None:
    method = make(tiny, model_type, weight=1.0)
    assert method.auxiliary is not None
    lower, upper = method._lower[0], method.auxiliary.backbone
    assert (len(lower.blocks), len(upper.blocks)) == (1, 2)
    start = encoder(tiny, model_type).backbone
    theirs, own = dict(start.blocks[0].named_parameters()), dict(upper.blocks[0].named_parameters())
    assert all(not torch.equal(p, own[name]) for name, p in theirs.items() if p.dim() > 1)
    before = lower.state_dict()["model.embeddings.word_embeddings.weight"].clone()
    updates = torch.optim.SGD(method.trained(), 0.1)
    for _ in range(3):
        updates.zero_grad()
        loss, _ = method.total(batch(method))
        loss.backward()  # type: ignore[no-untyped-call]
        assert all(p.grad is not None for p in method.trained())
        updates.step()
    assert all(p.grad is None for p in lower.parameters())
    assert torch.equal(lower.state_dict()["model.embeddings.word_embeddings.weight"], before)
    assert torch.equal(upper.model.embeddings.word_embeddings.weight, before)
    decoder = next(p for p in upper.head.parameters() if p.shape == before.shape)  # type: ignore[union-attr]
    assert not torch.equal(decoder, before), "the output layer is trained apart"


def test_the_prediction_reads_the_vector_and_reaches_the_encoder_through_it_alone(tiny: Tiny) -> None:
    method = make(tiny, weight=1.0)
    view = batch(method)["sentence"]
    ids, mask = view["input_ids"], view["attention_mask"]
    draw = torch.Generator().manual_seed(0)
    h = torch.randn(len(ids), 32, generator=draw).requires_grad_()
    found = []
    for vectors in (h, h * -1):
        torch.manual_seed(3)
        found.append(method._predicted(method.masking.mask(ids, mask), mask, vectors)[0])
    assert abs(found[0] - found[1]) > 1e-4
    found[0].backward()
    assert h.grad is not None
    assert (h.grad.abs().sum(1) > 0).all()
    assert all(p.grad is None for p in method.encoder.parameters())


def test_no_word_is_predicted_at_the_vectors_place(tiny: Tiny) -> None:
    method = make(tiny, mask=0.9)
    view = batch(method)["sentence"]
    for seed in range(5):
        torch.manual_seed(seed)
        masked = method.masking.mask(view["input_ids"], view["attention_mask"])
        at = masked.positions[masked.labels != -100]
        assert len(at) > 20
        assert (at % view["input_ids"].shape[1] > 0).all()


def test_what_cannot_be_is_named(tiny: Tiny) -> None:
    info, run = encoder(tiny).backbone.info, run_of()
    run.adapter = SimpleNamespace(r=None, name="none")
    run.backbone.source, run.backbone.name = "hub", "Luyu/condenser"
    assert InfoCSEConfig().check(info, run) == []
    run.backbone.name = "bert"
    (warning,) = InfoCSEConfig().check(info, run)
    assert "condenser" in warning
    for change, words in (
        ({"weight": -1.0}, "weight"), ({"mask": 0.0}, "mask"), ({"skip_from": 2}, "skip_from"),
        ({"skip_from": 0}, "skip_from"), ({"aux_layers": 3}, "aux_layers"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=f"method.{words}"):
            InfoCSEConfig(**change).check(info, run)  # type: ignore[arg-type]
