"""A run from its configuration to its export: what it leaves, what it selects, what it refuses."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import torch

import embedlab
from embedlab.engine.step import NonFiniteLoss
from embedlab.errors import UserError
from embedlab.evaluation.sts.sts import load_sts
from embedlab.run.callbacks.checkpoints import LAST
from embedlab.run.check import check_run
from embedlab.run.run import build, train
from tests.tiny_run import all_sts_files

GOLDEN = [2.6139, 2.1786, 2.1170, 2.1144, 2.1338]
GOLDEN_UNPADDED = [2.2081, 2.4062, 2.1996, 2.0887, 2.1933]  # dropout draws for other shapes


def test_what_a_run_leaves(compose_run, sts_dir, tmp_path):  # type: ignore[no-untyped-def]
    config = compose_run("trainer.max_steps=6", f"evaluation.sts_dir={sts_dir}", "evaluation.every=2")
    train(config, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} >= {
        "config.yaml", "metrics.csv", "last.ckpt", "best", "export", "scores.json"}  # fmt: skip
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["training"]["steps"] == 6
    assert scores["training"]["selected_step"] in (0, 2, 4, 6)
    assert -100 <= scores["scores"]["dev/spearman"] <= 100


def test_the_best_step_is_what_is_exported(compose_run, sts_dir, tmp_path):  # type: ignore[no-untyped-def]
    config = compose_run("trainer.max_steps=6", f"evaluation.sts_dir={sts_dir}", "evaluation.every=2")
    train(config, tmp_path)
    history = torch.load(tmp_path / LAST, weights_only=True)["callbacks"]["DevScoring"]["history"]
    best = max(history, key=lambda h: h["spearman"])
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["training"]["selected_step"] == best["step"]
    assert scores["scores"]["dev/spearman"] == pytest.approx(best["spearman"], abs=1e-4)
    assert [h["step"] for h in history] == [0, 2, 4, 6]


def test_checkpoint_export_and_run_folder_are_one_encoder(compose_run, tmp_path):  # type: ignore[no-untyped-def]
    train(compose_run("trainer.max_steps=3"), tmp_path)
    text = ["a cat sees the dog", "the old river"]
    vectors = [embedlab.load(p).encode(text) for p in (tmp_path, tmp_path / "export", tmp_path / LAST)]
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-6)
    np.testing.assert_allclose(vectors[0], vectors[2], atol=1e-6)


@pytest.mark.parametrize("seed", [0, 7])
def test_a_seed_is_a_seed(seed, compose_run, tmp_path):  # type: ignore[no-untyped-def]
    def final(name: str, s: int) -> torch.Tensor:
        train(compose_run("trainer.max_steps=2", f"seed={s}"), tmp_path / name)
        return torch.load(tmp_path / name / LAST, weights_only=True)["state_dict"]["head.0.weight"]

    assert torch.equal(final("a", seed), final("b", seed))
    assert not torch.equal(final("c", seed), final("d", seed + 1))


def test_dropout_is_on_in_training_and_off_in_scoring(compose_run, tmp_path):  # type: ignore[no-untyped-def]
    method, data = build(compose_run(), tmp_path)
    seen = {}

    def watched(batch):  # type: ignore[no-untyped-def]
        view = batch["sentence"]
        one, two = (method.encoder(view["input_ids"], view["attention_mask"]) for _ in range(2))
        seen["training"] = (one - two).abs().max().item()
        return original(batch)

    original, method.losses = method.losses, watched
    from lightning.pytorch import Trainer

    trainer = Trainer(max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                      enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    trainer.fit(method, datamodule=data)
    assert seen["training"] > 1e-3
    a, b = (method.encoder.encode(["a cat", "the dog runs"]) for _ in range(2))
    np.testing.assert_array_equal(a, b)


def test_every_trainable_parameter_is_in_the_optimizer_once(compose_run, tmp_path):  # type: ignore[no-untyped-def]
    method, data = build(compose_run(), tmp_path)
    from lightning.pytorch import Trainer

    trainer = Trainer(max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                      enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    trainer.fit(method, datamodule=data)
    held = [id(p) for g in trainer.optimizers[0].param_groups for p in g["params"]]
    assert sorted(held) == sorted({id(p) for p in method.parameters() if p.requires_grad})


def test_a_loss_that_is_no_number_names_the_rows_and_keeps_the_checkpoint(compose_run, tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    from embedlab.methods.simcse import SimCSE

    train(compose_run("trainer.max_steps=2"), tmp_path)
    before = torch.load(tmp_path / LAST, weights_only=True)["state_dict"]
    original = SimCSE.losses

    def broken(self, batch):  # type: ignore[no-untyped-def]
        outcome = original(self, batch)
        return type(outcome)({k: v * float("nan") for k, v in outcome.losses.items()})

    monkeypatch.setattr(SimCSE, "losses", broken)
    with pytest.raises(NonFiniteLoss, match="rows of the batch") as caught:
        train(compose_run("trainer.max_steps=4", "ckpt_path=last"), tmp_path)
    assert len(caught.value.rows) == 8
    assert f"The checkpoint {tmp_path / LAST} is intact" in str(caught.value)
    after = torch.load(tmp_path / LAST, weights_only=True)["state_dict"]
    assert all(torch.equal(before[k], after[k]) for k in before)
    with pytest.raises(NonFiniteLoss) as first:
        train(compose_run("trainer.max_steps=4"), tmp_path / "new")
    assert "checkpoint" not in str(first.value), "there is none"


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("method.tau=0", "method.tau"),
        ("evaluation.select=dev", "evaluation.sts_dir"),
        ("step=graph", "step"),
        ("trainer=gpu", "trainer.accelerator"),
        ("backbone.dropout=0.0", "backbone.dropout"),
        ("pooling=mask", "pooling"),
        ("seed=-1", "seed"),
    ],
)
def test_a_bad_configuration_is_refused_before_anything_is_loaded(override, key, compose_run, tmp_path):  # type: ignore[no-untyped-def]
    if torch.cuda.is_available() and override in ("step=graph", "trainer=gpu"):
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(UserError, match=key):
        check_run(compose_run(override))


@pytest.mark.parametrize("tokens", [2, 65, 9999])
def test_a_length_that_the_model_has_not_is_refused_by_its_key(tokens, compose_run, tmp_path):  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=rf"\(data\.max_length={tokens}\)"):
        build(compose_run(f"data.max_length={tokens}"), tmp_path)


def logged(folder, name):  # type: ignore[no-untyped-def]
    with (folder / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


@pytest.mark.parametrize(("unpad", "golden"), [("false", GOLDEN), ("auto", GOLDEN_UNPADDED)])
def test_losses_of_five_steps(unpad, golden, compose_run, tmp_path):  # type: ignore[no-untyped-def]
    """Golden losses of SimCSE on a fixed tiny model and seed: a change of recipe or data order shows here."""
    train(compose_run("trainer.max_steps=5", f"unpad={unpad}"), tmp_path)
    assert logged(tmp_path, "train/loss") == pytest.approx(golden, abs=2e-3)


def test_padding_changes_nothing_but_what_dropout_draws(compose_run, tmp_path):  # type: ignore[no-untyped-def]
    for unpad in ("false", "auto"):
        never = "backbone.dropout=1e-9"  # 0 is refused: SimCSE's views would be one
        train(compose_run("trainer.max_steps=5", f"unpad={unpad}", never), tmp_path / unpad)
    for name in ("train/loss", "train/grad_norm"):
        padded, unpadded = (logged(tmp_path / unpad, name) for unpad in ("false", "auto"))
        assert len(padded) == 5
        assert unpadded == pytest.approx(padded, rel=1e-4), name
    assert max(logged(tmp_path / "auto", "speed/padding_share")) < min(
        logged(tmp_path / "false", "speed/padding_share")
    )


@pytest.mark.parametrize("held", [None, 3.4567])
def test_a_run_tells_what_it_holds_of_a_card(held, compose_run, monkeypatch, tmp_path):  # type: ignore[no-untyped-def]
    for place in ("callbacks.train_log", "finish"):
        monkeypatch.setattr(f"embedlab.run.{place}.held_gib", lambda device: held)
    train(compose_run("trainer.max_steps=2"), tmp_path)
    columns = (tmp_path / "metrics.csv").read_text().splitlines()[0].split(",")
    training = json.loads((tmp_path / "scores.json").read_text())["training"]
    assert training.get("held_gib") == (held and round(held, 2))
    assert ("speed/held_gib" in columns) == (held is not None)
    if held is not None:
        assert logged(tmp_path, "speed/held_gib")[-1] == pytest.approx(held)


def test_the_last_weights_are_scored_beside_the_selected_ones(
    compose_run, sts_dir, tmp_path, monkeypatch, capsys
):  # type: ignore[no-untyped-def]
    """JTCSE's specification 3.2: step of the best, the gap from dev to test, the scores of the last checkpoint."""
    from embedlab.evaluation.sts.dev import DevSet

    folder = all_sts_files(sts_dir, tmp_path / "sts")
    plain, looks = DevSet.score, []

    def the_first_is_best(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        looks.append(plain(self, *args, **kwargs))
        return looks[-1] | ({"spearman": 101.0} if len(looks) == 1 else {})

    monkeypatch.setattr(DevSet, "score", the_first_is_best)
    settings = (
        f"evaluation.sts_dir={folder}",
        "evaluation.final=[sts]",
        "trainer.max_steps=2",
        "evaluation.every=1",
    )
    train(compose_run(*settings, "evaluation.last=true", "optimizer.lr=3e-2"), tmp_path / "run")
    kept = json.loads((tmp_path / "run" / "scores.json").read_text())
    assert (kept["training"]["selected_step"], kept["last"]["step"]) == (0, 2)
    last = embedlab.load(tmp_path / "run" / LAST)
    dev = DevSet(load_sts("stsb", folder, "raw", split="dev"))
    assert kept["last"]["scores"]["dev/spearman"] == pytest.approx(
        plain(dev, last.encode(dev.sentences, output="tensor"))["spearman"], abs=1e-6
    )
    assert kept["scores"] != kept["last"]["scores"]
    assert kept["scores"].keys() == kept["last"]["scores"].keys()
    for name, scores in (("selected", kept["scores"]), ("last", kept["last"]["scores"])):
        assert kept["dev_minus_test"][name] == scores["dev/spearman"] - scores["stsb/spearman"]
    assert "STS-B dev: selected (step 0)" in capsys.readouterr().out
    train(compose_run(*settings), tmp_path / "other")
    assert (
        not {"last", "dev_minus_test"} & json.loads((tmp_path / "other" / "scores.json").read_text()).keys()
    )


@pytest.mark.gpu
def test_scores_before_and_after_are_made_on_the_device(compose_run, sts_dir, tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    """Lightning has the model on the CPU before and after a fit, where scoring takes minutes instead of seconds."""
    from embedlab.encoders.encoder import SentenceEncoder

    original, seen = SentenceEncoder.encode, []
    monkeypatch.setattr(
        SentenceEncoder,
        "encode",
        lambda self, *a, **k: (seen.append(self.device.type), original(self, *a, **k))[1],
    )
    folder = all_sts_files(sts_dir, tmp_path / "sts")
    config = compose_run(
        "trainer=gpu", "trainer.max_steps=2", f"evaluation.sts_dir={folder}", "evaluation.before=true",
        "evaluation.final=[sts]",
    )  # fmt: skip
    train(config, tmp_path)
    assert set(seen) == {"cuda"}
    assert json.loads((tmp_path / "scores.json").read_text())["training"]["device"].startswith("NVIDIA")
