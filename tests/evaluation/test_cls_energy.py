"""CLS energy and sinks against values written out by hand, and a whole suite run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from embedlab.backbones import load_backbone
from embedlab.config.backbone import BackboneConfig
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.tokenization import Tokenization
from embedlab.encoders.twin import TwinEncoder
from embedlab.errors import UserError
from embedlab.evaluation import suite
from embedlab.evaluation.probes.cls_energy import METRICS, _marks, _punctuation, measure, profile
from embedlab.pooling import build_pooling
from tests.support import SENTENCES

MASK = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]])
PUNCTUATION = torch.tensor([[False, True, False, True, True], [True, False, False, False, False]])


def lengths(values: list[list[float]]) -> torch.Tensor:
    """States [B, L, 2] with these norms."""
    norms = torch.tensor(values)
    return torch.stack([0.6 * norms, 0.8 * norms], -1)


def measured(states: torch.Tensor, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    return measure(states, 2 * states, states, weights, MASK, *_marks(MASK, PUNCTUATION))


def uniform() -> torch.Tensor:
    real = MASK.float()
    return (real / real.sum(1, keepdim=True))[:, None, None].expand(2, 3, 5, 5)


def test_marks_are_disjoint_and_padding_is_none() -> None:
    first, last, punctuation = _marks(MASK, PUNCTUATION)
    assert first.tolist() == [[True, False, False, False, False], [True, False, False, False, False]]
    assert last.tolist() == [[False, False, False, True, False], [False, False, True, False, False]]
    assert punctuation.tolist() == [[False, True, False, False, False], [False] * 5], (
        "the last token stays SEP"
    )
    left = torch.tensor([[0, 0, 1, 1, 1]])
    first, last, _ = _marks(left, torch.zeros(1, 5, dtype=torch.bool))
    assert first[0].nonzero().item() == 2
    assert last[0].nonzero().item() == 4


def test_uniform_states_and_attention() -> None:
    found = measured(lengths([[2.0] * 5, [3.0] * 5]), uniform())
    for name in ("E1", "nE2", "E1_context", "E1_sum"):
        torch.testing.assert_close(found[name], torch.ones(2))
    torch.testing.assert_close(found["E2"], torch.tensor([1 / 4, 1 / 3]))
    torch.testing.assert_close(found["E3"], torch.tensor([1 / 4, 1 / 3]))
    torch.testing.assert_close(found["deficit"], torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(found["sink"], torch.tensor([1 / 4, 1 / 3]))


def test_by_hand() -> None:
    found = measured(lengths([[4.0, 1.0, 2.0, 3.0, 99.0], [1.0, 2.0, 3.0, 99.0, 99.0]]), uniform())
    torch.testing.assert_close(found["E1"], torch.tensor([4 / 2, 1 / 2.5]))
    torch.testing.assert_close(found["E2"], torch.tensor([4 / 10, 1 / 6]))
    torch.testing.assert_close(found["nE2"], torch.tensor([16 / 10, 3 / 6]))
    torch.testing.assert_close(found["E3"], torch.tensor([16 / 30, 1 / 14]))


def test_attention_mass_by_kind_adds_up_and_finds_the_sink() -> None:
    weights = torch.rand(2, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    weights = weights * MASK[:, None, None]
    weights[:, :, :, 2] += 5 * MASK[:, None, None, 2]
    weights = weights / weights.sum(-1, keepdim=True)
    found = measured(lengths([[1.0] * 5] * 2), weights)
    total = sum(found[f"A_{kind}"] for kind in ("CLS", "SEP", "punct", "other"))
    torch.testing.assert_close(total, torch.ones(2))
    # Token 2 is an ordinary one in the first sentence and the last one in the second.
    assert found["sink_is_SEP"].tolist() == [0.0, 1.0]
    assert found["sink_is_CLS"].tolist() == [0.0, 0.0]
    by_hand = weights[0, :, :4, 2].mean()
    assert found["sink"][0].item() == pytest.approx(by_hand.item())
    assert set(found) == set(METRICS)


@pytest.fixture
def sts_dev(tmp_path: Path) -> Path:
    rows = ["score\tsentence1\tsentence2"]
    rows += [
        f"{i % 5}.0\t{a}\t{b}" for i, (a, b) in enumerate(zip(SENTENCES[::2], SENTENCES[1::2], strict=True))
    ]
    (tmp_path / "stsb_dev.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return tmp_path


def encoder(tiny: Callable[..., Path], kind: str, seed: int = 0) -> SentenceEncoder:
    backbone, tokenizer = load_backbone(BackboneConfig(source="local", path=str(tiny(kind, seed=seed))))
    return SentenceEncoder(backbone, build_pooling("cls", backbone.info), Tokenization(tokenizer)).eval()


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_profile_equals_what_transformers_reports(tiny: Callable[..., Path], kind: str) -> None:
    """Attention maps and states of the eager model, sentence by sentence."""
    one = encoder(tiny, kind)
    texts = list(SENTENCES[:5])
    found = profile(one, texts, batch_tokens=40).values
    model = AutoModel.from_pretrained(tiny(kind), attn_implementation="eager", dtype=torch.float32).eval()
    e1, cls, sep = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    for row in one.tokenization.ids(texts):
        with torch.no_grad():
            out = model(input_ids=torch.tensor([row]), output_hidden_states=True, output_attentions=True)
        for m in range(2):
            norm = out.hidden_states[m + 1][0].norm(dim=-1)
            e1[m] += norm[0] / norm[1:].mean() / len(texts)
            received = out.attentions[m][0].mean(0).mean(0)
            cls[m] += received[0] / len(texts)
            sep[m] += received[-1] / len(texts)
    torch.testing.assert_close(found["E1"].float(), e1, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["A_CLS"].float(), cls, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["A_SEP"].float(), sep, rtol=1e-4, atol=1e-5)


def test_the_suite_of_a_twin_is_the_mean_of_its_towers(tiny: Callable[..., Path], sts_dev: Path) -> None:
    towers = [encoder(tiny, "bert", seed) for seed in (0, 1)]
    towers[0].train()
    scores, block = suite("cls_energy").run(TwinEncoder(towers), {"data_dir": str(sts_dev)})
    assert towers[0].training, "modes are as before"
    single = [suite("cls_energy").run(tower, {"data_dir": str(sts_dev)})[0] for tower in towers]
    for key in ("cls_energy/E_CLS", "cls_energy/A_CLS", "layer01/E3", "layer02/sink"):
        assert scores[key] == pytest.approx((single[0][key] + single[1][key]) / 2, rel=1e-5)
    assert scores["tower2/E1"] == pytest.approx(single[1]["cls_energy/E1"])
    assert scores["cls_energy/E_CLS"] == scores["cls_energy/E1"] == scores["layer02/E1"]
    assert block["towers"] == 2
    assert "formula is not known" in block["notes"][0]


def test_a_figure_on_demand(tiny: Callable[..., Path], sts_dev: Path) -> None:
    pytest.importorskip("matplotlib")
    settings = {"data_dir": str(sts_dev), "figure": str(sts_dev / "profile.svg")}
    suite("cls_energy").run(encoder(tiny, "distilbert"), settings)
    assert "</svg>" in (sts_dev / "profile.svg").read_text()


def test_what_has_no_inside_is_refused(tiny: Callable[..., Path], sts_dev: Path) -> None:
    class Foreign:
        def encode(self, sentences: list[str]) -> torch.Tensor:
            return torch.zeros(len(sentences), 3)

    with pytest.raises(UserError, match="looks inside"):
        suite("cls_energy").run(Foreign(), {"data_dir": str(sts_dev)})
    backbone, tokenizer = load_backbone(BackboneConfig(source="local", path=str(tiny("llama"))))
    decoder = SentenceEncoder(backbone, build_pooling("last", backbone.info), Tokenization(tokenizer))
    with pytest.raises(UserError, match="suite=cls_energy"):
        suite("cls_energy").run(decoder, {"data_dir": str(sts_dev)})


def test_punctuation_of_each_kind_of_tokenizer(tiny: Callable[..., Path]) -> None:
    for kind in ("bert", "roberta", "xlm-roberta"):
        tokenizer = encoder(tiny, kind).tokenizer
        found = _punctuation(tokenizer)
        for sign in (".", ","):
            index = tokenizer.convert_tokens_to_ids(sign)
            assert found[index], (kind, sign)
        assert not found[tokenizer.all_special_ids].any()
        assert not found[tokenizer("the", add_special_tokens=False)["input_ids"]].any()
