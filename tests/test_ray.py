"""`RayEncoder` on a local cluster of two workers, one of which is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import embedlab
from embedlab.encoders.codes import Codes
from embedlab.errors import UserError
from embedlab.ray import RayEncoder
from tests.support import SENTENCES

TEXTS = [f"{SENTENCES[i % 16]} {i}" for i in range(96)]


class OnceKilled(RayEncoder):
    """The first worker that comes to row 40 is killed there."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if 40 in batch["row"].tolist():
            try:
                os.close(os.open(os.environ["EMBEDLAB_TEST_KILLED"], os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)
            except FileExistsError:
                pass
        return super().__call__(batch)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    killed = tmp_path_factory.mktemp("ray") / "killed"
    env = {"EMBEDLAB_TEST_KILLED": str(killed), "PYTHONPATH": str(Path(embedlab.__file__).parents[1])}
    # Two for the workers, two for what reads and writes.
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": env})
    yield killed
    ray.shutdown()


@pytest.mark.timeout(900)  # three processes import torch, one after another where there are two cores
def test_rows_are_complete_and_right_though_a_worker_is_killed(
    cluster: Path, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    import ray

    (tmp_path / "in").mkdir()
    for part in range(4):
        rows = list(range(24 * part, 24 * part + 24))
        table = pa.table({"row": rows, "text": [TEXTS[row] for row in rows]})
        pq.write_table(table, tmp_path / "in" / f"{part}.parquet")
    ckpt = str(tiny("bert"))
    vectors = ray.data.read_parquet(str(tmp_path / "in")).map_batches(
        OnceKilled,
        fn_constructor_kwargs={"ckpt": ckpt, "normalize": True},
        compute=ray.data.ActorPoolStrategy(size=2),
        batch_size=8,
    )
    vectors.write_parquet(str(tmp_path / "out"))
    assert cluster.exists(), "no worker was killed"
    table = pq.read_table(tmp_path / "out").sort_by("row")
    assert table.column("row").to_pylist() == list(range(96))
    assert table.column("text").to_pylist() == TEXTS
    expected = embedlab.load(ckpt).encode(TEXTS, normalize=True)
    np.testing.assert_allclose(np.array(table.column("vector").to_pylist()), expected, atol=1e-5)


def test_a_batch_keeps_its_columns_and_gets_codes(tiny: Callable[..., Path]) -> None:
    ckpt = str(tiny("bert"))
    batch = {"id": np.arange(5), "title": np.array(TEXTS[:5], dtype=object)}
    found = RayEncoder(ckpt, column="title", output="bits", store="ubinary")(batch)
    vectors = embedlab.load(ckpt).encode(TEXTS[:5])
    assert list(found) == ["id", "title", "bits"]
    np.testing.assert_array_equal(found["bits"], Codes("ubinary", vectors.shape[1]).encode(vectors))


@pytest.mark.parametrize(
    ("settings", "texts", "said"),
    [
        ({"dtype": "float12"}, None, "dtype=float12"),
        ({"prompt_name": "query"}, None, "prompt_name=query"),
        ({"store": "int8"}, None, "store=int8"),
        ({"store": "int4"}, None, "store=int4"),
        ({"column": "body"}, ["a"], "has the columns text (column=body)"),
        ({}, ["a", None], "None in row 2 of a batch is no text"),
        ({}, ["a", "b", " "], "' ' in row 3 of a batch is no text"),
    ],
)
def test_what_is_wrong_is_one_line(
    settings: dict[str, Any], texts: list[Any] | None, said: str, tiny: Callable[..., Path]
) -> None:
    def used() -> None:
        encoder = RayEncoder(str(tiny("bert")), **settings)
        encoder({"text": np.array(texts or ["a"], dtype=object)})

    with pytest.raises(UserError) as caught:
        used()
    assert said in str(caught.value)
