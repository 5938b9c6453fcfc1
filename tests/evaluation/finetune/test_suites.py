"""The three fine-tuned suites on tasks that a tiny random encoder can learn, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embedlab.encoders.encoder import SentenceEncoder
from embedlab.errors import UserError
from embedlab.evaluation import suite
from embedlab.evaluation.core.files import Labelled
from embedlab.evaluation.finetune import glue, qa, qa_data, xnli
from embedlab.evaluation.finetune.config import FineTuneConfig
from tests.evaluation.helpers import HashedWords, write_tsv
from tests.evaluation.multilingual import write_xquad
from tests.evaluation.real import needs_data

# A word of the hypothesis says the label: what a classifier can learn from a few rows.
WORDS = {"entailment": "guitar", "neutral": "library", "contradiction": "market"}
QUICK = {"lr": 3e-3, "batch_size": 16, "max_length": 32, "warmup": 0.1, "dropout": 0.0}


def nli_rows(n: int, seed: int) -> list[list[str]]:
    draw = np.random.default_rng(seed)
    labels = draw.choice(list(WORDS), size=n)
    fill = ["dog", "lake", "rice", "star", "ball", "train"]
    return [
        [
            label,
            f"the {' '.join(draw.choice(fill, size=3))} {i + 1000 * seed}",
            f"a {WORDS[label]} {draw.choice(fill)}",
        ]
        for i, label in enumerate(labels)
    ]


def write_nli(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    header = ["label", "premise", "hypothesis"]
    write_tsv(folder / "snli_dev.tsv.gz", header, nli_rows(120, 1))
    write_tsv(folder / "xnli_dev_en.tsv.gz", header, nli_rows(40, 2))
    english = nli_rows(60, 3)
    write_tsv(folder / "xnli_test_en.tsv.gz", header, english)
    # Another language with the labels turned: what English teaches is wrong there.
    turned = {"entailment": "neutral", "neutral": "contradiction", "contradiction": "entailment"}
    write_tsv(folder / "xnli_test_xx.tsv.gz", header, [[turned[label], a, b] for label, a, b in english])
    return folder


def test_xnli_learns_english_and_scores_every_language(encoder: SentenceEncoder, tmp_path: Path) -> None:
    before = encoder.fingerprint()
    settings = {
        "data_dir": write_nli(tmp_path),
        "finetune": {**QUICK, "steps": 160, "evaluations": 2, "seed": 1},
    }
    with torch.random.fork_rng():
        scores, block = suite("xnli").run(encoder, settings)
    assert scores["xnli-en/accuracy"] > 90
    assert scores["xnli-xx/accuracy"] < 10
    assert scores["xnli/accuracy"] == pytest.approx(
        (scores["xnli-en/accuracy"] + scores["xnli-xx/accuracy"]) / 2
    )
    assert scores["xnli-zeroshot/accuracy"] == scores["xnli-xx/accuracy"]
    done = block["finetune"]
    assert (done["steps"], done["seed"], len(done["dev"]), block["scoring_seed"]) == (160, 1, 2, 1)
    assert block["data"]["train"]["rows"] == 120
    assert block["data"]["dev"]["rows"] == 40
    assert "the weights are those of the best English dev accuracy" in block["notes"]
    assert encoder.fingerprint() == before
    assert not encoder.training


def test_training_repeats_by_seed_and_leaves_the_random_state(
    encoder: SentenceEncoder, tmp_path: Path
) -> None:
    config = {**QUICK, "lr": 3e-4, "steps": 4, "evaluations": 1}
    settings = {"data_dir": write_nli(tmp_path), "limit": 30}
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    losses = [
        suite("xnli").run(encoder, {**settings, "finetune": {**config, "seed": seed}})[1]["finetune"][
            "last_loss"
        ]
        for seed in (0, 0, 1)
    ]
    assert torch.rand(1) == expected
    assert losses[0] == losses[1] != losses[2]


def test_held_out_pairs_and_repeats_do_not_train(tmp_path: Path) -> None:
    header = ["label", "premise", "hypothesis"]
    rows = [["neutral", "p", "h"], ["entailment", "q", "h"]]
    write_tsv(tmp_path / "a.tsv.gz", header, rows)
    write_tsv(tmp_path / "b.tsv.gz", header, [["contradiction", "q", "h"], ["neutral", "r", "h"]])
    held = Labelled(["p"], ["h"], np.array([0]), "x")
    found = xnli.load_training(tmp_path, ["a", "b"], [held], None)
    assert list(zip(found.first, found.labels.tolist(), strict=True)) == [("q", 0), ("r", 1)]
    with pytest.raises(UserError, match="all training pairs are held out"):
        xnli.load_training(tmp_path, ["a"], [held], 1)


def test_qa_learns_to_copy_the_place_and_fills_the_matrix(encoder: SentenceEncoder, tmp_path: Path) -> None:
    write_xquad(tmp_path)
    rows = [
        (
            i,
            f"en asks {i % 2} which place {p}",
            f"en tells that place{p} has towers and rivers {p}",
            f"place{p}",
        )
        for i, p in enumerate([*range(9)] * 4)
    ]
    write_tsv(tmp_path / "en.tsv.gz", ["qid", "question", "passage", "answer"], rows)
    settings = {"data_dir": tmp_path, "finetune": {**QUICK, "steps": 80, "max_length": 48}}
    scores, block = suite("qa").run(encoder, settings)
    assert {key.split("/")[0] for key in scores} == {
        "xquad-xlt", "xquad-gxlt", "xquad-en-en", "xquad-en-de", "xquad-de-en", "xquad-de-de"
    }  # fmt: skip
    assert scores["xquad-xlt/f1"] > 80
    assert scores["xquad-xlt/f1"] == pytest.approx((scores["xquad-en-en/f1"] + scores["xquad-de-de/f1"]) / 2)
    assert block["matrices"]["xquad"]["f1"]["de"]["en"] == pytest.approx(scores["xquad-en-de/f1"], abs=0.01)
    assert block["data"]["train"] == {
        "source": str(tmp_path / "en.tsv.gz"), "rows": 36, "dropped": 0, "windows": 36
    }  # fmt: skip
    json.dumps(block)


def test_a_matrix_has_the_cells_that_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reader:
        """Answers with nothing, which is never right."""

        def __init__(self, *of: object) -> None: ...

        def learn(self, training: object) -> dict[str, Any]:
            return {"windows": 1}

        def answers(self, grid: qa_data.Grid) -> list[tuple[tuple[str, str], list[str]]]:
            return [(pair, [""] * len(asked)) for pair, asked in grid.items()]

    monkeypatch.setattr(qa, "Reader", Reader)
    write_xquad(tmp_path)
    write_tsv(tmp_path / "en.tsv.gz", ["qid", "question", "passage", "answer"], [("0", "what", "a b", "a")])
    settings = {"data_dir": tmp_path}
    data = suite("qa").load(settings)
    del data.grids["xquad"]["en", "de"]
    _, block = suite("qa").score(HashedWords(), data, settings)
    assert block["matrices"]["xquad"]["em"] == {"en": {"en": 0.0}, "de": {"en": 0.0, "de": 0.0}}


def test_glue_tasks_and_metrics(encoder: SentenceEncoder, tmp_path: Path) -> None:
    (tmp_path / "glue").mkdir()
    (tmp_path / "transfer").mkdir()
    draw = np.random.default_rng(0)
    for name, folder, header in (
        ("cola", "glue", ["label", "sentence"]),
        ("mrpc", "transfer", ["label", "sentence1", "sentence2"]),
    ):
        for split in ("train", "test" if name == "mrpc" else "dev"):
            labels = draw.integers(0, 2, size=80)
            texts = [[f"{('market', 'guitar')[y]} {i}"] * (len(header) - 1) for i, y in enumerate(labels)]
            rows = [[y, *text] for y, text in zip(labels, texts, strict=True)]
            write_tsv(tmp_path / folder / f"{name}_{split}.tsv.gz", header, rows)
    settings = {"data_dir": tmp_path, "tasks": "cola,mrpc", "finetune": {**QUICK, "steps": 40}}
    scores, block = suite("glue").run(encoder, settings)
    assert set(scores) == {"cola/mcc", "cola/accuracy", "mrpc/accuracy", "mrpc/f1", "glue/mean"}
    assert scores["cola/mcc"] > 80
    assert scores["glue/mean"] == pytest.approx((scores["cola/mcc"] + scores["mrpc/accuracy"]) / 2)
    assert set(block["finetune"]["tasks"]) == {"cola", "mrpc"}
    assert any("train and dev, scored on its test set" in note for note in block["notes"])


def test_metrics_by_hand() -> None:
    gold, said = np.array([1, 1, 1, 0, 0]), np.array([1, 1, 0, 1, 0])
    assert glue.accuracy(said, gold) == pytest.approx(60)
    assert glue.f1(said, gold) == pytest.approx(100 * 2 / 3)
    assert glue.mcc(said, gold) == pytest.approx(100 * (2 * 1 - 1 * 1) / np.sqrt(3 * 3 * 2 * 2))
    assert glue.mcc(np.ones(5, dtype=int), gold) == 0
    assert glue.mcc(1 - gold, gold) == pytest.approx(-100)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "xnli",
            {"finetune": {"learning_rate": 1}},
            r"unknown key \(finetune.learning_rate=1\).*\blr\b",
        ),
        ("xnli", {"finetune": {"steps": 1.5}}, "finetune.steps=1.5"),
        ("xnli", {"finetune": {"lr": 0}}, "finetune.lr=0"),
        ("xnli", {"finetune": {"vector": "max"}}, "finetune.vector=max"),
        ("xnli", {"dtype": "float16"}, "dtype=float16"),
        ("xnli", {"languages": "de"}, "languages=de"),
        ("xnli", {"train": "nowhere"}, r"has no nowhere.tsv.gz"),
        ("glue", {"tasks": "sts"}, "tasks=sts"),
        ("glue", {"tasks": "cola"}, "has no cola_train"),
        ("qa", {"tasks": "xquad"}, r"has no xquad_\*_passages"),
        ("qa", {"data_dir": "/nowhere"}, "no such folder"),
    ],
)
def test_bad_settings(
    encoder: SentenceEncoder, tmp_path: Path, name: str, settings: dict[str, Any], message: str
) -> None:
    write_nli(tmp_path)
    with pytest.raises(UserError, match=message):
        suite(name).run(encoder, {"data_dir": tmp_path, **settings})


def test_a_wrong_label_names_its_row(encoder: SentenceEncoder, tmp_path: Path) -> None:
    write_nli(tmp_path)
    rows = [["neutral", "a", "b"], ["maybe", "a", "b"]]
    write_tsv(tmp_path / "xnli_test_en.tsv.gz", ["label", "premise", "hypothesis"], rows)
    with pytest.raises(UserError, match=r"xnli_test_en.tsv.gz:3: unknown label \(label=maybe\)"):
        suite("xnli").run(encoder, {"data_dir": tmp_path})


def test_an_encoder_without_a_backbone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="one backbone"):
        suite("xnli").run(HashedWords(), {"data_dir": write_nli(tmp_path)})


def test_a_loss_that_is_no_number_is_one_line(encoder: SentenceEncoder, tmp_path: Path) -> None:
    settings = {
        "data_dir": write_nli(tmp_path),
        "finetune": {**QUICK, "lr": 1e30, "steps": 20, "warmup": 0.0},
    }
    with pytest.raises(UserError, match="the loss is not finite at step"):
        suite("xnli").run(encoder, settings)


def test_defaults_of_the_configuration_file_are_those_of_the_code() -> None:
    from embedlab.cli.compose import compose

    keys = compose("evaluate", ["ckpt=x"])["finetune"]
    assert set(keys) == set(FineTuneConfig().plain()) - {"clip", "dropout"}
    assert FineTuneConfig().with_settings({"finetune": keys}) == FineTuneConfig()


def test_the_defaults_are_glues_usual_ones() -> None:
    config = FineTuneConfig()
    assert (config.epochs, config.steps, config.batch_size, config.lr) == (3, None, 32, 2e-5)
    assert (config.weight_decay, config.warmup, config.clip, config.dropout) == (0.01, 0.06, 1, 0.1)
    assert (config.max_length, config.stride, config.vector, config.evaluations) == (128, 128, "first", 3)


def test_real_files_are_read() -> None:
    nli = needs_data("nli")
    assert len(xnli.languages(nli)) == 11
    tests = [xnli.load(nli, "en", split) for split in ("dev", "test")]
    assert [len(t) for t in tests] == [2490, 5010]
    training = xnli.load_training(nli, None, tests, None)
    assert 95_000 < len(training) < 110_000
    sizes = {
        name: [len(s) for s in glue.load(name, {"data_dir": nli.parent})] for name in (*glue.SMALL, "wnli")
    }
    assert sizes == {
        "cola": [8551, 1043], "sst2": [67349, 872], "mrpc": [4076, 1725], "rte": [2490, 277], "wnli": [635, 71]
    }  # fmt: skip


def test_the_papers_sets_come_before_the_small_ones_of_a_folder(tmp_path: Path) -> None:
    header = ["label", "premise", "hypothesis"]
    small, multinli = ["neutral", "small", "set"], ["entailment", "from", "MultiNLI"]
    write_tsv(tmp_path / f"{xnli.TRAINING[0]}.tsv", header, [small])
    assert xnli.load_training(tmp_path, None, [], None).first == ["small"]
    write_tsv(tmp_path / "mnli_train.tsv", header, [multinli])
    assert xnli.load_training(tmp_path, None, [], None).first == ["from"]
    assert xnli.load_training(tmp_path, [xnli.TRAINING[0]], [], None).first == ["small"]

    questions = ["question", "passage", "answer"]
    (tmp_path / "tydiqa_goldp_train").mkdir()
    write_tsv(tmp_path / "tydiqa_goldp_train" / "en.tsv", questions, [["which", "a small set", "set"]])
    assert qa_data.load_training(tmp_path).rows[0].passage == "a small set"
    write_tsv(tmp_path / "squad_train.tsv", questions, [["which", "from SQuAD", "SQuAD"]])
    assert qa_data.load_training(tmp_path).rows[0].passage == "from SQuAD"
    assert qa_data.load_training(tmp_path, "en").rows[0].passage == "a small set"

    for split in ("mlqa_dev", "mlqa_test"):
        (tmp_path / split).mkdir()
        write_tsv(tmp_path / split / f"{split}_de_passages.tsv", ["pid", "passage"], [["p", split]])
        asked = ["de", "p", "welche", "Menge"]
        names = ["question_lang", "pid", "question", "answer"]
        write_tsv(tmp_path / split / f"{split}_de_questions.tsv", names, [asked])
        assert qa_data.load_grid("mlqa", tmp_path)["de", "de"].passages == [split]


@pytest.mark.parametrize("key", ["max_length", "steps", "batch_size"])
def test_the_least_of_a_count_is_one(key: str) -> None:
    assert getattr(FineTuneConfig().with_settings({"finetune": {key: 1}}), key) == 1
    with pytest.raises(UserError, match=rf"finetune\.{key}=0"):
        FineTuneConfig().with_settings({"finetune": {key: 0}})
