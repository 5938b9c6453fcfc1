"""JTCSE's losses on two tiny towers: invariants 16, 17, 18, 20, 22 and 23, the coin, options, ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from embedlab.backbones import load_backbone
from embedlab.config.backbone import BackboneConfig
from embedlab.config.optimizer import OptimizerConfig
from embedlab.distributed.gather import broadcast_coin
from embedlab.encoders.cross_attention import CrossedTwin
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.tokenization import Tokenization
from embedlab.encoders.twin import TwinEncoder
from embedlab.errors import UserError
from embedlab.methods import method_config
from embedlab.methods.jtcse import JTCSE, JTCSEConfig, TNCSEConfig
from embedlab.methods.towers import linear_cka, tower_pooler
from embedlab.objectives.pair_nce import interleave, pair_nce
from embedlab.pooling import build_pooling
from tests.methods.golden import check_golden
from tests.methods.runs import run_of
from tests.ranks import Step, start_on_two

Tiny = Callable[..., Path]
LAYERS, WIDTH = 4, 32
BASE = JTCSEConfig(n_ca=2, icnce="symmetric", tower1="a", tower2="b")


def tower(tiny: Tiny, seed: int, kind: str = "bert", pooling: str = "cls") -> SentenceEncoder:
    source = BackboneConfig(source="local", path=str(tiny(kind, layers=LAYERS, seed=seed)))
    backbone, tokenizer = load_backbone(source)
    return SentenceEncoder(backbone, build_pooling(pooling, backbone.info), Tokenization(tokenizer))


def method(
    tiny: Tiny, config: JTCSEConfig = BASE, seeds: tuple[int, int] = (0, 1), kind: str = "bert"
) -> JTCSE:
    twin = TwinEncoder([tower(tiny, seed, kind) for seed in seeds])
    poolers = tuple(tower_pooler([], WIDTH, 10 + seed) for seed in seeds)
    return JTCSE(twin, config, OptimizerConfig(), poolers).eval()  # type: ignore[arg-type]


def batch(n: int = 5, repeat: bool = False) -> dict[str, Any]:
    ids = torch.randint(10, 100, (n, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    hashes = torch.arange(n)
    if repeat:
        ids[3], mask[3], hashes[3] = ids[1], mask[1], hashes[1]
    view = {"input_ids": ids, "attention_mask": mask, "hash": hashes}
    return {"rows": torch.arange(n), "sentence": view}


def losses(jtcse: JTCSE, data: dict[str, Any] | None = None) -> dict[str, Tensor]:
    return jtcse.losses(data or batch()).losses


def vectors(jtcse: JTCSE) -> tuple[Tensor, ...]:
    view = batch()["sentence"]
    ids, mask = (interleave(x, x) for x in (view["input_ids"], view["attention_mask"]))
    return jtcse.streams(ids, mask)


def grads(module: nn.Module) -> dict[str, float]:
    found = {n: 0.0 if p.grad is None else float(p.grad.abs().max()) for n, p in module.named_parameters()}
    module.zero_grad()
    return found


@pytest.mark.parametrize("kind", ["bert", "distilbert"])
def test_invariant_16_equal_towers_without_dropout(tiny: Tiny, kind: str) -> None:
    jtcse = method(tiny, replace(BASE, icnce="coin"), seeds=(0, 0), kind=kind)
    u, v, s, t = vectors(jtcse)
    assert torch.equal(s, u)
    assert torch.equal(t, v)
    terms = losses(jtcse)
    within = pair_nce(u, u, 0.05).loss
    torch.testing.assert_close(terms["cross"] + terms["side"], 2 * within)
    # The poolers differ, but the views are equal: cos = 1, so there is nothing to constrain.
    assert abs(terms["ictm"].item()) < 1e-6


def test_invariant_17_swapped_towers_give_the_same_loss(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def total(seeds: tuple[int, int], heads: bool) -> Tensor:
        monkeypatch.setattr("embedlab.methods.jtcse.broadcast_coin", lambda device: torch.tensor(heads))
        terms = losses(method(tiny, replace(BASE, icnce="coin"), seeds))
        return torch.stack(list(terms.values())).sum()

    torch.testing.assert_close(total((0, 1), True), total((1, 0), False), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(total((0, 1), False), total((1, 0), True), rtol=1e-6, atol=1e-6)
    assert abs(total((0, 1), True) - total((0, 1), False)) > 1e-4, "the coin must matter"


def test_invariant_18_the_side_stream_leaves_the_main_streams_alone(tiny: Tiny) -> None:
    reference = vectors(method(tiny, replace(BASE, terms=("nce",))))
    side = []
    for n in (1, 2, 4):
        u, v, s, _ = vectors(method(tiny, replace(BASE, n_ca=n)))
        # Equal up to rounding: alone, a tower's last block computes the token that is read (backbones.last_block).
        torch.testing.assert_close(u, reference[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(v, reference[1], rtol=1e-5, atol=1e-6)
        side.append(s)
    assert (side[0] - side[1]).abs().max() > 1e-4, "the number of exchanges must matter"
    plain = vectors(method(tiny, replace(BASE, terms=("nce", "cross"))))
    assert torch.equal(plain[2], plain[0]), "no side stream is run where no term needs it"


def test_invariant_20_gradients_reach_every_parameter(tiny: Tiny) -> None:
    jtcse = method(tiny).train()
    torch.stack(list(losses(jtcse).values())).sum().backward()
    found = grads(jtcse)
    # Softmax does not see a key's bias; positions beyond the batch's length are unused rows of a used tensor.
    dead = [name for name, size in found.items() if size < 1e-9 and not name.endswith("key.bias")]
    assert dead == []
    assert any(name.startswith("poolers.1.") for name in found)
    assert any("towers.1.backbone.model.embeddings.word" in name for name in found)


def test_invariant_22_poolers_have_their_gradient_from_the_modulus_alone(tiny: Tiny) -> None:
    jtcse = method(tiny).train()
    terms = losses(jtcse)
    (terms["nce"] + terms["cross"] + terms["side"]).backward(retain_graph=True)
    assert all(p.grad is None for p in jtcse.poolers.parameters())  # type: ignore[union-attr]
    terms["ictm"].backward()
    assert all(size > 0 for size in grads(jtcse.poolers).values())  # type: ignore[arg-type]
    # In a run without the term they are not even there, so that DDP finds no parameter without gradient.
    assert method(tiny, replace(BASE, terms=("nce", "cross"))).poolers is None
    assert method(tiny, replace(BASE, tmc_use="last_hidden")).poolers is None


def test_invariant_23_without_dropout_the_views_are_equal(tiny: Tiny) -> None:
    quiet = method(tiny)
    outcome = quiet.losses(batch())
    assert outcome.stats["positive_cosine"].item() == pytest.approx(1.0, abs=1e-6)
    u = vectors(quiet)[0]
    assert torch.equal(u[0::2], u[1::2])
    loud = method(tiny).train()
    assert loud.losses(batch()).stats["positive_cosine"].item() < 0.999
    u = vectors(loud)[0]
    assert (u[0::2] - u[1::2]).abs().max() > 1e-2


def test_the_coin_falls_both_ways_for_both_terms_at_once(tiny: Tiny) -> None:
    torch.manual_seed(0)
    tosses = torch.stack([broadcast_coin(torch.device("cpu")) for _ in range(400)])
    assert 150 < int(tosses.sum()) < 250
    jtcse = method(tiny, replace(BASE, icnce="coin"))
    u, v, s, t = vectors(jtcse)
    there = pair_nce(u, v, 0.05).loss, pair_nce(s, t, 0.05).loss
    back = pair_nce(v, u, 0.05).loss, pair_nce(t, s, 0.05).loss
    seen = set()
    for seed in range(12):
        torch.manual_seed(seed)
        terms = losses(jtcse)
        heads = torch.isclose(terms["cross"], there[0], rtol=1e-6)
        expected = there if heads else back
        torch.testing.assert_close((terms["cross"], terms["side"]), expected)
        torch.manual_seed(seed)
        assert torch.equal(losses(jtcse)["cross"], terms["cross"]), "the seed decides"
        seen.add(bool(heads))
    assert seen == {True, False}


def test_symmetric_is_the_mean_of_both_and_fixed_the_first(tiny: Tiny) -> None:
    u, v, s, t = vectors(method(tiny))
    there, back = pair_nce(u, v, 0.05).loss, pair_nce(v, u, 0.05).loss
    torch.testing.assert_close(losses(method(tiny))["cross"], (there + back) / 2)
    fixed = losses(method(tiny, replace(BASE, icnce="fixed")))
    torch.testing.assert_close(fixed["cross"], there)
    torch.testing.assert_close(fixed["side"], pair_nce(s, t, 0.05).loss)


def test_the_total_is_the_plain_sum_of_the_terms(tiny: Tiny) -> None:
    jtcse = method(tiny)
    total, logged = jtcse.total(batch())
    terms = losses(jtcse)
    assert set(terms) == {"nce", "cross", "side", "ictm"}
    torch.testing.assert_close(total, torch.stack(list(terms.values())).sum())
    for name, value in terms.items():
        torch.testing.assert_close(logged[f"loss/{name}"], value.detach())
        assert logged[f"gradient/{name}"] > 0
    for name in ("towers/cosine", "towers/cka", "towers/norm_ratio"):
        assert torch.isfinite(logged[name])


def test_scale_clamp_and_source_of_the_modulus(tiny: Tiny) -> None:
    reference = losses(method(tiny))["ictm"]
    torch.testing.assert_close(losses(method(tiny, replace(BASE, tmc_scale=1.0)))["ictm"], 2 * reference)
    other = losses(method(tiny, replace(BASE, tmc_use="last_hidden")))["ictm"]
    assert abs(other - reference) > 1e-4


def test_double_precision_reaches_the_poolers(tiny: Tiny) -> None:
    """trainer.precision=64-true: vectors and poolers are fp64 alike."""
    single, double = losses(method(tiny)), losses(method(tiny).double())  # type: ignore[arg-type]
    for name, value in single.items():
        assert double[name].dtype == torch.float64
        torch.testing.assert_close(double[name].float(), value, rtol=1e-4, atol=1e-4)


def test_a_repeated_sentence_is_no_negative_unless_as_released(tiny: Tiny) -> None:
    twice = batch(repeat=True)
    masked = losses(method(tiny), twice)
    released = losses(method(tiny, replace(BASE, mask_duplicates=False)), twice)
    for name in ("nce", "cross", "side"):
        assert masked[name] < released[name] - 1e-3
    assert torch.equal(
        losses(method(tiny))["nce"], losses(method(tiny, replace(BASE, mask_duplicates=False)))["nce"]
    )


def test_in_stream_wiring_trains_on_other_vectors_than_it_scores(tiny: Tiny, tmp_path: Path) -> None:
    jtcse = method(tiny, replace(BASE, wiring="instream"))
    u, v, s, _ = vectors(jtcse)
    plain = vectors(method(tiny, replace(BASE, terms=("nce",))))
    beside = vectors(method(tiny))
    assert (u - plain[0]).abs().max() > 1e-3
    assert torch.equal(u, beside[2]), "H in the stream is what T is beside it"
    assert torch.equal(v, beside[3])
    assert (s - u).abs().max() > 1e-3, "T is the state after layer 2"
    ids = batch()["sentence"]
    scored = jtcse.encoder(ids["input_ids"], ids["attention_mask"])
    torch.testing.assert_close(scored, (plain[0] + plain[1])[0::2])
    crossed = CrossedTwin(jtcse.encoder, BASE.n_ca)
    torch.testing.assert_close(crossed(ids["input_ids"], ids["attention_mask"]), (u + v)[0::2])
    assert crossed.fingerprint() != jtcse.encoder.fingerprint()
    with pytest.raises(UserError, match="without its cross-attention"):
        crossed.save(tmp_path / "crossed")


def test_in_stream_the_side_vectors_are_of_one_layer(tiny: Tiny) -> None:
    twin = TwinEncoder([tower(tiny, seed, pooling="first_last") for seed in (0, 1)])
    poolers = tower_pooler([], WIDTH, 1), tower_pooler([], WIDTH, 2)
    with pytest.raises(UserError, match="from one layer in the middle"):
        JTCSE(twin, replace(BASE, wiring="instream"), OptimizerConfig(), poolers)
    for fine in (replace(BASE, wiring="instream", terms=("nce", "ictm")), BASE):
        JTCSE(twin, fine, OptimizerConfig(), poolers)


def test_cached_gradients_are_those_of_the_whole_batch(tiny: Tiny) -> None:
    found = []
    for chunk in (None, 4):
        jtcse = method(tiny)
        jtcse.optimizer_config = OptimizerConfig(chunk=chunk)
        jtcse.total(batch())[0].backward()
        found.append({n: p.grad for n, p in jtcse.named_parameters()})
    for name, whole in found[0].items():
        torch.testing.assert_close(found[1][name], whole, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("change", [{}, {"wiring": "instream"}, {"terms": ("nce", "cross", "ictm")}])
def test_a_step_asks_the_device_for_no_value(tiny: Tiny, change: dict[str, Any]) -> None:
    """With tensors that have no values: whatever would wait for one (item, nonzero, a branch) raises, and a step
    that does cannot be captured in a CUDA graph."""
    import copy

    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

    mode = FakeTensorMode()
    with FakeCopyMode(mode):
        jtcse = copy.deepcopy(method(tiny, replace(BASE, icnce="coin", **change)).train())
    data = batch()
    view = {k: mode.from_tensor(v) for k, v in data["sentence"].items()}
    with mode, torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        loss, logged = jtcse.total({"rows": mode.from_tensor(data["rows"]), "sentence": view})
        loss.backward()
    assert loss.shape == ()
    assert all(p.grad is not None for p in jtcse.parameters())
    assert all(value.shape == () for value in logged.values())


def test_equal_towers_are_refused_at_the_start(tiny: Tiny) -> None:
    alone = SimpleNamespace(num_devices=1, num_nodes=1)
    equal, apart = method(tiny, seeds=(0, 0)), method(tiny)
    equal._trainer = apart._trainer = alone
    with pytest.raises(UserError, match=r"same weights.*method\.tower2"):
        equal.on_fit_start()
    apart.on_fit_start()


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"tau": 0.0}, "method.tau=0"),
        ({"n_ca": 5}, "method.n_ca=5"),
        ({"icnce": "coins"}, "method.icnce=coins"),
        ({"wiring": "up"}, "method.wiring=up"),
        ({"route": "key_owner"}, "method.route"),
        ({"tmc_use": "cls"}, "method.tmc_use"),
        ({"clamp": "none"}, "method.clamp"),
        ({"floor": 0.0}, "method.floor"),
        ({"terms": ("nce", "tmc")}, "method.terms=tmc"),
        ({"tower2": "a"}, "method.tower2=a"),
        ({"pooler_seeds": [1]}, "method.pooler_seeds"),
    ],
)
def test_settings_without_meaning_are_named(tiny: Tiny, change: dict[str, Any], key: str) -> None:
    info = tower(tiny, 0).backbone.info
    with pytest.raises(UserError) as caught:
        method_config({"name": "jtcse", "tower1": "a", "tower2": "b", "n_ca": 2, **change}).check(
            info, run_of()
        )
    assert key in str(caught.value)


def test_neighbours_are_checked(tiny: Tiny) -> None:
    info = tower(tiny, 0).backbone.info
    assert BASE.check(info, run_of()) == []
    for key in ("tower1", "tower2"):
        (warning,) = replace(BASE, **{key: None}).check(info, run_of())
        assert f"method.{key} is not given: that tower begins as the backbone itself" in warning
    with pytest.raises(UserError, match="method=jtcse trains encoders"):
        BASE.check(replace(info, kind="decoder"), run_of())
    assert BASE.kinds == ("wikipedia",)
    with pytest.raises(UserError, match=r"data\.pack"):
        BASE.check(info, run_of(pack=64))
    with pytest.raises(UserError, match="method=jtcse"):
        replace(TNCSEConfig(tower1="a", tower2="b"), terms=("side",)).check(info, run_of())
    (warning,) = BASE.check(replace(info, dropout=0.0), run_of())
    assert "backbone.dropout=0" in warning
    # A twelve-layer backbone has the published positions, and no exchange needs no division.
    assert replace(BASE, n_ca=6).check(replace(info, layers=12), run_of()) == []
    assert replace(BASE, n_ca=5, terms=("nce",)).check(info, run_of()) == []
    assert replace(BASE, terms=()).idle
    assert not BASE.idle


def test_poolers_are_seeded_apart_or_come_from_the_checkpoint(tiny: Tiny, tmp_path: Path) -> None:
    one, two, again = (tower_pooler([], WIDTH, seed) for seed in (1, 2, 1))
    assert torch.equal(one[0].weight, again[0].weight)  # type: ignore[index]
    assert not torch.equal(one[0].weight, two[0].weight)  # type: ignore[index]
    assert one[0].weight.std().item() == pytest.approx(0.02, rel=0.2)  # type: ignore[index]
    from transformers import AutoTokenizer, BertModel

    folder = tiny("bert", layers=LAYERS)
    model = BertModel.from_pretrained(folder, add_pooling_layer=True)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    source = BackboneConfig(source="local", path=str(tmp_path))
    kept = tower_pooler([BackboneConfig(source="local", path=str(folder)), source], WIDTH, 1)
    assert torch.equal(kept[0].weight, model.pooler.dense.weight)  # type: ignore[index]
    gone = BackboneConfig(source="local", path=str(tmp_path / "gone"))
    assert torch.equal(tower_pooler([gone], WIDTH, 1)[0].weight, one[0].weight)  # type: ignore[index]


def test_linear_cka() -> None:
    a = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    rotation = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))[0]
    assert linear_cka(a, 3 * a @ rotation + 1).item() == pytest.approx(1.0, abs=1e-5)
    assert linear_cka(a, torch.randn(40, 8, generator=torch.Generator().manual_seed(2))).item() < 0.5


def _rank(rank: int, folders: tuple[str, str], results: Any) -> None:
    jtcse = _from_folders(folders)
    model = nn.parallel.DistributedDataParallel(Step(jtcse))
    torch.manual_seed(rank)  # ranks draw apart, as in a run; the coin must agree all the same
    model(_share(rank)).backward()
    if rank == 0:
        results.put({n: p.grad.tolist() for n, p in jtcse.named_parameters() if "word_emb" not in n})


def _from_folders(folders: tuple[str, str]) -> JTCSE:
    towers = []
    for folder in folders:
        backbone, tokenizer = load_backbone(BackboneConfig(source="local", path=folder))
        towers.append(SentenceEncoder(backbone, build_pooling("cls", backbone.info), Tokenization(tokenizer)))
    poolers = (tower_pooler([], WIDTH, 1), tower_pooler([], WIDTH, 2))
    config = replace(BASE, icnce="coin")
    return JTCSE(TwinEncoder(towers), config, OptimizerConfig(), poolers).eval()


def _share(rank: int | None) -> dict[str, Any]:
    whole = batch(6, repeat=True)
    if rank is None:
        return whole
    rows = slice(3 * rank, 3 * rank + 3)
    return {"rows": whole["rows"][rows], "sentence": {k: v[rows] for k, v in whole["sentence"].items()}}


@pytest.mark.timeout(180)
def test_two_ranks_give_the_gradient_of_one_big_batch(tiny: Tiny) -> None:
    import torch.multiprocessing as mp

    folders = tuple(str(tiny("bert", layers=LAYERS, seed=seed)) for seed in (0, 1))
    # Forked: two fresh interpreters would import torch for half a minute.
    queue = mp.get_context("fork").SimpleQueue()
    context = start_on_two(_rank, folders, queue, method="fork")
    found = queue.get()
    context.join()
    jtcse = _from_folders(folders)  # type: ignore[arg-type]
    torch.manual_seed(0)  # the coin of rank 0
    jtcse.total(_share(None))[0].backward()
    for name, p in jtcse.named_parameters():
        if "word_emb" in name or "key.bias" in name:  # a key's bias has no gradient but rounding
            continue
        assert p.grad is not None
        scale = float(p.grad.abs().max()) + 1e-6
        torch.testing.assert_close(torch.tensor(found[name]) / scale, p.grad / scale, rtol=1e-3, atol=1e-4)


def test_golden_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_golden("jtcse", tmp_path, monkeypatch)
