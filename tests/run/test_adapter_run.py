"""Runs with adapters: small checkpoints that come back whole, exact resume, merged exports, refusals."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import embedlab
from embedlab.config.run import RunConfig
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.tokenization import Tokenization
from embedlab.errors import UserError
from embedlab.run.callbacks.checkpoints import LAST, PREVIOUS
from embedlab.run.check import backbone_info, check_run
from embedlab.run.run import build, train
from tests.support import tiny_backbone

Compose = Callable[..., RunConfig]
TEXTS = ["a cat sees the dog", "the old river runs fast", ""]
SHAPE = {"model_type": "llama", "width": 128, "ffn": 512, "max_positions": 128}
CSESFP = ("method=csesfp", "template=eol_sum", "pooling=rep2", "data.max_length=16")


def _config(compose_run: Compose, adapter: str, *more: str) -> RunConfig:
    return compose_run(*CSESFP, f"adapter={adapter}", "adapter.r=1", "trainer.max_steps=4", *more, **SHAPE)


@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_checkpoints_are_small_and_whole(
    compose_run: Compose, sts_dir: Path, tmp_path: Path, adapter: str
) -> None:
    scoring = (f"evaluation.sts_dir={sts_dir}", "evaluation.every=2", "evaluation.select=last")
    config = _config(compose_run, adapter, *scoring, "callbacks.checkpoint.every_steps=2")
    train(config, tmp_path)
    base = Path(str(config.backbone.path)) / "model.safetensors"
    state = torch.load(tmp_path / LAST, weights_only=True)["state_dict"]
    assert len(state) == 2 * 14
    assert all(".lora_" in name for name in state)
    assert sum(v.numel() * v.element_size() for v in state.values()) < 0.05 * base.stat().st_size
    assert any(v.abs().sum() > 0 for n, v in state.items() if "lora_B" in n)
    vectors = [embedlab.load(tmp_path / name).encode(TEXTS) for name in ("export", LAST)]
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-4)
    # The export needs neither base nor PEFT.
    assert not any("lora" in n or "absmax" in n for n in load_file(tmp_path / "export" / "model.safetensors"))
    untrained = build(config, tmp_path / "other")[0].encoder.encode(TEXTS)
    assert np.abs(untrained - vectors[0]).max() > 1e-3


@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_an_adapter_alone_comes_back_on_its_base(compose_run: Compose, tmp_path: Path, adapter: str) -> None:
    method, _ = build(_config(compose_run, adapter), tmp_path)
    with torch.no_grad():
        for name, p in method.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.1)
    encoder = method.encoder.eval()
    encoder.save(tmp_path / "adapter", merge=False)
    encoder.save(tmp_path / "whole")
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    assert not list((tmp_path / "whole").glob("adapter*"))
    modes = {p.stat().st_mode for p in (tmp_path / "adapter").iterdir()}
    assert len(modes) == 1, "the weights may be read by whom the other files may be"
    alone, whole = (SentenceEncoder.load(tmp_path / name) for name in ("adapter", "whole"))
    vectors = encoder.encode(TEXTS)
    np.testing.assert_allclose(alone.encode(TEXTS), vectors, atol=1e-5)
    np.testing.assert_allclose(whole.encode(TEXTS), vectors, atol=1e-4)
    assert alone.tokenization.preparation == whole.tokenization.preparation == "closed"
    assert encoder.fingerprint() == alone.fingerprint() == whole.fingerprint()
    merged = alone.merged()
    assert not any("lora" in n for n, _ in merged.named_parameters())
    np.testing.assert_allclose(merged.encode(TEXTS), whole.encode(TEXTS), atol=1e-6)


def test_export_of_an_adapter_is_whole(compose_run: Compose, tmp_path: Path) -> None:
    from embedlab.cli.export import export

    method, _ = build(_config(compose_run, "lora"), tmp_path)
    method.encoder.save(tmp_path / "adapter", merge=False)
    encoder = embedlab.load(tmp_path / "adapter")
    for target, most in (("hf", 1e-6), ("sentence-transformers", 1e-5)):
        told = export(encoder, target, tmp_path / target)
        assert float(told.removeprefix("largest difference ")) < most
    assert "lora" not in (tmp_path / "sentence-transformers" / "config.json").read_text()


def test_best_holds_the_adapter_and_is_selected(compose_run: Compose, sts_dir: Path, tmp_path: Path) -> None:
    scoring = (f"evaluation.sts_dir={sts_dir}", "evaluation.every=2")
    train(_config(compose_run, "qlora", *scoring), tmp_path)
    best = tmp_path / "best"
    assert (best / "adapter_model.safetensors").stat().st_size < 100_000
    assert not (best / "model.safetensors").exists()
    vectors = [embedlab.load(p).encode(TEXTS) for p in (best, tmp_path / "export")]
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-4)


@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_resume_is_exact(compose_run: Compose, tmp_path: Path, adapter: str) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    train(_config(compose_run, adapter), straight)
    train(_config(compose_run, adapter, "callbacks.checkpoint.every_steps=3"), broken)
    shutil.copy(broken / PREVIOUS, broken / LAST)
    assert torch.load(broken / LAST, weights_only=True)["global_step"] == 3
    train(_config(compose_run, adapter, "ckpt_path=last"), broken)
    one, two = (torch.load(f / LAST, weights_only=True)["state_dict"] for f in (straight, broken))
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(two[name], value), name


def test_a_bad_checkpoint_does_not_take_the_place_of_a_good_one(
    compose_run: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning.pytorch.strategies import Strategy

    write = Strategy.save_checkpoint
    written: list[str] = []

    def spoilt(self: Strategy, state: dict[str, object], path: Path) -> None:
        write(self, state, path)
        if written:
            content = torch.load(path, weights_only=True)
            content["state_dict"] = dict(list(content["state_dict"].items())[1:])
            torch.save(content, path)
        written.append(str(path))

    monkeypatch.setattr(Strategy, "save_checkpoint", spoilt)
    config = _config(compose_run, "lora", "callbacks.checkpoint.every_steps=2")
    with pytest.raises(RuntimeError, match="does not hold the trained weights"):
        train(config, tmp_path)
    assert len(written) == 2
    good = torch.load(tmp_path / LAST, weights_only=True)
    assert good["global_step"] == 2
    assert len(good["state_dict"]) == 28


def test_the_base_must_be_the_same(compose_run: Compose, tmp_path: Path) -> None:
    base = tiny_backbone("llama", tmp_path / "base", width=128, ffn=512, max_positions=128)
    config = compose_run(*CSESFP, "adapter=lora", "adapter.r=1", f"backbone.path={base}", model_type="llama")
    method, _ = build(config, tmp_path / "run")
    method.encoder.save(tmp_path / "adapter", merge=False)
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="not the one that the adapter was trained on"):
        SentenceEncoder.load(tmp_path / "adapter")
    shutil.rmtree(base)
    with pytest.raises(UserError, match="needs its base model"):
        SentenceEncoder.load(tmp_path / "adapter")


def test_gradient_checkpointing_and_chunks_train_alike(compose_run: Compose, tmp_path: Path) -> None:
    """The same run in less memory: dropout off, as other shapes draw other masks."""
    plain = ("adapter.dropout=0.0", "trainer.max_steps=2")
    states = []
    for name, more in (
        ("a", ()),
        ("b", ("adapter.gradient_checkpointing=true",)),
        ("c", ("optimizer.chunk=3",)),
        ("d", ("optimizer.chunk=3", "adapter.gradient_checkpointing=true")),
    ):
        train(_config(compose_run, "lora", *plain, *more), tmp_path / name)
        states.append(torch.load(tmp_path / name / LAST, weights_only=True)["state_dict"])
    for other in states[1:]:
        for name, value in states[0].items():
            torch.testing.assert_close(other[name], value, atol=1e-5, rtol=1e-3)


def test_a_captured_step_recomputes_nothing(compose_run: Compose) -> None:
    for more in ("optimizer.chunk=4", "adapter.gradient_checkpointing=true"):
        config = _config(compose_run, "lora", "step=graph", more)
        with pytest.raises(UserError, match=r"step=graph.*step=compile"):
            check_run(config)


def test_adapters_are_not_sharded(compose_run: Compose) -> None:
    with pytest.raises(UserError, match=r"trainer.strategy=fsdp.*trainer=ddp"):
        check_run(_config(compose_run, "qlora", "trainer.strategy=fsdp"))


def test_simcse_takes_the_adapters_dropout(compose_run: Compose) -> None:
    plain = ("method=simcse", "pooling=last")
    with pytest.raises(UserError, match=r"backbone.dropout=0.0"):
        check_run(compose_run(*plain, model_type="llama"))
    check_run(compose_run(*plain, "adapter=lora", model_type="llama"))


def test_two_passes_warn_and_train(
    compose_run: Compose, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = _config(compose_run, "lora", "method=prompteol", "template=eol", "pooling=last")
    train(config, tmp_path)
    assert any("no dropout of its own" in r.getMessage() for r in caplog.records)
    assert embedlab.load(tmp_path).encode(TEXTS).shape == (3, 128)
    with pytest.raises(UserError, match=r"adapter.dropout=0.0"):
        check_run(compose_run("method=prompteol", "template=eol", "pooling=last", model_type="llama"))


def test_causal_lm_learns_packed_text(compose_run: Compose, tmp_path: Path) -> None:
    config = compose_run(
        "method=causal_lm", "pooling=mean", "data.pack=16", "data.max_length=null", "trainer.max_steps=30",
        "trainer.max_epochs=30", "optimizer.lr=1e-2", model_type="llama",
    )  # fmt: skip
    train(config, tmp_path)
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("train/loss")
    losses = [float(r.split(",")[column]) for r in rows[1:] if r.split(",")[column]]
    assert losses[-1] < 0.8 * losses[0]
    again = compose_run("backbone=local", f"backbone.path={tmp_path / 'export'}", *CSESFP)
    assert backbone_info(again).kind == "decoder"


def test_text_is_prepared_for_scoring_alone(compose_run: Compose, tmp_path: Path) -> None:
    """CSE-SFP's specification 1.2: full stop and quotes are the evaluation's affair."""
    texts = ['a "cat" sees the dog', "the old river runs fast"] * 4
    (tmp_path / "text.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    method, data = build(_config(compose_run, "lora", f"data.files={tmp_path / 'text.txt'}"), tmp_path)
    data.setup("fit")
    view = next(iter(data.train_dataloader()))["sentence"]
    rows = {
        tuple(r[m.bool()].tolist()) for r, m in zip(view["input_ids"], view["attention_mask"], strict=True)
    }
    own = method.encoder.tokenization
    assert own.preparation == "closed"
    raw = Tokenization(own.tokenizer, own.template, 16).ids(texts)
    assert rows == set(map(tuple, raw))
    assert rows.isdisjoint(map(tuple, own.ids(texts)))
