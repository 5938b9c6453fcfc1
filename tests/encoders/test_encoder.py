"""encode() gives each sentence its own vector, whatever surrounds it; a folder gives the encoder back."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.parallel import DistributedDataParallel

from embedlab.backbones import load_backbone
from embedlab.config.backbone import BackboneConfig
from embedlab.config.template import Template
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.folder import CARD, POOLING_WEIGHTS
from embedlab.encoders.tokenization import Tokenization
from embedlab.errors import UserError
from embedlab.pooling import build_pooling, pooling_config
from tests.support import ENCODERS, MODEL_TYPES, SENTENCES

Tiny = Callable[..., Path]
TEXTS = [*SENTENCES[:6], "  hello ", "", "a", "word " * 90, "a [MASK] b"]
MASKED = Template('This sentence of "{sentence}" means {mask}.')
STAGES = Template(
    'This sentence : "{sentence}" means in one word{rep1}, it can be summarized as{rep2}', "text"
)
POOLED = [("cls", None), ("mean", None), ("last", None), ("first_last", None), ("cls_mlp", None), ("mask", MASKED),
          ("mean", STAGES), ("last", STAGES)]  # fmt: skip


def build(
    folder: Path,
    pooling: str = "mean",
    template: Template | None = None,
    max_length: int | None = None,
    head: Any = None,
) -> SentenceEncoder:
    backbone, tokenizer = load_backbone(BackboneConfig(source="local", path=str(folder)), head=head)
    torch.manual_seed(0)
    encoder = SentenceEncoder(
        backbone, build_pooling(pooling, backbone.info), Tokenization(tokenizer, template, max_length)
    )
    return encoder.eval()


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_batched_is_alone_is_padded_left(tiny: Tiny, model_type: str) -> None:
    """Pitfalls 26 to 30, through the whole encoder: every architecture with every pooling that it can have."""
    backbone, tokenizer = load_backbone(BackboneConfig(source="local", path=str(tiny(model_type))))
    texts = TEXTS[4:]
    for pooling, template in POOLED:
        if model_type not in ENCODERS and pooling in ("cls", "cls_mlp", "mask"):
            with pytest.raises(UserError):
                pooling_config(pooling).check(backbone.info, template, "simcse")
            continue
        pooled = build_pooling(pooling, backbone.info)
        encoder = SentenceEncoder(backbone, pooled, Tokenization(tokenizer, template))
        together = encoder.encode(texts)
        assert np.isfinite(together).all()
        others = [
            np.stack([encoder.encode(t) for t in texts]),
            encoder.encode(texts[::-1], batch_size=3)[::-1],
        ]
        tokenizer.padding_side = "left"
        others.append(encoder.encode(texts))
        tokenizer.padding_side = "right"
        for other in others:
            np.testing.assert_allclose(other, together, rtol=0, atol=2e-5)
        scale = np.linalg.norm(together, axis=1).mean()
        assert np.linalg.norm(together[0] - together[1]) > 0.01 * scale


def test_outputs(tiny: Tiny) -> None:
    encoder = build(tiny("bert"))
    vectors = encoder.encode(TEXTS)
    assert isinstance(vectors, np.ndarray)
    assert (vectors.shape, vectors.dtype, encoder.dim) == ((len(TEXTS), 32), np.float32, 32)
    tensor = encoder.encode(TEXTS, output="tensor")
    assert isinstance(tensor, torch.Tensor)
    assert torch.equal(tensor, torch.from_numpy(vectors))
    assert not tensor.is_inference()
    one = encoder.encode(TEXTS[2])
    assert one.shape == (32,)
    np.testing.assert_allclose(one, vectors[2], atol=1e-5)
    assert encoder.encode([]).shape == (0, 32)
    assert encoder.encode(tuple(TEXTS)).shape == vectors.shape
    normal = encoder.encode(TEXTS, normalize=True)
    np.testing.assert_allclose(np.linalg.norm(normal, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(normal, vectors / np.linalg.norm(vectors, axis=1, keepdims=True), atol=1e-6)


def test_bad_calls(tiny: Tiny) -> None:
    encoder = build(tiny("bert"))
    with pytest.raises(TypeError, match="sentence 1 is a float"):
        encoder.encode(["a", float("nan")])
    with pytest.raises(UserError, match="numpy or tensor"):
        encoder.encode(["a"], output="list")
    with pytest.raises(UserError, match="bfloat16"):
        encoder.encode(["a"], dtype="int8")
    with pytest.raises(UserError, match="batch_size"):
        encoder.encode(["a"], batch_size=0)


def test_batches_are_of_similar_length_and_within_their_budget(tiny: Tiny) -> None:
    encoder = build(tiny("bert"))
    seen: list[tuple[int, int]] = []
    encoder.backbone.register_forward_pre_hook(lambda m, args: seen.append(tuple(args[0].shape)))  # type: ignore[arg-type]
    rows = [[5] * n for n in (1, 40, 2, 39, 3, 38, 60)]
    encoder.encode_ids(rows, batch_tokens=80)
    assert seen == [(1, 60), (2, 40), (2, 38), (2, 2)]
    seen.clear()
    encoder.encode_ids(rows, 3)
    assert seen == [(3, 60), (3, 38), (1, 1)]


def test_encode_ids_is_what_encode_calls(tiny: Tiny) -> None:
    encoder = build(tiny("bert"))
    vectors = encoder.encode_ids(encoder.tokenization.ids(TEXTS))
    np.testing.assert_array_equal(vectors.numpy(), encoder.encode(TEXTS))


def test_modes_are_restored_and_dropout_is_off(tiny: Tiny) -> None:
    encoder = build(tiny("bert"), "cls_mlp")
    expected = encoder.encode(TEXTS)
    encoder.train()
    encoder.backbone.blocks[0].eval()
    before = [m.training for m in encoder.modules()]
    np.testing.assert_array_equal(encoder.encode(TEXTS), expected)
    assert [m.training for m in encoder.modules()] == before
    encoder.pooling.forward = None  # type: ignore[assignment,method-assign]
    with pytest.raises(TypeError):
        encoder.encode(TEXTS)
    assert [m.training for m in encoder.modules()] == before


def test_half_precision_is_near(tiny: Tiny) -> None:
    encoder = build(tiny("bert"))
    exact = encoder.encode(TEXTS, normalize=True)
    for dtype, least in (("bfloat16", 0.999), ("float16", 0.9999), ("float32", 0.999999)):
        vectors = encoder.encode(TEXTS, normalize=True, dtype=dtype)
        assert vectors.dtype == np.float32
        assert (vectors * exact).sum(1).min() > least
    assert np.abs(encoder.encode(TEXTS, dtype="bfloat16") - encoder.encode(TEXTS)).max() > 1e-5
    with torch.autocast("cpu", dtype=torch.bfloat16):
        np.testing.assert_array_equal(encoder.encode(TEXTS, dtype="float32", normalize=True), exact)


def test_a_long_progress(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    build(tiny("bert")).encode(TEXTS, show_progress_bar=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"{len(TEXTS)} texts, " in captured.err


def test_every_batch_is_told(tiny: Tiny) -> None:
    told: list[tuple[int, int]] = []
    texts = [*TEXTS, *TEXTS]
    build(tiny("bert")).encode(texts, batch_size=2, on_batch=lambda done, of: told.append((done, of)))
    assert len(told) == -(-len(TEXTS) // 2)
    assert told == sorted(told)
    assert told[-1] == (len(texts), len(texts))
    assert {of for _, of in told} == {len(texts)}


def test_compiled_blocks_are_left_alone_by_scoring(tiny: Tiny) -> None:
    encoder = build(tiny("bert", layers=1))
    expected = encoder.encode(TEXTS)

    def refuse(*_: Any) -> Any:
        raise AssertionError("compiled")

    encoder.backbone.compile_blocks(backend=refuse)
    np.testing.assert_array_equal(encoder.encode(TEXTS), expected)
    torch._dynamo.reset()


def test_one_training_step_under_autocast_reaches_every_weight(tiny: Tiny) -> None:
    encoder = build(tiny("bert"), "cls_mlp").train()
    tokens = encoder.tokenization.pad(encoder.tokenization.ids(TEXTS))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        vectors = encoder(**tokens)
    assert vectors.dtype == torch.float32
    vectors.sum().backward()
    without = [n for n, p in encoder.named_parameters() if p.grad is None]
    assert without == []
    assert all(p.grad.dtype == torch.float32 for p in encoder.parameters() if p.grad is not None)


def test_ddp_takes_it_without_looking_for_unused_weights(tiny: Tiny, tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        encoder = build(tiny("bert"), "first_last")
        tokens = encoder.tokenization.pad(encoder.tokenization.ids(TEXTS))
        wrapped = DistributedDataParallel(encoder)
        for _ in range(2):  # the second forward fails where a gradient did not come
            wrapped(**tokens).sum().backward()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("pooling", "template"), POOLED)
def test_a_folder_gives_it_back(tiny: Tiny, tmp_path: Path, pooling: str, template: Template | None) -> None:
    encoder = build(tiny("bert"), pooling, template, 9)
    encoder.card = {"training": {"seed": 7}, "note": "naïve"}
    encoder.save(tmp_path / "e")
    again = SentenceEncoder.load(tmp_path / "e")
    assert not again.training
    np.testing.assert_array_equal(again.encode(TEXTS), encoder.encode(TEXTS))
    assert again.fingerprint() == encoder.fingerprint()
    assert again.tokenization.fingerprint == encoder.tokenization.fingerprint
    assert again.pooling.config == encoder.pooling.config
    assert again.card == encoder.card
    assert (tmp_path / "e" / POOLING_WEIGHTS).exists() == (pooling == "cls_mlp")


def test_a_folder_is_one_of_hugging_face(tiny: Tiny, tmp_path: Path) -> None:
    from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

    encoder = build(tiny("bert"), "cls", head="masked_lm")
    encoder.save(tmp_path / "e")
    tokens = AutoTokenizer.from_pretrained(tmp_path / "e")("a cat", return_tensors="pt")
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(tmp_path / "e").eval()(**tokens).last_hidden_state
        np.testing.assert_allclose(hidden[0, 0], encoder.encode("a cat"), atol=1e-5)
        logits = AutoModelForMaskedLM.from_pretrained(tmp_path / "e").eval()(**tokens).logits
        expected = encoder.backbone.head(encoder.backbone(tokens["input_ids"], tokens["attention_mask"])[0])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert "embedlab_sdpa" not in (tmp_path / "e" / "config.json").read_text()
    # ... and what was saved with its head can be trained further with it.
    config = BackboneConfig(source="local", path=str(tmp_path / "e"))
    assert load_backbone(config, head="masked_lm")[0].info.has_mlm_head


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_everyone_may_read_what_the_umask_lets(tiny: Tiny, tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        encoder = build(tiny("bert"), "cls_mlp")
        encoder.save(tmp_path / "e")
        encoder.to_sentence_transformers(tmp_path / "st")
    finally:
        os.umask(before)
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert sum(p.suffix == ".safetensors" for p in files) > 3
    assert {p.stat().st_mode & 0o777 for p in files} == {mode}
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "e", tmp_path / "st")} == {0o777 & ~umask}


def test_half_precision_on_disk_is_fp32_in_memory(tiny: Tiny, tmp_path: Path) -> None:
    encoder = build(tiny("bert"), "cls_mlp", head="masked_lm")
    encoder.save(tmp_path / "e", dtype="float16")
    again = SentenceEncoder.load(tmp_path / "e")
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    np.testing.assert_allclose(again.encode(TEXTS), encoder.encode(TEXTS), atol=5e-3)


def test_saving_is_whole_or_not_at_all(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = build(tiny("bert"))
    target = tmp_path / "deep" / "e"
    encoder.save(target)
    before = {f.name: f.read_bytes() for f in target.iterdir()}

    def full(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(encoder.tokenizer, "save_pretrained", full)
    with torch.no_grad():
        next(encoder.parameters()).add_(1)
    with pytest.raises(OSError, match="No space"):
        encoder.save(target)
    assert {f.name: f.read_bytes() for f in target.iterdir()} == before
    assert [f.name for f in target.parent.iterdir()] == ["e"]
    monkeypatch.undo()
    (target / "stale").write_text("x")
    encoder.save(target)
    assert not (target / "stale").exists()
    assert [f.name for f in target.parent.iterdir()] == ["e"]
    np.testing.assert_array_equal(SentenceEncoder.load(target).encode(TEXTS), encoder.encode(TEXTS))


def test_saving_never_replaces_something_else(tiny: Tiny, tmp_path: Path) -> None:
    encoder = build(tiny("bert"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years")
    with pytest.raises(UserError, match="other things than an encoder"):
        encoder.save(tmp_path / "home")
    with pytest.raises(UserError, match="is a file"):
        encoder.save(tmp_path / "home" / "thesis.txt")
    assert (tmp_path / "home" / "thesis.txt").read_text() == "years"
    (tmp_path / "empty").mkdir()
    encoder.save(tmp_path / "empty")


def test_broken_folders(tiny: Tiny, tmp_path: Path) -> None:
    build(tiny("bert"), "cls_mlp").save(tmp_path / "e")

    def broken(change: Callable[[Path], None]) -> UserError:
        folder = tmp_path / "broken"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "e", folder)
        change(folder)
        with pytest.raises(UserError) as caught:
            SentenceEncoder.load(folder)
        assert "\n" not in str(caught.value)
        return caught.value

    def edit(**values: Any) -> Callable[[Path], None]:
        def change(folder: Path) -> None:
            card = json.loads((folder / CARD).read_text())
            (folder / CARD).write_text(
                json.dumps({k: v for k, v in (card | values).items() if v is not None})
            )

        return change

    def weights(folder: Path) -> None:
        state = load_file(folder / POOLING_WEIGHTS)
        save_file({"linear.weight": state["linear.weight"]}, folder / POOLING_WEIGHTS)

    def layer(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        kept = {k: v for k, v in state.items() if "layer.1.output" not in k}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})

    assert "is no encoder" in str(broken(lambda f: os.remove(f / CARD)))
    assert "is not JSON" in str(broken(lambda f: (f / CARD).write_text("{")))
    assert "a key is missing (pooling)" in str(broken(edit(pooling=None)))
    assert "too old" in str(broken(edit(format=99)))
    for wrong in ([1], "bert", 3):
        assert "(backbone=" in str(broken(edit(backbone=wrong)))
    assert "two towers or more" in str(broken(edit(towers=["x"])))
    for name in ({}, [], 3):
        assert "unknown pooling" in str(broken(edit(pooling={"name": name})))
    assert "(tokenization.max_length=-1)" in str(broken(edit(tokenization={"max_length": -1})))
    assert "too deeply" in str(broken(lambda f: (f / CARD).write_text("[" * 100_000)))
    assert "holds no keys" in str(broken(lambda f: (f / CARD).write_text("[1]")))
    assert "unknown pooling" in str(broken(edit(pooling={"name": "attention"})))
    assert "pooling's weights do not fit" in str(broken(weights))
    assert "pooling's weights do not fit" in str(broken(lambda f: os.remove(f / POOLING_WEIGHTS)))
    assert "lacks" in str(broken(layer))
    assert "cannot be read" in str(broken(lambda f: os.remove(f / "model.safetensors")))


def test_another_kernel_and_precision_at_loading(tiny: Tiny, tmp_path: Path) -> None:
    encoder = build(tiny("bert"))
    encoder.save(tmp_path / "e")
    other = SentenceEncoder.load(tmp_path / "e", attention="eager", dtype="bfloat16")
    assert other.provenance()["attention"] == "eager"
    assert other.provenance()["dtype"] == "bfloat16"
    cosine = (other.encode(TEXTS, normalize=True) * encoder.encode(TEXTS, normalize=True)).sum(1)
    assert cosine.min() > 0.99
    card = json.loads((tmp_path / "e" / CARD).read_text())
    card["backbone"]["attention"] = "flash_attention_2"
    (tmp_path / "e" / CARD).write_text(json.dumps(card))
    if not torch.cuda.is_available():
        assert SentenceEncoder.load(tmp_path / "e").provenance()["attention"] == "sdpa"


def test_facts(tiny: Tiny) -> None:
    encoder = build(tiny("bert"), "mask", MASKED, 4)
    encoder.card = {"training": {"seed": 3}}
    assert encoder.provenance(["a", "a b c d e", "a b c d"]) == {
        "pooling": {"name": "mask"},
        "template": {"text": MASKED.text, "join": "ids"},
        "preparation": "raw",
        "max_length": 4,
        "truncated": 1,
        "dtype": "float32",
        "attention": "sdpa",
        "checkpoint": encoder.fingerprint(),
        "seed": 3,
        "device": "cpu",
    }
    assert encoder.provenance()["truncated"] is None


def test_the_fingerprint_follows_what_decides_the_vectors(tiny: Tiny) -> None:
    encoder = build(tiny("bert"))
    changed = copy.deepcopy(encoder)
    with torch.no_grad():
        next(changed.backbone.parameters())[0, 0] += 1e-6
    variants = [
        encoder,
        changed,
        build(tiny("bert"), "cls"),
        build(tiny("bert"), "cls_mlp"),
        build(tiny("bert"), "mean", MASKED),
        build(tiny("bert"), max_length=16),
    ]
    assert len({v.fingerprint() for v in variants}) == len(variants)
    assert build(tiny("bert"), head="masked_lm").fingerprint() == encoder.fingerprint()
    encoder.card = {"note": "another"}
    assert encoder.fingerprint() == variants[0].fingerprint()


def test_half_of_a_character_is_named_by_its_sentence(tiny: Tiny) -> None:
    with pytest.raises(UserError, match="sentence 1 holds half of a character"):
        build(tiny("bert")).encode(["a", "b \udc80 c"])


def test_on_another_device_and_back(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder on the processor that says it is elsewhere."""
    encoder = build(tiny())
    expected = encoder.encode(TEXTS[:3])
    at = [torch.device("meta")]
    monkeypatch.setattr(SentenceEncoder, "device", property(lambda self: at[-1]))
    monkeypatch.setattr(encoder, "to", lambda device: at.append(torch.device(device)))
    seen: list[torch.device] = []
    found = encoder.encode(TEXTS[:3], device="cpu", on_batch=lambda *_: seen.append(encoder.device))
    assert np.array_equal(found, expected)
    assert set(seen) == {torch.device("cpu")}
    assert [str(device) for device in at] == ["meta", "cpu", "meta"]
    at.append(torch.device("cpu"))
    encoder.encode(TEXTS[:3], device="cpu:0")  # another name of where it is
    assert len(at) == 4


@pytest.mark.parametrize("dim", [1, 7, 32])
def test_a_narrower_vector_is_cut_before_it_is_normalised(tiny: Tiny, dim: int) -> None:
    # sentence-transformers cuts after its Normalize module, so that the vectors are not of length one.
    encoder = build(tiny("bert"))
    whole, texts = encoder.encode(TEXTS), TEXTS
    np.testing.assert_array_equal(encoder.encode(texts, dim=dim), whole[:, :dim])
    kept = encoder.encode(texts, dim=dim, normalize=True)
    expected = whole[:, :dim] / np.linalg.norm(whole[:, :dim], axis=1, keepdims=True)
    np.testing.assert_allclose(kept, expected, atol=1e-6)
    for encode in (encoder.encode_query, encoder.encode_document):
        np.testing.assert_array_equal(encode(texts, dim=dim), whole[:, :dim])
    assert encoder.dim == 32


@pytest.mark.parametrize("dim", [0, -1, 33, 2.0, True])
def test_a_width_that_is_none_is_refused(tiny: Tiny, dim: Any) -> None:
    with pytest.raises(UserError, match=f"dim={dim}.*1 to 32"):
        build(tiny("bert")).encode(TEXTS, dim=dim)
