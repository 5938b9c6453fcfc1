"""Data that a suite will miss are missed before anything is encoded."""

from __future__ import annotations

import gzip
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from embedlab.config.backbone import known
from embedlab.errors import UserError
from embedlab.evaluation.core.suite import suite, suite_names
from embedlab.evaluation.probes.cls_energy import looks_into
from embedlab.evaluation.sts.compare import Comparison
from tests.evaluation.everything import collection, every_kind
from tests.evaluation.helpers import write_sts_folder, write_tsv
from tests.evaluation.multilingual import write_parallel

IN_FOLDERS = [name for name in suite_names() if suite(name).folders]


def test_a_suite_takes_its_own_folder_where_there_is_one(tmp_path: Path) -> None:
    assert suite("sts").folder(None) is None
    assert suite("retrieval").folder(tmp_path) == str(tmp_path)
    (tmp_path / "retrieval").mkdir()
    assert suite("retrieval").folder(tmp_path) == str(tmp_path / "retrieval")
    assert suite("lee").folder(tmp_path) == str(tmp_path)
    (tmp_path / "glue").mkdir()
    assert suite("glue").folder(tmp_path) == str(tmp_path)  # transfer/ is beside it


@pytest.mark.parametrize("name", IN_FOLDERS)
def test_every_suite_finds_its_data_in_a_folder_of_all(name: str, tmp_path: Path) -> None:
    data = every_kind(tmp_path / "data")
    suite(name).local({"data_dir": suite(name).folder(data)})
    assert set(IN_FOLDERS) | {"lee", "stories", "emoji", "mteb"} == set(suite_names())


@pytest.mark.parametrize(
    ("name", "message"),
    [("retrieval", "holds no corpus.jsonl"), ("transfer", "has no mr.tsv.gz"), ("geometry", "has no"),
     ("sts", "has no"), ("robustness", "has no")],
)  # fmt: skip
def test_what_is_missing_is_said(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        suite(name).local({"data_dir": str(tmp_path)})


def test_what_is_there_passes_without_an_encoder(tmp_path: Path) -> None:
    (tmp_path / "sts").mkdir()
    sts = write_sts_folder(tmp_path / "sts")
    for name in ("sts", "robustness", "geometry"):
        suite(name).local({"data_dir": str(sts)})
    suite("retrieval").local({"data_dir": str(collection(tmp_path / "x").parent)})
    for name in ("lee", "mteb", "sts"):
        suite(name).local({"data_dir": None})


def test_wrong_settings_are_said_too(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such STS task"):
        suite("robustness").local({"data_dir": str(tmp_path), "tasks": ["sts99"]})


@pytest.mark.parametrize("name", sorted(set(IN_FOLDERS) - {"retrieval"}))
def test_a_file_of_a_header_alone_is_said(name: str, tmp_path: Path) -> None:
    data = every_kind(tmp_path / "data")
    for path in data.rglob("*.tsv*"):
        raw = path.read_bytes()
        header = (gzip.decompress(raw) if path.suffix == ".gz" else raw).split(b"\n")[0].decode()
        write_tsv(path, [header], [])
    with pytest.raises(UserError, match="has a header and no rows"):
        suite(name).local({"data_dir": suite(name).folder(data)})


@pytest.mark.parametrize(
    ("name", "module"), [("transfer", "sklearn"), ("retrieval", "ir_measures"), ("mteb", "mteb")]
)
def test_a_package_that_is_missing_is_said(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = every_kind(tmp_path / "data")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=r"the package .* is missing. Fix: pip install"):
        suite(name).local({"data_dir": suite(name).folder(data)})


def test_too_few_translations_are_said(tmp_path: Path) -> None:
    write_parallel(tmp_path / "parallel", rows=4)
    with pytest.raises(UserError, match=r"ntrex.*: too few sentences for a probe: 4"):
        suite("languages").local({"data_dir": str(tmp_path)})


def test_a_comparison_looks_too(tmp_path: Path) -> None:
    write_sts_folder(tmp_path / "sts")
    Comparison().load({"data_dir": str(tmp_path)})
    with pytest.raises(UserError, match=r"resamples=0"):
        Comparison().load({"data_dir": str(tmp_path), "resamples": 0})
    (tmp_path / "sts" / "sts12_test.tsv.gz").unlink()
    with pytest.raises(UserError, match="has no sts12_test"):
        Comparison().load({"data_dir": str(tmp_path)})


@pytest.mark.parametrize("name", suite_names())
def test_suites_that_an_encoder_is_not_for(name: str) -> None:
    bert = known("bert-base-uncased")
    assert suite(name).fits(bert, 1) is None
    assert (suite(name).fits(bert, 2) is not None) == (name in ("xnli", "qa", "glue"))
    assert suite(name).fits(None, 1) is None, "a backbone that is not known yet"
    for decoder in ("HuggingFaceTB/SmolLM2-135M", "facebook/opt-6.7b"):
        assert (suite(name).fits(known(decoder), 1) is not None) == (name == "cls_energy")


@pytest.mark.parametrize(
    ("model_type", "can"),
    [("distilbert", True), ("modernbert", True), ("electra", True), ("mpnet", False), ("albert", False),
     ("funnel", False), ("of-a-checkpoints-own-code", True)],
)  # fmt: skip
def test_cls_energy_knows_the_builds_that_it_looks_into(model_type: str, can: bool) -> None:
    bert = known("bert-base-uncased")
    assert bert is not None
    assert looks_into(replace(bert, model_type=model_type)) == can
