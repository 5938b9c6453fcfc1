"""A run whose text is kept apart from evaluation sets says so: in its data report, scores.json, protocol and card."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import embedlab
from embedlab.errors import UserError
from embedlab.export.card import model_card
from embedlab.run.finish import overlap_of
from embedlab.run.run import train
from tests.evaluation.helpers import write_sts_folder


def test_a_run_apart_from_sts(compose_run: Callable, text_file: Path, tmp_path: Path) -> None:  # type: ignore[type-arg]
    folder = write_sts_folder(tmp_path / "sts")
    import gzip

    line = (
        gzip.decompress((folder / "sts13_test.tsv.gz").read_bytes()).decode().splitlines()[1].split("\t")[3]
    )
    (tmp_path / "more.txt").write_text(f"{line.lower()}\n{line}\n")
    config = compose_run(
        "data.decontaminate=[sts]", f"data.also={tmp_path / 'more.txt'}", f"evaluation.sts_dir={folder}",
        "trainer.max_steps=1", "evaluation.select=last", "evaluation.final=[sts]",
    )  # fmt: skip
    train(config, tmp_path / "run")
    report = json.loads((tmp_path / "run" / "data_report.json").read_text())
    assert report["dropped"] == {"in evaluation sets of sts": 2}
    content = json.loads((tmp_path / "run" / "scores.json").read_text())
    apart = content["training"]["decontaminated"]
    assert (apart["against"], apart["rows"]) == (["sts"], 2)
    assert "2 rows of training text with evaluation texts were dropped" in content["protocol"]["sts"]["notes"]
    encoder = embedlab.load(str(tmp_path / "run"))
    assert "- decontaminated: `" in model_card(encoder, "mine")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("[sts]", r"evaluation.sts_dir is not set.*\(data.decontaminate=sts\)"),
        ("[glue]", r"no such evaluation texts \(data.decontaminate=glue\)"),
    ],
)
def test_what_is_refused(compose_run: Callable, override: str, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(UserError, match=message):
        overlap_of(compose_run(f"data.decontaminate={override}"))
