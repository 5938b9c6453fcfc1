from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import embedlab
from embedlab.errors import UserError
from embedlab.evaluation.core import protocol
from embedlab.evaluation.core.suite import suite, suite_names
from embedlab.evaluation.core.table import protocol_line
from tests.evaluation.helpers import HashedWords, write_sts_folder


def block(**changes: Any) -> dict[str, Any]:
    return protocol.describe(HashedWords(), suite="sts", name="x", aggregation="all", text="raw") | changes


@pytest.mark.parametrize("name", ["sts", "geometry", "lee"])
def test_every_suite_gives_a_complete_block(name: str, tmp_path: Path) -> None:
    if name == "lee":
        pytest.importorskip("gensim", reason="gensim (extra quickstart) is not installed")
    settings = {"resamples": 5} if name == "lee" else {"data_dir": str(write_sts_folder(tmp_path))}
    _, made = suite(name).run(HashedWords(), settings)
    protocol.check(made)
    assert made["suite"] == name
    assert made["checkpoint"] == "unknown", "what an encoder does not state is not guessed"
    assert made["versions"]["torch"]
    assert made["versions"]["embedlab"]


@pytest.mark.parametrize("key", protocol.REQUIRED)
def test_a_missing_key_is_a_failure(key: str, tmp_path: Path) -> None:
    incomplete = {name: value for name, value in block().items() if name != key}
    with pytest.raises(ValueError, match=key):
        protocol.check(incomplete)
    with pytest.raises(ValueError, match="incomplete"):
        protocol.write_scores(tmp_path / "s.json", {"a/b": 1.0}, incomplete)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", sorted(set(protocol.REQUIRED) - protocol.MAY_BE_NULL))
def test_a_null_is_a_failure_where_a_value_must_be_known(key: str) -> None:
    with pytest.raises(ValueError, match=key):
        protocol.check(block(**{key: None}))


@pytest.mark.parametrize("name", ["provenance", "facts"])
def test_facts_come_from_the_encoder(name: str) -> None:
    def stated(self: object, sentences: list[str] | None) -> dict[str, Any]:
        return {"pooling": "mean", "max_length": 32, "truncated": len(sentences or []), "secret": 1}

    encoder = type("Stated", (HashedWords,), {name: stated})()
    made = protocol.describe(encoder, suite="s", name="n", aggregation="a", sentences=["x", "y"])
    assert (made["pooling"], made["max_length"], made["truncated"]) == ("mean", 32, 2)
    assert "secret" not in made


def test_what_an_encoder_of_this_package_states_is_read_without_a_wrapper() -> None:
    encoder = embedlab.load("mini")
    made = protocol.encoder_facts(encoder, ["x"])
    assert made == encoder.provenance(["x"])
    assert protocol.UNKNOWN not in made.values()


def test_a_caption_says_how_the_scores_came_about() -> None:
    stated = {
        "pooling": {"name": "s2sent", "n": 4, "m": None},
        "template": {"text": "[{sentence}]", "join": "ids"},
    }
    line = protocol_line(
        block(**stated, max_length=32, truncated=1200, seed=3, checkpoint="0123456789abcdef")
    )
    for part in ("x, aggregation: all", "pooling: s2sent (n=4)", "template: [{sentence}]", "max length: 32"):
        assert part in line
    for part in ("1,200 texts cut", "checkpoint 0123456789ab;", "training seed 3", "text: raw"):
        assert part in line
    assert "no template; no length limit" in protocol_line(block())


def test_scores_survive_a_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "sts.json"
    protocol.write_scores(
        path, {"sts7/spearman": 70.25, "geometry/alignment_ratio": math.nan}, block(text="tok")
    )
    content = json.loads(path.read_text())
    assert set(content) == {"scores", "protocol", "created"}
    assert content["scores"]["geometry/alignment_ratio"] is None, "NaN is not JSON"
    scores, read = protocol.read_scores(path)
    assert scores["sts7/spearman"] == 70.25
    assert math.isnan(scores["geometry/alignment_ratio"])
    assert read["text"] == "tok"
    assert [p.name for p in path.parent.iterdir()] == ["sts.json"], "no temporary file is left"


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    protocol.write_json(path, {"old": 1})
    with pytest.raises(TypeError):
        protocol.write_json(path, {"new": object()})
    assert json.loads(path.read_text()) == {"old": 1}
    assert len(list(tmp_path.iterdir())) == 1


def test_text_is_written_as_it_is(tmp_path: Path) -> None:
    protocol.write_json(tmp_path / "s.json", {"note": "naïve – 中文"})
    assert "naïve – 中文" in (tmp_path / "s.json").read_text(encoding="utf-8")


def test_written_files_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        protocol.write_json(tmp_path / "s.json", {})
    finally:
        os.umask(before)
    assert (tmp_path / "s.json").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    "content", ["", "[]", '{"scores": {}}', '{"scores": {}, "protocol": {"suite": "sts"}}']
)
def test_other_files_are_refused_in_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"x\.json:.*Fix: write it with embedlab evaluate"):
        protocol.read_scores(path)
    with pytest.raises(UserError, match="cannot be read"):
        protocol.read_scores(tmp_path / "none.json")


@pytest.mark.parametrize(("key", "value"), [("suite", ["sts"]), ("checkpoint", 3), ("warnings", "none")])
def test_a_block_with_odd_values_is_refused(tmp_path: Path, key: str, value: object) -> None:
    block = dict.fromkeys(protocol.REQUIRED, "x") | {"warnings": [], key: value}
    path = tmp_path / "x.json"
    with pytest.raises(ValueError, match=f"odd protocol block: {key} is"):
        protocol.write_scores(path, {}, block)
    path.write_text(json.dumps({"scores": {}, "protocol": block}))
    with pytest.raises(UserError, match=rf"x\.json: is not a scores file \(odd protocol block: {key}"):
        protocol.read_scores(path)


def test_suites_are_listed_without_an_import_and_one_that_is_not_there_is_refused() -> None:
    assert {"sts", "geometry", "lee"} <= set(suite_names())
    with pytest.raises(UserError, match=r"suite=gone.*one of .*sts"):
        suite("gone")
    with pytest.raises(UserError, match=r"evaluation\.final=gone"):
        suite("gone", "evaluation.final")


def test_evaluation_knows_nothing_of_lightning_or_hydra() -> None:
    code = (
        "import sys\n"
        "from embedlab.evaluation.core.suite import suite, suite_names\n"
        "assert 'torch' not in sys.modules, 'suites are imported when asked for'\n"
        "import embedlab.evaluation.sts.dev, embedlab.evaluation.sts.lee, embedlab.evaluation.core.table\n"
        "[suite(name) for name in suite_names() if name not in ('xnli', 'qa', 'glue')]\n"
        "bad = {'lightning', 'pytorch_lightning', 'hydra', 'omegaconf'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
