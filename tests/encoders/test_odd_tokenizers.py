"""Tokenizers of every state: without special tokens or padding, with a cut or padding of their own, past the table."""

from __future__ import annotations

import itertools
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModel, PreTrainedTokenizerFast

from embedlab.backbones import load_backbone
from embedlab.config.backbone import BackboneConfig
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.tokenization import Tokenization
from embedlab.errors import UserError
from embedlab.pooling import build_pooling
from tests.model_zoo import POSITIONS, VOCABULARY, tiny_model

TYPES = ("bert", "roberta", "gpt2", "llama", "bart", "bloom")
TEXTS = ("w6", "w1 w2 w3 w4 w5 w6 w7 w8 w9", "w30 w31 w32", " ".join(f"w{i}" for i in range(40)))
FRAMES = {"none": ("", ""), "both": ("<s>", "</s>"), "end": ("", "</s>"), "begin": ("<s>", "")}


class Kind(NamedTuple):
    """How a tokenizer is made."""

    frame: str
    pad: str | None
    """Own, that of the text's end, or none."""
    cut: int | None
    """Truncation that stands in tokenizer.json."""
    filled: str | None
    """Padding that stands there: its side."""
    limit: float | None
    """`model_max_length`."""


KINDS = [
    Kind(*values)
    for values in itertools.product(FRAMES, ("<pad>", "</s>", None), (None, 3), (None, "left"), (1e30, None, -1, 64))
]  # fmt: skip


def write(kind: Kind, folder: Path, extra: int = 0) -> Tokenizer:
    """Write a tokenizer, and return one of its library alone that has neither cut nor padding."""
    before, after = FRAMES[kind.frame]
    # Ids that the models' configurations give a meaning are no word's, whether the tokenizer knows it or not.
    names = ["<s>", "<pad>", "</s>"]
    words = {w: i for i, w in enumerate([*names, *(f"w{i}" for i in range(VOCABULARY - len(names)))])}
    tok = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tok.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if before or after:
        parts = " ".join(p for p in (before, "$A", after) if p)
        ids = [(t, words[t]) for t in (before, after) if t]
        tok.post_processor = processors.TemplateProcessing(single=parts, special_tokens=ids)
    plain = Tokenizer.from_str(tok.to_str())
    if kind.cut:
        tok.enable_truncation(kind.cut)
    if kind.filled:
        tok.enable_padding(direction=kind.filled, pad_id=0, length=16)
    named = {"bos_token": before, "eos_token": after, "pad_token": kind.pad}
    more: dict[str, Any] = {k: v for k, v in named.items() if v}
    if kind.limit is not None:
        more["model_max_length"] = int(kind.limit)
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, **more)
    fast.add_tokens([f"new{i}" for i in range(extra)])
    fast.save_pretrained(folder)
    return plain


@pytest.fixture(scope="session")
def bodies(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(model_type: str) -> Path:
        if model_type not in made:
            made[model_type] = tmp_path_factory.mktemp("bodies") / model_type
            tiny_model(model_type).save_pretrained(made[model_type])
        return made[model_type]

    return get


def encoder(folder: Path) -> SentenceEncoder:
    backbone, tokenizer = load_backbone(BackboneConfig(source="local", path=str(folder)))
    return SentenceEncoder(backbone, build_pooling("mean", backbone.info), Tokenization(tokenizer)).eval()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(TYPES), st.sampled_from(KINDS))
def test_vectors_are_those_of_the_tokens_alone(
    bodies: Callable[[str], Path], tmp_path: Path, model_type: str, kind: Kind
) -> None:
    folder = shutil.copytree(bodies(model_type), tmp_path / uuid.uuid4().hex)
    plain = write(kind, folder)
    whole: Any = AutoModel.from_pretrained(folder).eval()
    model = whole.get_encoder() if model_type == "bart" else whole
    ours = encoder(folder)
    limit = ours.tokenization.model_limit
    assert limit is None or limit <= POSITIONS
    vectors = ours.encode(list(TEXTS), output="tensor")
    for text, vector in zip(TEXTS, vectors, strict=True):
        ids = torch.tensor([plain.encode(text).ids])
        assert limit is None or ids.shape[1] <= limit
        with torch.no_grad():
            expected = model(input_ids=ids).last_hidden_state[0].mean(0)
        torch.testing.assert_close(vector, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("pad", ["<pad>", None])
def test_an_empty_text_is_its_special_tokens_or_one_line(
    bodies: Callable[[str], Path], tmp_path: Path, frame: str, pad: str | None
) -> None:
    folder = shutil.copytree(bodies("llama"), tmp_path / "m")
    plain = write(Kind(frame, pad, None, None, None), folder)
    ours = encoder(folder)
    if frame == "none" and pad is None:
        with pytest.raises(UserError, match="no special token to stand for it") as caught:
            ours.encode(["w1", ""])
        assert "\n" not in str(caught.value)
        return
    ids = torch.tensor([plain.encode("").ids or [1]])  # the padding token, where there is no other
    with torch.no_grad():
        expected = ours.backbone(ids, torch.ones_like(ids))[0][0].mean(0)
    torch.testing.assert_close(ours.encode(["w1", ""], output="tensor")[1], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("extra", [1, 7])
def test_ids_past_the_table_are_one_line_at_load(
    bodies: Callable[[str], Path], tmp_path: Path, model_type: str, extra: int
) -> None:
    folder = shutil.copytree(bodies(model_type), tmp_path / "m")
    write(Kind("both", "<pad>", None, None, None), folder, extra)
    with pytest.raises(UserError) as caught:
        encoder(folder)
    text = str(caught.value)
    assert "\n" not in text
    for part in (str(folder), f"ids up to {VOCABULARY + extra - 1}", f"{VOCABULARY} rows", "new0"):
        assert part in text


def test_a_padding_token_past_the_table_is_never_looked_up(
    bodies: Callable[[str], Path], tmp_path: Path
) -> None:
    """Llama's users add one without resizing."""
    folder = shutil.copytree(bodies("llama"), tmp_path / "m")
    write(Kind("both", None, None, None, None), folder)
    expected = encoder(folder).encode(list(TEXTS), output="tensor")
    fast = PreTrainedTokenizerFast.from_pretrained(folder)
    fast.add_special_tokens({"pad_token": "<fill>"})
    assert fast.pad_token_id == VOCABULARY
    fast.save_pretrained(folder)
    torch.testing.assert_close(encoder(folder).encode(list(TEXTS), output="tensor"), expected)


def test_the_frame_of_a_vocabulary_without_a_latin_letter(
    bodies: Callable[[str], Path], tmp_path: Path
) -> None:
    """Where "a" has no tokens, the special tokens after it cannot be told from those before."""
    folder = shutil.copytree(bodies("bert"), tmp_path / "m")
    words = {w: i for i, w in enumerate(["<s>", "</s>", "が", "の", "は"])}
    tok = Tokenizer(models.BPE(words, []))  # drops what it does not know
    tok.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    tokenization = encoder(folder).tokenization
    assert (tokenization.prefix_ids, tokenization.suffix_ids) == ([0], [1])
    assert tokenization.ids(["がの", "", "a"]) == [[0, 2, 3, 1], [0, 1], [0, 1]]
