"""Approximate search: equal to the exact one where all is searched, merged as if built whole, damage in one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from embedlab.cli.main import main
from embedlab.corpus import approximate, stored
from embedlab.corpus.plan import plan
from embedlab.corpus.search import Index, Layout, build_vector_index
from embedlab.corpus.stored import Part, Source, Stored
from embedlab.encoders.codes import Codes
from embedlab.errors import UserError
from embedlab.locks import locked

faiss = pytest.importorskip("faiss")
DIM = 16


@pytest.fixture(autouse=True)
def few_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approximate, "QUESTIONS", 20)


def some(n: int, seed: int = 0) -> np.ndarray:
    """Vectors around 20 centres, of any length."""
    generator = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(20, DIM))
    return (centres[generator.integers(20, size=n)] + 0.5 * generator.normal(size=(n, DIM))).astype(
        np.float32
    )


def parts(folder: Path, sizes: tuple[int, ...] = (700, 1, 499), dtype: str = "float32") -> Source:
    folder.mkdir()
    start, x = 0, some(sum(sizes)).astype(dtype)
    for i, size in enumerate(sizes):
        np.save(folder / f"part-{i:06d}.npy", x[start : start + size])
        start += size
    return Source(sorted(folder.glob("*.npy")))


def opened(source: Source) -> Stored:
    return Stored([Part(p, len(np.load(p))) for p in source.files], Codes("float32", DIM))


def exact(queries: np.ndarray, k: int, n: int = 1200) -> tuple[np.ndarray, np.ndarray]:
    x, q = some(n), queries / np.linalg.norm(queries, axis=1, keepdims=True)
    cosine = q @ (x / np.linalg.norm(x, axis=1, keepdims=True)).T
    order = np.argsort(-cosine, axis=1, kind="stable")[:, :k]
    return order, np.take_along_axis(cosine, order, axis=1)


@pytest.mark.parametrize("kind", ["ivf_flat", "exact", "hnsw"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_searching_all_lists_is_exact(tmp_path: Path, kind: str, dtype: str) -> None:
    source = parts(tmp_path / "vectors", dtype=dtype)
    build_vector_index(tmp_path / "index", source, layout=Layout(kind=kind))
    index = Index(tmp_path / "index")
    if kind != "exact":
        index.tune(10_000 if kind == "hnsw" else 16, rescore=20)
    queries = some(30, seed=1)
    rows, scores = exact(queries, 10)
    for hits, want, cosine in zip(index.search_vectors(torch.from_numpy(queries)), rows, scores, strict=True):
        if dtype == "float32":
            assert [hit.row for hit in hits] == want.tolist()
        assert [hit.score for hit in hits] == pytest.approx(cosine, abs=1e-6 if dtype == "float32" else 2e-3)


@pytest.mark.parametrize("factory", ["IVF16,Flat", "OPQ8,IVF16,PQ8x4", "IVF16_HNSW8,SQ8"])
@pytest.mark.parametrize("piece", [100, 450])
def test_merged_pieces_are_the_whole(tmp_path: Path, factory: str, piece: int) -> None:
    vectors = opened(parts(tmp_path / "vectors"))
    made = plan("ivf_pq", len(vectors), DIM, factory=factory)
    merged = approximate.build(vectors, made, tmp_path / "work", piece=piece)
    whole = faiss.read_index(str(tmp_path / "work" / "trained.faiss"))
    whole.add_with_ids(vectors.take(np.arange(len(vectors))).numpy(), np.arange(len(vectors)))
    queries = torch.nn.functional.normalize(torch.from_numpy(some(20, seed=2)), dim=1).numpy()
    for nprobe in (2, 16):
        found = []
        for index in (merged, whole):
            approximate.turn(index, "nprobe", nprobe)
            found.append(index.search(queries, 30))
        assert np.array_equal(found[0][0], found[1][0])
        assert np.array_equal(np.sort(found[0][1]), np.sort(found[1][1]))


def test_a_killed_build_goes_on(tmp_path: Path) -> None:
    source = parts(tmp_path / "vectors")
    made, vectors = plan("ivf_flat", 1200, DIM), opened(source)

    def kill(done: int, of: int) -> None:
        if done >= 700:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        approximate.build(vectors, made, tmp_path / "work", kill, piece=200)
    there = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "work").glob("*.faiss")}
    assert len(there) == 5, "the trained index and the four pieces of the first part"
    merged = approximate.build(vectors, made, tmp_path / "work", piece=200)
    assert merged.ntotal == 1200
    assert {name: (tmp_path / "work" / name).stat().st_mtime_ns for name in there} == there
    with pytest.raises(UserError, match="of other vectors or settings"):
        approximate.build(vectors, plan("ivf_flat", 1200, DIM, nlist=4), tmp_path / "work", piece=200)
    with pytest.raises(UserError, match="of other vectors or settings"):
        approximate.build(vectors, made, tmp_path / "work", piece=200, identity="others")


def test_recall_is_that_of_brute_force(tmp_path: Path) -> None:
    vectors = opened(parts(tmp_path / "vectors"))
    index = approximate.build(vectors, plan("ivf_flat", 1200, DIM), tmp_path / "work")
    asked = approximate.questions(vectors, None, count=50)
    dial, value, measured = approximate.measure(index, vectors, asked, 0.9)
    assert dial == "nprobe"
    assert [point["value"] for point in measured] == [1, 2, 4, 8, 16]
    assert [measured[-1][f"recall@{k}"] for k in (1, 10, 100)] == [1, 1, 1]
    unit = vectors.take(np.arange(1200)).numpy()
    approximate.turn(index, "nprobe", 1)
    _, found = index.search(unit[asked.own], 1200)
    hits = []
    for own, candidates in zip(asked.own, found, strict=True):
        cosine = unit @ unit[own]
        cosine[own] = -2
        best = set(np.argsort(-cosine)[:10].tolist())
        hits.append(len(best & set(candidates.tolist())) / 10)
    assert measured[0]["recall@10"] == pytest.approx(np.mean(hits))
    least = next(point["value"] for point in measured if point["recall@10"] >= 0.9)
    assert value == least


def test_equal_rows_count_for_each_other(tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", np.tile(some(60), (20, 1)))
    vectors = Stored([Part(tmp_path / "v.npy", 1200)], Codes("float32", DIM))
    index = approximate.build(vectors, plan("ivf_flat", 1200, DIM), tmp_path / "work")
    _, value, measured = approximate.measure(index, vectors, approximate.questions(vectors, None, 40), 0.99)
    assert (measured[0]["recall@1"], measured[0]["recall@10"], value) == (1, 1, 1)


def test_more_candidates_find_more_behind_coarse_codes(tmp_path: Path) -> None:
    source, found = parts(tmp_path / "vectors"), []
    for rescore in (1, 4, 40):
        layout = Layout(factory="IVF1,PQ2x4", rescore=rescore)
        build_vector_index(tmp_path / f"{rescore}", source, layout=layout)
        lists = json.loads((tmp_path / f"{rescore}" / "lists.json").read_text())
        assert lists["rescore"] == rescore
        found.append(lists["recall"][-1]["recall@10"])
    assert found == sorted(found)
    assert found[0] < 0.5 < found[2]


def test_two_rows_and_given_queries(tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", some(2))
    layout = Layout(kind="hnsw", queries=torch.nn.functional.normalize(torch.from_numpy(some(3)), dim=1))
    build_vector_index(tmp_path / "index", Source([tmp_path / "v.npy"]), layout=layout)
    lists = json.loads((tmp_path / "index" / "lists.json").read_text())
    assert lists["recall"][0]["recall@1"] == 1
    assert len(Index(tmp_path / "index").search_vectors(torch.from_numpy(some(1)), k=5)[0]) == 2


def test_work_outlives_a_kill_and_not_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, work = parts(tmp_path / "vectors"), tmp_path / "work"
    layout = Layout(kind="ivf_flat", work=work)

    def kill(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_vector_index(tmp_path / "index", source, layout=layout, told=kill)
    assert sorted(p.name for p in work.iterdir()) == [
        "build.json",
        "rows-000000000000.faiss",
        "trained.faiss",
    ]
    assert not (tmp_path / "index").exists()
    with locked(work / "lock"), pytest.raises(UserError, match=r"another process writes it \(work\)"):
        build_vector_index(tmp_path / "index", source, layout=layout)
    monkeypatch.setattr(approximate, "_train", lambda *_: pytest.fail("it is trained already"))
    build_vector_index(tmp_path / "index", source, layout=layout)
    assert not work.exists()
    assert len(Index(tmp_path / "index")) == 1200


@pytest.mark.parametrize("name", ["lists.faiss", "lists.json", "index.json", "part-000001.npy", "rows.npy"])
@pytest.mark.parametrize("way", ["cut", "flip", "gone", "empty"])
def test_damage_of_each_file_is_one_line(
    tmp_path: Path, name: str, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = parts(tmp_path / "vectors")
    if name == "rows.npy":
        source = Source([parquet(tmp_path)])
    build_vector_index(tmp_path / "index", source, layout=Layout(kind="ivf_flat"))
    path = tmp_path / ("vectors" if name.startswith("part") else "index") / name
    content = path.read_bytes()
    path.write_bytes({"cut": content[: len(content) // 2], "empty": b""}.get(way, content))
    if way == "flip":
        path.write_bytes(content[:6] + bytes([content[6] ^ 0x10]) + content[7:])
    elif way == "gone":
        path.unlink()
    np.save(tmp_path / "q.npy", some(1))
    capsys.readouterr()
    assert main(["search", "query", str(tmp_path / "index"), f"queries={tmp_path / 'q.npy'}"]) == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1
    assert error.startswith("embedlab: ")


def parquet(folder: Path, n: int = 1200) -> Path:
    from embedlab.corpus.vector_files import vector_file

    with vector_file(folder / "v.parquet") as target:
        target.add(range(2, 2 * n + 2, 2), some(n))
    return folder / "v.parquet"


def test_commands_over_vectors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "BLOCK", 500)
    index, queries = tmp_path / "index", tmp_path / "q.npy"
    np.save(queries, some(3, seed=1))
    assert (
        main(["search", "index", str(parquet(tmp_path)), str(index), "kind=ivf_flat", "target_recall=1"]) == 0
    )
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("1,200 vectors in")
    assert out[1] == "IVF16,Flat, trained on 1,024 rows"
    assert out[2].split()[:4] == ["nprobe", "recall@1", "recall@10", "recall@100"]
    assert [line.endswith("kept") for line in out[3:]].count(True) == 1
    assert main(["search", "query", str(index), f"queries={queries}", "k=2", f"nprobe={10**20}"]) == 0
    found = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    rows, scores = exact(some(3, seed=1), 2)
    assert [int(line[0]) for line in found] == [1, 1, 2, 2, 3, 3]
    assert [int(line[2]) for line in found] == [2 * (row + 1) for row in rows.flatten()], (
        "as the Parquet file says"
    )
    assert [float(line[1]) for line in found] == pytest.approx(scores.flatten(), abs=1e-4)

    import pyarrow.parquet as pq

    assert main(["search", "export", str(index), str(tmp_path / "out.parquet")]) == 0
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column_names == ["row", "vector"]
    assert table.column("row").to_pylist() == list(range(2, 2402, 2))
    unit = some(1200) / np.linalg.norm(some(1200), axis=1, keepdims=True)
    np.testing.assert_allclose(np.array(table.column("vector").to_pylist()), unit, atol=1e-6)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["kind=tree"], "no such kind (kind=tree)"),
        (["kind=ivf_flat", "nlist=64"], "less than 39 a list"),
        (["kind=ivf_pq"], "kind=exact"),
        (["factory=Nothing"], "faiss: could not parse index string"),
        (["kind=ivf_flat", "nlist=0"], "must be a positive whole number (nlist=0)"),
        (["nlist=8"], "an exact index has no such thing (nlist=8)"),
        (["kind=ivf_flat", "target_recall=2"], "above 0 and at most 1"),
        (["kind=ivf_flat", "queries=nowhere.npy"], "nowhere.npy: cannot be read"),
        (["kind=ivf_flat", "queries=texts.txt"], "texts want the encoder of the vectors"),
        (["kind=ivf_flat", "queries=wide.npy"], "of width 17, the vectors of 16 (queries)"),
        (["kind=hnsw", "m=1"], "two links a row or more (m=1)"),
        (["texts=texts.txt"], "2 texts for 1,200 vectors"),
    ],
)
def test_bad_input(
    tmp_path: Path,
    argv: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts.txt").write_text("one\ntwo\n")
    np.save("wide.npy", np.ones((2, DIM + 1), np.float32))
    parts(tmp_path / "vectors")
    assert main(["search", "index", "vectors", "index", *argv]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert not Path("index").exists()


def test_sources_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = parts(tmp_path / "vectors").files[0].parent
    for name, array, message in [
        ("z.npy", np.ones((3, 5), np.float32), "is 5 wide"),
        ("z.npy", np.ones(3, np.float32), "no table of vectors"),
        ("z.npy", np.ones((3, DIM), np.int32), "is no array of float16"),
        ("z.npy", np.full((3, DIM), np.nan, np.float32), "not finite"),
    ]:
        np.save(folder / name, array)
        assert main(["search", "index", str(folder), str(tmp_path / "index"), "kind=ivf_flat"]) == 2
        assert message in capsys.readouterr().err
    (folder / "z.npy").unlink()
    parquet(folder)
    assert main(["search", "index", str(folder), str(tmp_path / "index")]) == 2
    assert "holds .npy and .parquet files" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["search", "index", str(tmp_path / "empty"), str(tmp_path / "index")]) == 2
    assert "holds no .npy or .parquet file" in capsys.readouterr().err


def test_texts_do_not_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts.txt").write_text("one\ntwo\n")
    command = ["search", "index", str(tmp_path / "texts.txt"), str(tmp_path / "index"), "ckpt=mini"]
    assert main([*command, "kind=hnsw", f"work={tmp_path / 'work'}"]) == 2
    assert "texts are encoded anew each time (work=" in capsys.readouterr().err
