from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from embedlab.config.data import DataConfig
from embedlab.config.template import Template
from embedlab.data.build import build_token_table
from embedlab.data.loader import BatchLoader
from embedlab.data.plan import BatchPlan
from embedlab.data.resident import ResidentTable
from embedlab.data.table import PackedTable, TokenTable
from embedlab.encoders.tokenization import Tokenization
from tests.data.standin import WordTokenization
from tests.support import SENTENCES


@pytest.fixture
def table(sentences: Path, tokenization: Tokenization) -> TokenTable:
    framed = Tokenization(tokenization.tokenizer, Template('The "{sentence}" means {mask}.'), 10)
    fields = {"plain": ("sentence", tokenization), "framed": ("sentence", framed)}
    return build_token_table(DataConfig(files=str(sentences)), fields)


ROWS = torch.tensor([3, 15, 0, 3, 9])


def test_a_gathered_batch_is_the_padded_batch(table: TokenTable, tokenization: Tokenization) -> None:
    texts = [SENTENCES[i] for i in ROWS]
    want = tokenization.pad(tokenization.ids(texts), multiple=8)
    length = want["input_ids"].shape[1]
    batch = ResidentTable(table, "cpu").gather(ROWS, {"plain": length, "framed": 24})
    assert torch.equal(batch["plain"]["input_ids"], want["input_ids"])
    assert torch.equal(batch["plain"]["attention_mask"], want["attention_mask"])
    assert batch["plain"]["input_ids"].dtype == batch["plain"]["attention_mask"].dtype == torch.int64
    assert batch["framed"]["input_ids"].shape == (5, 24)
    assert torch.equal(batch["rows"], ROWS)
    assert batch["hash"].tolist() == table.fields["plain"].hashes[ROWS.numpy()].view("int64").tolist()
    assert torch.equal(batch["framed"]["hash"], batch["hash"])
    assert batch["hash"][0] == batch["hash"][3]


def test_both_kinds_of_batch_are_equal(table: TokenTable) -> None:
    plan = BatchPlan(table.n_rows, 4, seed=1, mega_batch=2, lengths=table.longest)
    resident = ResidentTable(table, "cpu")
    for tokens, rows in zip(BatchLoader(table, plan), BatchLoader(table, plan, emit="rows"), strict=True):
        gathered = resident.gather(rows["rows"], rows["lengths"])
        assert rows["lengths"] == {name: tokens[name]["input_ids"].shape[1] for name in table.fields}
        assert (rows["tokens"], rows["padded_tokens"]) == (tokens["tokens"], tokens["padded_tokens"])
        for name in table.fields:
            for key in ("input_ids", "attention_mask", "hash"):
                assert torch.equal(gathered[name][key], tokens[name][key])


def test_the_last_row_reads_nothing_beyond_the_table(table: TokenTable) -> None:
    last = torch.tensor([table.n_rows - 1])
    batch = ResidentTable(table, "cpu").gather(last, {"plain": 64, "framed": 64})
    row = table.fields["plain"].row(table.n_rows - 1).tolist()
    assert batch["plain"]["input_ids"][0].tolist() == row + [0] * (64 - len(row))


@pytest.mark.parametrize("vocabulary", [60_000, 250_000])
def test_ids_in_the_upper_half_of_their_type(tmp_path: Path, vocabulary: int) -> None:
    texts = [f"word{i} and{i}" for i in range(200)]
    (tmp_path / "a.txt").write_text("\n".join(texts))
    words: Any = WordTokenization(vocabulary=vocabulary)
    table = build_token_table(DataConfig(files=str(tmp_path / "a.txt")), {"sentence": ("sentence", words)})
    ids = ResidentTable(table, "cpu").gather(torch.arange(200), {"sentence": 4})["sentence"]["input_ids"]
    assert ids.tolist() == words.ids_and_cut(texts)[0]
    assert int(ids.max()) > 1 << 15


@pytest.mark.parametrize("kind", ["ragged", "packed"])
def test_gathering_is_one_graph_of_fixed_shapes(table: TokenTable, packed: PackedTable, kind: str) -> None:
    resident = ResidentTable(table if kind == "ragged" else packed, "cpu")
    lengths = {"plain": 16, "framed": 24} if kind == "ragged" else {"sentence": packed.length}
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(
        lambda rows: resident.gather(rows, lengths), fullgraph=True, backend=backend, dynamic=False
    )
    for rows in (torch.tensor([0, 1, 2]), torch.tensor([2, 2, 1])):
        want, got = resident.gather(rows, lengths), compiled(rows)
        for name in lengths:
            full = want[name].pop("full", None)
            assert got[name].pop("full", None) is full
            assert all(torch.equal(want[name][key], got[name][key]) for key in want[name])
    assert len(graphs) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["ragged", "packed"])
def test_gathering_inside_a_cuda_graph(table: TokenTable, packed: PackedTable, kind: str) -> None:
    on_cpu = ResidentTable(table if kind == "ragged" else packed, "cpu")
    on_gpu = ResidentTable(table if kind == "ragged" else packed, "cuda")
    lengths = {"plain": 16, "framed": 24} if kind == "ragged" else {"sentence": packed.length}
    rows = torch.tensor([0, 1, 2], device="cuda")
    on_gpu.gather(rows, lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        batch = on_gpu.gather(rows, lengths)
    for numbers in ([0, 1, 2], [2, 0, 2]):
        rows.copy_(torch.tensor(numbers))
        graph.replay()
        want = on_cpu.gather(torch.tensor(numbers), lengths)
        for name in lengths:
            assert all(
                torch.equal(v, batch[name][key].cpu()) for key, v in want[name].items() if key != "full"
            )


@pytest.fixture
def packed(sentences: Path, tokenization: Tokenization) -> PackedTable:
    config = DataConfig(files=str(sentences), pack=16)
    return PackedTable(build_token_table(config, {"sentence": ("sentence", tokenization)}), 16)
