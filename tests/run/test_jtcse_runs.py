"""Whole runs of JTCSE and its relatives on a tiny backbone: stages, resume, scores, exports (invariant 26)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import embedlab
from embedlab.cli.compose import compose
from embedlab.cli.train import train_one
from embedlab.encoders.twin import TwinEncoder
from embedlab.errors import UserError
from embedlab.evaluation.sts.dev import DevSet
from embedlab.evaluation.sts.sts import load_sts
from embedlab.methods.distil import Distil
from embedlab.pooling import pooling_config
from embedlab.run.callbacks.scoring import DevScoring
from embedlab.run.parse import parse_run
from embedlab.run.run import build

TEXTS = ["the cat runs", "a small red bird", ""]


@pytest.fixture
def values(
    tiny: Callable[..., Path], text_file: Path, sts_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """values("experiment=jtcse_mini", ...) -> a composed configuration of a tiny run."""
    monkeypatch.setenv("EMBEDLAB_CACHE", str(tmp_path / "cache"))
    folder = tiny("bert", layers=3)

    def make(experiment: str, *overrides: str) -> dict[str, Any]:
        basics = [f"experiment={experiment}", "backbone=local", f"backbone.path={folder}", "trainer=cpu",
                  f"data.files={text_file}", "data.batch_size=8", "data.report=false", "callbacks.progress=none",
                  "trainer.max_steps=2", "trainer.log_every_n_steps=1", f"evaluation.sts_dir={sts_dir}",
                  "evaluation.every=1", "evaluation.final=[]"]  # fmt: skip
        return compose("train", [*basics, *overrides])

    return make


def scores(folder: Path, name: str = "scores.json") -> dict[str, float]:
    return dict(json.loads((folder / name).read_text())["scores"])


def test_one_command_trains_both_towers_and_then_the_twin(
    values: Callable[..., dict[str, Any]], tmp_path: Path, sts_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = values("jtcse_mini", "optimizer.lr=1e-3", "stages.stage1_a.optimizer.lr=1e-3")
    assert train_one(run, tmp_path / "run") == 0
    home = tmp_path / "run"
    out = capsys.readouterr().out
    assert out.count("before (n=1)") == 2, (
        "stage a and the twin have a table before and after; b has none before"
    )
    assert "The run and its stages" in out
    assert out.count("Encode with the result") == 1, "of the run, not of its stages"
    towers = [embedlab.load(home / name) for name in ("stage1_a", "stage1_b")]
    assert towers[0].fingerprint() != towers[1].fingerprint()
    # Before stage 2 the twin is the sum of its towers: control (b).
    dev = DevSet(load_sts("stsb", sts_dir, "raw", split="dev"))
    total = sum(tower.encode(dev.sentences, output="tensor") for tower in towers)
    assert dev.score(total)["spearman"] == pytest.approx(
        scores(home, "scores_before.json")["dev/spearman"], abs=1e-4
    )  # type: ignore[arg-type]

    # Invariant 26: the weights of the best dev score, read from the disk, have the score that was logged.
    twin = embedlab.load(home)
    assert isinstance(twin, TwinEncoder)
    logged = [float(v) for v in column(home / "metrics.csv", "dev/spearman")]
    assert len(logged) >= 3
    again = dev.score(twin.encode(dev.sentences, output="tensor"))["spearman"]
    assert again == pytest.approx(max(logged), abs=1e-6)
    assert scores(home)["dev/spearman"] == pytest.approx(again, abs=1e-6)

    # The checkpoint is whole by itself.
    last = embedlab.load(home / "last.ckpt")
    assert isinstance(last, TwinEncoder)
    for name in ("nce", "cross", "side", "ictm"):
        assert column(home / "metrics.csv", f"train/loss/{name}")
        assert column(home / "metrics.csv", f"train/gradient/{name}")

    # Again: the stages are finished, and a resumed run that is over gives the same.
    trained = (home / "stage1_a" / "last.ckpt").stat().st_mtime_ns
    run["ckpt_path"] = "last"
    assert train_one(run, home) == 0
    assert (home / "stage1_a" / "last.ckpt").stat().st_mtime_ns == trained
    assert embedlab.load(home).fingerprint() == twin.fingerprint()


def test_what_is_finished_needs_no_data_any_more(
    values: Callable[..., dict[str, Any]], tmp_path: Path, sts_dir: Path, text_file: Path
) -> None:
    data, text, home = tmp_path / "data", tmp_path / "text.txt", tmp_path / "run"
    shutil.copytree(sts_dir, data)
    shutil.copy(text_file, text)
    given = (f"evaluation.sts_dir={data}", f"data.files={text}", "evaluation.before=false",
             "evaluation.final=[cls_energy]")  # fmt: skip
    run = values("jtcse_mini", *given, "stages.stage1_b.optimizer.lr=1e-5")
    assert train_one(run, home) == 0
    data.rename(tmp_path / "gone")
    text.rename(tmp_path / "gone.txt")
    run["ckpt_path"] = "last"
    assert train_one(run, home) == 0
    # One stage is to be trained again: it needs both, and nothing is trained before that is said.
    shutil.rmtree(home / "stage1_b")
    with pytest.raises(UserError, match=r"no such folder \(evaluation\.sts_dir"):
        train_one(run, home)
    (tmp_path / "gone").rename(data)
    with pytest.raises(UserError, match=r"no such file \(data\.files"):
        train_one(run, home)
    assert not (home / "stage1_b").exists()


def column(path: Path, name: str) -> list[str]:
    import csv

    with path.open() as file:
        return [row[name] for row in csv.DictReader(file) if row.get(name)]


@pytest.mark.parametrize("tower", ["a", "b"])
def test_a_tower_is_trained_on_round_trip_translations_where_a_file_has_them(
    values: Callable[..., dict[str, Any]], tmp_path: Path, tower: str
) -> None:
    pairs = tmp_path / "pairs.tsv"
    rows = [f"the cat {i} runs\ta cat {i} is running" for i in range(16)]
    pairs.write_text("\n".join(["sentence\trtt", *rows]) + "\n")
    header = ("data=parallel", "data.package=null", f"data.files={pairs}", "data.columns.source=sentence",
              "data.columns.target=rtt")  # fmt: skip
    run = values(f"jtcse_stage1_{tower}", *header)
    assert train_one(run, tmp_path / "run") == 0
    kept = json.loads((tmp_path / "run" / "scores.json").read_text())
    assert kept["training"]["sentences"] == len(rows)
    _, data = build(parse_run(run), tmp_path / "probe")
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert {"source", "target"} <= batch.keys(), "a sentence and its translation there and back"


def test_invariant_26_the_selected_checkpoint_is_what_is_exported(
    values: Callable[..., dict[str, Any]],
    tiny: Callable[..., Path],
    tmp_path: Path,
    sts_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reloaded, its dev Spearman is the logged one to the last bit, in evaluation mode and fp32."""
    original = DevScoring._score
    weights: dict[int, dict[str, torch.Tensor]] = {}
    looks: list[dict[str, float]] = []

    def score(self: DevScoring, trainer: Any, method: Any) -> None:
        original(self, trainer, method)
        weights[trainer.global_step] = {k: v.clone() for k, v in method.encoder.state_dict().items()}

    def best_at_the_second_look(self: DevSet, *args: Any, **kwargs: Any) -> dict[str, float]:
        looks.append(plain(self, *args, **kwargs))
        # Far lower elsewhere, so that neither the first nor the last weights are selected.
        return looks[-1] | ({} if len(looks) == 2 else {"spearman": looks[-1]["spearman"] - 1000.0})

    plain = DevSet.score
    monkeypatch.setattr(DevScoring, "_score", score)
    monkeypatch.setattr(DevSet, "score", best_at_the_second_look)
    towers = [f"method.tower{i}={tiny('bert', layers=3, seed=i)}" for i in (1, 2)]
    more = ("optimizer.lr=1e-3", "trainer.max_steps=3", "evaluation.before=false")
    assert train_one(values("jtcse_mini", *towers, *more), tmp_path / "run") == 0
    monkeypatch.undo()
    assert list(weights) == [0, 1, 2, 3]
    assert json.loads((tmp_path / "run" / "scores.json").read_text())["training"]["selected_step"] == 1
    assert any(not torch.equal(v, weights[3][k]) for k, v in weights[1].items()), (
        "the last weights are others"
    )
    dev = DevSet(load_sts("stsb", sts_dir, "raw", split="dev"))
    logged = float(column(tmp_path / "run" / "metrics.csv", "dev/spearman")[1])
    for name in ("best", "export"):
        twin = embedlab.load(tmp_path / "run" / name)
        state = twin.state_dict()
        assert state.keys() == weights[1].keys()
        for key, value in state.items():
            assert value.dtype == torch.float32, key
            assert torch.equal(value, weights[1][key]), key
        # As many tokens a forward as while training: another shape sums in another order.
        vectors = twin.encode_ids(twin.tokenization.ids(dev.sentences), batch_tokens=16_384)
        assert dev.score(vectors)["spearman"] == logged


@pytest.mark.parametrize("method", ["jtcse", "tncse"])
def test_the_last_rows_of_an_epoch_are_trained_on_if_asked_be_it_one(
    values: Callable[..., dict[str, Any]], tiny: Callable[..., Path], tmp_path: Path, method: str
) -> None:
    """As released (specification 1.6): 17 rows in batches of 8 are two steps, or three."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"the cat {i} runs" for i in range(17)) + "\n")
    towers = [f"method.tower{i}={tiny('bert', layers=3, seed=i)}" for i in (1, 2)]
    for drop, steps in (("true", 2), ("false", 3)):
        folder = tmp_path / drop
        run = values(f"{method}_bert", *towers, f"data.files={text}", "data.package=null", "trainer.max_steps=-1",
                     f"data.drop_last={drop}", "evaluation.before=false", "optimizer.lr=1e-3")  # fmt: skip
        assert train_one(run, folder) == 0
        assert json.loads((folder / "scores.json").read_text())["training"]["steps"] == steps
        losses = [float(v) for v in column(folder / "metrics.csv", "train/loss")]
        assert len(losses) == steps
        state = torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]
        assert all(bool(torch.isfinite(v).all()) for v in [*state.values(), torch.tensor(losses)])


def test_towers_that_are_named_are_not_trained_and_stage_2_resumes_exactly(
    values: Callable[..., dict[str, Any]], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    towers = [f"method.tower{i}={tiny('bert', layers=3, seed=i)}" for i in (1, 2)]
    run = values("jtcse_mini", *towers, "optimizer.lr=1e-3", "trainer.max_steps=4", "evaluation.before=false")
    assert train_one(run, tmp_path / "whole") == 0
    assert not (tmp_path / "whole" / "stage1_a").exists()
    half = values(
        "jtcse_mini", *towers, "optimizer.lr=1e-3", "trainer.max_steps=2", "evaluation.before=false"
    )
    assert train_one(half, tmp_path / "parts") == 0
    run["ckpt_path"] = "last"
    assert train_one(run, tmp_path / "parts") == 0
    a, b = (
        torch.load(tmp_path / n / "last.ckpt", weights_only=True)["state_dict"] for n in ("whole", "parts")
    )
    assert a.keys() == b.keys()
    assert "poolers.0.0.weight" in a
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


def test_a_bad_setting_of_the_twin_stops_before_the_first_stage(
    values: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"method\.n_ca=2"):
        train_one(values("jtcse_mini", "method.n_ca=2"), tmp_path / "run")
    with pytest.raises(UserError, match=r"method\.tau"):
        train_one(values("jtcse_mini", "stages.stage1_b.method.tau=0"), tmp_path / "run")
    assert not (tmp_path / "run" / "stage1_a" / "config.yaml").exists()


def test_one_backbone_for_both_towers_is_refused(
    values: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    run = values("jtcse_mini") | {"stages": {}}
    with pytest.raises(UserError, match="both towers would be the same"):
        train_one(run, tmp_path / "run")


def test_a_tower_that_is_not_there_is_named(
    values: Callable[..., dict[str, Any]], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    towers = [f"method.tower1={tiny('bert', layers=3, seed=1)}", f"method.tower2={tmp_path}/gone"]
    with pytest.raises(UserError, match=r"no encoder in this folder \(method\.tower2="):
        train_one(values("jtcse_mini", *towers), tmp_path / "run")


def test_the_student_comes_near_its_frozen_teacher(
    values: Callable[..., dict[str, Any]], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    teacher = embedlab.encoders.twin.TwinEncoder(
        [embedlab.load(tiny("bert", layers=3, seed=i)) for i in (1, 2)]
    )
    teacher.save(tmp_path / "teacher")
    before = teacher.fingerprint()
    run = values(
        "jtcse_distil",
        f"method.teacher={tmp_path / 'teacher'}",
        "pooling=mean",
        "optimizer.lr=1e-3",
        "trainer.max_steps=20",
        "trainer.max_epochs=5",
        "evaluation.every=20",
    )
    config = parse_run(run | {"stages": {}})
    method, _ = build(config, tmp_path / "probe")
    assert isinstance(method, Distil)
    method.train()
    assert not any(m.training for m in method.teachers[0].encoder.modules()), "locked in evaluation mode"
    assert not any("teacher" in n for n, _ in method.named_parameters())
    assert train_one(run, tmp_path / "run") == 0
    assert not (tmp_path / "run" / "twin").exists(), "the teacher was given"
    assert embedlab.load(tmp_path / "teacher").fingerprint() == before
    state = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)["state_dict"]
    assert all(name.startswith("encoder.") for name in state), "the teacher is in no checkpoint"
    distance = [float(v) for v in column(tmp_path / "run" / "metrics.csv", "train/loss/l1")]
    assert distance[-1] < 0.8 * distance[0]


def test_an_ensemble_is_scored_and_exported_without_training(
    values: Callable[..., dict[str, Any]], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    members = [str(tiny("bert", layers=3, seed=i)) for i in (1, 2)]
    run = values("jtcse_ensemble", f"method.first={members[0]}", f"method.second={members[1]}")
    assert train_one(run, tmp_path / "run") == 0
    mixed = embedlab.load(tmp_path / "run")
    both = [embedlab.load(member) for member in members]
    for member in both:
        member.read_by(pooling_config("cls"))
    expected = 0.3 * both[0].encode(TEXTS) + 0.7 * both[1].encode(TEXTS)
    torch.testing.assert_close(
        torch.tensor(mixed.encode(TEXTS)), torch.tensor(expected), rtol=1e-5, atol=1e-5
    )
    assert "dev/spearman" in scores(tmp_path / "run")
    with pytest.raises(UserError, match=r"method\.second=ffgcc/InfoCSE-bert-base"):  # from the hub
        train_one(values("jtcse_ensemble", f"method.first={members[0]}"), tmp_path / "other")
    none = values("jtcse_ensemble", f"method.first={members[0]}", "method.second=null")
    with pytest.raises(UserError, match=r"Fix: method\.second=RUN"):
        train_one(none, tmp_path / "other")


def test_arms_of_the_ablation_share_their_towers_and_the_sum_is_an_arm(
    values: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    for arm, terms in (("b", []), ("f", ["nce", "cross", "ictm"])):
        run = values("jtcse_ablation", f"arm={arm}", "seed=1", "optimizer.lr=1e-3", "evaluation.select=last")
        assert run["method"]["terms"] == terms
        assert train_one(run, tmp_path / arm) == 0
    towers = sorted(p.name for p in (tmp_path / "stage1_own" / "seed1").iterdir() if p.is_dir())
    assert towers == ["stage1_a", "stage1_b"]
    same = scores(tmp_path / "f", "scores_before.json")
    assert scores(tmp_path / "b")["dev/spearman"] == pytest.approx(same["dev/spearman"], abs=1e-6)
    plain = values("jtcse_ablation", "arm=c", "seed=1")
    assert plain["stages_dir"] == "../stage1_plain/seed1"
    assert plain["stages"]["stage1_a"]["optimizer"]["lr"] == 3e-5
