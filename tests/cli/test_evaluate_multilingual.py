"""`embedlab evaluate` with the multilingual and fine-tuned suites: keys, tables, files."""

from __future__ import annotations

from pathlib import Path

import pytest

from embedlab.cli.main import main
from embedlab.evaluation.core import protocol
from tests.evaluation.finetune.test_suites import write_nli
from tests.evaluation.multilingual import write_parallel


def test_languages_are_chosen_and_the_folder_of_a_kind_is_found(
    ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_parallel(tmp_path / "data" / "parallel", rows=20)
    arguments = [f"ckpt={ckpt}", f"data_dir={tmp_path / 'data'}", "limit=8", "languages=eng,deu"]
    assert main(["evaluate", "suite=languages", *arguments]) == 0
    out, err = capsys.readouterr()
    scores, block = protocol.read_scores(ckpt / "scores" / "languages.json")
    assert block["data"]["table"]["languages"] == ["eng", "deu"]
    assert "cosine-eng-deu/gap" in scores
    assert out.count("languages: ") == 4, "a table each for spectrum, cosine, identity and purity"
    assert "limit=8" in err
    assert main(["evaluate", "suite=bitext", *arguments[:3], "languages=deu", "tasks=tatoeba"]) == 0
    scores, _ = protocol.read_scores(ckpt / "scores" / "bitext.json")
    assert set(scores) == {
        f"{task}/{m}"
        for task in ("tatoeba", "tatoeba36", "tatoeba-deu")
        for m in ("forward", "backward", "mean")
    }


def test_fine_tuning_takes_its_keys_and_leaves_the_checkpoint(ckpt: Path, tmp_path: Path) -> None:
    write_nli(tmp_path / "data" / "nli")
    before = sorted((p.name, p.stat().st_mtime_ns) for p in ckpt.iterdir())
    out = tmp_path / "out.json"
    arguments = ["finetune.steps=2", "finetune.batch_size=4", "finetune.seed=3", "dtype=bfloat16", "limit=10"]
    assert (
        main(
            [
                "evaluate",
                f"ckpt={ckpt}",
                "suite=xnli",
                f"data_dir={tmp_path / 'data'}",
                *arguments,
                f"out={out}",
            ]
        )
        == 0
    )
    scores, block = protocol.read_scores(out)
    assert {"xnli/accuracy", "xnli-en/accuracy", "xnli-xx/accuracy"} <= set(scores)
    done = block["finetune"]
    assert (done["steps"], done["batch_size"], done["seed"], done["precision"]) == (2, 4, 3, "bf16-mixed")
    assert sorted((p.name, p.stat().st_mtime_ns) for p in ckpt.iterdir()) == before


def test_an_unknown_key_is_one_line(ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_nli(tmp_path / "nli")
    arguments = [f"ckpt={ckpt}", "suite=xnli", f"data_dir={tmp_path}"]
    assert main(["evaluate", *arguments, "finetune.step=3"]) == 2
    assert "finetune.step" in capsys.readouterr().err.strip().splitlines()[-1]
    assert main(["evaluate", *arguments, "finetune.warmup=2"]) == 2
    assert (
        "must be at least 0 and below 1 (finetune.warmup=2)"
        in capsys.readouterr().err.strip().splitlines()[-1]
    )
