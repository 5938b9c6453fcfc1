"""Kinds of data are found by name and need no torch; numeric columns lie beside the tokens."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from embedlab import parts
from embedlab.config.data import DataConfig
from embedlab.data.build import build_token_table
from embedlab.data.kinds import DataKind, check_kind, data_config
from embedlab.data.loader import BatchLoader
from embedlab.data.plan import BatchPlan
from embedlab.data.resident import ResidentTable
from embedlab.data.rows import read_rows
from embedlab.data.table import TokenTable
from embedlab.encoders.tokenization import Tokenization
from embedlab.errors import UserError

KIND = """
from embedlab.data.kinds import DataKind


class Rated(DataKind):
    name = "rated"
    roles = ("first", "second")
    usual = {"first": ("a",), "second": ("b",), "score": ("score",), "label": ("label",)}
    numbers = {"score": float, "label": int}
"""
HEADER = "a\tb\tscore\tlabel\n"


@pytest.fixture
def rated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A kind of another package, and a file of it."""
    folder = tmp_path / "site" / "kind_of_test"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "rated.py").write_text(KIND)
    monkeypatch.syspath_prepend(tmp_path / "site")
    both = (*parts.packages(), ("kind_of_test", folder))
    monkeypatch.setattr(parts, "packages", lambda: both)
    parts.part_names.cache_clear()
    file = tmp_path / "rated.tsv"
    file.write_text(HEADER + "".join(f"a cat {n}\ta dog {n}\t{n / 4}\t{n - 2}\n" for n in range(8)))
    yield file
    parts.part_names.cache_clear()
    for name in [name for name in sys.modules if name.startswith("kind_of_test")]:
        del sys.modules[name]


def table_of(file: Path, tokenization: Tokenization, **settings: Any) -> TokenTable:
    config = data_config({"name": "rated", "files": str(file), "max_length": 24, **settings})
    return build_token_table(config, {role: (role, tokenization) for role in ("first", "second")})


def test_numbers_stand_in_the_batches_of_the_host_and_of_the_device(
    rated: Path, tokenization: Tokenization
) -> None:
    table = table_of(rated, tokenization)
    plan = BatchPlan(table.n_rows, 4, seed=3)
    loader = BatchLoader(table, plan)
    for batch in loader:
        rows = batch["rows"]
        torch.testing.assert_close(batch["score"], rows.float() / 4)
        assert batch["label"].dtype == torch.int64
        assert batch["label"].tolist() == [row - 2 for row in rows.tolist()]
    gathered = ResidentTable(table, "cpu").gather(torch.tensor([5, 1]), {"first": 8, "second": 8})
    assert gathered["score"].tolist() == [1.25, 0.25]


def test_other_numbers_are_another_cache_and_other_content(rated: Path, tokenization: Tokenization) -> None:
    before = table_of(rated, tokenization)
    assert table_of(rated, tokenization).folder == before.folder
    rated.write_text(rated.read_text().replace("\t0.25\t", "\t0.5\t"))
    after = table_of(rated, tokenization)
    assert after.folder != before.folder
    assert after.report["content"] != before.report["content"]


def test_rows_that_differ_in_a_number_are_no_duplicates(rated: Path) -> None:
    rated.write_text(HEADER + "x\ty\t1\t1\nx\ty\t1\t1\nx\ty\t2\t1\n")
    rows = list(read_rows(DataConfig(name="rated", files=str(rated), duplicates="drop")))
    assert [row[2] for row in rows] == [("x", "y", 1.0, 1), ("x", "y", 2.0, 1)]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("x\ty\thigh\t1", "the score is 'high', not a number"),
        ("x\ty\tnan\t1", "the score is 'nan', not a number"),
        ("x\ty\t-inf\t1", "the score is '-inf', not a number"),
        ("x\ty\t1e39\t1", "the score is '1e39', not a number"),  # infinite in fp32
        ("x\ty\t1\t1.5", "the label is '1.5', not a whole number"),
        ("x\ty\t1\t99999999999999999999", "the label is '99999999999999999999', not a whole number"),
    ],
)
def test_what_is_no_number_is_named_by_file_and_row(rated: Path, row: str, says: str) -> None:
    rated.write_text(f"{HEADER}a\tb\t1\t1\n{row}\n")
    with pytest.raises(UserError, match=r"rated\.tsv") as caught:
        list(read_rows(DataConfig(name="rated", files=str(rated))))
    assert says in str(caught.value)


def test_a_missing_column_is_refused_and_a_missing_number_dropped(rated: Path) -> None:
    (rated.parent / "a.jsonl").write_text(
        '{"a": "x", "b": "y", "score": null, "label": 1}\n{"a": "x", "b": "y", "score": 2, "label": 0}\n'
    )
    stream = read_rows(DataConfig(name="rated", files=str(rated.parent / "a.jsonl")))
    assert [row[2] for row in stream] == [("x", "y", 2.0, 0)]
    assert stream.dropped == {"without a number": 1}
    rated.write_text("a\tb\tscore\nx\ty\t1\n")
    with pytest.raises(UserError, match="no column label"):
        read_rows(DataConfig(name="rated", files=str(rated)))


def test_numbers_cannot_be_packed_and_keys_of_other_kinds_are_refused(rated: Path) -> None:
    for settings, key in (({"pack": 16}, "data.pack"), ({"pivot": "en"}, "data.pivot")):
        with pytest.raises(UserError) as caught:
            check_kind(DataConfig(name="rated", files=str(rated), **settings))  # type: ignore[arg-type]
        assert caught.value.key == key


@pytest.mark.parametrize("numbers", [{"rows": float}, {"first": int}, {"score": str}])
def test_a_kind_whose_numbers_cannot_be_is_refused_where_it_is_written(numbers: dict[str, type]) -> None:
    with pytest.raises(TypeError, match="numbers"):
        type("Bad", (DataKind,), {"name": "bad", "roles": ("first",), "numbers": numbers})


def test_kinds_are_checked_without_torch() -> None:
    code = (
        "import sys; from embedlab.data.kinds import data_config;"
        "[data_config({'name': n, 'files': 'x.tsv'}) for n in ('wikipedia', 'nli', 'parallel')];"
        "assert 'torch' not in sys.modules and 'lightning' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
