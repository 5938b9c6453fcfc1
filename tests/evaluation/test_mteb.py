"""MTEB through its package, on tasks whose data lie in a folder; without the hub."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from embedlab.errors import UserError
from embedlab.evaluation.core.protocol import check
from embedlab.evaluation.mteb.mteb import LISTS, MTEB, list_notes, resolve_tasks
from tests.evaluation.helpers import WORDS, HashedWords

pytest.importorskip("mteb", reason="mteb is not installed (pip install 'embedlab[eval]')")
run = MTEB().run


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """STSBenchmark by organisation and name, Banking77 by name only; both tiny."""
    root = tmp_path_factory.mktemp("mteb")
    rng = np.random.default_rng(0)

    def words() -> str:
        return " ".join(rng.choice(WORDS, 5))

    pairs = [
        {"sentence1": words(), "sentence2": words(), "score": float(rng.uniform(0, 5))} for _ in range(40)
    ]
    write_jsonl(root / "mteb" / "stsbenchmark-sts" / "test.jsonl", pairs)
    for split in ("train", "test"):
        rows = [{"text": f"{('good', 'bad')[i % 2]} {words()}", "label": i % 2} for i in range(40)]
        write_jsonl(root / "banking77" / f"{split}.jsonl", rows)
    return root, pairs


class Centred(HashedWords):
    """States its checkpoint, so that mteb can tell results apart."""

    def facts(self, _: object) -> dict[str, Any]:
        return {"checkpoint": "abc123"}


def test_local_tasks(folder: tuple[Path, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch) -> None:
    root, pairs = folder
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    tasks = ["STSBenchmark", "Banking77Classification", "SICK-R"]
    scores, block = run(Centred(), {"tasks": tasks, "data_dir": root, "prompts": {"STS": "say: "}})
    a, b = (HashedWords().encode(["say: " + p[key] for p in pairs]) for key in ("sentence1", "sentence2"))
    cosine = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    expected = 100 * stats.spearmanr(cosine, [p["score"] for p in pairs]).statistic
    assert scores["STSBenchmark/cosine_spearman"] == pytest.approx(expected, abs=1e-4)
    assert scores["Banking77Classification/accuracy"] > 70
    check(block)
    json.dumps(block)
    assert block["data"]["STSBenchmark"]["prompts"] == {"STS": "say: "}
    assert block["data"]["Banking77Classification"]["prompts"] == {}
    assert block["data"]["Banking77Classification"]["source"] == str(root / "banking77")
    (warning,) = block["warnings"]
    assert warning.startswith("SICK-R was not scored"), "the task without data does not take the others along"


def test_no_task_with_data_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="SICK-R cannot be scored") as caught:
        run(HashedWords(), {"tasks": "SICK-R", "data_dir": tmp_path})
    assert "\n" not in str(caught.value)


def test_the_list_of_jtcse_resolves() -> None:
    tasks = resolve_tasks("jtcse_zeroshot")
    types = [task.metadata.type for task in tasks]
    counts = {kind: types.count(kind) for kind in set(types)}
    assert counts == {"STS": 1, "Classification": 45, "Reranking": 14, "BitextMining": 15}
    names = [task.metadata.name for task in tasks]
    listed = (LISTS / "jtcse_zeroshot.txt").read_text().splitlines()
    assert names == [line for line in listed if line and not line.startswith("#")], (
        "no name was renamed by mteb"
    )


def test_a_list_says_what_it_lacks(
    folder: tuple[Path, list[dict[str, Any]]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (note,) = list_notes("STS12,jtcse_zeroshot")
    assert note.startswith("jtcse_zeroshot: 75 of the 120 tasks")
    path = tmp_path / "part.txt"
    path.write_text("#: half of them\n# a comment\nSTSBenchmark\n")
    _, block = run(Centred(), {"tasks": str(path), "data_dir": folder[0]})
    assert block["notes"] == ["half of them"]
    assert "half of them" in caplog.text


def test_list_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("# two\nSTS12\n\nSTS13  # a comment\nSTS12\n")
    assert [task.metadata.name for task in resolve_tasks(str(path))] == ["STS12", "STS13"]
    path.write_text("# none\n")
    with pytest.raises(UserError, match=r"mine\.txt: names no task"):
        resolve_tasks([str(path)])
    with pytest.raises(UserError, match="cannot be read"):
        resolve_tasks("missing.txt")
    with pytest.raises(UserError, match=r"has no such task .tasks=STS99"):
        resolve_tasks("STS12,STS99")
    with pytest.raises(UserError, match=r"Invalid language code: xx .languages=deu,xx"):
        resolve_tasks("STS17", ["deu", "xx"])


def test_bad_settings(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        run(HashedWords(), {"tasks": "STS12", "data_dir": tmp_path / "nowhere"})


def test_mteb_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mteb", None)
    with pytest.raises(UserError, match=r"mteb cannot be imported .*embedlab\[eval\]"):
        run(HashedWords(), {})
