"""Weights in a byte each: near, read wherever a folder's weights are, and refused where they are not whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import embedlab
from embedlab.backbones.int8_rows import FILE, from_int8, in_int8, write_int8
from embedlab.backbones.load import load_backbone
from embedlab.config.backbone import BackboneConfig
from embedlab.errors import UserError
from embedlab.files import shipped_encoders
from tests.support import SENTENCES

TEXTS = list(SENTENCES)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 5), st.integers(1, 7), st.floats(-30, 30), st.integers(0, 99))
def test_an_error_is_at_most_half_a_step_of_its_row(rows: int, columns: int, power: float, seed: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 10**power
    weight[0] = 0
    back = from_int8(in_int8({"w": weight}))["w"]
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((back - weight).abs() <= step * 0.5001).all()
    assert not back[0].any()


def test_what_is_no_matrix_of_numbers_stays_as_it_is() -> None:
    state = {"bias": torch.randn(3), "ids": torch.arange(4).view(2, 2), "cube": torch.randn(2, 2, 2)}
    assert all(torch.equal(value, from_int8(in_int8(state))[name]) for name, value in state.items())


@pytest.fixture
def small(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    embedlab.load(tiny("bert")).save(tmp_path / "small")
    write_int8(tmp_path / "small")
    return tmp_path / "small"


def test_a_folder_in_bytes_is_an_encoder_as_any_other(
    small: Path, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    assert not (small / "model.safetensors").exists()
    encoder, whole = embedlab.load(small), embedlab.load(tiny("bert"))
    a, b = (e.encode(TEXTS, normalize=True) for e in (encoder, whole))
    assert (a * b).sum(1).min() > 0.999
    encoder.save(tmp_path / "again")
    np.testing.assert_array_equal(embedlab.load(tmp_path / "again").encode(TEXTS, normalize=True), a)
    backbone, _ = load_backbone(BackboneConfig(source="local", path=str(small), dtype="bfloat16"))
    assert next(backbone.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize("damage", ["scale", "shape", "missing", "cut"])
def test_what_is_not_whole_is_refused_in_a_line(small: Path, damage: str) -> None:
    stored = load_file(small / FILE)
    name = next(key for key in stored if key.endswith("::scale"))
    if damage == "scale":
        del stored[name]
    elif damage == "shape":
        stored[name] = stored[name][1:].contiguous()
    elif damage == "missing":
        del stored[name], stored[name.removesuffix("::scale")]
    save_file(stored, small / FILE)
    if damage == "cut":
        (small / FILE).write_bytes((small / FILE).read_bytes()[:-100])
    with pytest.raises(UserError) as caught:
        embedlab.load(small)
    assert "\n" not in str(caught.value)
    assert str(small) in str(caught.value)


@pytest.mark.parametrize("name", shipped_encoders())
def test_a_shipped_encoders_export_has_its_vectors(tmp_path: Path, name: str) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    encoder = embedlab.load(name)
    encoder.to_sentence_transformers(tmp_path / "st")
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "st"), device="cpu").encode(
        TEXTS, normalize_embeddings=True
    )
    np.testing.assert_allclose(theirs, encoder.encode(TEXTS, normalize=True), atol=1e-6)
