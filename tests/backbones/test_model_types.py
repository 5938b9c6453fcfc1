"""Every text architecture of the installed transformers: hidden states are Hugging Face's, and claims hold."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto as auto

from embedlab.backbones import load_backbone
from embedlab.backbones.architecture import (
    UNREADABLE,
    can_be_adapted,
    check_config,
    has_blocks,
    has_layer_states,
    runs_eager,
)
from embedlab.backbones.load import model_class
from embedlab.config.backbone import BackboneConfig
from embedlab.errors import UserError
from tests.backbones import architecture_checks as checks
from tests.model_zoo import LEFT_OUT, text_types, tiny_folder
from tools.architectures import PAGE, listed, row

SAMPLE = (
    "albert", "bart", "bert", "bloom", "deberta-v2", "falcon", "fnet", "gemma2", "mamba", "mpnet", "roberta",
    "t5", "xlnet",
)  # fmt: skip
"""A type of each kind: what `make test` runs; the others wait for ``--whole``."""
TYPES = [n for n in listed() if n in CONFIG_MAPPING]
"""Those of docs/architectures.md that this transformers has."""
SAID = (
    *auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    *auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    *auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    *auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
)
"""Types that transformers lists as those of text models."""

NEED_PARTS = {"encoder-decoder", "gemma4_assistant", "gemma4_unified_assistant"}
"""Those whose configuration cannot be made without that of another model."""


def some(types: list[str]) -> list[object]:
    return [n if n in SAMPLE else pytest.param(n, marks=pytest.mark.whole) for n in types]


@pytest.fixture(scope="session")
def folders() -> dict[str, Path]:
    return {}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.fixture
def folder(model_type: str, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of the type, made once."""
    if model_type not in folders:
        folders[model_type] = tiny_folder(model_type, tmp_path_factory.mktemp("zoo") / "model")
    return folders[model_type]


@pytest.mark.parametrize("model_type", some(TYPES))
def test_hidden_states_and_facts(model_type: str, folder: Path, tmp_path: Path) -> None:
    backbone = checks.load(folder)
    assert (backbone.attention == "eager") == runs_eager(model_type)
    checks.check_states(folder, backbone)
    checks.check_facts(backbone)
    checks.check_written(backbone, tmp_path / "written")


@pytest.mark.parametrize("model_type", some(TYPES))
def test_a_step(model_type: str, folder: Path) -> None:
    checks.check_step(checks.load(folder))


@pytest.mark.parametrize("model_type", some(TYPES))
def test_adapters_and_compiled_blocks(model_type: str, folder: Path) -> None:
    if not has_blocks(model_type):
        for check in (lambda: checks.check_adapters(folder), lambda: checks.load(folder).compile_blocks()):
            with pytest.raises(UserError, match="no list of") as caught:
                check()
            assert "\n" not in str(caught.value)
        return
    assert len(checks.load(folder).blocks) == checks.load(folder).info.layers
    if not can_be_adapted(model_type):
        with pytest.raises(UserError, match=r"adapter"):
            checks.check_adapters(folder)
    else:
        checks.check_adapters(folder)
    if model_type in SAMPLE:
        checks.check_compiled(checks.load(folder))


@pytest.mark.whole
def test_every_type_is_in_the_table_or_left_out_with_a_reason() -> None:
    """`python -m tools.architectures` adds what a new transformers has to the table, and the tests above take it up."""
    assert not set(text_types()) - set(listed()) - set(LEFT_OUT)
    for name in sorted(set(SAID) - set(text_types()) - NEED_PARTS):
        config = CONFIG_MAPPING[name]()
        with pytest.raises(UserError):
            check_config(config)


def test_the_table_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert set(TYPES) >= set(SAMPLE)
    assert not set(listed()) & set(LEFT_OUT)
    for model_type in SAMPLE:
        assert row(model_type) + "\n" in page


@pytest.mark.parametrize("model_type", sorted(UNREADABLE))
def test_what_cannot_be_read_is_refused_by_name(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type]
    with pytest.raises(UserError, match=model_type):
        check_config(config())


def test_layer_states_are_refused_before_the_first_forward(tmp_path: Path) -> None:
    backbone = checks.load(tiny_folder("canine", tmp_path / "m"))
    assert not has_layer_states("canine")
    with pytest.raises(UserError, match="no hidden state after each layer"):
        backbone.prepare_all_layers()


@pytest.mark.parametrize("model_type", ["gemma2", "t5gemma"])
def test_scores_with_a_cap_run_eager_whatever_the_class_says(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_class(CONFIG_MAPPING[model_type]()), "_supports_sdpa", True)
    assert checks.load(tiny_folder(model_type, tmp_path / "m")).attention == "eager"


def test_an_architecture_without_sdpa_runs_eager_with_one_notice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tiny_folder("mpnet", tmp_path / "m"))
    with caplog.at_level(logging.WARNING):
        backbone = load_backbone(BackboneConfig(source="local", path=path))[0]
    assert backbone.attention == "eager"
    assert [r.message for r in caplog.records if "eager" in r.message] == [
        f"{path}: mpnet has no sdpa attention, so it runs eager."
    ]
    with pytest.raises(UserError, match=r"backbone\.attention=flash_attention_2"):
        load_backbone(BackboneConfig(source="local", path=path, attention="flash_attention_2"))
