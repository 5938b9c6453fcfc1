"""No run goes on from the checkpoint of another recipe."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from embedlab.config.run import SAME_RECIPE
from embedlab.errors import UserError
from embedlab.run.resume import MAY_CHANGE, check_recipe
from embedlab.run.run_folder import Record


def checkpoint(folder: Path, recipe: object) -> Path:
    path = folder / "last.ckpt"
    torch.save({"global_step": 1, "state_dict": {}, "embedlab": {"recipe": recipe}}, path)
    return path


def pair(key: str, was: object, now: object) -> tuple[dict[str, object], dict[str, object]]:
    section, _, name = key.partition(".")
    return {section: {name: was} if name else was}, {section: {name: now} if name else now}


@pytest.mark.parametrize("kept", ["in the checkpoint", "beside it"])
@pytest.mark.parametrize(
    ("key", "refused"),
    [
        *((key, False) for key in sorted(MAY_CHANGE | SAME_RECIPE)),
        ("logger.csv", False),
        ("trainer.precision", True),
        ("data.limit", True),
        ("seed", True),
        ("method", True),
        ("pooling.name", True),
    ],
)
def test_another_recipe_is_refused_with_both_values(
    key: str, refused: bool, kept: str, tmp_path: Path
) -> None:
    was, now = pair(key, 1, 2)
    path = checkpoint(tmp_path, was if kept == "in the checkpoint" else None)
    Record(tmp_path).write(was if kept == "beside it" else now)
    if not refused:
        check_recipe(path, now)
        return
    with pytest.raises(UserError, match=f"{key}=1") as error:
        check_recipe(path, now)
    assert (error.value.key, error.value.value) == (key, 2)


def test_a_key_that_the_recipe_lacks_is_of_a_later_version(tmp_path: Path) -> None:
    check_recipe(checkpoint(tmp_path, {"data": {}}), {"data": {"new": 1}, "other": 2})
    for was, now in ((None, 1), (1, None), (None, {"text": "x"})):
        old, new = pair("template.x", was, now)
        with pytest.raises(UserError, match=r"template\.x"):
            check_recipe(checkpoint(tmp_path, old), new)


@pytest.mark.parametrize(("was", "goes_on"), [("bf16-mixed", True), ("32-true", False), ("16-mixed", False)])
def test_runs_of_before_go_on_where_a_trainers_precision_is_auto_now(
    was: str, goes_on: bool, tmp_path: Path
) -> None:
    old, new = pair("trainer.precision", was, "auto")
    with nullcontext() if goes_on else pytest.raises(UserError, match="precision"):
        check_recipe(checkpoint(tmp_path, old), new)


def test_a_refused_start_leaves_what_was_there(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record.write({"seed": 1})
    record.put_back()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "config.yaml").write_bytes(b"\xff")
    record = Record(tmp_path)
    record.write({"seed": 1})
    record.put_back()
    assert (tmp_path / "config.yaml").read_bytes() == b"\xff"
