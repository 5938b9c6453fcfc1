"""The name of an encoder: another for whatever gives other vectors, the same for the same ones, and its first half is
enough for what earlier releases wrote."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import embedlab
from embedlab.cli.main import main
from embedlab.encoders.folder import same_encoder
from embedlab.encoders.twin import TwinEncoder
from embedlab.pooling import build_pooling, pooling_config
from tests.support import MODEL_TYPES, SENTENCES

Tiny = Callable[..., Path]
_BERT = {"layer_norm_eps": 0.1, "hidden_act": "relu", "num_attention_heads": 2}
_LLAMA = {"rms_norm_eps": 0.1, "hidden_act": "relu", "is_causal": False}
_LLAMA["rope_parameters"] = {"rope_theta": 3.0, "rope_type": "default"}
OTHER: dict[str, dict[str, Any]] = {
    "bert": _BERT, "roberta": _BERT, "llama": _LLAMA,
    "gpt2": {"activation_function": "relu", "layer_norm_epsilon": 0.1, "n_head": 2},
    "modernbert": {"local_attention": 4, "norm_eps": 0.1, "hidden_activation": "relu"},
}  # fmt: skip
_SAME = {
    "transformers_version": "4.0.0", "dtype": "float16", "id2label": {"0": "a"}, "label2id": {"a": 0},
    "problem_type": "regression", "initializer_range": 0.5, "use_cache": False,
}  # fmt: skip


def changed(folder: Path, to: Path, change: dict[str, Any]) -> Path:
    """A copy of a model with another configuration."""
    shutil.copytree(folder, to)
    file = to / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    return to


@pytest.mark.parametrize(("model_type", "key"), [(kind, key) for kind in OTHER for key in OTHER[kind]])
def test_another_configuration_of_the_same_weights_is_another_encoder(
    tiny: Tiny, tmp_path: Path, model_type: str, key: str
) -> None:
    one = embedlab.load(tiny(model_type))
    other = embedlab.load(changed(tiny(model_type), tmp_path / "other", {key: OTHER[model_type][key]}))
    texts = [text * 3 for text in SENTENCES[:4]]
    assert not np.allclose(one.encode(texts), other.encode(texts), atol=1e-4), "or the test says nothing"
    first, second = one.fingerprint(), other.fingerprint()
    assert not same_encoder(first, second)
    assert first.split("+")[0] == second.split("+")[0], "earlier releases knew no other"
    other.save(tmp_path / "saved")
    assert embedlab.load(tmp_path / "saved").fingerprint() == second


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_what_changes_no_vector_changes_no_fingerprint(
    tiny: Tiny, tmp_path: Path, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = embedlab.load(tiny(model_type))
    name = encoder.fingerprint()
    dropout = {key: 0.3 for key in encoder.towers[0].backbone.model.config.to_dict() if "drop" in key}
    assert embedlab.load(changed(tiny(model_type), tmp_path / "other", _SAME | dropout)).fingerprint() == name
    usual = type(encoder.towers[0].backbone.model.config).to_dict
    monkeypatch.setattr(
        type(encoder.towers[0].backbone.model.config), "to_dict", lambda self: usual(self) | {"newer_key": 1}
    )
    assert encoder.fingerprint() == name, "of a release whose configuration has one key more"


@pytest.mark.parametrize("pooling", [{"name": "mean"}, {"name": "cls_mlp"}, {"name": "scalar_mix", "n": 2}])
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("twin", [False, True])
def test_in_whatever_its_weights_are_held_a_saved_encoder_has_the_same(
    tiny: Tiny, tmp_path: Path, pooling: dict[str, Any], held: torch.dtype, twin: bool
) -> None:
    """A folder is loaded in fp32."""
    encoder: Any = embedlab.load(tiny("bert"))
    encoder.pooling = build_pooling(pooling_config(pooling), encoder.backbone.info)
    if twin:
        encoder = TwinEncoder([encoder, embedlab.load(tiny("bert", seed=1))])
    before = encoder.fingerprint()
    encoder.to(held)
    encoder.save(tmp_path / "saved")
    after = encoder.fingerprint()
    assert embedlab.load(tmp_path / "saved").fingerprint() == after
    assert (after == before) == (held in (torch.float32, torch.float64)), "rounded weights give other vectors"


def test_a_fingerprint_is_compared_as_far_as_both_say() -> None:
    assert same_encoder("a1+b2", "a1+b2")
    assert same_encoder("a1", "a1+b2")
    assert same_encoder("a1+b2", "a1")
    for other in ("a1+c3", "a2+b2", "a2", "b2", "", "a"):
        assert not same_encoder("a1+b2", other)
        assert not same_encoder(other, "a1+b2")


def _shortened(file: Path, *keys: str) -> None:
    """What an earlier release would have written."""
    values = json.loads(file.read_text())
    for key in keys:
        assert "+" in values[key]
        values[key] = values[key].split("+")[0]
    file.write_text(json.dumps(values))


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("kind", ["texts", "vectors", "parts", "mine"])
def test_what_was_made_of_a_configuration_goes_on_with_it_alone(
    kind: str, earlier: bool, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Every command that holds an encoder to what another run wrote; of an earlier release it is as it was."""
    monkeypatch.chdir(tmp_path)
    own, other = tiny("bert"), changed(tiny("bert"), tmp_path / "other", {"layer_norm_eps": 0.1})
    Path("texts.txt").write_text("\n".join(SENTENCES) + "\n")
    pairs = zip(SENTENCES[:4], SENTENCES[4:8], strict=True)
    rows = [json.dumps({"anchor": a, "positive": b}) + "\n" for a, b in pairs]
    Path("pairs.jsonl").write_text("".join(rows))
    encode = ["encode", "texts.txt", "parts", "part_rows=5", "device=cpu"]
    mine = ["mine", "pairs.jsonl", "out.jsonl", "device=cpu", "work=work", "corpus=texts.txt", "negatives=1"]
    mine += ["scores=true", f"teacher={own}"]
    first, then, file, keys = {
        "texts": (["search", "index", "texts.txt", "index"], ["search", "query", "index", "cats"],
                  "index/index.json", ["fingerprint"]),
        "vectors": (encode, ["search", "index", "parts", "index", "overwrite=true"], "parts/manifest.json",
                    ["fingerprint"]),
        "parts": (encode, encode, "parts/manifest.json", ["fingerprint"]),
        "mine": (mine, [*mine, "overwrite=true"], "work/settings.json",
                 ["ckpt", "teacher"]),
    }[kind]  # fmt: skip
    assert main([*first, f"ckpt={own}"]) == 0, capsys.readouterr().err
    if earlier:
        _shortened(Path(file), *keys)
    assert main([*then, f"ckpt={own}"]) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert main([*then, f"ckpt={other}"]) == (0 if earlier else 2)
    if kind == "vectors" and earlier:
        made = json.loads(Path("index/index.json").read_text())
        assert made["fingerprint"] == json.loads(Path(file).read_text())["fingerprint"], "no more is known"
    if not earlier:
        assert len(capsys.readouterr().err.splitlines()) == 1
