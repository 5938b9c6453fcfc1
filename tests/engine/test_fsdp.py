"""FSDP: two ranks with half of the weights each train what one process trains; a whole checkpoint; refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import embedlab
from embedlab.errors import UserError
from embedlab.run.check import check_run
from embedlab.run.parse import parse_run
from embedlab.run.processes import start_ranks
from tests.distributed.test_ddp import losses, settings

MORE = (
    "pooling=last",
    "data.drop_last=true",
    "evaluation.select=last",
    "optimizer.schedule=constant",
    "data.batch_size=4",
)


def run(values: dict[str, Any], folder: Path, devices: int, **change: Any) -> None:
    folder.mkdir(exist_ok=True)
    values = {**values, **{k: v for k, v in change.items() if k != "trainer"}}
    values["trainer"] = values["trainer"] | change.get("trainer", {})
    (folder / "given.yaml").write_text(yaml.safe_dump(values))
    paths = [str(folder / "given.yaml"), str(folder), str(folder)]
    assert start_ranks(["embedlab", "worker", *paths], devices) == 0


def fsdp(folder: Path, tmp: Path, *more: str) -> dict[str, Any]:
    return settings(folder, tmp, 2, *MORE, "trainer.strategy=fsdp", *more)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "method", [(), ("method=supervised", "method.objective=sigmoid")], ids=["simcse", "sigmoid"]
)
def test_two_shards_train_as_one_process_and_resume(
    method: tuple[str, ...], tiny: Callable[..., Path], sts_dir: Path, tmp_path: Path
) -> None:
    """Also what is learned beside the encoder and is too small to have shares: a scale and a bias."""
    folder, dev = tiny("llama"), (f"evaluation.sts_dir={sts_dir}", *method)
    run(settings(folder, tmp_path, 1, *MORE[:4], "data.batch_size=8", *dev), tmp_path / "one", 1)
    run(fsdp(folder, tmp_path, *dev), tmp_path / "two", 2, trainer={"max_steps": 2})
    half = torch.load(tmp_path / "two" / "last.ckpt", weights_only=True)
    assert half["global_step"] == 2
    run(fsdp(folder, tmp_path, *dev), tmp_path / "two", 2, ckpt_path="last")
    one, two = (torch.load(tmp_path / d / "last.ckpt", weights_only=True) for d in ("one", "two"))
    assert one["state_dict"].keys() == two["state_dict"].keys()
    for name, value in one["state_dict"].items():
        assert two["state_dict"][name].shape == value.shape
    a, b = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(a["train/loss"]) == 4
    assert b["train/grad_norm"] == pytest.approx(a["train/grad_norm"], rel=1e-3)
    assert b["train/loss"] == pytest.approx(a["train/loss"], rel=1e-3)
    text = ["a cat sees the dog", "the old river"]
    exported = embedlab.load(tmp_path / "two" / "export").encode(text)
    np.testing.assert_allclose(
        exported, embedlab.load(tmp_path / "two" / "last.ckpt").encode(text), atol=1e-6
    )
    np.testing.assert_allclose(exported, embedlab.load(tmp_path / "one" / "export").encode(text), atol=1e-2)


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (("adapter=lora",), "trainer.strategy=fsdp"),
        (("method=masked_lm", "data=wikipedia", "pooling=cls"), "this method cannot be sharded"),
        (("evaluation.select=loss",), "evaluation.select=last"),
    ],
)
def test_what_cannot_be_sharded_is_refused(
    more: tuple[str, ...], part: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=part):
        check_run(parse_run(fsdp(tiny("llama"), tmp_path, *more)))
