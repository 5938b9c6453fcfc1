"""What a run says of itself."""

from __future__ import annotations

import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from embedlab.evaluation.core.suite import suite
from embedlab.run.finish import this_python
from embedlab.run.run import train

NO_STS = "No sts scores: evaluation.sts_dir names neither a folder of its files nor hub."


def test_the_interpreter_is_the_one_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / ".venv" / "bin" / "python"
    monkeypatch.setattr(sys, "executable", str(own))
    places = {
        tmp_path: ".venv/bin/python",
        tmp_path / "elsewhere": str(own),
        own.parent: str(own),  # a bare `python` would be looked for in PATH
    }
    for folder, shown in places.items():
        folder.mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(folder)
        assert this_python() == shown


def test_the_line_at_the_end_works(compose_run, tmp_path, capsys):  # type: ignore[no-untyped-def]
    train(compose_run("trainer.max_steps=1"), tmp_path / "run")
    line = next(s for s in capsys.readouterr().out.splitlines() if s.startswith("Encode with the result: "))
    command = shlex.split(line.partition(": ")[2])
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("(2, ")


@pytest.mark.parametrize(
    ("suites", "said"),
    [
        (("sts",), [NO_STS]),
        (("sts", "emoji"), [NO_STS, "Scoring emoji (suite 1 of 1)."]),
        (("lee",), []),
        (("emoji",), ["Scoring emoji (suite 1 of 1)."]),
        (("lee", "emoji"), ["Scoring lee (suite 1 of 2).", "Scoring emoji (suite 2 of 2)."]),
    ],
)
def test_suites_are_named_before_they_are_scored(compose_run, tmp_path, monkeypatch, caplog, suites, said):  # type: ignore[no-untyped-def]
    for name in suites:
        monkeypatch.setattr(type(suite(name)), "packages", {})
        monkeypatch.setattr(type(suite(name)), "load", lambda self, settings: [])
        monkeypatch.setattr(type(suite(name)), "score", lambda self, encoder, data, settings: ({}, {}))
    final = f"evaluation.final=[{','.join(suites)}]"
    with caplog.at_level("INFO"):
        train(compose_run("trainer.max_steps=1", "evaluation.before=true", final), tmp_path / "run")
    told = [line for line in caplog.messages if line.startswith(("Scoring ", "No "))]
    scored = [line for line in said if line != NO_STS]
    assert told == [*said, *scored]  # before and after; that a suite is left out is said once


@pytest.mark.parametrize(
    ("overrides", "model_type", "candidates"),
    [
        (("method=simcse",), "bert", True),
        (("method=masked_lm",), "bert", False),
        (("method=causal_lm", "pooling=last"), "gpt2", False),
    ],
)
def test_candidates_are_of_methods_that_have_them(  # type: ignore[no-untyped-def]
    compose_run, tmp_path, caplog, overrides, model_type, candidates
):
    with caplog.at_level("INFO"), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train(compose_run(*overrides, "trainer.max_steps=1", model_type=model_type), tmp_path / "run")
    (banner,) = (line for line in caplog.messages if line.startswith("step="))
    assert ("8 in-batch candidates an anchor, " in banner) == candidates
    assert "| batch 8 on each device, " in banner
    assert banner.endswith(", 8 sentences an update")
    assert not [str(w.message) for w in seen if "LeafSpec" in str(w.message)]
