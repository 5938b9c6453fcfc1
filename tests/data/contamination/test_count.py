"""Counts of evaluation texts in training tables, on planted overlaps."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embedlab.cli.main import main
from embedlab.config.data import DataConfig
from embedlab.data.build import build_token_table
from embedlab.data.contamination.count import contamination
from embedlab.data.contamination.overlap import HeldOut, Overlap
from embedlab.data.readers import open_reader
from embedlab.data.report import report_tables
from embedlab.data.rows import read_rows
from embedlab.errors import UserError
from embedlab.evaluation.held_out import held_out
from tests.data.standin import WordTokenization
from tests.evaluation.helpers import write_sts_folder

TEXTS = [
    "the quick brown fox jumps over the lazy dog today",
    "a man is playing an old guitar on the stage",
    "five words are here now",
    "too short to count",
]
SETS = [HeldOut("one", "sts", TEXTS, [(0, 1), (1, 2), (3, 3)]), HeldOut("docs", "retrieval", [TEXTS[0]])]


def table(folder: Path) -> Path:
    rows = [
        ("Nothing of the kind stands in this row", "nor in this one"),
        (
            "The QUICK, brown fox jumps over the lazy dog - today!",
            "A man is playing an old guitar on the stage.",
        ),
        ("I saw: the quick brown fox jumps over the lazy dog today", "five words are here now and more"),
        ("five words are here, now", "too short to count"),
    ]
    path = folder / "pairs.tsv"
    path.write_text("anchor\tpositive\n" + "".join(f"{a}\t{b}\n" for a, b in rows), encoding="utf-8")
    return path


def test_counts_of_planted_overlaps(tmp_path: Path) -> None:
    report = contamination([open_reader(table(tmp_path))], Overlap(SETS))
    assert (report["rows"], report["rows_hit"]) == (4, 3)
    assert report["roles"] == {"anchor": {"texts": 4, "hit": 3}, "positive": {"texts": 4, "hit": 1}}
    one, docs = report["sets"]
    assert (one["texts"], one["hit"], one["equal"], one["pairs"], one["both"]) == (4, 3, 3, 3, 1)
    assert (docs["texts"], docs["hit"], docs["equal"], docs["pairs"]) == (1, 1, 1, 0)
    first = report["examples"][0]
    assert (first["set"], first["row"], first["role"], first["equal"]) == ("one", 3, "anchor", True)
    assert first["evaluation_text"] == TEXTS[0]
    assert len(report["examples"]) == 4


def test_columns(tmp_path: Path) -> None:
    reader = open_reader(table(tmp_path))
    assert contamination([reader], Overlap(SETS), ["positive"])["rows_hit"] == 1
    with pytest.raises(UserError, match=r"has the columns anchor, positive \(columns=negative\)"):
        contamination([reader], Overlap(SETS), ["negative"])


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_lists_of_texts_are_read(tmp_path: Path, suffix: str) -> None:
    rows: list[dict[str, object]] = [
        {"query": "who is playing", "pos": [TEXTS[1]], "neg": ["none", TEXTS[0], None], "score": [0.5]},
        {"query": "nothing", "pos": [], "neg": None, "score": []},
    ]
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    report = contamination([open_reader(path)], Overlap(SETS))
    assert (report["rows"], report["rows_hit"]) == (2, 1)
    assert report["roles"]["pos"] == {"texts": 1, "hit": 1}
    assert report["roles"]["neg"] == {"texts": 2, "hit": 1}
    assert report["sets"][0]["both"] == 1


def test_rows_are_dropped_counted_and_key_the_cache(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\n".join(["something else", *TEXTS, f"and {TEXTS[1]} again"]))
    plain = DataConfig(files=str(path))
    apart = DataConfig(files=str(path), decontaminate=["sts", "retrieval"])
    stream = read_rows(apart, overlap=Overlap(SETS))
    assert [texts[0] for _, _, texts, _ in stream] == ["something else", TEXTS[3]]
    assert stream.dropped == {"in evaluation sets of sts": 4}

    fields = {"sentence": ("sentence", WordTokenization())}
    other = Overlap([HeldOut("docs", "retrieval", TEXTS[:1])])
    tables = [
        build_token_table(plain, fields),
        *(build_token_table(apart, fields, overlap=o) for o in (Overlap(SETS), other)),
    ]
    assert [t.n_rows for t in tables] == [6, 2, 5]
    assert len({t.folder for t in tables}) == 3
    assert "decontaminated" not in tables[0].report
    facts = tables[1].report["decontaminated"]
    assert (facts["against"], facts["rows"], facts["texts"], facts["window"]) == (
        ["sts", "retrieval"],
        4,
        5,
        13,
    )
    assert report_tables(tables[1].report)
    with pytest.raises(ValueError, match="needs the texts"):
        build_token_table(apart, fields)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_sts_folder(tmp_path / "sts")
    held = held_out(["sts"], folder)
    assert [one.name for one in held] == [
        "sts12",
        "sts13",
        "sts14",
        "sts15",
        "sts16",
        "stsb",
        "sickr",
        "stsb_dev",
    ]
    long = next(text for one in held for text in one.texts if len(text.split()) >= 5)
    (tmp_path / "a.txt").write_text(f"nothing here at all\n{long.upper()}!\n")
    (tmp_path / "b.txt").write_text("nor there\n")
    command = ["contamination", str(tmp_path / "a.txt"), str(tmp_path / "b.txt"), f"data_dir={folder}"]
    assert main([*command, "against=sts", f"out={tmp_path / 'out.json'}"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 of 3 rows (33.33%)")
    assert long.upper() not in out, "texts of evaluation sets are not printed"
    report = json.loads((tmp_path / "out.json").read_text())
    assert [one["hit"] for one in report["files"]] == [1, 0]
    assert {one["set"] for one in report["sets"] if one["hit"]} >= {report["examples"][0]["set"]}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "files is missing"),
        (["a.txt"], "data_dir is not set"),
        (
            ["a.txt", "against=sts,glue"],
            "no such evaluation texts (against=glue). Fix: one of sts, retrieval",
        ),
        (["a.txt", "data_dir=."], "has no sts12_test.tsv.gz"),
        (["nowhere.txt", "data_dir=."], "no such file (files=nowhere.txt)"),
        (["a.txt", "n=4"], "from 5 up (n=4)"),
    ],
)
def test_bad_commands(
    tmp_path: Path,
    argv: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("one\n")
    assert main(["contamination", *argv]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
