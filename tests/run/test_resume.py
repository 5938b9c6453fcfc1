"""A resumed run is the run that was not interrupted: same losses, same weights, bit for bit on the CPU."""

from __future__ import annotations

import csv
import json
import os
import signal
from pathlib import Path

import pytest
import torch

from embedlab.errors import UserError
from embedlab.run.callbacks.checkpoints import (
    LAST,
    PREVIOUS,
    Interrupted,
    LastCheckpoint,
    find_checkpoint,
)
from embedlab.run.run import train
from tests.tiny_run import sentences

STEPS = 11  # 60 rows in batches of 8: an epoch has 7, so this ends in the middle of the second


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state = torch.load(folder / LAST, weights_only=True)
    return {
        **state["state_dict"],
        **{f"adam.{i}": s["exp_avg"] for i, s in state["optimizer_states"][0]["state"].items()},
    }


def losses(folder: Path) -> dict[int, str]:
    with (folder / "metrics.csv").open() as file:
        return {int(r["step"]): r["train/loss"] for r in csv.DictReader(file) if r.get("train/loss")}


class StopAt:
    """Asks for a checkpoint and the end after a given update, as a signal would."""

    def __init__(self, step: int, monkeypatch: pytest.MonkeyPatch, number: int = signal.SIGTERM) -> None:
        original = LastCheckpoint.on_train_batch_end

        def at(keeper: LastCheckpoint, trainer, *args):  # type: ignore[no-untyped-def]
            if trainer.global_step == step:
                os.kill(os.getpid(), number)
            original(keeper, trainer, *args)

        monkeypatch.setattr(LastCheckpoint, "on_train_batch_end", at)


def run_in_parts(settings, stop, compose_run, folder, monkeypatch):  # type: ignore[no-untyped-def]
    """The folders of a whole run and of one that stopped and went on, which must be equal to the last bit."""
    whole, parts = folder / "whole", folder / "parts"
    train(compose_run(*settings), whole)
    with monkeypatch.context() as patch:
        StopAt(stop, patch)
        with pytest.raises(Interrupted):
            train(compose_run(*settings), parts)
    train(compose_run(*settings, "ckpt_path=last"), parts)
    expected, got = weights(whole), weights(parts)
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[k], got[k]) for k in expected)
    assert losses(whole) == losses(parts)
    return whole, parts


@pytest.mark.parametrize(
    ("stop", "extra"),
    [
        (3, ()),
        (7, ()),  # the edge of an epoch
        (9, ()),
        (4, ("optimizer.accumulate=2",)),
        (4, ("dev",)),  # a step at which validation is due
        (5, ("dev",)),
    ],
)
def test_resume_is_exact(stop, extra, compose_run, sts_dir, tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    more = [f"evaluation.sts_dir={sts_dir}", "evaluation.every=2"] if "dev" in extra else list(extra)
    settings = [f"trainer.max_steps={STEPS}", "trainer.max_epochs=9", *more]
    whole, parts = run_in_parts(settings, stop, compose_run, tmp_path, monkeypatch)
    if "dev" in extra:
        one, other = (
            torch.load(f / LAST, weights_only=True)["callbacks"]["DevScoring"] for f in (whole, parts)
        )
        assert one == other


@pytest.mark.parametrize(("stops", "accumulate"), [((7, 9, 14, 16), 1), ((4, 6, 8, 11), 2)])
def test_resume_is_exact_after_several_stops(stops, accumulate, compose_run, tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    """Seven batches an epoch: the first stops are at and after the edge of one."""
    settings = [f"optimizer.accumulate={accumulate}", "trainer.max_epochs=9", "trainer.max_steps=18"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(compose_run(*settings), whole)
    again: tuple[str, ...] = ()
    for stop in stops:
        with monkeypatch.context() as patch:
            StopAt(stop, patch)
            with pytest.raises(Interrupted):
                train(compose_run(*settings, *again), parts)
        again = ("ckpt_path=last",)
    train(compose_run(*settings, *again), parts)
    expected, got = weights(whole), weights(parts)
    assert all(torch.equal(expected[k], got[k]) for k in expected)
    assert losses(whole) == losses(parts)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_finished_run_can_be_lengthened_again_and_again(accumulate, compose_run, tmp_path):  # type: ignore[no-untyped-def]
    settings = [f"optimizer.accumulate={accumulate}", "optimizer.schedule=constant", "trainer.max_steps=-1"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(compose_run(*settings, "trainer.max_epochs=4"), whole)
    train(compose_run(*settings, "trainer.max_epochs=1"), parts)
    for epochs in (2, 3, 4):
        train(compose_run(*settings, f"trainer.max_epochs={epochs}", "ckpt_path=last"), parts)
    expected, got = weights(whole), weights(parts)
    assert all(torch.equal(expected[k], got[k]) for k in expected)
    assert losses(whole) == losses(parts)


def test_a_refused_resume_leaves_the_record_of_the_run(compose_run, tmp_path):  # type: ignore[no-untyped-def]
    train(compose_run("trainer.max_steps=2"), tmp_path)
    before = (tmp_path / "config.yaml").read_bytes()
    with pytest.raises(UserError, match="seed"):
        train(compose_run("trainer.max_steps=4", "seed=7", "ckpt_path=last"), tmp_path)
    assert (tmp_path / "config.yaml").read_bytes() == before


def test_no_run_goes_on_from_another_recipe(compose_run, tmp_path):  # type: ignore[no-untyped-def]
    """Neither in its own folder nor in another, where nothing is left behind."""
    run, other = tmp_path / "run", tmp_path / "other"
    train(compose_run("trainer.max_steps=2"), run)
    before = contents(run)
    for changed, key in (
        ("method.tau=0.5", "method.tau"),
        ("pooling=mean", "pooling.name"),
        ("optimizer.lr=2e-3", "optimizer.lr"),
        ("adapter=lora", "adapter.name"),
    ):
        for folder in (run, other):
            with pytest.raises(UserError, match="another recipe") as error:
                train(compose_run("trainer.max_steps=4", changed, f"ckpt_path={run / LAST}"), folder)
            assert error.value.key == key
    assert contents(run) == before
    assert not other.exists()
    train(compose_run("trainer.max_steps=3", "ckpt_path=last"), run)


def test_other_text_is_refused_and_leaves_no_configuration(compose_run, tmp_path):  # type: ignore[no-untyped-def]
    run, other = tmp_path / "run", tmp_path / "other"
    train(compose_run("trainer.max_steps=2"), run)
    (tmp_path / "text.txt").write_text("\n".join(sentences(60, seed=5)))
    with pytest.raises(UserError, match="other text"):
        train(
            compose_run(
                "trainer.max_steps=4", f"data.files={tmp_path / 'text.txt'}", f"ckpt_path={run / LAST}"
            ),
            other,
        )
    assert not (other / "config.yaml").exists()


@pytest.mark.parametrize(
    "damage",
    [
        {"global_step": "2"},
        {"embedlab": []},
        {"embedlab": {"parameters": "x"}},
        {"embedlab": {"recipe": [1]}},
        {"loops": []},
        {"loops": {"fit_loop": {}}},
        {"callbacks": 3},
        {"callbacks": {"Randomness": {}}},
        {"optimizer_states": [{}]},
        {"lr_schedulers": "x"},
        {"SentenceDataModule": {}},
        {"state_dict": {}},
        {"state_dict": 3},
    ],
)
def test_a_checkpoint_of_another_shape_is_one_line(damage, compose_run, tmp_path):  # type: ignore[no-untyped-def]
    train(compose_run("trainer.max_steps=2"), tmp_path)
    before = (tmp_path / "config.yaml").read_bytes()
    content = torch.load(tmp_path / LAST, weights_only=True)
    torch.save(content | damage, tmp_path / "odd.ckpt")
    with pytest.raises(UserError, match=r"odd\.ckpt|parameters|lacks its place|rows of text"):
        train(compose_run("trainer.max_steps=4", f"ckpt_path={tmp_path / 'odd.ckpt'}"), tmp_path)
    assert (tmp_path / "config.yaml").read_bytes() == before


def test_checkpoints_hold_no_code(compose_run, tmp_path):  # type: ignore[no-untyped-def]
    train(compose_run("trainer.max_steps=2"), tmp_path)
    state = torch.load(tmp_path / LAST, weights_only=True)
    assert state["global_step"] == 2


def test_a_broken_last_checkpoint_gives_way_to_the_previous_one(compose_run, tmp_path):  # type: ignore[no-untyped-def]
    train(compose_run("trainer.max_steps=4", "callbacks.checkpoint.every_steps=2"), tmp_path)
    assert (tmp_path / PREVIOUS).is_file()
    (tmp_path / LAST).write_bytes((tmp_path / LAST).read_bytes()[:1000])
    assert find_checkpoint("last", tmp_path) == tmp_path / PREVIOUS
    train(compose_run("trainer.max_steps=6", "ckpt_path=last"), tmp_path)
    assert torch.load(tmp_path / LAST, weights_only=True)["global_step"] == 6


def test_nothing_to_resume_from_is_one_line(tmp_path):  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match="ckpt_path=last"):
        find_checkpoint("last", tmp_path)
    with pytest.raises(UserError, match="no such checkpoint"):
        find_checkpoint(str(tmp_path / "none.ckpt"), tmp_path)


def test_a_model_with_other_parameters_is_refused(compose_run, tmp_path):  # type: ignore[no-untyped-def]
    train(compose_run("trainer.max_steps=2"), tmp_path)
    state = torch.load(tmp_path / LAST, weights_only=True)
    state["embedlab"]["parameters"].reverse()
    torch.save(state, tmp_path / LAST)
    with pytest.raises(UserError, match="parameters are not this model's"):
        train(compose_run("trainer.max_steps=4", "ckpt_path=last"), tmp_path)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a run's folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("key", "fewer", "where"),
    [("max_steps", 3, "at step 9"), ("max_epochs", 1, "at step 14, after 2 epochs")],
)
def test_fewer_steps_than_are_done_touch_nothing(key, fewer, where, compose_run, tmp_path):  # type: ignore[no-untyped-def]
    length = (
        ["trainer.max_steps=9", "trainer.max_epochs=9"] if key == "max_steps" else ["trainer.max_epochs=2"]
    )
    train(compose_run(*length), tmp_path)
    before = contents(tmp_path)
    with pytest.raises(UserError, match=where) as error:
        train(compose_run(*length, f"trainer.{key}={fewer}", "ckpt_path=last"), tmp_path)
    assert (error.value.key, error.value.value) == (f"trainer.{key}", fewer)
    assert "or more" in (error.value.fix or "")
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "length", [("trainer.max_steps=9", "trainer.max_epochs=9"), ("trainer.max_epochs=1",)]
)
def test_a_finished_run_says_so_and_keeps_its_scores(length, compose_run, tmp_path, caplog):  # type: ignore[no-untyped-def]
    scores = train(compose_run(*length), tmp_path)
    before = contents(tmp_path)
    with caplog.at_level("INFO"):
        again = train(compose_run(*length, "ckpt_path=last"), tmp_path)
    assert again == scores
    assert "Finished" in caplog.text
    assert contents(tmp_path) == before


@pytest.mark.parametrize("left", [None, "", "{", "[1]", "{}", '{"scores": {}, "training": null}'])
def test_a_run_that_was_stopped_before_its_scores_gets_them(left, compose_run, tmp_path):  # type: ignore[no-untyped-def]
    length = ("trainer.max_steps=2", "trainer.max_epochs=9")
    scores = train(compose_run(*length), tmp_path)
    path = tmp_path / "scores.json"
    path.unlink() if left is None else path.write_text(left)
    assert train(compose_run(*length, "ckpt_path=last"), tmp_path) == scores
    assert json.loads(path.read_text())["training"]["steps"] == 2
