from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from embedlab.errors import UserError
from embedlab.evaluation import suite
from embedlab.evaluation.core.files import read_tsv
from embedlab.evaluation.core.vectors import Vectors
from embedlab.evaluation.sts import sts
from embedlab.evaluation.sts.sts import SEVEN, STSPairs, evaluate_sts, load_sts, score_pairs
from tests.evaluation.helpers import Constant, HashedWords, Lookup, write_sts_folder, write_tsv


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sts_folder(tmp_path_factory.mktemp("sts"))


def test_three_aggregations_of_two_subsets_by_hand() -> None:
    """Subset p (2 pairs) is ranked right, q (3 pairs) wrong: 100 and -100; the joined five have Spearman
    0.3."""
    angle = {"a": 0.0, "b": 10.0, "c": 20.0, "d": 30.0, "e": 40.0, "f": 50.0}
    table = {name: (float(np.cos(np.radians(v))), float(np.sin(np.radians(v)))) for name, v in angle.items()}
    pairs = STSPairs(
        task="sts12",
        split="test",
        text="raw",
        first=["a"] * 5,
        second=["b", "f", "c", "d", "e"],  # cosine falls b > c > d > e > f
        gold=np.array([5.0, 0.0, 1.0, 2.0, 3.0]),
        subsets=["p", "p", "q", "q", "q"],
        source="by hand",
    )
    vectors = Vectors(Lookup(table), [*pairs.first, *pairs.second])
    scores = score_pairs(vectors, pairs)
    # cosine ranks b5 f1 c4 d3 e2, gold ranks 5 1 2 3 4: sum d^2 = 0 + 0 + 4 + 0 + 4 = 8, 1 - 6 * 8 / (5 * 24)
    # = 0.6
    assert scores["spearman"] == pytest.approx(60.0)
    assert scores["spearman_mean"] == pytest.approx(0.0)
    assert scores["spearman_wmean"] == pytest.approx((2 * 100 - 3 * 100) / 5)


def test_single_set_tasks_have_one_value_under_three_names(folder: Path) -> None:
    scores = evaluate_sts(HashedWords(), folder, tasks=["stsb", "sickr"])
    for task in ("stsb", "sickr"):
        assert (
            scores[f"{task}/spearman"] == scores[f"{task}/spearman_mean"] == scores[f"{task}/spearman_wmean"]
        )
    assert not any(key.startswith("sts7") for key in scores), "no mean of seven from two tasks"


def test_mean_of_seven_and_each_task_against_scipy(folder: Path) -> None:
    encoder = HashedWords()
    scores = evaluate_sts(encoder, folder)
    for task in SEVEN:
        pairs = load_sts(task, folder)
        x, y = encoder.encode(pairs.first).astype(np.float64), encoder.encode(pairs.second).astype(np.float64)
        cosine = (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)
        expected = 100 * stats.spearmanr(cosine.round(12), pairs.gold).statistic
        assert scores[f"{task}/spearman"] == pytest.approx(expected, abs=1e-6)
    for metric in ("spearman", "spearman_mean", "spearman_wmean"):
        assert scores[f"sts7/{metric}"] == pytest.approx(np.mean([scores[f"{t}/{metric}"] for t in SEVEN]))


def test_suite_encodes_each_sentence_once_and_scores_both_texts(folder: Path) -> None:
    encoder = HashedWords()
    scores, protocol = suite("sts").run(encoder, {"data_dir": str(folder)})
    assert len(encoder.calls) == 1
    assert len(encoder.calls[0]) == len(set(encoder.calls[0]))
    assert protocol["text"] == "raw"
    assert scores["sts7/spearman"] == pytest.approx(evaluate_sts(encoder, folder, "raw")["sts7/spearman"])
    assert scores["sts7_tok/spearman"] == pytest.approx(evaluate_sts(encoder, folder, "tok")["sts7/spearman"])
    swapped, protocol = suite("sts").run(encoder, {"data_dir": str(folder), "sts_text": "tok"})
    assert protocol["text"] == "tok"
    assert swapped["sts7/spearman"] == scores["sts7_tok/spearman"]
    assert swapped["sts7_raw/spearman"] == scores["sts7/spearman"]


def test_the_folder_of_all_kinds_will_do(tmp_path: Path) -> None:
    write_sts_folder(tmp_path / "sts")
    for split in ("dev", "test"):
        one, other = (load_sts("stsb", where, split=split) for where in (tmp_path, tmp_path / "sts"))
        assert (one.first, one.second, list(one.gold)) == (other.first, other.second, list(other.gold))


def test_wrong_row_counts_are_told_in_the_protocol(folder: Path) -> None:
    _, protocol = suite("sts").run(HashedWords(), {"data_dir": str(folder), "tasks": ["sts16"]})
    assert len(protocol["warnings"]) == 1
    assert "39 pairs where SentEval has 1186" in protocol["warnings"][0]
    assert protocol["name"] == "sts_cosine_spearman"


def test_pairs_without_rating_are_dropped_and_text_variants_differ(folder: Path) -> None:
    raw, tok = load_sts("sts12", folder), load_sts("sts12", folder, "tok")
    assert len(raw) == len(tok) == 39
    assert raw.first[0].endswith(".")
    assert not raw.first[0].endswith(" .")
    assert tok.first[0] == raw.first[0].lower().replace(".", " ."), "tokens are joined by one space"


def test_sick_is_split_at_spaces_and_keeps_its_case_as_in_senteval(tmp_path: Path) -> None:
    rows = ["relatedness\tsentence1\tsentence2", "4.5\tA Man  runs\tA man, in Rome", "1.5\tNo dog\tThe  Cat"]
    (tmp_path / "sick_test.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    tok = load_sts("sickr", tmp_path, "tok")
    assert (tok.first, tok.second) == (["A Man runs", "No dog"], ["A man, in Rome", "The Cat"])
    assert "case kept" in tok.notes[0]


@pytest.mark.parametrize("text", ["raw", "tok"])
def test_the_protocols_name_says_which_text_was_scored(
    folder: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embedlab.evaluation.sts.sts.row_count_warnings", lambda tasks: [])
    _, protocol = suite("sts").run(HashedWords(), {"data_dir": str(folder), "sts_text": text})
    assert protocol["name"] == {"raw": "sts7_raw", "tok": "sts7_senteval_tok"}[text]


def test_a_source_without_tokens_scores_raw_only(tmp_path: Path) -> None:
    folder = write_sts_folder(tmp_path, tok=False)
    scores, protocol = suite("sts").run(HashedWords(), {"data_dir": str(folder)})
    assert "sts7/spearman" in scores
    assert "sts7_tok/spearman" not in scores
    assert any("tok is not in this source" in note for note in protocol["notes"])
    with pytest.raises(UserError, match="sts_text=tok"):
        suite("sts").run(HashedWords(), {"data_dir": str(folder), "sts_text": "tok"})


def test_a_collapsed_encoder_scores_zero(folder: Path) -> None:
    scores, protocol = suite("sts").run(Constant(), {"data_dir": str(folder), "tasks": ["stsb"]})
    assert scores["stsb/spearman"] == 0
    assert any("all sentence vectors are equal" in warning for warning in protocol["warnings"])


def test_quotes_and_odd_line_separators_stay_in_the_text(tmp_path: Path) -> None:
    odd = 'He said "yes\u2028no" to it'
    write_tsv(tmp_path / "stsb_dev.tsv", ["score", "sentence1", "sentence2"], [(1, odd, '"'), (2, "b", "c")])
    pairs = load_sts("stsb", tmp_path, split="dev")
    assert pairs.first == [odd, "b"]
    assert pairs.second == ['"', "c"]


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda f: f.unlink(), "has no stsb_test.tsv.gz"),
        (lambda f: f.write_bytes(f.read_bytes()[:-200]), "the .gz file is truncated or damaged"),
        (lambda f: f.write_bytes(b"plain text"), "the .gz file is truncated or damaged"),
        (
            lambda f: f.write_bytes(gzip.compress(b"score\tsentence1\tsentence2\n1\tcaf\xe9\tx\n")),
            ":2: not UTF-8",
        ),
        (lambda f: f.write_bytes(gzip.compress(b"")), "is empty"),
        (lambda f: f.write_bytes(gzip.compress(b"rating\tsentence1\tsentence2\n")), "has no column 'score'"),
        (
            lambda f: f.write_bytes(gzip.compress(b"score\tsentence1\tsentence2\n1\ta\n")),
            ":2: 2 fields where the header has 3",
        ),
        (
            lambda f: f.write_bytes(gzip.compress(b"score\tsentence1\tsentence2\n1\ta\tb\nx\ta\tb\n")),
            ":3: rating",
        ),
        (lambda f: f.write_bytes(gzip.compress(b"score\tsentence1\tsentence2\nnan\ta\tb\n")), ":2: rating"),
        (
            lambda f: f.write_bytes(gzip.compress(b"score\tsentence1\tsentence2\n\ta\tb\n")),
            "has no rated pair",
        ),
        (
            lambda f: f.write_bytes(gzip.compress(b"score\tsentence1\tsentence2\n1\ta\tb\n\tc\td\n")),
            "has one rated pair",
        ),
        (
            lambda f: f.write_bytes(gzip.compress(b"score\tsentence1\tsentence2\n1\ta\tb\n1.0\tc\td\n")),
            "rates all 2 pairs the same",
        ),
    ],
)
def test_bad_files_end_in_one_line(tmp_path: Path, break_it, message: str) -> None:  # type: ignore[no-untyped-def]
    write_sts_folder(tmp_path)
    break_it(tmp_path / "stsb_test.tsv.gz")
    with pytest.raises(UserError) as caught:
        load_sts("stsb", tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "stsb_test.tsv.gz" in str(caught.value)


COLUMNS = ["score", "sentence1", "sentence2"]
RATED = [("1", "a cat", "a dog"), ("4", "a bird", "birds"), ("2.5", "old tree", "a house")]
ODD = {"no rating": ("", "red cat", "blue dog"), "blank line": ("", "", "")}


@given(st.lists(st.sampled_from([*ODD])), st.integers(0, 3))
@settings(max_examples=20, deadline=None)
def test_what_is_dropped_is_counted_with_its_reason(odd: list[str], empty: int) -> None:
    rows = [*RATED, *(("3", "", f"alone {i}") for i in range(empty)), *(ODD[why] for why in odd)]
    with TemporaryDirectory() as place:
        write_tsv(Path(place) / "stsb_test.tsv", COLUMNS, rows)
        write_tsv(Path(place) / "mine.tsv", COLUMNS, rows)
        chosen = {"data_dir": place, "tasks": ["stsb", "mine.tsv"]}
        _, protocol = suite("sts").run(HashedWords(), chosen)
    for task in ("stsb", "mine"):
        counts = protocol["data"][task]
        assert counts["read"] == len(rows)
        assert counts["dropped"] == Counter(odd)
        assert counts["pairs"] == len(RATED) + empty
        notes = [note for note in protocol["notes"] if note.startswith(f"{task}: ")]
        for why, n in Counter(odd).items():
            assert f"{task}: {n} of {len(rows)} rows dropped ({why})" in notes
        assert (f"{task}: {empty} pairs have an empty sentence, and are scored" in notes) == (empty > 0)


@pytest.mark.parametrize("task", SEVEN)
@pytest.mark.parametrize("rating", ["50", "5.01", "-0.1", "-1", "1e9"])
def test_a_rating_outside_the_scale_of_a_known_task_is_refused(
    task: str, rating: str, tmp_path: Path
) -> None:
    column, stem = ("relatedness", "sick_test") if task == "sickr" else ("score", f"{task}_test")
    write_tsv(tmp_path / f"{stem}.tsv", [column, *COLUMNS[1:]], [*RATED, (rating, "x", "y")])
    with pytest.raises(UserError, match=rf"{stem}\.tsv:5: rating is not on the scale .*{column}={rating}"):
        load_sts(task, tmp_path)


def test_a_file_of_ones_own_has_any_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(str(100 * float(score) - 700), a, b) for score, a, b in RATED]
    write_tsv(tmp_path / "mine.v2.tsv.gz", COLUMNS, rows)
    (tmp_path / "here").mkdir()
    write_tsv(tmp_path / "here" / "stsb_test.tsv", COLUMNS, RATED)
    monkeypatch.chdir(tmp_path / "here")
    for place, chosen in ((None, str(tmp_path / "mine.v2.tsv.gz")), (str(tmp_path), "mine.v2.tsv.gz")):
        scores, protocol = suite("sts").run(HashedWords(), {"data_dir": place, "tasks": [chosen]})
        known = suite("sts").run(HashedWords(), {"data_dir": ".", "tasks": ["stsb"]})[0]
        assert scores["mine/spearman"] == known["stsb/spearman"]
        assert any("rated -600 to -300" in note for note in protocol["notes"])
        assert not protocol["warnings"]
        assert "mine" in suite("sts").tables("me", scores, protocol)[0].columns
    assert suite("sts").local({"tasks": [str(tmp_path / "mine.v2.tsv.gz")]}) is not None


@pytest.mark.parametrize(("tasks", "message"), [
    (["none.tsv"], "none.tsv: no such file"), (["a/stsb.tsv"], "other scores are called stsb"),
    (["a/one.tsv", "b/one.csv"], "other scores are called one"), (["sts7.tsv"], "called sts7"),
    (["picture.png"], "no such file"),
])  # fmt: skip
def test_own_files_that_cannot_be_are_refused(tasks: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        suite("sts").run(HashedWords(), {"data_dir": str(tmp_path), "tasks": tasks})


@pytest.mark.parametrize(("name", "files"), [
    ("sts", ["mine", "mine_tok"]), ("sts", ["mine_tok", "mine"]), ("sts", ["stsb_raw"]), ("sts", ["sts7_tok"]),
    ("sts", ["sts", "mine"]), ("robustness", ["mine", "mine_typos"]), ("robustness", ["stsb_case"]),
])  # fmt: skip
def test_no_file_of_ones_own_takes_the_name_of_other_scores(
    name: str, files: list[str], tmp_path: Path
) -> None:
    """The second would have replaced the first, without a word."""
    header = ("score", "sentence1", "sentence2", "sentence1_tok", "sentence2_tok")
    for file in files:
        table = [(i % 4, f"A {i}", f"B {i % 7}", f"a {i}", f"b {i}") for i in range(9)]
        write_tsv(tmp_path / f"{file}.tsv", header, table)
    with pytest.raises(UserError, match=r"other scores are called .* Fix: rename the file"):
        suite(name).run(HashedWords(), {"tasks": [str(tmp_path / f"{file}.tsv") for file in files]})


@pytest.mark.parametrize("columns", [3, 5])
def test_a_file_that_ends_as_a_variant_has_its_own_row(columns: int, tmp_path: Path) -> None:
    header = ("score", "sentence1", "sentence2", "sentence1_tok", "sentence2_tok")[:columns]
    table = [(i % 4, f"A {i}", f"B {i % 7}", f"a {i} x", f"b {i}")[:columns] for i in range(9)]
    write_tsv(tmp_path / "mine_tok.tsv", header, table)
    scores, protocol = suite("sts").run(HashedWords(), {"tasks": [str(tmp_path / "mine_tok.tsv")]})
    (shown,) = suite("sts").tables("me", scores, protocol)
    keys = ["mine_tok/spearman", "mine_tok_tok/spearman"][: columns - 3 or 1]
    assert [row[1] for row in shown.rows] == [f"{scores[key]:.2f}" for key in keys]


@pytest.mark.parametrize("rating", [None, [1], "x", float("nan")])
def test_a_rating_of_the_hub_that_is_no_number_is_one_line(rating: Any) -> None:
    pairs = STSPairs("mine", "test", "raw", ["a", "b"], ["c", "d"], np.zeros(2), None, "hub:x")
    with pytest.raises(UserError, match=r"hub:x:3: rating is not a number"):
        sts.rated_pairs(pairs, [1.0, rating])


def test_bad_names_and_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"stsbench \(test\).*did you mean stsb"):
        load_sts("stsbench", tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        load_sts("stsb", tmp_path / "nowhere")
    with pytest.raises(UserError, match="sts_text=both"):
        load_sts("stsb", tmp_path, "both")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="tasks=stsbench"):
        suite("sts").run(HashedWords(), {"data_dir": str(tmp_path), "tasks": ["stsbench"]})


def test_hub_offline_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach 'mteb/sts12-sts' on the Hub\nsecond line")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(UserError, match=r"cannot load mteb/sts12-sts .*Fix: give data_dir=FOLDER"):
        load_sts("sts12")


def test_hub_rows_become_pairs_without_subset_aggregations(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(name: str, config: str | None, split: str) -> object:
        asked.append((name, config, split))
        rows = {"sentence1": ["a b", "c d", "e"], "sentence2": ["a", "c d", "f"], "score": [2.0, 5.0, 0.0]}
        return datasets.Dataset.from_dict(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    pairs = load_sts("sts13")
    assert asked == [("mteb/sts13-sts", None, "test")]
    scores = score_pairs(Vectors(HashedWords(), [*pairs.first, *pairs.second]), pairs)
    assert scores["spearman"] == pytest.approx(100)
    assert "spearman_mean" not in scores


def test_equals_sentence_transformers_evaluator(folder: Path) -> None:
    """Protocols agree on a single set: same vectors, same Spearman and Pearson to 1e-4 (x100)."""
    evaluation = pytest.importorskip("sentence_transformers.sentence_transformer.evaluation")
    encoder = HashedWords()
    pairs = load_sts("sts14", folder)

    class Model:
        similarity_fn_name = "cosine"

        def encode(self, sentences, **_):  # type: ignore[no-untyped-def]
            return torch.from_numpy(encoder.encode(list(sentences)))

    class Evaluator(evaluation.EmbeddingSimilarityEvaluator):  # type: ignore[misc]
        def embed_inputs(self, model, sentences, **_):  # type: ignore[no-untyped-def]
            return model.encode(sentences)

        def store_metrics_in_model_card_data(self, *_: object, **__: object) -> None:
            pass

    theirs = Evaluator(pairs.first, pairs.second, list(pairs.gold), write_csv=False)(Model())
    ours = score_pairs(Vectors(encoder, [*pairs.first, *pairs.second]), pairs)
    assert ours["spearman"] == pytest.approx(100 * theirs["spearman_cosine"], abs=1e-4)
    assert ours["pearson"] == pytest.approx(100 * theirs["pearson_cosine"], abs=1e-4)


def test_labels_cover_the_tasks() -> None:
    assert set(sts.LABELS) == {*SEVEN, "sts7"}


def test_repeats_are_kept_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a small archive can hold much of."""
    monkeypatch.setattr("embedlab.evaluation.core.files._SHARED", 3)
    rows = [f"{word}\t{word}" for word in ("one", "two", "six", "ten") * 3]
    (tmp_path / "a.tsv").write_text("\n".join(["x\ty", *rows]) + "\n")
    table = read_tsv(tmp_path / "a.tsv", ["x", "y"])
    assert table["x"] == table["y"] == [row.split("\t")[0] for row in rows]
    assert len({id(text) for text in table["x"] if text in ("one", "two", "six")}) == 3


def test_texts_that_are_cut_are_counted_once(folder: Path) -> None:
    class Short(HashedWords):
        def provenance(self, sentences: Sequence[str] | None) -> dict[str, Any]:
            return {"max_length": 8, "truncated": len(sentences or [])}

    encoder = Short()
    _, protocol = suite("sts").run(encoder, {"data_dir": str(folder)})
    assert protocol["truncated"] == len(encoder.calls[0]) > 0
