"""The transfer protocol against a plain re-implementation and against hand-made encoders."""

from __future__ import annotations

import json
import shutil
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embedlab.errors import UserError
from embedlab.evaluation.core.files import Labelled
from embedlab.evaluation.core.protocol import check
from embedlab.evaluation.core.suite import suite
from embedlab.evaluation.transfer import transfer
from embedlab.evaluation.transfer.classifier import ClassifierConfig, Fitted, Job, LabelledVectors
from embedlab.evaluation.transfer.transfer import Mode, Transfer, evaluate_task, nested_kfold_outcome
from embedlab.evaluation.transfer.transfer_data import SEVEN, TASKS, load_transfer, source
from tests.evaluation.everything import write_transfer
from tests.evaluation.helpers import Constant, HashedWords, write_tsv
from tests.evaluation.senteval_reference import nested_folds
from tests.evaluation.test_kept import Known

run = Transfer().run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_transfer(tmp_path_factory.mktemp("transfer"))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast mode with few passes: these data are easy."""
    fast = ClassifierConfig("rmsprop", batch_size=16, tenacity=1, epoch_size=1, max_epoch=4)
    monkeypatch.setitem(transfer.MODES, "fast", Mode(3, fast))


def test_nested_folds_are_those_of_one_classifier_at_a_time() -> None:
    rng = np.random.default_rng(1)
    y = rng.permutation(np.repeat([0, 1], [34, 46]))
    x = torch.tensor(rng.normal(size=(80, 5)) + 0.5 * y[:, None], dtype=torch.float32)
    config = ClassifierConfig(batch_size=16, tenacity=1, epoch_size=1, max_epoch=12)
    found = nested_kfold_outcome(LabelledVectors(x, y, 2), np.arange(80), Mode(4, config))
    dev, test, chosen = nested_folds(x, y, 4, transfer.L2_GRID, config)
    assert (found.dev_accuracy, found.accuracy, found.l2) == (dev, test, chosen)
    assert found.accuracy == round(float(np.mean(found.folds)), 2)


@pytest.mark.parametrize("best", range(4))
def test_a_fixed_dev_set_chooses_the_classifier_that_is_scored(
    best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the four classifiers of the grid the chosen one is right on the test rows but for one, the others wrong."""
    x = torch.tensor([[1.0], [1.0], [-1.0], [-1.0], [1.0]])
    data = LabelledVectors(x, np.array([1, 1, 0, 0, 0]), 2)
    right = torch.tensor([[-1.0, 0.0], [1.0, 0.0]])
    weight = torch.stack([right if r == best else -right for r in range(4)])
    dev = [0.9 if r == best else 0.1 for r in range(4)]
    asked: list[Any] = []

    def fitted(given: LabelledVectors, jobs: list[Job], config: ClassifierConfig) -> list[Fitted]:
        assert given is data
        asked.extend(jobs)
        return [Fitted(weight, dev, [3] * 4)]

    monkeypatch.setattr(transfer, "fit_linear", fitted)
    train, held, test = np.array([2, 3]), np.array([4]), np.array([0, 1, 4])
    found = transfer.split_outcome(data, train, held, test, transfer.MODES["fast"])
    assert found.l2 == [transfer.L2_GRID[best]]
    assert (found.accuracy, found.dev_accuracy, found.folds) == (66.67, 90.0, [66.67])
    assert found.predictions is not None
    assert found.predictions.tolist() == [1, 1, 1]
    (job,) = asked
    assert job.l2 == transfer.L2_GRID
    assert (job.train.tolist(), job.dev.tolist()) == ([2, 3], [4])


def test_modes_are_the_published_ones() -> None:
    test, fast = transfer.MODES["test"], transfer.MODES["fast"]
    assert (test.folds, fast.folds) == (10, 5)
    for mode, expected in (test, ("adam", 64, 5, 4, 200, 1111)), (fast, ("rmsprop", 128, 3, 2, 200, 1111)):
        assert tuple(vars(mode.classifier).values()) == expected
    assert transfer.L2_GRID == (1e-5, 1e-4, 1e-3, 1e-2)


def test_pairs_become_difference_and_product() -> None:
    table = {"a": (1.0, 2.0), "b": (3.0, -1.0), "c": (0.0, 0.5)}
    split = Labelled(["a", "b"], ["b", "c"], np.array([0, 1]))
    vectors = torch.tensor([table[t] for t in split.first + (split.second or [])])
    expected = torch.tensor([[2.0, 3.0, 3.0, -2.0], [3.0, 1.5, 0.0, -0.5]])
    torch.testing.assert_close(transfer.classifier_inputs(vectors, [split]), expected)


def test_rows_are_sorted_as_senteval_does(tmp_path: Path) -> None:
    rows = [[1, "b  b b"], [0, "c c c"], [1, "a"], [1, "z z z"], [0, "a a"]]
    write_tsv(tmp_path / "mr.tsv", ["label", "sentence"], rows)
    split = load_transfer("mr", tmp_path)["all"]
    assert split.first == ["a", "a a", "c c c", "b b b", "z z z"], "by tokens, label, then as in the file"
    assert split.labels.tolist() == [1, 0, 0, 1, 1]


def test_the_folder_of_all_kinds_will_do(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "transfer")
    for task in SEVEN:
        one, other = load_transfer(task, tmp_path), load_transfer(task, folder)
        assert {k: (v.first, v.second) for k, v in one.items()} == {
            k: (v.first, v.second) for k, v in other.items()
        }
        assert str(tmp_path / "transfer") in source(task, tmp_path)


def test_all_seven_tasks(folder: Path, quick: None) -> None:
    scores, block = run(HashedWords(), {"data_dir": folder, "mode": "fast", "device": "cpu"})
    assert {f"{task}/accuracy" for task in SEVEN} < set(scores)
    assert scores["transfer7/accuracy"] == pytest.approx(np.mean([scores[f"{t}/accuracy"] for t in SEVEN]))
    # One word list a label: separable, up to what four passes learn.
    assert all(scores[f"{task}/accuracy"] > 85 for task in ("mr", "cr", "subj", "mpqa", "sst2", "trec"))
    assert scores["mrpc/f1"] > 85
    check(block)
    json.dumps(block)
    assert block["name"] == "senteval_transfer_fast"
    assert block["data"]["trec"]["source"] == f"{folder / 'trec_train.tsv.gz'}, {folder / 'trec_test.tsv.gz'}"
    assert block["scoring_seed"] == 1111
    assert len(block["l2_chosen"]["mr"]) == 3
    assert len(block["warnings"]) == 11, "every split of the fixture is shorter than SentEval's"


def test_a_stopped_run_goes_on_after_its_finished_tasks(
    folder: Path, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"data_dir": folder, "mode": "fast", "tasks": "cr,trec,mrpc", "device": "cpu"}
    whole, _ = run(Known(), settings)
    settings["kept"] = tmp_path / "transfer.unfinished"
    real = transfer.task_outcome

    def stop_at_mrpc(vectors: torch.Tensor, task: str, *rest: Any) -> transfer.ProbeResult:
        if task == "mrpc":
            raise KeyboardInterrupt
        return real(vectors, task, *rest)

    monkeypatch.setattr(transfer, "task_outcome", stop_at_mrpc)
    with pytest.raises(KeyboardInterrupt):
        run(Known(), settings)
    monkeypatch.undo()
    monkeypatch.setitem(transfer.MODES, "fast", Mode(3, ClassifierConfig("rmsprop", 16, 1, 1, 4)))
    encoder = Known()
    scores, block = run(encoder, settings)
    assert scores == whole
    assert block["notes"] == ["scored before an interruption: cr, trec"]
    only = [text for split in load_transfer("mrpc", folder).values() for text in split.first + split.second]
    assert encoder.calls == [list(dict.fromkeys(only))], "finished tasks are not encoded again"


def test_a_collapsed_encoder_gets_the_majority(folder: Path, quick: None) -> None:
    scores, _ = run(Constant(), {"data_dir": folder, "mode": "fast", "tasks": "sst2,mr", "device": "cpu"})
    assert scores["sst2/accuracy"] == pytest.approx(50)
    assert "transfer7/accuracy" not in scores


def test_equal_texts_are_encoded_once(folder: Path, quick: None) -> None:
    encoder = HashedWords()
    evaluate_task(encoder, "mrpc", load_transfer("mrpc", folder), transfer.MODES["fast"])
    (texts,) = encoder.calls
    assert len(texts) == len(set(texts))


def test_suite_is_registered() -> None:
    assert isinstance(suite("transfer"), Transfer)


class NaN(HashedWords):
    def _vector(self, sentence: str) -> np.ndarray:
        return super()._vector(sentence) * (np.nan if "fine" in sentence else 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "slow"}, "mode=slow"),
        ({"tasks": ["mr", "imdb"]}, "tasks=imdb"),
    ],
)
def test_bad_settings(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(HashedWords(), {"data_dir": folder, **settings})


def test_vectors_that_are_not_finite(folder: Path, quick: None) -> None:
    with pytest.raises(UserError, match=r"not finite, the first for .*fine"):
        run(NaN(), {"data_dir": folder, "mode": "fast", "tasks": ["mr"]})


def test_bad_files(tmp_path: Path) -> None:
    write_tsv(tmp_path / "trec_train.tsv", ["coarse", "question"], [["HUM", "who"], ["WHO", "who"]])
    with pytest.raises(UserError, match=r"trec_train\.tsv:3: unknown label \(coarse=WHO\)"):
        load_transfer("trec", tmp_path)
    write_tsv(tmp_path / "mr.tsv", ["label", "sentence"], [])
    with pytest.raises(UserError, match=r"mr\.tsv: the file has a header and no rows"):
        load_transfer("mr", tmp_path)
    with pytest.raises(UserError, match=r"cr\.tsv\.gz"):
        load_transfer("cr", tmp_path)


@pytest.mark.parametrize(
    ("task", "mode", "counts", "message"),
    [
        ("mr", "test", (4, 40), "has 4 rows of label 0, and 10 folds need 12"),
        ("mr", "test", (40, 11), "has 11 rows of label 1, and 10 folds need 12"),  # one fold would leave 9
        ("mr", "test", (12, 12), None),
        ("mr", "fast", (7, 17), "has 24 rows, and 5 folds need 25"),
        ("mr", "fast", (7, 18), None),
        ("trec", "test", (10, 10, 10, 9, 10, 10), "has 9 rows of label HUM, and 10 folds need 10"),
        ("trec", "test", (10,) * 6, None),
        ("mrpc", "fast", (5, 14), "has 19 rows, and 5 folds need 20"),
    ],
)
def test_too_few_rows_are_said_before_anything_is_encoded(  # type: ignore[no-untyped-def]
    tmp_path, monkeypatch, task, mode, counts, message
):
    config = ClassifierConfig("rmsprop", batch_size=16, tenacity=1, epoch_size=1, max_epoch=1)
    monkeypatch.setitem(transfer.MODES, mode, Mode(transfer.MODES[mode].folds, config))
    known = TASKS[task]
    for split in known.splits:
        labels = [name for name, n in zip(known.classes, counts, strict=True) for _ in range(n)]
        rows = [[label, *[f"word{i}"] * len(known.texts)] for i, label in enumerate(labels)]
        write_tsv(tmp_path / f"{known.file(split)}.tsv", [known.label, *known.texts], rows)
    settings = {"data_dir": tmp_path, "tasks": [task], "mode": mode}
    if message is None:
        run(HashedWords(), settings)
        return
    with pytest.raises(UserError, match=message) as caught:
        Transfer().local(settings)
    assert caught.value.file == str(tmp_path / f"{known.file(known.splits[0])}.tsv")
    with pytest.raises(UserError, match=message):
        run(Unasked(), settings)


class Unasked:
    def encode(self, sentences: Sequence[str]) -> np.ndarray:
        raise AssertionError("nothing is encoded")


class Rows(dict):  # type: ignore[type-arg]
    """The two things that are used of a hub data set."""

    @property
    def column_names(self) -> list[str]:
        return list(self)


def test_hub_splits_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(hub: str, config: str | None, split: str) -> Rows:
        asked.append((hub, config, split))
        return Rows(label=[1, 0], sentence1=[f"{split} a b", "x"], sentence2=["c", "d"])

    fake = types.ModuleType("datasets")
    fake.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    splits = load_transfer("mrpc")
    assert asked == [("nyu-mll/glue", "mrpc", s) for s in ("train+validation", "test")]
    assert splits["train"].first == ["x", "train+validation a b"]
    assert splits["train"].labels.tolist() == [0, 1]
    with pytest.raises(UserError, match=r"hub:.*has no column 'sentence'"):
        load_transfer("cr")


def test_a_hub_out_of_reach_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("datasets")

    def load_dataset(*_: object, **__: object) -> None:
        raise ConnectionError("no route\nto host")

    fake.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    with pytest.raises(UserError, match=r"cannot load .*SentEval-MR from the hub .no route.") as caught:
        load_transfer("mr")
    assert "data_dir=FOLDER" in str(caught.value)
