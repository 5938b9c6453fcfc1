"""Keys of a suite on the command line, and suites of other distributions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from embedlab.cli.main import main
from embedlab.evaluation.core import protocol
from tests.evaluation.everything import collection

SUITE = """
from embedlab.evaluation.core.protocol import describe
from embedlab.evaluation.core.suite import Suite
from embedlab.evaluation.core.vectors import embed


class Lengths(Suite):
    name = "toy_lengths"
    keys = ("scale",)

    def load(self, settings):
        return ["a cat", "a dog sleeps"]

    def score(self, encoder, data, settings):
        norms = embed(encoder, data).norm(dim=1)
        scores = {"toy/norm": (settings.get("scale") or 1) * float(norms.mean())}
        return scores, describe(encoder, suite=self.name, name="toy", aggregation="mean", sentences=data)
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["suite=retrieval", "+query_promt=x"], "no such key (query_promt=x). Fix: query_prompt=…"),
        (["suite=retrieval", "+resamples=9"], "suite retrieval has no such key (resamples=9)"),
        (["suite=lee", "+resample=9"], "Fix: resamples=…"),
    ],
)
def test_a_key_that_no_suite_reads_is_one_line_with_the_nearest(
    ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    data = collection(tmp_path / "data")
    assert main(["evaluate", f"ckpt={ckpt}", f"data_dir={data}", *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("embedlab: ")
    assert message in line
    assert not (ckpt / "scores").exists()


def test_prompts_are_read_and_said_by_the_protocol_and_the_files_name(ckpt: Path, tmp_path: Path) -> None:
    data = collection(tmp_path / "data")
    command = ["evaluate", f"ckpt={ckpt}", "suite=retrieval", f"data_dir={data}"]
    assert main(command) == 0
    assert main([*command, "+query_prompt='query: '", "+corpus_prompt='passage: '"]) == 0
    files = sorted(path.name for path in (ckpt / "scores").iterdir())
    assert files == ["retrieval-query_-passage_.json", "retrieval.json"]
    _, plain = protocol.read_scores(ckpt / "scores" / "retrieval.json")
    _, prompted = protocol.read_scores(ckpt / "scores" / "retrieval-query_-passage_.json")
    assert plain["prompts"] == {"query": "", "corpus": ""}
    assert prompted["prompts"] == {"query": "query: ", "corpus": "passage: "}


def test_a_suite_of_another_distribution_is_scored(ckpt: Path, tmp_path: Path) -> None:
    site, record = tmp_path / "site", tmp_path / "site" / "toy_parts-1.0.dist-info"
    (site / "toy_parts" / "evaluation").mkdir(parents=True)
    (site / "toy_parts" / "__init__.py").touch()
    (site / "toy_parts" / "evaluation" / "__init__.py").touch()
    (site / "toy_parts" / "evaluation" / "lengths.py").write_text(SUITE)
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-parts\nVersion: 1.0\n")
    (record / "entry_points.txt").write_text("[embedlab.parts]\ntoy = toy_parts\n")
    code = "import sys; from embedlab.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "evaluate", f"ckpt={ckpt}", "suite=toy_lengths"]
    env = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{Path(__file__).parents[2]}"}
    norms = []
    for more in ([], ["+scale=2"]):
        done = subprocess.run([*command, *more], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "toy_lengths: " in done.stdout
        scores, block = protocol.read_scores(ckpt / "scores" / "toy_lengths.json")
        assert block["suite"] == "toy_lengths"
        norms.append(scores["toy/norm"])
    assert norms[1] == pytest.approx(2 * norms[0])
    refused = subprocess.run([*command, "+scal=2"], env=env, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr.strip().endswith("suite toy_lengths has no such key (scal=2). Fix: scale=…")
