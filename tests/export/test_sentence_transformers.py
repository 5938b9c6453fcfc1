"""SentenceTransformer(folder).encode gives our vectors: pitfalls 34, 36, 37 and 64."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedlab.config.template import Template
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.sentence_transformers import CUSTOM
from tests.encoders.test_encoder import MASKED, STAGES, build
from tests.support import SENTENCES

sentence_transformers: Any = pytest.importorskip(
    "sentence_transformers", reason="sentence-transformers (extra st) is not installed"
)
Tiny = Callable[..., Path]
TEXTS = [*SENTENCES[:5], "  hello ", "a\nb", "word " * 200, "a [MASK] b", '"q".']
QUERY = Template("query: {sentence}")


def theirs(folder: Path, trust: bool) -> Any:
    return sentence_transformers.SentenceTransformer(str(folder), device="cpu", trust_remote_code=trust)


def is_stock(folder: Path) -> bool:
    """Whether a written folder needs nothing but sentence-transformers."""
    return CUSTOM not in (folder / "modules.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("model_type", "pooling", "template", "max_length", "stock"),
    [
        ("bert", "cls", None, None, True),
        ("bert", "mean", None, 7, True),
        ("bert", "last", None, None, True),
        ("bert", "cls_mlp", None, None, True),
        ("bert", "first_last", None, None, True),
        ("bert", {"name": "first_last", "embeddings": True}, None, None, True),
        ("bert", "mean", QUERY, None, True),
        ("bert", "mean", QUERY, 5, True),
        ("bert", "mask", MASKED, None, False),
        ("bert", "mask", MASKED, 6, False),
        ("bert", "first_last", MASKED, None, False),
        ("bert", "cls_mlp", STAGES, None, False),
        ("roberta", "mean", None, None, True),
        ("distilbert", "mean", None, None, True),
        ("modernbert", "first_last", None, None, True),
        ("xlm-roberta", "mask", MASKED, None, False),
        ("gpt2", "mean", None, 9, True),
        ("opt", "last", None, None, True),
        ("llama", "first_last", None, None, True),
        ("llama", "last", STAGES, 8, False),
        ("qwen2", "last", STAGES, None, False),
    ],
)  # fmt: skip
def test_same_vectors(
    tiny: Tiny, tmp_path: Path, model_type: str, pooling: Any, template: Template | None, max_length: int | None,
    stock: bool,
) -> None:  # fmt: skip
    encoder = build(tiny(model_type), pooling, template, max_length)
    encoder.to_sentence_transformers(tmp_path / "st")
    assert is_stock(tmp_path / "st") == stock
    model = theirs(tmp_path / "st", trust=not stock)
    np.testing.assert_allclose(model.encode(TEXTS), encoder.encode(TEXTS), rtol=0, atol=1e-5)
    assert model.get_embedding_dimension() == encoder.dim
    # Their folder is ours too.
    np.testing.assert_array_equal(SentenceEncoder.load(tmp_path / "st").encode(TEXTS), encoder.encode(TEXTS))


def test_the_empty_text(tiny: Tiny, tmp_path: Path) -> None:
    for model_type in ("bert", "roberta", "opt"):
        encoder = build(tiny(model_type))
        encoder.to_sentence_transformers(tmp_path / model_type)
        vectors = theirs(tmp_path / model_type, trust=False).encode(["", "a"])
        np.testing.assert_allclose(vectors, encoder.encode(["", "a"]), rtol=0, atol=1e-5)


def test_their_own_saving_keeps_our_module(tiny: Tiny, tmp_path: Path) -> None:
    encoder = build(tiny("bert"), "mask", MASKED)
    encoder.to_sentence_transformers(tmp_path / "a")
    theirs(tmp_path / "a", trust=True).save(str(tmp_path / "b"))
    again = theirs(tmp_path / "b", trust=True)
    np.testing.assert_allclose(again.encode(TEXTS), encoder.encode(TEXTS), rtol=0, atol=1e-5)
    assert again.max_seq_length == 64


def test_our_module_takes_a_prompt(tiny: Tiny, tmp_path: Path) -> None:
    encoder = build(tiny("bert"), "mask", MASKED)
    encoder.to_sentence_transformers(tmp_path / "a")
    vectors = theirs(tmp_path / "a", trust=True).encode(["a cat"], prompt="the ")
    np.testing.assert_allclose(vectors[0], encoder.encode("the a cat"), rtol=0, atol=1e-5)


def test_a_template_that_is_no_plain_prefix_for_the_tokenizer(tiny: Tiny, tmp_path: Path) -> None:
    """Byte-level: `say:word` may merge, so ids joined apart are not those of the whole string."""
    encoder = build(tiny("gpt2"), "mean", Template("the{sentence}"))
    encoder.to_sentence_transformers(tmp_path / "st")
    assert not is_stock(tmp_path / "st")
    model = theirs(tmp_path / "st", trust=True)
    np.testing.assert_allclose(model.encode(["man"]), encoder.encode(["man"]), rtol=0, atol=1e-5)


def test_no_library_of_theirs_is_needed_to_write(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    build(tiny("bert")).to_sentence_transformers(tmp_path / "st")
    modules = json.loads((tmp_path / "st" / "modules.json").read_text())
    assert [m["type"].rpartition(".")[2] for m in modules] == ["Transformer", "Pooling"]
