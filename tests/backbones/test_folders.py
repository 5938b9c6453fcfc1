"""Model folders in every state: sharded, pickled, tied, in half precision; and those that are of two models."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from embedlab.backbones import load_backbone, probe
from embedlab.backbones.architecture import check_sizes
from embedlab.backbones.resolve import resolve
from embedlab.config.backbone import BackboneConfig
from embedlab.errors import UserError
from embedlab.files import shipped_encoders
from tests.model_zoo import tiny_model, tiny_words

Tiny = Callable[..., Path]
IDS = torch.tensor([[0, 5, 6, 7, 2]])


def local(folder: Path, **more: Any) -> BackboneConfig:
    return BackboneConfig(source="local", path=str(folder), **more)


def states(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return load_backbone(local(folder))[0](IDS, torch.ones_like(IDS))[0]


def one_line(folder: Path, **more: Any) -> str:
    """The error of loading a folder: one line that names it."""
    with pytest.raises(UserError) as caught:
        load_backbone(local(folder, **more))
    text = str(caught.value)
    assert "\n" not in text
    assert str(folder) in text
    return text


@pytest.mark.parametrize("name", shipped_encoders())
def test_an_encoder_in_the_box_as_a_path_is_told_its_key(name: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(local(Path(name)))
    keys = dict(part.split("=") for part in str(caught.value.fix).split(",")[0].split())
    assert keys == {"backbone": "mini", "backbone.name": name}
    assert resolve(BackboneConfig(source="shipped", name=keys["backbone.name"]))


@pytest.mark.parametrize("kind", ["folder", "file.gguf", "file.txt"])
def test_only_what_may_be_a_model_is_meant_by_a_slip_of_the_pen(kind: str, tmp_path: Path) -> None:
    there = tmp_path / ("encoder" + Path(kind).suffix)
    if kind == "folder":
        there.mkdir()
    else:
        there.touch()
    fix = one_line(tmp_path / ("encodr" + there.suffix)).partition("Fix: ")[2]
    assert (str(there) in fix) == (kind != "file.txt")


@pytest.fixture
def bert(tiny: Tiny, tmp_path: Path) -> Path:
    return shutil.copytree(tiny("bert"), tmp_path / "m")


def edit(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def store(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("model_type", ["bert", "t5", "bart", "llama"])
@pytest.mark.parametrize("form", ["sharded", "bin", "sharded bin", "bf16"])
def test_the_same_states_from_every_form(tmp_path: Path, model_type: str, form: str) -> None:
    model = tiny_model(model_type)
    if form == "bf16":
        model = model.bfloat16()
    whole = tmp_path / "whole"
    model.float().save_pretrained(whole) if form == "bf16" else model.save_pretrained(whole)
    tiny_words().save_pretrained(whole)
    folder = tmp_path / "form"
    if "bin" in form:
        shutil.copytree(whole, folder)
        tensors = weights(folder)
        (folder / "model.safetensors").unlink()
        files = [tensors] if form == "bin" else [dict(list(tensors.items())[i::2]) for i in range(2)]
        names = ["pytorch_model.bin"] if form == "bin" else [f"pytorch_model-{i}.bin" for i in range(2)]
        for name, part in zip(names, files, strict=True):
            torch.save(part, folder / name)
        if len(names) > 1:
            where = {k: name for name, part in zip(names, files, strict=True) for k in part}
            index = {"metadata": {}, "weight_map": where}
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    else:
        model.to(torch.bfloat16 if form == "bf16" else torch.float32)
        model.save_pretrained(folder, max_shard_size="20KB" if form == "sharded" else "5GB")
        tiny_words().save_pretrained(folder)
    assert (
        len(list(folder.glob("*.safetensors"))) == {"sharded": 4, "bf16": 1}.get(form, 0) or form == "sharded"
    )
    torch.testing.assert_close(states(folder), states(whole), rtol=0, atol=1e-6)


def test_a_pickle_with_code_is_not_run(bert: Path) -> None:
    class Code:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (bert / "ran",))

    (bert / "model.safetensors").unlink()
    torch.save({"x": Code()}, bert / "pytorch_model.bin")
    one_line(bert)
    assert not (bert / "ran").exists()


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [("vocab_size", 300, "word_embeddings"), ("max_position_embeddings", 32, "position_embeddings"),
     ("intermediate_size", 48, "intermediate.dense")],
)  # fmt: skip
def test_another_shape_names_the_tensor_and_both_shapes(bert: Path, key: str, value: int, name: str) -> None:
    stored = next(v for k, v in sorted(weights(bert).items()) if name in k and "bert." in k)
    edit(bert, **{key: value})
    if key == "vocab_size":
        tiny_words().save_pretrained(bert)
    text = one_line(bert)
    assert name in text
    assert "x".join(str(n) for n in stored.shape) in text
    assert str(value) in text


@pytest.mark.parametrize("model_type", ["bert", "gpt2", "t5", "bart", "llama"])
def test_layers_that_the_configuration_leaves_out_are_refused(tmp_path: Path, model_type: str) -> None:
    tiny_model(model_type).save_pretrained(tmp_path)
    tiny_words().save_pretrained(tmp_path)
    name = {"gpt2": "n_layer", "t5": "num_layers", "bart": "encoder_layers"}.get(
        model_type, "num_hidden_layers"
    )
    edit(tmp_path, **{name: 1, "architectures": None})
    text = one_line(tmp_path)
    assert "does not use, the first" in text
    assert ".1." in text
    edit(tmp_path, **{name: 3})
    assert "the checkpoint lacks" in one_line(tmp_path)


def test_layers_that_are_left_out_are_seen_beside_a_head(bert: Path) -> None:
    edit(bert, num_hidden_layers=1)
    assert "the first bert.encoder.layer.1.attention" in one_line(bert)


def test_heads_and_poolers_may_be_there_or_not(bert: Path) -> None:
    expected = states(bert)
    tensors = weights(bert)
    more = tensors | {
        "bert.pooler.dense.weight": torch.randn(32, 32),
        "classifier.weight": torch.randn(2, 32),
    }
    store(bert, more)
    torch.testing.assert_close(states(bert), expected)
    store(bert, {k: v for k, v in tensors.items() if not k.startswith("cls.")})
    torch.testing.assert_close(states(bert), expected)


def test_a_part_of_a_block_that_is_not_used_is_refused(bert: Path) -> None:
    """Position embeddings within attention, which transformers 5 has no code for any more."""
    name = "bert.encoder.layer.0.attention.self.distance_embedding.weight"
    store(bert, weights(bert) | {name: torch.randn(127, 8)})
    assert "distance_embedding" in one_line(bert)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_missing_weight_of_the_body_is_named(tiny: Tiny, tmp_path: Path, data: st.DataObject) -> None:
    folder = shutil.copytree(tiny("bert"), tmp_path / "m", dirs_exist_ok=True)
    tensors = weights(folder)
    gone = data.draw(st.sampled_from(sorted(k for k in tensors if k.startswith("bert."))))
    store(folder, {k: v for k, v in tensors.items() if k != gone})
    text = one_line(folder)
    assert "lacks 1 of the model's weights" in text
    assert gone.removeprefix("bert.") in text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", -1), ("num_hidden_layers", 0), ("num_hidden_layers", 10**9),
        ("hidden_size", 10**12), ("hidden_size", -8), ("vocab_size", 10**15), ("vocab_size", 2**30),
        ("intermediate_size", 10**11), ("max_position_embeddings", 10**11), ("num_attention_heads", 0),
        ("num_attention_heads", 7), ("hidden_size", "wide"), ("num_hidden_layers", None), ("hidden_size", [32]),
        ("hidden_size", 1.5), ("model_type", "no-such-type"), ("hidden_act", "no-such-function"),
    ],
)  # fmt: skip
def test_sizes_that_cannot_be_are_one_line_before_anything_is_allocated(
    bert: Path, key: str, value: Any
) -> None:
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    edit(bert, **{key: value})
    one_line(bert)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kB


@pytest.mark.parametrize("value", [-1, 10**9])
def test_the_check_of_a_run_says_so_too(bert: Path, value: int) -> None:
    edit(bert, num_hidden_layers=value)
    with pytest.raises(UserError, match=f"num_hidden_layers={value}"):
        probe(local(bert))


@pytest.mark.parametrize("text", ["[]", "null", "3", "{", '{"model_type": 3}', "{}", '{"model_type": "bert"'])
def test_a_configuration_of_another_form(bert: Path, text: str) -> None:
    (bert / "config.json").write_text(text)
    one_line(bert)


@settings(max_examples=50, deadline=None)
@given(st.recursive(st.integers() | st.text() | st.none(), lambda s: st.dictionaries(st.text(), s)))
def test_any_json_has_sizes_or_a_user_error(values: Any) -> None:
    with contextlib.suppress(UserError):
        check_sizes(values)


def test_an_encoder_by_itself_is_read_like_the_whole(tmp_path: Path) -> None:
    """T5's encoder saved by Hugging Face's own class says that it is no encoder-decoder."""
    from transformers import T5EncoderModel

    whole = tiny_model("t5")
    for name in ("whole", "encoder"):
        whole.save_pretrained(tmp_path / name)
        tiny_words().save_pretrained(tmp_path / name)
    T5EncoderModel.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "encoder")
    theirs = AutoModel.from_pretrained(tmp_path / "whole").get_encoder().eval()
    with torch.no_grad():
        expected = theirs(input_ids=IDS).last_hidden_state
    for name in ("whole", "encoder"):
        torch.testing.assert_close(states(tmp_path / name), expected, rtol=0, atol=1e-6)
