"""A decoder that looks both ways: its first token sees the last, padded or not, also after it was saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from embedlab.backbones import load_backbone, probe
from embedlab.backbones.architecture import BOTH_WAYS
from embedlab.config.backbone import KNOWN, BackboneConfig
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.loading import load
from embedlab.encoders.tokenization import Tokenization
from embedlab.errors import UserError
from embedlab.kernels.packing import packable
from embedlab.pooling import build_pooling
from tests.support import SENTENCES

Tiny = Callable[..., Path]


def config(tiny: Tiny, model_type: str, bidirectional: bool = True) -> BackboneConfig:
    return BackboneConfig(source="local", path=str(tiny(model_type)), bidirectional=bidirectional)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("model_type", BOTH_WAYS)
def test_the_first_token_sees_the_last(
    tiny: Tiny, model_type: str, bidirectional: bool, padding: int
) -> None:
    backbone, _ = load_backbone(config(tiny, model_type, bidirectional))
    ids = torch.randint(10, 60, (2, 8), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(8) < torch.tensor([[8], [8 - padding]])).long()
    other = ids.clone()
    other[0, 7], other[1, 7 - padding] = 61, 61
    a, b = (backbone(x, mask)[-1][:, 0] for x in (ids, other))
    assert ((a - b).abs().amax(1) > 1e-5).tolist() == [bidirectional] * 2
    other = ids.clone()
    other[1, 8 - padding :] = 61
    torch.testing.assert_close(backbone(other, mask)[-1][1, 0], backbone(ids, mask)[-1][1, 0])
    alone = backbone(ids[1:, : 8 - padding], mask[1:, : 8 - padding])[-1]
    torch.testing.assert_close(backbone(ids, mask)[-1][1, : 8 - padding], alone[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model_type", BOTH_WAYS)
def test_it_is_an_encoder_and_stays_one(tiny: Tiny, model_type: str, tmp_path: Path) -> None:
    wanted = config(tiny, model_type)
    backbone, tokenizer = load_backbone(wanted)
    assert probe(wanted).kind == backbone.info.kind == "encoder"
    assert not packable(model_type, "encoder")
    encoder = SentenceEncoder(backbone, build_pooling("mean", backbone.info), Tokenization(tokenizer)).eval()
    encoder.save(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert again.towers[0].backbone.info.kind == "encoder"
    torch.testing.assert_close(again.encode_texts(SENTENCES[:5]), encoder.encode_texts(SENTENCES[:5]))
    plain = SentenceEncoder(
        load_backbone(config(tiny, model_type, False))[0], encoder.pooling, encoder.tokenization
    )
    assert (plain.eval().encode_texts(SENTENCES[:5]) - encoder.encode_texts(SENTENCES[:5])).abs().max() > 1e-4


def test_what_cannot_is_named(tiny: Tiny) -> None:
    for model_type, attention, words in (("bert", "sdpa", "as it is"), ("llama", "eager", "by eager")):
        source = BackboneConfig("local", path=str(tiny(model_type)), attention=attention, bidirectional=True)  # type: ignore[arg-type]
        for look in (probe, load_backbone):
            with pytest.raises(UserError, match=words):
                look(source)  # type: ignore[operator]
    name = "HuggingFaceTB/SmolLM2-135M"
    assert (KNOWN[name].kind, probe(BackboneConfig(name=name, bidirectional=True)).kind) == (
        "decoder",
        "encoder",
    )
    with pytest.raises(UserError, match="gemma"):
        probe(BackboneConfig(name="google/gemma-2b", bidirectional=True))
