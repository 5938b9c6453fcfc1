"""Twin encoders: invariants 24 and 25, folders, sentence-transformers, ensembles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers.normalizers import BertNormalizer
from transformers import AutoModel, AutoTokenizer

import embedlab
from embedlab.backbones import load_backbone
from embedlab.config.backbone import BackboneConfig
from embedlab.config.template import Template
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.tokenization import Tokenization
from embedlab.encoders.twin import TwinEncoder, check_addable, ensemble, same_tokenizer
from embedlab.errors import UserError
from embedlab.pooling import build_pooling
from tests.support import SENTENCES

Tiny = Callable[..., Path]
TEXTS = [*SENTENCES[:6], "", "a"]


def encoder(
    tiny: Tiny, kind: str = "bert", seed: int = 0, pooling: str = "cls", template: Template | None = None
) -> SentenceEncoder:
    backbone, tokenizer = load_backbone(BackboneConfig(source="local", path=str(tiny(kind, seed=seed))))
    return SentenceEncoder(
        backbone, build_pooling(pooling, backbone.info), Tokenization(tokenizer, template)
    ).eval()


@pytest.mark.parametrize(
    "differs", ["handle_chinese_chars", "clean_text", "strip_accents", "lowercase", "side"]
)
def test_tokenizers_of_one_vocabulary_that_read_some_text_otherwise_are_told_apart(
    tiny: Tiny, differs: str
) -> None:
    first, second = encoder(tiny), encoder(tiny)
    assert same_tokenizer(first.tokenization, second.tokenization)
    if differs == "side":
        second.tokenizer.truncation_side = "left"
    else:
        settings = dict.fromkeys(("handle_chinese_chars", "clean_text", "strip_accents", "lowercase"), True)
        for one, values in ((first, settings), (second, settings | {differs: False})):
            one.tokenizer.backend_tokenizer.normalizer = BertNormalizer(**values)
    assert not same_tokenizer(first.tokenization, second.tokenization)
    with pytest.raises(UserError, match="reads text differently"):
        check_addable(first, second, "the second")


def twin(tiny: Tiny, kind: str = "bert", pooling: str = "cls") -> TwinEncoder:
    return TwinEncoder([encoder(tiny, kind, 0, pooling), encoder(tiny, kind, 1, pooling)], card={"seed": 7})


def test_the_vector_is_the_sum_of_the_towers(tiny: Tiny) -> None:
    both = twin(tiny)
    assert both.dim == 32
    expected = both.towers[0].encode(TEXTS) + both.towers[1].encode(TEXTS)
    np.testing.assert_allclose(both.encode(TEXTS), expected, atol=1e-6)
    np.testing.assert_allclose(both.encode(TEXTS[0]), expected[0], atol=1e-5)
    both.train()
    both.encode(TEXTS)
    assert both.training
    assert both.towers[1].backbone.training


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "modernbert"])
def test_invariant_24_the_towers_on_disk_are_plain_encoders(tiny: Tiny, kind: str, tmp_path: Path) -> None:
    both = twin(tiny, kind)
    both.save(tmp_path / "twin")
    total = 0.0
    for name in ("tower1", "tower2"):
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "twin" / name)
        model = AutoModel.from_pretrained(tmp_path / "twin" / name, dtype=torch.float32).eval()
        batch = tokenizer(list(SENTENCES[:6]), padding=True, return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            total = total + model(**batch).last_hidden_state[:, 0].numpy()
    np.testing.assert_allclose(both.encode(list(SENTENCES[:6])), total, atol=1e-5)


def test_invariant_25_scale_of_the_sum_is_nothing_but_its_parts_are_not_normalised(tiny: Tiny) -> None:
    both = twin(tiny)
    both.towers[1].backbone.model.embeddings.LayerNorm.weight.data.mul_(2.0)

    def cosine(x: np.ndarray) -> np.ndarray:
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
        return x @ x.T

    parts = [tower.encode(TEXTS) for tower in both.towers]
    parts[1] = 3 * parts[1]
    total = parts[0] + parts[1]
    np.testing.assert_allclose(cosine(total), cosine(total / 2), atol=1e-6)
    unit = sum(p / np.linalg.norm(p, axis=1, keepdims=True) for p in parts)
    assert np.abs(cosine(total) - cosine(unit)).max() > 1e-3


def test_a_folder_and_back(tiny: Tiny, tmp_path: Path) -> None:
    both = twin(tiny)
    both.save(tmp_path / "twin")
    assert sorted(p.name for p in (tmp_path / "twin").iterdir()) == ["embedlab.json", "tower1", "tower2"]
    again = TwinEncoder.load(tmp_path / "twin")
    assert torch.equal(torch.from_numpy(again.encode(TEXTS)), torch.from_numpy(both.encode(TEXTS)))
    assert again.fingerprint() == both.fingerprint()
    assert again.card == {"seed": 7}
    assert not again.training
    with pytest.raises(UserError, match="is a twin"):
        SentenceEncoder.load(tmp_path / "twin")
    with pytest.raises(UserError, match="no twin"):
        TwinEncoder.load(tmp_path / "twin" / "tower1")
    one = SentenceEncoder.load(tmp_path / "twin" / "tower2")
    assert one.fingerprint() == both.towers[1].fingerprint()
    both.save(tmp_path / "twin")  # again, over itself


def test_load_knows_a_twin(tiny: Tiny, tmp_path: Path) -> None:
    both = twin(tiny)
    (tmp_path / "run").mkdir()
    both.save(tmp_path / "run" / "export")
    for path in (tmp_path / "run", tmp_path / "run" / "export"):
        loaded = embedlab.load(path)
        assert isinstance(loaded, TwinEncoder)
        assert loaded.fingerprint() == both.fingerprint()


def test_a_checkpoint_knows_where_the_weights_of_each_tower_are(tiny: Tiny) -> None:
    both = twin(tiny)
    texts, weights = both.manifest().values()
    assert "tower1/config.json" in texts
    state = both.state_dict()
    for prefix in weights.values():
        assert any(name.startswith(prefix) for name in state)
    assert weights["tower2/model.safetensors"] == "towers.1.backbone.model."


@pytest.mark.parametrize(("kind", "pooling"), [("bert", "cls"), ("roberta", "mean")])
def test_one_sentence_transformers_folder_gives_the_same_vectors(
    tiny: Tiny, tmp_path: Path, kind: str, pooling: str
) -> None:
    st = pytest.importorskip("sentence_transformers")
    both = twin(tiny, kind, pooling)
    three = ensemble([both, encoder(tiny, kind, 2, pooling)], [0.3, 0.7])
    for name, one in (("two", both), ("three", three)):
        one.to_sentence_transformers(tmp_path / name)
        model = st.SentenceTransformer(str(tmp_path / name), device="cpu")  # nothing but its own modules
        vectors = model.encode(TEXTS, show_progress_bar=False, batch_size=3)
        np.testing.assert_allclose(vectors, one.encode(TEXTS), atol=2e-6)
    assert not (tmp_path / "two" / "parts").exists()


def test_other_poolings_go_into_a_module_of_this_package(tiny: Tiny, tmp_path: Path) -> None:
    st = pytest.importorskip("sentence_transformers")
    both = twin(tiny, "bert", "first_last")
    both.to_sentence_transformers(tmp_path / "twin")
    model = st.SentenceTransformer(str(tmp_path / "twin"), device="cpu", trust_remote_code=True)
    np.testing.assert_allclose(model.encode(TEXTS, show_progress_bar=False), both.encode(TEXTS), atol=1e-6)


def test_an_ensemble_takes_a_twin_apart_and_weights_its_members(tiny: Tiny) -> None:
    both, third = twin(tiny), encoder(tiny, seed=2)
    mixed = ensemble([both, third], [0.3, 0.7])
    assert mixed.weights == (0.3, 0.3, 0.7)
    np.testing.assert_allclose(
        mixed.encode(TEXTS), 0.3 * both.encode(TEXTS) + 0.7 * third.encode(TEXTS), atol=1e-5
    )
    assert mixed.fingerprint() != ensemble([both, third], [0.5, 0.5]).fingerprint()


def test_a_length_limit_reaches_every_tower(tiny: Tiny) -> None:
    both = twin(tiny)
    both.tokenization = Tokenization(both.tokenizer, None, 5)
    assert all(tower.tokenization.max_length == 5 for tower in both.towers)
    assert max(map(len, both.tokenization.ids(TEXTS))) == 5


def test_towers_that_cannot_be_added_are_refused(tiny: Tiny) -> None:
    first = encoder(tiny)
    backbone, tokenizer = load_backbone(BackboneConfig(source="local", path=str(tiny("bert", width=16))))
    narrow = SentenceEncoder(backbone, build_pooling("cls", backbone.info), Tokenization(tokenizer))
    with pytest.raises(UserError, match="32 and 16 features"):
        TwinEncoder([first, narrow])
    with pytest.raises(ValueError, match="two towers"):
        TwinEncoder([first])
    for other in (encoder(tiny, "roberta"), encoder(tiny, template=Template("It is {sentence}"))):
        with pytest.raises(UserError, match="reads text differently"):
            check_addable(first, other, "tower 2")
    assert same_tokenizer(first.tokenization, Tokenization(first.tokenizer, None, 7))


OTHERS = {"roberta": {"kind": "roberta"}, "a template": {"template": Template("It is {sentence}")}}


@pytest.mark.parametrize("third", OTHERS)
def test_a_third_encoder_reads_text_in_its_own_way(tiny: Tiny, tmp_path: Path, third: str) -> None:
    both, other = twin(tiny), encoder(tiny, seed=3, **OTHERS[third])
    mixed = ensemble([both, other], [0.3, 0.7])
    assert mixed.mixed
    assert not both.mixed
    expected = 0.3 * both.encode(TEXTS) + 0.7 * other.encode(TEXTS)
    np.testing.assert_allclose(mixed.encode(TEXTS), expected, atol=1e-5)
    unit = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(mixed.encode(TEXTS, normalize=True, batch_size=3), unit, atol=1e-5)
    np.testing.assert_allclose(mixed.encode(TEXTS[1]), expected[1], atol=1e-5)
    told: list[int] = []
    towers, read = sum(t.tokens_read for t in mixed.towers), mixed.tokens_read
    mixed.encode(TEXTS, batch_size=1, on_batch=lambda done, of: told.append(done))
    assert told == sorted(told)
    assert told.index(len(TEXTS)) == len(told) - 1
    assert mixed.tokens_read - read == sum(t.tokens_read for t in mixed.towers) - towers > 0
    mixed.save(tmp_path / "mixed")
    again = embedlab.load(tmp_path / "mixed")
    np.testing.assert_array_equal(again.encode(TEXTS), mixed.encode(TEXTS))
    mixed.tokenization = Tokenization(mixed.tokenizer, None, 5)
    assert [tower.tokenization.max_length for tower in mixed.towers] == [5, 5, 5]
    assert mixed.towers[2].tokenizer is other.tokenizer
    for refused in (
        lambda: mixed.encode_ids([[1, 2]]),
        lambda: mixed.to_sentence_transformers(tmp_path / "st"),
    ):
        with pytest.raises(UserError, match="read text differently"):
            refused()


def test_facts_for_protocols(tiny: Tiny) -> None:
    both = twin(tiny)
    facts = both.provenance(TEXTS)
    assert facts["checkpoint"] == both.fingerprint()
    assert facts["pooling"] == {"name": "cls"}
    assert facts["truncated"] == 0
