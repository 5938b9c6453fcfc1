"""Tables of runs: grouping, paired differences, what n can show, and the files of `embedlab report`."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_rel

from embedlab.cli.report import main
from embedlab.config.run import SAME_RECIPE
from embedlab.config.trainer import ScoringConfig
from embedlab.errors import UserError
from embedlab.evaluation.core.protocol import REQUIRED
from embedlab.evaluation.core.ratings import separation, written
from embedlab.evaluation.core.table import Table
from embedlab.report.figures import swept_numbers
from embedlab.report.paired import paired_difference
from embedlab.report.report import find_baseline, make_report
from embedlab.report.runs import find_runs, group_runs


def write_run(
    folder: Path, seed: int, score: float, overrides: list[str] | None = None, **pooling: object
) -> None:
    folder.mkdir(parents=True)
    config = {"seed": seed, "method": {"name": "simcse"}, "pooling": {"name": "s2sent"} | pooling}
    scores = {"sts7/spearman": score, "stsb/spearman": score + 1}
    training = {"seed": seed, "device": "cpu", "steps": 3}
    (folder / "scores.json").write_text(
        json.dumps({"scores": scores, "config": config, "training": training})
    )
    if overrides is not None:
        (folder / "trial.json").write_text(json.dumps({"status": "finished", "overrides": overrides}))
        (folder / "trial.yaml").write_text("seed: 0\n")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    for n, base in ((1, 70.0), (3, 72.0)):
        for seed in (0, 1, 2):
            write_run(tmp_path / f"{n}-{seed}", seed, base + seed + 0.1 * n * seed, n=n, m=4)
    return tmp_path


def test_seeds_of_one_recipe_are_one_row(sweep: Path) -> None:
    groups = group_runs(find_runs([sweep])[0])
    assert sorted((g.label, len(g.runs)) for g in groups) == [("pooling.n=1", 3), ("pooling.n=3", 3)]
    assert swept_numbers(groups) == ["pooling.n"]


def test_labels_come_from_the_sweep_where_it_says_them(tmp_path: Path) -> None:
    write_run(tmp_path / "0", 0, 70.0, ["pooling=mean", "seed=0"])
    write_run(tmp_path / "1", 0, 71.0, ["pooling=cls", "seed=0"], n=3)
    assert {g.label for g in group_runs(find_runs([tmp_path])[0])} == {"pooling=mean", "pooling=cls"}


def test_a_part_is_called_by_its_name_and_by_what_its_namesakes_lack(tmp_path: Path) -> None:
    """All defaults of a pooling would bury what differs."""
    recipes: list[dict[str, object]] = [
        {"name": "mean"},
        {"name": "s2sent", "n": 3, "m": 4, "squeeze": "dct"},
        {"name": "s2sent", "n": 3, "m": 4, "squeeze": "gap"},
    ]
    for i, pooling in enumerate(recipes):
        write_run(tmp_path / str(i), 0, 70.0, **pooling)
    assert {g.label for g in group_runs(find_runs([tmp_path])[0])} == {
        "pooling=mean",
        "pooling=s2sent, pooling.squeeze=dct",
        "pooling=s2sent, pooling.squeeze=gap",
    }


def test_towers_of_a_seed_and_the_tables_of_arms_make_no_other_recipe(tmp_path: Path) -> None:
    for seed in range(3):
        for arm in ("f", "h"):
            folder = tmp_path / f"{arm}-{seed}"
            write_run(folder, seed, 70.0 + seed)
            content = json.loads((folder / "scores.json").read_text())
            content["config"] |= {"arm": arm, "arms": {"f": 1, "h": 2}, "stages_dir": f"../own/seed{seed}"}
            content["config"]["method"] |= {"tower1": f"/x/stage1_own/seed{seed}/stage1_a/export"}
            (folder / "scores.json").write_text(json.dumps(content))
        write_run(tmp_path / f"student-{seed}", seed, 69.0)
        content = json.loads((tmp_path / f"student-{seed}" / "scores.json").read_text())
        content["config"]["method"] = {"name": "distil", "teacher": f"/x/h-{seed}/export"}
        (tmp_path / f"student-{seed}" / "scores.json").write_text(json.dumps(content))
    groups = group_runs(find_runs([tmp_path])[0])
    assert sorted((g.label, len(g.runs)) for g in groups) == [
        ("arm=f, method=simcse", 3),
        ("arm=h, method=simcse", 3),
        ("method=distil", 3),
    ]


def test_other_towers_make_another_recipe(tmp_path: Path) -> None:
    for name in ("stage1_a", "stage2_a"):
        write_run(tmp_path / name, 1, 70.0)
        content = json.loads((tmp_path / name / "scores.json").read_text())
        content["config"]["method"] |= {"tower1": f"/x/{name}/export"}
        (tmp_path / name / "scores.json").write_text(json.dumps(content))
    assert len(group_runs(find_runs([tmp_path])[0])) == 2


@pytest.mark.parametrize("score", ["high", True, math.nan, math.inf, [1], {}, 1e300, 10**400])
def test_what_is_no_number_is_no_score(
    score: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("good", "bad"):
        write_run(tmp_path / name, 0, 70.0)
    path = tmp_path / "bad" / "scores.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"scores": content["scores"] | {"sts7/spearman": score}}))
    runs, _ = find_runs([tmp_path])
    assert [run.folder.name for run in runs] == ["good"]
    (line,) = caplog.messages
    assert "bad/scores.json" in line
    assert "scores.sts7/spearman" in line or "64 bits" in line


def test_null_stands_for_a_score_that_is_no_number(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 0, 70.0)
    path = tmp_path / "a" / "scores.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"config": None, "scores": {"x": None, "y": 1}}))
    (group,) = group_runs(find_runs([tmp_path])[0])
    assert (group.values("x"), group.values("y")) == ({}, {0: 1.0})


@pytest.mark.parametrize(
    "change",
    [
        {"scores": [1]},
        {"scores": None},
        {"training": []},
        {"training": {"seed": "abc"}},
        {"config": "x"},
        {"config": {"pooling": "mean"}},
        {"protocol": {"sts": 3}},
    ],
)
def test_a_run_of_another_shape_is_left_out_by_name(
    change: dict[str, object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("good", "bad"):
        write_run(tmp_path / name, 0, 70.0)
    path = tmp_path / "bad" / "scores.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert [run.folder.name for run in find_runs([tmp_path])[0]] == ["good"]
    (line,) = caplog.messages
    assert "bad/scores.json: " in line
    assert next(iter(change)) in line


@pytest.mark.parametrize(
    ("key", "recipes"), [*((key, 1) for key in sorted(SAME_RECIPE)), ("stages", 2), ("data.limit", 2)]
)
def test_what_is_scored_and_where_files_are_makes_no_other_recipe(
    key: str, recipes: int, tmp_path: Path
) -> None:
    section, _, name = key.partition(".")
    for seed in (0, 1):
        write_run(tmp_path / str(seed), seed, 70.0)
        path = tmp_path / str(seed) / "scores.json"
        content = json.loads(path.read_text())
        content["config"][section] = {name: seed} if name else seed
        path.write_text(json.dumps(content))
    assert len(group_runs(find_runs([tmp_path])[0])) == recipes


@pytest.mark.parametrize(
    ("one", "other", "recipes"),
    [
        ({"sts_dir": "/x"}, {"sts_dir": None}, 2),
        ({"sts_dir": "/x"}, {"sts_dir": "/y"}, 1),
        ({"sts_dir": "/x"}, {"dev": "a.csv"}, 2),
        ({"dev": "a.csv"}, {"dev": "b.csv"}, 2),
        ({"dev": "a.csv", "select": "last"}, {"dev": "b.csv", "select": "last"}, 1),
        ({"sts_dir": "/x", "select": "last"}, {"sts_dir": None, "select": "auto"}, 1),
        ({"sts_dir": "/x", "select": "dev"}, {"sts_dir": "/x", "select": "auto"}, 1),
        ({"dev": "a.csv", "every": 2}, {"dev": "a.csv", "every": 5}, 2),
        ({"select": "loss", "every": 2}, {"select": "loss", "every": 5}, 2),
        ({"sts_dir": "/x", "select": "last", "every": 2}, {"select": "last", "every": 5}, 1),
    ],
)
def test_other_selections_make_other_recipes(
    one: dict[str, Any], other: dict[str, Any], recipes: int, tmp_path: Path
) -> None:
    """The last weights and the best of a dev set are no two seeds of one recipe; of one seed, one was dropped."""
    for seed, scoring in enumerate((one, other)):
        config = ScoringConfig(**scoring)
        write_run(tmp_path / str(seed), 0, 70.0)
        path = tmp_path / str(seed) / "scores.json"
        content = json.loads(path.read_text())
        content["config"]["evaluation"] = dataclasses.asdict(config)
        content["training"]["select"] = config.selection
        path.write_text(json.dumps(content))
    groups = group_runs(find_runs([tmp_path])[0])
    assert len(groups) == recipes
    assert len({g.label for g in groups}) == recipes


def test_paired_difference_is_the_paired_t_interval() -> None:
    a, b = {0: 71.0, 1: 72.5, 2: 73.0, 5: 1.0}, {0: 70.0, 1: 71.0, 2: 72.8, 9: 2.0}
    found = paired_difference(a, b)
    assert found is not None
    reference = ttest_rel([71.0, 72.5, 73.0], [70.0, 71.0, 72.8]).confidence_interval(0.95)
    assert (found.n, found.low, found.high) == (
        3,
        pytest.approx(reference.low),
        pytest.approx(reference.high),
    )
    assert found.detectable > (found.high - found.low) / 2
    assert found.verdict == "not resolved"


def test_one_seed_resolves_nothing() -> None:
    found = paired_difference({0: 90.0}, {0: 10.0})
    assert found is not None
    assert found.n == 1
    assert found.verdict == "not resolved"
    assert math.isnan(found.detectable)
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


def test_a_clear_difference_is_resolved() -> None:
    base = {s: 70.0 + s for s in range(5)}
    up = {s: v + 2 + 0.01 * s for s, v in base.items()}
    assert paired_difference(up, base).verdict == "better"  # type: ignore[union-attr]
    assert paired_difference(base, up).verdict == "worse"  # type: ignore[union-attr]


def test_the_table_says_n_and_what_is_missing(sweep: Path) -> None:
    write_run(sweep / "single", 0, 60.0, n=6, m=4)
    (sweep / "dead").mkdir()
    (sweep / "dead" / "trial.yaml").write_text("seed: 1\n")
    runs, unfinished = find_runs([sweep])
    groups = group_runs(runs)
    report = make_report(groups, unfinished, find_baseline(groups, "pooling.n=1"))
    text = report.markdown()
    assert "n=1: a single seed" in text
    assert "dead (not finished)" in text
    row = next(line for line in text.splitlines() if line.startswith("| pooling.n=3"))
    assert "73.30 ± 1.30" in row
    assert "better" in row


def test_a_recipe_without_the_score_is_not_scored(sweep: Path) -> None:
    for seed in (0, 1, 2):
        path = sweep / f"3-{seed}" / "scores.json"
        content = json.loads(path.read_text())
        content["scores"]["pawsx-en/roc_auc"] = 50.0
        path.write_text(json.dumps(content))
    groups = group_runs(find_runs([sweep])[0])
    scored = find_baseline(groups, "pooling.n=3")
    text = make_report(groups, [], scored, "pawsx-en/roc_auc").markdown()
    row = next(line for line in text.splitlines() if line.startswith("| pooling.n=1"))
    assert "not scored" in row
    assert "no seed in common" not in row


def test_baseline_by_name_is_one(sweep: Path) -> None:
    groups = group_runs(find_runs([sweep])[0])
    with pytest.raises(UserError, match="2 recipes"):
        find_baseline(groups, "pooling")
    with pytest.raises(UserError, match="no recipe"):
        find_baseline(groups, "bert")


def test_baseline_by_settings_in_any_order_and_whole(tmp_path: Path) -> None:
    for n in (1, 12):
        for m in (1, 4):
            write_run(tmp_path / f"{n}-{m}", 0, 70.0, n=n, m=m)
    groups = group_runs(find_runs([tmp_path])[0])
    for name in ("pooling.n=1, pooling.m=4", "pooling.m=4,pooling.n=1", " pooling.m=4.0,  pooling.n=1e0"):
        found = find_baseline(groups, name)
        assert found is not None
        assert set(found.label.split(", ")) == {"pooling.n=1", "pooling.m=4"}
    with pytest.raises(UserError, match="2 recipes"):
        find_baseline(groups, "pooling.n=1")


def test_the_command_writes_every_form(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main([str(sweep), "baseline=pooling.n=1", f"out={out}"]) == 0
    assert {p.name for p in out.iterdir()} == {
        "report.md",
        "report.csv",
        "report.html",
        "report.tex",
        "report.png",
    }
    assert "pooling.n=3" in capsys.readouterr().out
    assert (out / "report.csv").read_text().count("\n") == 7
    assert r"$\pm$" in (out / "report.tex").read_text()


def test_cosines_by_rating_become_a_figure(sweep: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main([str(sweep), "--out", str(out)]) == 0
    assert not (out / "density.png").exists()
    assert "Cosines by rating" not in (out / "report.html").read_text()
    draw = random.Random(0)
    for path in sweep.glob("*/scores.json"):
        content = json.loads(path.read_text())
        groups = {f"{i}–{i + 1}": np.array([draw.gauss(i / 5, 0.1) for _ in range(20)]) for i in range(5)}
        content["protocol"] = {"geometry": {"cosines_by_rating": written(groups)}}
        content["scores"]["geometry/separation"] = separation(groups)
        path.write_text(json.dumps(content))
    assert main([str(sweep), "--metric", "geometry/separation", "--out", str(out), "overwrite=true"]) == 0
    assert (out / "density.png").stat().st_size > 10_000
    assert "Cosines by rating" in (out / "report.html").read_text()
    assert "geometry/separation" in (out / "report.md").read_text()


def test_energy_and_sts_are_related_where_ten_runs_have_both(tmp_path: Path) -> None:
    for seed in range(10):
        write_run(tmp_path / str(seed), seed, 60.0 + seed)
        path = tmp_path / str(seed) / "scores.json"
        content = json.loads(path.read_text())
        content["scores"]["cls_energy/E_CLS"] = 1.0 - 0.01 * seed
        path.write_text(json.dumps(content))
    text = make_report(group_runs(find_runs([tmp_path])[0])).markdown()
    assert "over 10 runs: Spearman -1.00" in text
    content["scores"]["cls_energy/E_CLS"] = None
    (tmp_path / "9" / "scores.json").write_text(json.dumps(content))
    assert "Spearman" not in make_report(group_runs(find_runs([tmp_path])[0])).markdown()


def test_latex_has_no_character_that_it_reads_otherwise() -> None:
    report = Table("t", ("a", "Δ [95 % CI]"), (("{sentence}_1 $x^2 ~\\", "1.00 ± 0.10 – …"),))
    body = report.latex().split("\\hline\n")
    assert body[1] == r"a & $\Delta$ [95 \% CI] \\" + "\n"
    assert body[2].startswith(
        r"\{sentence\}\_1 \$x\textasciicircum{}2 \textasciitilde{}\textbackslash{} & 1.00 $\pm$ 0.10 -- \dots{}"
    )


def test_a_folder_without_runs_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no finished run"):
        find_runs([tmp_path])
    with pytest.raises(UserError, match="no such folder"):
        find_runs([tmp_path / "none"])
    (tmp_path / "scores.json").write_text("{")
    with pytest.raises(UserError, match="no finished run"):
        find_runs([tmp_path])


def test_a_metric_that_no_run_has_writes_nothing(sweep: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserError, match="no run has this score") as error:
        main([str(sweep), "--metric", "stsb/spearmann", "--out", str(out)])
    assert "stsb/spearman" in (error.value.fix or "")
    assert not out.exists()


def evaluated(folder: Path, suite: str, scores: dict[str, float], checkpoint: str, pooling: str) -> None:
    (folder / "scores").mkdir(exist_ok=True)
    block = (
        dict.fromkeys(REQUIRED, "x")
        | {"warnings": []}
        | {
            "suite": suite,
            "checkpoint": checkpoint,
            "pooling": {"name": pooling},
        }
    )
    content = json.dumps({"scores": scores, "protocol": block})
    (folder / "scores" / f"{suite}.json").write_text(content)


def test_what_was_evaluated_later_belongs_to_the_run(sweep: Path) -> None:
    for n in (1, 3):
        for seed in (0, 1, 2):
            folder = sweep / f"{n}-{seed}"
            evaluated(folder, "xnli", {"xnli-en/accuracy": 60.0 + n, "stsb/spearman": 1.0}, "later", "s2sent")
            evaluated(folder, "sts", {"sts7/spearman": 5.0, "sts12/spearman": 5.0}, "later", "mean")
    found = make_report(group_runs(find_runs([sweep])[0]), metric="xnli-en/accuracy")
    assert found.columns[-1] == "xnli-en/accuracy"
    assert [row[-1] for row in found.rows] == ["63.00 ± 0.00", "61.00 ± 0.00"]
    run = find_runs([sweep / "1-0"])[0][0]
    assert run.scores["stsb/spearman"] == 71.0  # the run's own
    assert "sts12/spearman" not in run.scores  # of another reading
    assert run.protocol["xnli"]["checkpoint"] == "later"


def test_where_the_run_names_its_weights_those_decide(sweep: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = sweep / "1-0"
    path = folder / "scores.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"protocol": {"sts": {"checkpoint": "mine"}}}))
    evaluated(folder, "xnli", {"xnli-en/accuracy": 60.0}, "mine", "mean")
    evaluated(folder, "glue", {"glue/mean": 60.0}, "another", "s2sent")
    scores = find_runs([folder])[0][0].scores
    assert "xnli-en/accuracy" in scores
    assert "glue/mean" not in scores
    assert [line for line in caplog.messages if "glue.json is of another checkpoint" in line]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ("transfer", {"sst2/accuracy": 50.0, "glue-sst2/accuracy": 90.0}),
        ("glue", {"sst2/accuracy": 50.0, "transfer-sst2/accuracy": 80.0}),
        ("lee", {"sst2/accuracy": 90.0, "transfer-sst2/accuracy": 80.0}),
    ],
)
def test_one_name_of_two_suites_is_two_scores(own: str, expected: dict[str, float], sweep: Path) -> None:
    """SST-2 is a task of both; what the run itself scored has the plain name."""
    path = sweep / "1-0" / "scores.json"
    content = json.loads(path.read_text()) | {"protocol": {own: {"checkpoint": "mine"}}}
    content["scores"] |= {"sst2/accuracy": 50.0} if own != "lee" else {}
    path.write_text(json.dumps(content))
    evaluated(path.parent, "glue", {"sst2/accuracy": 90.0}, "mine", "s2sent")
    evaluated(path.parent, "transfer", {"sst2/accuracy": 80.0}, "mine", "s2sent")
    scores = find_runs([path.parent])[0][0].scores
    assert {key: value for key, value in scores.items() if "sst2" in key} == expected


def test_scores_of_codes_are_none_of_the_run(sweep: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`embedlab evaluate suite=retrieval +store=binary` has the checkpoint's hash, too."""
    path = sweep / "1-0" / "scores.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"protocol": {"sts": {"checkpoint": "mine"}}}))
    evaluated(path.parent, "retrieval", {"scifact/ndcg@10": 40.0}, "mine", "s2sent")
    file = path.parent / "scores" / "retrieval.json"
    content = json.loads(file.read_text())
    content["protocol"] |= {"store": "binary"}
    file.rename(file.with_name("retrieval-binary.json")).write_text(json.dumps(content))
    assert "scifact/ndcg@10" not in find_runs([path.parent])[0][0].scores
    assert "another reading of it" in caplog.text


def test_what_is_no_score_of_the_run_is_left_out(sweep: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = sweep / "1-0"
    evaluated(folder, "compare", {"sts12/change": 1.0}, "later", "s2sent")
    evaluated(folder, "bitext", {"tatoeba/mean": 50.0}, "later", "s2sent")
    path = folder / "scores" / "bitext.json"
    content = json.loads(path.read_text())
    content["protocol"]["warnings"] = ["limit=5: only the first rows of each set were used"]
    path.write_text(json.dumps(content))
    odd = content | {"protocol": content["protocol"] | {"warnings": 3}}
    for name, text in (
        ("a", "{"),
        ("b", "[]"),
        ("c", json.dumps(content | {"scores": [1]})),
        ("d", json.dumps(odd)),
        ("e", "[" * 100_000),
    ):
        (folder / "scores" / f"{name}.json").write_text(text)
    (run,) = find_runs([folder])[0]
    assert set(run.scores) == {"sts7/spearman", "stsb/spearman"}
    said = "\n".join(caplog.messages)
    assert len(caplog.messages) == 6
    assert "bitext.json (limit=5" in said
    assert all(f"Left out: {folder / 'scores' / name}.json" in said for name in "abcde")


def test_without_a_fingerprint_another_reading_is_known_by_its_file(sweep: Path) -> None:
    folder = sweep / "1-0"
    evaluated(folder, "lee", {"lee/spearman": 6.0}, "later", "s2sent")
    (folder / "scores" / "lee.json").rename(folder / "scores" / "lee-8.json")
    assert "lee/spearman" not in find_runs([folder])[0][0].scores


def test_columns_can_be_chosen(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(sweep), "metrics=stsb/spearman, sts7/spearman,stsb/spearman,"]) == 0
    assert "recipe n STS-B Avg. 7" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(UserError, match=r"no run has this score \(metrics=glue/mean\)"):
        main([str(sweep), "--metrics", "stsb/spearman,glue/mean"])
