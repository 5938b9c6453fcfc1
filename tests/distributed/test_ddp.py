"""Two ranks are one process with the whole batch: losses, gradients, scores; and what must differ between ranks."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn

from embedlab.backbones import load_backbone
from embedlab.config.backbone import BackboneConfig
from embedlab.config.optimizer import OptimizerConfig
from embedlab.distributed.gather import first_row, gather, gather_rows, rows_per_rank, weight
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.tokenization import Tokenization
from embedlab.encoders.twin import TwinEncoder
from embedlab.engine.module import Method
from embedlab.errors import UserError
from embedlab.methods.jtcse import JTCSE, JTCSEConfig
from embedlab.methods.simcse import SimCSE, SimCSEConfig
from embedlab.methods.towers import tower_pooler
from embedlab.pooling import build_pooling
from embedlab.run.callbacks.randomness import Randomness
from embedlab.run.check import check_run
from embedlab.run.processes import start_ranks
from tests.ranks import Step, gradients, run_on_two
from tests.support import SENTENCES
from tests.tiny_run import sentences

WORLD = 2
EVEN, UNEVEN = (3, 3), (4, 3)
CASES = [("simcse", EVEN), ("simcse", UNEVEN), ("jtcse", EVEN), ("jtcse", UNEVEN)]


def encoder(folder: str) -> SentenceEncoder:
    backbone, tokenizer = load_backbone(BackboneConfig(source="local", path=folder, dropout=0.0))
    return SentenceEncoder(backbone, build_pooling("cls", backbone.info), Tokenization(tokenizer))


def method(name: str, folders: list[str]) -> Method:
    torch.manual_seed(0)
    if name == "simcse":
        return SimCSE(encoder(folders[0]), SimCSEConfig(hard_negative_weight=0.5), OptimizerConfig()).train()
    twin = TwinEncoder([encoder(f) for f in folders])
    # The coin is drawn anew each step; that ranks agree on it has its own test.
    config = JTCSEConfig(n_ca=2, icnce="symmetric", tower1="a", tower2="b")
    poolers = tower_pooler([], twin.dim, 10), tower_pooler([], twin.dim, 11)
    return JTCSE(twin, config, OptimizerConfig(), poolers).train()


def batch(made: Method, rows: int, own: slice) -> dict[str, Any]:
    """Triples or sentences; the texts of the first row come again on the second rank."""
    tokenizer = Tokenization(made.encoder.tokenizer)
    texts = [*SENTENCES[: rows - 1], SENTENCES[0]]
    found: dict[str, Any] = {"rows": torch.arange(rows)[own]}
    for offset, view in enumerate(
        ("anchor", "positive", "negative") if isinstance(made, SimCSE) else ("sentence",)
    ):
        shifted = [SENTENCES[(SENTENCES.index(t) + 5 * offset) % len(SENTENCES)] for t in texts]
        tokens = tokenizer.pad(tokenizer.ids(shifted), 8) | {
            "hash": torch.tensor([SENTENCES.index(t) for t in shifted])
        }
        found[view] = {k: v[own] for k, v in tokens.items()}
    return found


def own_rows(sizes: tuple[int, ...], rank: int) -> slice:
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def worker(rank: int, folders: list[str], out: str) -> None:
    found = []
    for name, sizes in CASES:
        made = method(name, folders)
        model = nn.parallel.DistributedDataParallel(Step(made))
        uneven = sizes if len(set(sizes)) > 1 else None
        for _ in range(2):  # the second finds any parameter that the first left without a gradient
            model.zero_grad()
            with rows_per_rank(uneven):
                loss = model(batch(made, sum(sizes), own_rows(sizes, rank)))
            loss = loss * (weight(sizes) if uneven else 1.0)
            loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        found.append({"loss": mean / WORLD, "gradients": gradients(made)})
    draws = torch.zeros(WORLD, 4)
    Randomness(7).on_train_start(None, None)  # type: ignore[arg-type]
    draws[rank] = torch.rand(4)
    dist.all_reduce(draws)
    vectors = torch.arange(7.0)[:, None].repeat(1, 3)
    share = list(range(rank, 7, WORLD))
    whole = gather_rows(vectors[share], share, 7)
    with rows_per_rank((4, 3)):
        twice = gather(torch.full((2 * (4, 3)[rank], 1), float(rank)))
        first = first_row(2 * (4, 3)[rank])
    if rank == 1:
        torch.save(
            {"cases": found, "draws": draws, "whole": whole, "twice": twice, "first": torch.tensor(first)},
            out,
        )


@pytest.fixture(scope="module")
def two_ranks(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folders = [str(tiny("bert", layers=4, seed=seed)) for seed in (0, 1)]
    out = str(tmp_path_factory.mktemp("ddp") / "found")
    run_on_two(worker, folders, out)
    return {**torch.load(out, weights_only=True), "folders": folders}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}-{CASES[i][1]}")
def test_loss_and_gradient_are_those_of_the_whole_batch(case: int, two_ranks: dict[str, Any]) -> None:
    name, sizes = CASES[case]
    alone = method(name, two_ranks["folders"])
    loss = alone.total(batch(alone, sum(sizes), slice(None)))[0]
    loss.backward()
    found, expected = two_ranks["cases"][case], gradients(alone)
    torch.testing.assert_close(found["loss"], loss.detach(), rtol=1e-5, atol=1e-6)
    assert found["gradients"].keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    assert largest > 1e-3
    for parameter, grad in expected.items():
        error = float((found["gradients"][parameter] - grad).abs().max()) / largest
        assert error < 1e-4, f"{parameter}: {error:.1e} of the largest gradient"


def test_each_rank_has_its_own_random_stream(two_ranks: dict[str, Any]) -> None:
    draws = two_ranks["draws"]
    assert not torch.equal(draws[0], draws[1])
    torch.manual_seed(7)
    assert torch.equal(draws[0], torch.rand(4)), "rank 0 draws what one process would"


def test_rows_come_back_in_their_order(two_ranks: dict[str, Any]) -> None:
    assert two_ranks["whole"][:, 0].tolist() == list(range(7))
    assert two_ranks["twice"][:, 0].tolist() == [0.0] * 8 + [1.0] * 6
    assert two_ranks["first"].item() == 8


GUIDED = ("method=supervised", "method.objective=gist", "method.guide={guide}", "method.cached=true",
          "method.tau=0.05", "data.no_duplicates=true")  # fmt: skip
"""With vectors that are computed once, and batches that follow from the texts."""


def settings(folder: Path, tmp: Path, devices: int, *more: str) -> dict[str, Any]:
    """A supervised run of 21 triples: the last batch of an epoch is uneven on two ranks; no dropout."""
    from embedlab.cli.compose import compose

    table = tmp / "triples.tsv"
    texts = sentences(63, seed=3)
    rows = ["sent0\tsent1\thard_neg"] + ["\t".join(texts[3 * i : 3 * i + 3]) for i in range(21)]
    table.write_text("\n".join(rows) + "\n")
    return compose("train", [
        "backbone=local", f"backbone.path={folder}", "backbone.dropout=0.0", "data=nli", f"data.files={table}",
        "trainer=cpu", f"trainer.devices={devices}", f"trainer.strategy={'ddp' if devices > 1 else 'auto'}",
        f"data.batch_size={8 // devices}", "data.drop_last=false", "optimizer.lr=1e-3", "trainer.max_epochs=2",
        "callbacks.progress=none", "data.report=false", "trainer.log_every_n_steps=1", "evaluation.final=[]",
        "evaluation.before=false", "evaluation.every=3", f"data.cache_dir={tmp / 'cache'}", *more,
    ])  # fmt: skip


def losses(folder: Path) -> dict[str, list[float]]:
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    keys = ("train/loss", "train/accuracy", "train/grad_norm", "dev/spearman")
    return {k: [float(r[k]) for r in rows if r.get(k)] for k in keys}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("more", [(), GUIDED], ids=["simcse", "guided"])
def test_a_run_on_two_ranks_is_the_run_on_one(
    more: tuple[str, ...], tiny: Callable[..., Path], sts_dir: Path, tmp_path: Path
) -> None:
    """21 rows in batches of 8: the third of an epoch has 5, shared 3 to 2."""
    more = tuple(each.format(guide=tiny("roberta", width=16)) for each in more)
    for devices in (2, 1):
        folder = tmp_path / str(devices)
        folder.mkdir()
        config = settings(
            tiny("bert"), tmp_path, devices, f"evaluation.sts_dir={sts_dir}", "evaluation.select=last", *more
        )
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        paths = [str(folder / "config.yaml"), str(folder), str(folder)]
        if devices == 1:
            subprocess.run([sys.executable, "-m", "embedlab", "worker", *paths], check=True)
        else:
            assert start_ranks(["embedlab", "worker", *paths], devices) == 0
    one, two = (torch.load(tmp_path / d / "last.ckpt", weights_only=True)["state_dict"] for d in ("1", "2"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=2e-4)
    a, b = losses(tmp_path / "1"), losses(tmp_path / "2")
    assert len(a["dev/spearman"]) >= 2
    assert b["dev/spearman"] == pytest.approx(a["dev/spearman"], abs=1e-2)
    for key in ("train/loss", "train/accuracy", "train/grad_norm"):
        assert b[key] == pytest.approx(a[key], rel=1e-3)


@pytest.mark.parametrize(("step", "devices"), [("graph", 2), ("graph", 1)])
def test_a_captured_step_is_refused_where_it_cannot_be(
    step: str, devices: int, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    from embedlab.run.parse import parse_run

    if torch.cuda.is_available() and devices == 1:
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(UserError, match=r"needs CUDA devices.*step=graph.*step=compile"):
        check_run(parse_run(settings(tiny("bert"), tmp_path, devices, f"step={step}")))
