"""What a run says of the data that it scores on."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from embedlab.config.trainer import ScoringConfig
from embedlab.errors import UserError
from embedlab.evaluation.core.files import Hub
from embedlab.evaluation.core.suite import keys_named, suite, suite_names
from embedlab.run.dev import KEYS, load_dev
from embedlab.run.finish import FinalEvaluation, check_final
from embedlab.run.run import build, train
from tests.evaluation.everything import collection, every_kind
from tests.tiny_run import all_sts_files


@pytest.mark.parametrize(
    ("there", "message"),
    [
        ([], r"no such folder \(evaluation.sts_dir=.*Fix: give the folder that holds stsb_dev.tsv.gz"),
        (["x"], r"has no stsb_dev.tsv.gz \(evaluation.sts_dir=.*, or evaluation.sts_dir=hub$"),
        (
            ["stsb_dev.tsv"],
            r"has no mr.tsv.gz \(evaluation.sts_dir=.*Fix: a folder that holds transfer/ beside sts/$",
        ),
    ],
)
def test_its_folder_goes_by_the_runs_key(there, message, compose_run, sts_dir, tmp_path):  # type: ignore[no-untyped-def]
    folder = tmp_path / "here"
    for name in there:
        folder.mkdir()
        shutil.copy(sts_dir / "stsb_dev.tsv", folder / name)
    settings = (f"evaluation.sts_dir={folder}", "evaluation.final=[transfer]", "evaluation.before=true")
    with pytest.raises(UserError, match=message):
        train(compose_run(*settings), tmp_path / "run")


def test_so_does_the_hubs_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError) as caught, keys_named(KEYS, None):
        Hub(str(tmp_path / "nowhere"), None, "test", "the STS files").rows()
    assert caught.value.key == "evaluation.sts_dir"
    assert caught.value.fix == "give evaluation.sts_dir=FOLDER with the STS files"


def test_an_error_without_a_key_stays_as_it_is() -> None:
    with pytest.raises(UserError) as caught, keys_named(KEYS, None):
        raise UserError("no rows", fix="f")
    assert str(caught.value) == "no rows. Fix: f"


@pytest.mark.parametrize(
    ("suite", "message"),
    [("retrieval", r"holds no corpus.jsonl \(evaluation.sts_dir\). Fix: a folder that holds retrieval/ beside sts/"),
     ("languages", r"\(evaluation.sts_dir.*Fix: a folder that holds parallel/ beside sts/")],
)  # fmt: skip
def test_data_of_the_last_suite_are_missed_before_anything_is_done(  # type: ignore[no-untyped-def]
    compose_run, sts_dir, tmp_path, monkeypatch, suite, message
):
    settings = (f"evaluation.sts_dir={sts_dir}", f"evaluation.final=[{suite}]", "evaluation.before=false")
    with pytest.raises(UserError, match=message):
        train(compose_run(*settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_so_they_are_without_a_folder_and_by_a_run_that_goes_on(compose_run, sts_dir, tmp_path):  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match="retrieval reads local collections"):
        train(compose_run("evaluation.final=[retrieval]"), tmp_path / "run")
    run = tmp_path / "run"
    train(compose_run("trainer.max_steps=1"), run)
    before = sorted(run.rglob("*"))
    settings = ("trainer.max_steps=2", f"evaluation.sts_dir={sts_dir}", "evaluation.final=[retrieval]")
    with pytest.raises(UserError, match=r"holds no corpus\.jsonl"):
        train(compose_run(*settings, "ckpt_path=last"), run)
    assert sorted(run.rglob("*")) == before


def test_suites_find_their_data_in_a_folder_of_several_kinds(compose_run, sts_dir, tmp_path):  # type: ignore[no-untyped-def]
    data = tmp_path / "data"
    shutil.copytree(sts_dir, data / "sts")
    collection(data / "retrieval" / "few")
    settings = (f"evaluation.sts_dir={data}", "evaluation.final=[retrieval]", "trainer.max_steps=1")
    scores = train(compose_run(*settings), tmp_path / "run")
    assert scores["few/ndcg@10"] == pytest.approx(100.0)
    assert "dev/spearman" in scores


@pytest.mark.parametrize("name", [name for name in suite_names() if suite(name).folders])
def test_the_folder_that_is_named_then_works(name: str, tmp_path: Path) -> None:
    everything, nothing, data = every_kind(tmp_path / "everything"), tmp_path / "nothing", tmp_path / "data"
    nothing.mkdir()
    with pytest.raises(UserError, match=rf"\(evaluation.sts_dir(={nothing})?\)") as caught:
        check_final(ScoringConfig(sts_dir=str(nothing), final=(name,)))
    said = re.fullmatch(r"(a folder that holds|give the folder that holds) (.*)", caught.value.fix or "")
    assert said is not None
    kinds = re.findall(r"(\w+)/", said[2]) or ["sts"]
    for kind in {"sts", *kinds}:
        (data / kind).mkdir(parents=True)
    with pytest.raises(UserError) as caught:
        check_final(ScoringConfig(sts_dir=str(data), final=(name,)))
    if kinds != ["sts"]:
        inside = " and ".join(str(data / kind) for kind in kinds if kind != "sts")
        assert caught.value.fix == f"the files of the suite in {inside}"
    for kind in {"sts", *kinds}:
        shutil.copytree(everything / kind, data / kind, dirs_exist_ok=True)
    check_final(ScoringConfig(sts_dir=str(data), final=(name,)))
    load_dev(ScoringConfig(sts_dir=str(data)))


def test_a_fix_that_a_run_has_no_key_for_is_not_named(tmp_path: Path) -> None:
    folder = every_kind(tmp_path / "data")
    lines = [f"{i % 2}\ttext {i}" for i in range(8)]
    (folder / "transfer" / "mr.tsv.gz").unlink()
    (folder / "transfer" / "mr.tsv").write_text("\n".join(["label\tsentence", *lines]) + "\n")
    with pytest.raises(UserError, match="10 folds") as caught:
        check_final(ScoringConfig(sts_dir=str(folder), final=("transfer",)))
    assert caught.value.fix == "give the whole data set"


class Stub:
    """A suite of one score."""

    packages: dict[str, str] = {}  # noqa: RUF012
    optional = False
    asked: list[Any] = []  # noqa: RUF012

    def __init__(self, value: float) -> None:
        self.value = value

    def folder(self, data_dir: Any) -> None:
        return None

    def score(self, encoder: Any, data: Any, settings: dict[str, Any]) -> Any:
        self.asked.append(settings["device"])
        return {"sst2/accuracy": self.value}, {"warnings": [], "notes": []}


@pytest.mark.parametrize("order", [("transfer", "glue"), ("glue", "transfer"), ("glue", "glue")])
@pytest.mark.parametrize("device", [None, "meta"])
def test_no_suite_of_a_run_hides_anothers_score_or_takes_another_device(  # type: ignore[no-untyped-def]
    order, device, compose_run, tmp_path, monkeypatch
) -> None:
    """SST-2 is a task of both; and a run on the fourth card scores there, not on the first."""
    config = compose_run(f"evaluation.final=[{','.join(order)}]")
    stubs = {name: Stub(i) for i, name in enumerate(order)}
    monkeypatch.setattr("embedlab.run.finish.suite", stubs.__getitem__)
    method, data = build(config, tmp_path)
    finale = FinalEvaluation(
        config, tmp_path, method.encoder, data, None, loaded={name: [1] for name in order}
    )
    finale.device = device and torch.device(device)
    Stub.asked.clear()
    monkeypatch.setattr(method.encoder, "to", lambda device: method.encoder)
    monkeypatch.setattr(
        type(method.encoder), "device", property(lambda _: finale.device or torch.device("cpu"))
    )
    scores, protocols = finale.score()
    again = {} if order[0] == order[1] else {f"{order[1]}-sst2/accuracy": 1}
    assert scores == {"sst2/accuracy": stubs[order[0]].value} | again
    assert list(protocols) == list(dict.fromkeys(order))
    assert set(Stub.asked) == {device or "cpu"}


@pytest.mark.parametrize("dev", ["sts", "own"])
def test_the_gap_to_the_test_set_is_of_its_own_dev_set(  # type: ignore[no-untyped-def]
    dev, compose_run, sts_dir, tmp_path, capsys
) -> None:
    """STS-B's test goes with STS-B's dev alone."""
    own = tmp_path / "mine.tsv"
    shutil.copy(sts_dir / "stsb_dev.tsv", own)
    folder = all_sts_files(sts_dir, tmp_path / "sts")
    more = (f"evaluation.dev={own}",) if dev == "own" else ()
    settings = (f"evaluation.sts_dir={folder}", "evaluation.final=[sts]", "evaluation.last=true", *more)
    train(compose_run(*settings, "trainer.max_steps=1"), tmp_path / "run")
    kept = json.loads((tmp_path / "run" / "scores.json").read_text())
    gaps, told = kept["dev_minus_test"], capsys.readouterr().out
    assert (gaps == {"selected": None, "last": None}) == (dev == "own")
    assert (f"\n{own}: selected (step" in told) == (dev == "own")
    assert ("STS-B dev: selected (step" in told) == (dev == "sts")
