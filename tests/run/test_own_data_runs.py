"""Runs on one's own data go on where they were stopped, to the last bit; several processes have one set a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.test_resume import run_in_parts
from tests.tiny_run import compose_run as compose_run
from tests.tiny_run import sentences
from tests.tiny_run import text_file as text_file


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    texts = sentences(120, seed=9)
    made = {name: tmp_path / f"{name}.csv" for name in ("pairs", "rated", "labelled")}
    pairs = list(zip(texts[:48:2], texts[1:48:2], strict=True))
    made["pairs"].write_text("anchor,positive\n" + "".join(f"{a},{b}\n" for a, b in [*pairs, *pairs[:6]]))
    made["rated"].write_text(
        "sentence1,sentence2,score\n" + "".join(f"{a},{b},{i % 6}\n" for i, (a, b) in enumerate(pairs))
    )
    made["labelled"].write_text(
        "text,label\n" + "".join(f"{t},{'xyz'[i % 3]}\n" for i, t in enumerate(texts))
    )
    return made


CASES = {
    "mix": (
        "data=mix", "data.mix.a={{name: pairs, files: {pairs}}}",
        "data.mix.b={{name: scored, files: {rated}, score_range: [0, 5], objective: cosent}}",
        "data.sampling=temperature", "data.temperature=3", "data.epoch_steps=5", "data.no_duplicates=true",
        "method.matryoshka.dims=[32,16,8]", "method.matryoshka.dims_per_step=1",
    ),
    "distinct": (
        "data=pairs", "data.files={pairs}", "data.no_duplicates=true", "data.drop_last=false",
        "method.objective=sigmoid",
    ),
    "guide": (
        "data=mix", "data.mix.a={{name: scored, files: {rated}, objective: cosent}}",
        "data.mix.b={{name: pairs, files: {pairs}}}", "method.objective=gist", "method.guide={guide}",
        "method.cached=true",
    ),
    "labels": ("data=labelled", "data.files={labelled}", "data.per_label=4", "method.objective=multi_positive"),
}  # fmt: skip


@pytest.mark.parametrize("stop", [2, 5])
@pytest.mark.parametrize("case", CASES)
def test_resume_is_exact(case, stop, files, tiny, compose_run, tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    own = [setting.format(**files, guide=tiny("roberta", width=16)) for setting in CASES[case]]
    settings = [
        "method=supervised",
        *own,
        "data.max_length=32",
        "trainer.max_steps=8",
        "trainer.max_epochs=9",
    ]
    run_in_parts(settings, stop, compose_run, tmp_path, monkeypatch)
