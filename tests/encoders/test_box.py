"""The sentence encoder in the box: the file that was scored, read as it was then, and with its card."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import embedlab
from embedlab.backbones.int8_rows import FILE
from embedlab.encoders.base import Encoder
from embedlab.encoders.folder import same_encoder
from embedlab.files import SENTENCE_ENCODER, assets_dir
from tests.support import SENTENCES

FOLDER = assets_dir() / SENTENCE_ENCODER
VECTORS = np.load(Path(__file__).with_name("mini_sentence.npy"))
"""Of the first four sentences, when the file was scored (CPU, torch 2.13): unit vectors."""
WEIGHTS = "75d96c29544dace9caf3605442f62bb4edc8f48d0d3c1ca4e91fc9fe89dbb16f"


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return embedlab.load()


def test_the_weights_are_those_that_were_scored() -> None:
    assert hashlib.sha256((FOLDER / FILE).read_bytes()).hexdigest() == WEIGHTS
    assert not list(FOLDER.glob("model*")), "one form of the weights"
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 14 * 2**20


def test_every_matrix_has_a_byte_a_weight() -> None:
    stored = load_file(FOLDER / FILE)
    matrices = {name for name in stored if f"{name}::scale" in stored}
    assert {stored[name].dtype for name in matrices} == {torch.int8}
    others = {name for name in stored if name not in matrices and not name.endswith("::scale")}
    assert all(stored[name].ndim == 1 for name in others), "biases and norms"
    assert len(matrices) == 3 + 12 * 6, "embeddings, and six matrices a block"


def test_its_vectors_are_those_of_the_day_it_was_scored(encoder: Encoder) -> None:
    vectors = encoder.encode(list(SENTENCES[: len(VECTORS)]), normalize=True)
    np.testing.assert_allclose(vectors, VECTORS, atol=1e-5)


def test_a_byte_a_weight_is_enough(encoder: Encoder) -> None:
    assert encoder.card["stored"]["least cosine to fp32"] >= 0.999


def test_it_is_the_encoder_to_use_and_no_masked_language_model(encoder: Encoder) -> None:
    assert encoder.card["name"] == SENTENCE_ENCODER
    texts = ["A cat is asleep.", "A kitten takes a nap.", "Shares fell on Monday."]
    near, far = (e.encode(texts, normalize=True) for e in (encoder, embedlab.load("mini")))
    assert near[0] @ near[1] > 0.5
    assert near[0] @ near[1] - near[0] @ near[2] > far[0] @ far[1] - far[0] @ far[2]


def test_its_card_says_what_it_is(encoder: Encoder) -> None:
    card, said = encoder.card, (FOLDER / "README.md").read_text(encoding="utf-8")
    assert "experiment=distil_mini" in card["training"]["command"]
    assert card["training"]["teacher"].startswith("all-MiniLM-L6-v2 (Apache-2.0)")
    assert f"| sts7/spearman | {card['scores']['sts7/spearman']:.2f} |" in said
    assert same_encoder(card["protocol"]["sts"]["checkpoint"], encoder.fingerprint()), (
        "scored as it is shipped"
    )
    assert set(card["overlap"]["scored"]["against"]) == {"sts", "transfer", "scifact", "cranfield"}
    assert f"- equal of sts: {card['overlap']['training']['nli']['equal of sts']}" in said
    for part in ("CC BY-SA", "English only", "bias", "256 tokens"):
        assert part in said
    for text in (said, (FOLDER / "embedlab.json").read_text(encoding="utf-8")):
        assert not re.search(r"[\"' (]/\w+/", text), "a path of a machine"
