"""The model card says what is known, with n and protocol, and does not guess the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import embedlab
from embedlab.cli.export import main
from embedlab.errors import UserError
from embedlab.export.card import model_card


@pytest.fixture
def encoder(tiny: Callable[..., Path]) -> embedlab.SentenceEncoder:
    return embedlab.load(tiny("bert"))


def front_matter(card: str) -> dict:
    return yaml.safe_load(card.split("---")[1])


def test_nothing_known_is_said_so(encoder: embedlab.SentenceEncoder) -> None:
    encoder.card = {}
    card = model_card(encoder, "m")
    assert "Not known: the encoder was not trained by a run of embedlab." in card
    assert "Not scored." in card
    assert "license" not in front_matter(card)


def test_scores_stand_with_their_n_and_protocol(encoder: embedlab.SentenceEncoder) -> None:
    encoder.card = {
        "training": {"seed": 7, "device": "cpu", "steps": 3},
        "config": {
            "method": {"name": "simcse", "tau": 0.05},
            "data": {"name": "wikipedia", "files": "a.txt"},
        },
        "scores": {"stsb/spearman": 70.125, "sts7/spearman": 69.5, "lee/spearman": float("nan")},
        "protocol": {"sts": {"name": "sts7_raw", "aggregation": "all", "text": "raw"}},
    }
    card = model_card(encoder, "m", "apache-2.0")
    assert card.index("| sts7/spearman | 69.50 |") < card.index("| stsb/spearman | 70.12 |")
    assert "One seed (7): n=1." in card
    assert "- aggregation: all" in card
    assert "nan" not in card
    assert "tau: 0.05" in card
    assert front_matter(card)["license"] == "apache-2.0"


def test_the_shipped_encoder_has_a_card() -> None:
    card = model_card(embedlab.load("mini"), "mini")
    assert "| sts7/spearman | 51.88 |" in card
    assert "One seed (42): n=1." in card
    assert "- hardware: one NVIDIA H100" in card
    assert "CC BY-SA" in card.split("## Licence")[1]


@pytest.mark.parametrize("target", ["hf", "sentence-transformers"])
def test_every_export_has_its_card(target: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    if target == "sentence-transformers":
        pytest.importorskip("sentence_transformers")
    out = tmp_path / "out"
    assert main([f"ckpt={tiny('bert')}", f"to={target}", f"out={out}", "licence=mit"]) == 0
    assert front_matter((out / "README.md").read_text())["license"] == "mit"


def test_pushing_needs_the_hub(tiny: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="push=someone/model"):
        main([f"ckpt={tiny('bert')}", "to=hf", f"out={tmp_path / 'out'}", "push=someone/model"])
    assert (tmp_path / "out" / "config.json").is_file()
