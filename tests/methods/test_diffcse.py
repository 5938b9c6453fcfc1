"""DiffCSE: where its gradient goes, what it is without its second part, what the generator changes, what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from embedlab.config.adapter import AdapterConfig
from embedlab.config.backbone import BackboneConfig
from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.trainer import TrainerConfig
from embedlab.errors import UserError
from embedlab.methods.conditioned import with_head
from embedlab.methods.diffcse import DiffCSE, DiffCSEConfig
from embedlab.methods.simcse import SimCSE, SimCSEConfig
from embedlab.pooling import pooling_config
from tests.methods.baselines import Tiny, batch, encoder
from tests.methods.golden import check_golden
from tests.methods.runs import run_of


def make(tiny: Tiny, model_type: str = "bert", **config: Any) -> DiffCSE:
    torch.manual_seed(0)
    found, second = encoder(tiny, model_type), encoder(tiny, model_type, seed=0)
    generator, _ = with_head(BackboneConfig(source="local", path=str(tiny(model_type))))
    return DiffCSE(found, DiffCSEConfig(**config), OptimizerConfig(), second.backbone, generator).eval()


def test_golden_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_golden("diffcse", tmp_path, monkeypatch)


def test_without_the_discriminator_it_is_simcse_with_the_projector(tiny: Tiny) -> None:
    method = DiffCSE(encoder(tiny), DiffCSEConfig(lam=0.0), OptimizerConfig()).eval()
    simcse = SimCSE(encoder(tiny), SimCSEConfig(mlp="bn2"), OptimizerConfig()).eval()
    simcse.head.load_state_dict(method.head.state_dict())
    data = batch(method)
    torch.testing.assert_close(method.total(data)[0], simcse.total(data)[0])
    names = {name.partition(".")[0] for name in method.state_dict()}
    assert names == {"encoder", "head"}


@pytest.mark.parametrize("model_type", ["bert", "roberta", "distilbert"])
def test_the_discriminator_knows_nothing_at_first(tiny: Tiny, model_type: str) -> None:
    method = make(tiny, model_type, lam=1.0)
    loss = method.losses(batch(method)).losses["difference"]
    assert loss.item() == pytest.approx(math.log(2), abs=0.05)
    torch.nn.init.zeros_(method.classifier.weight)
    torch.nn.init.zeros_(method.classifier.bias)
    assert method.losses(batch(method)).losses["difference"].item() == pytest.approx(math.log(2), rel=1e-5)


@pytest.mark.parametrize("condition", ["head", "raw"])
def test_its_gradient_reaches_encoder_and_discriminator_and_not_the_generator(
    tiny: Tiny, condition: Any
) -> None:
    method = make(tiny, lam=1.0, condition=condition)
    torch.nn.init.normal_(method.classifier.weight)
    method.losses(batch(method)).losses["difference"].backward()  # type: ignore[no-untyped-call]
    assert method.discriminator is not None
    for module in (method.encoder, method.discriminator, method.classifier):
        assert any(p.grad is not None and p.grad.abs().max() > 0 for p in module.parameters())
    heads = [p.grad is not None for p in method.head.parameters()]
    assert all(heads) if condition == "head" else not any(heads)
    assert all(p.grad is None for p in method._generator[0].parameters())
    assert not any("generator" in name for name in method.state_dict())


def test_the_first_token_of_the_discriminator_is_the_vector(tiny: Tiny) -> None:
    """What stands at the first position of its input is nothing to it."""
    method = make(tiny)
    assert method.discriminator is not None
    ids = torch.tensor([[2, 9, 10, 11, 3, 0]])
    mask, z = (ids > 0).long(), torch.randn(1, 32, generator=torch.Generator().manual_seed(1))

    def states(ids: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        found = method.discriminator(ids, mask, lambda e: torch.cat([z[:, None], e[:, 1:]], 1))  # type: ignore[misc]
        return found[mask.bool()]

    other = ids.clone()
    other[0, 0] = 20
    torch.testing.assert_close(states(other, z), states(ids, z))
    assert (states(ids, -z) - states(ids, z)).abs().max() > 1e-3


def test_only_masked_words_change_but_in_the_release(tiny: Tiny) -> None:
    method = make(tiny, mask=0.5)
    view = batch(method)["sentence"]
    ids, mask = view["input_ids"], view["attention_mask"]
    torch.manual_seed(0)
    changed = method.changed(ids, mask)
    share = ((changed != ids) & mask.bool()).sum() / mask.sum()
    assert 0.2 < share < 0.6
    assert (changed == ids)[mask == 0].all()
    assert (changed == ids)[:, 0].all()
    torch.manual_seed(1)
    assert not torch.equal(method.changed(ids, mask), changed)
    released = make(tiny, mask=0.5, form="released")
    torch.manual_seed(0)
    everywhere = released.changed(ids, mask)
    assert (everywhere == ids)[:, 0].all()
    assert ((everywhere != ids) & mask.bool()).sum() > 0.8 * (mask.sum() - len(ids))


def test_the_mean_is_over_tokens_or_as_released_over_cells(tiny: Tiny) -> None:
    losses = {}
    for form in ("paper", "released"):
        method = make(tiny, lam=1.0, form=form)
        method.changed = lambda ids, mask: ids  # type: ignore[method-assign]
        torch.nn.init.zeros_(method.classifier.weight)
        method.classifier.bias.data = torch.tensor([0.0, 1.0])
        losses[form] = method.losses(batch(method)).losses["difference"].item()
    for loss in losses.values():  # nothing was replaced: every counted token costs the same
        assert loss == pytest.approx(math.log(1 + math.e), rel=1e-5)


def test_what_cannot_be_is_named(tiny: Tiny) -> None:
    info = encoder(tiny).backbone.info

    def run(**changes: Any) -> Any:
        made = run_of(**changes)
        made.adapter = SimpleNamespace(r=None, name="none")
        made.backbone.source = "hub"
        return made

    assert DiffCSEConfig().check(info, run()) == []
    for change, words in (({"lam": -1.0}, "lam"), ({"mask": 0.0}, "mask"), ({"mask": 1.0}, "mask")):
        with pytest.raises(UserError, match=f"method.{words}"):
            DiffCSEConfig(**change).check(info, run())  # type: ignore[arg-type]
    with pytest.raises(UserError, match="bert"):
        DiffCSEConfig().check(replace(info, model_type="modernbert"), run())
    adapted, fresh = run(), run()
    adapted.adapter.r, fresh.backbone.source = 4, "fresh"
    for wrong, words in ((adapted, "adapter=none"), (fresh, "masked_lm first")):
        with pytest.raises(UserError, match=words):
            DiffCSEConfig().check(info, wrong)


@pytest.mark.parametrize("wrong", ["no/such", "text", "decoder", "roberta", "bare"])
def test_what_cannot_fill_masks_is_said_of_the_generator(tiny: Tiny, tmp_path: Path, wrong: str) -> None:
    given = {"no/such": "no/such/model", "decoder": str(tiny("llama")), "roberta": str(tiny("roberta"))}
    bare = encoder(tiny)
    for part in (bare.backbone.model, bare.tokenizer):
        part.save_pretrained(tmp_path / "bare")
    (tmp_path / "text").write_text("")
    run: Any = SimpleNamespace(
        backbone=BackboneConfig(source="local", path=str(tiny("bert"))), adapter=AdapterConfig(), template=None,
        pooling=pooling_config("cls"), optimizer=OptimizerConfig(), trainer=TrainerConfig(accelerator="cpu"),
        method=DiffCSEConfig(generator=given.get(wrong, str(tmp_path / wrong))),
    )  # fmt: skip
    with pytest.raises(UserError) as error:
        DiffCSE.from_run(run)
    assert error.value.key == "method.generator"
    assert error.value.value == run.method.generator
    assert "method.generator=self" in str(error.value)


def test_a_start_without_a_head_draws_no_words_at_random(tiny: Tiny, tmp_path: Path) -> None:
    bare = encoder(tiny)
    bare.backbone.model.save_pretrained(tmp_path)
    bare.tokenizer.save_pretrained(tmp_path)
    for new_head in (False, True):
        with pytest.raises(UserError, match=r"predicts no masked words") as caught:
            with_head(BackboneConfig(source="local", path=str(tmp_path), new_head=new_head))
        for part in ("method=masked_lm backbone.new_head=true", "backbone=local backbone.path=RUN/export"):
            assert part in str(caught.value.fix)  # a fix without one of these is refused in its turn
