"""Data that a suite will miss are missed before anything is encoded."""

from __future__ import annotations

import gzip
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from embedlab.config.published import known
from embedlab.errors import UserError
from embedlab.evaluation import FINE_TUNED, SUITES
from embedlab.evaluation.core.preflight import SUBFOLDERS, check_comparison, check_data, folder_for, unfit
from embedlab.evaluation.probes.cls_energy import looks_into
from tests.evaluation.everything import collection, every_kind
from tests.evaluation.helpers import write_sts_folder, write_tsv
from tests.evaluation.multilingual import write_parallel


def test_a_suite_takes_its_own_folder_where_there_is_one(tmp_path: Path) -> None:
    assert folder_for(None, "sts") is None
    assert folder_for(tmp_path, "retrieval") == str(tmp_path)
    (tmp_path / "retrieval").mkdir()
    assert folder_for(tmp_path, "retrieval") == str(tmp_path / "retrieval")
    assert folder_for(tmp_path, "lee") == str(tmp_path)
    (tmp_path / "glue").mkdir()
    assert folder_for(tmp_path, "glue") == str(tmp_path)  # transfer/ is beside it


@pytest.mark.parametrize("suite", SUBFOLDERS)
def test_every_suite_finds_its_data_in_a_folder_of_all(suite: str, tmp_path: Path) -> None:
    data = every_kind(tmp_path / "data")
    check_data(suite, {"data_dir": folder_for(data, suite)})
    assert set(SUBFOLDERS) | {"lee", "emoji", "mteb"} == set(SUITES)


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


@pytest.mark.parametrize("suite", sorted(SUBFOLDERS.keys() - {"retrieval"}))
def test_a_file_of_a_header_alone_is_said(suite: str, tmp_path: Path) -> None:
    data = every_kind(tmp_path / "data")
    for path in data.rglob("*.tsv*"):
        raw = path.read_bytes()
        header = (gzip.decompress(raw) if path.suffix == ".gz" else raw).split(b"\n")[0].decode()
        write_tsv(path, [header], [])
    with pytest.raises(UserError, match="has no rows"):
        check_data(suite, {"data_dir": folder_for(data, suite)})


@pytest.mark.parametrize(
    ("suite", "module"), [("transfer", "sklearn"), ("retrieval", "ir_measures"), ("mteb", "mteb")]
)
def test_a_package_that_is_missing_is_said(
    suite: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = every_kind(tmp_path / "data")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=r"the package .* is missing. Fix: pip install"):
        check_data(suite, {"data_dir": folder_for(data, suite)})


def test_too_few_translations_are_said(tmp_path: Path) -> None:
    write_parallel(tmp_path / "parallel", rows=4)
    with pytest.raises(UserError, match=r"ntrex.*: too few sentences for a probe: 4"):
        check_data("languages", {"data_dir": str(tmp_path)})


def test_a_comparison_looks_too(tmp_path: Path) -> None:
    write_sts_folder(tmp_path / "sts")
    check_comparison({"data_dir": None})
    check_comparison({"data_dir": str(tmp_path)})
    with pytest.raises(UserError, match=r"resamples=0"):
        check_comparison({"data_dir": str(tmp_path), "resamples": 0})
    (tmp_path / "sts" / "sts12_test.tsv.gz").unlink()
    with pytest.raises(UserError, match="has no sts12_test"):
        check_comparison({"data_dir": str(tmp_path)})


@pytest.mark.parametrize("suite", SUITES)
def test_suites_that_an_encoder_is_not_for(suite: str) -> None:
    bert = known("bert-base-uncased")
    assert unfit(suite, bert, 1) is None
    assert (unfit(suite, bert, 2) is not None) == (suite in FINE_TUNED)
    assert unfit(suite, None, 1) is None, "a backbone that is not known yet"
    for name in ("HuggingFaceTB/SmolLM2-135M", "facebook/opt-6.7b"):
        assert (unfit(suite, known(name), 1) is not None) == (suite == "cls_energy")


@pytest.mark.parametrize(
    ("model_type", "can"),
    [("distilbert", True), ("modernbert", True), ("electra", True), ("mpnet", False), ("albert", False),
     ("funnel", False), ("of-a-checkpoints-own-code", True)],
)  # fmt: skip
def test_cls_energy_knows_the_builds_that_it_looks_into(model_type: str, can: bool) -> None:
    bert = known("bert-base-uncased")
    assert bert is not None
    assert looks_into(replace(bert, model_type=model_type)) == can
