"""Data that a suite will miss are missed before anything is encoded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from embedlab.errors import UserError
from embedlab.evaluation.preflight import check_data, folder_for
from tests.evaluation.helpers import write_sts_folder


def collection(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "corpus.jsonl").write_text(json.dumps({"_id": "d", "title": "", "text": "a cat"}) + "\n")
    (folder / "queries.jsonl").write_text(json.dumps({"_id": "q", "text": "cat"}) + "\n")
    (folder / "qrels").mkdir()
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\td\t1\n")
    return folder


def test_a_suite_takes_its_own_folder_where_there_is_one(tmp_path: Path) -> None:
    assert folder_for(None, "sts") is None
    assert folder_for(tmp_path, "retrieval") == str(tmp_path)
    (tmp_path / "retrieval").mkdir()
    assert folder_for(tmp_path, "retrieval") == str(tmp_path / "retrieval")
    assert folder_for(tmp_path, "lee") == str(tmp_path)


@pytest.mark.parametrize(
    ("suite", "message"),
    [("retrieval", "holds no corpus.jsonl"), ("transfer", "has no mr.tsv.gz"), ("geometry", "has no"),
     ("sts", "has no"), ("robustness", "has no")],
)  # fmt: skip
def test_what_is_missing_is_said(suite: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        check_data(suite, {"data_dir": str(tmp_path)})


def test_what_is_there_passes_without_an_encoder(tmp_path: Path) -> None:
    (tmp_path / "sts").mkdir()
    sts = write_sts_folder(tmp_path / "sts")
    for suite in ("sts", "robustness", "geometry"):
        check_data(suite, {"data_dir": str(sts)})
    check_data("retrieval", {"data_dir": str(collection(tmp_path / "x").parent)})
    for suite in ("lee", "mteb", "sts"):
        check_data(suite, {"data_dir": None})


def test_wrong_settings_are_said_too(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such STS task"):
        check_data("robustness", {"data_dir": str(tmp_path), "tasks": ["sts99"]})
