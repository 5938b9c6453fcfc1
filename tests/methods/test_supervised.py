"""Supervised: its golden losses, every objective on two devices as on one, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize

from embedlab.backbones import load_backbone
from embedlab.config.backbone import BackboneConfig, BackboneInfo
from embedlab.config.optimizer import OptimizerConfig
from embedlab.data.kinds import data_config
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.tokenization import Tokenization
from embedlab.engine.optimizer import parameter_groups
from embedlab.errors import UserError
from embedlab.methods import method_config
from embedlab.methods.alignment import AlignmentConfig, Vectors, align
from embedlab.methods.contrast import ContrastConfig, Matryoshka
from embedlab.methods.supervised import READS, TAKES, Supervised, SupervisedConfig, view_names
from embedlab.methods.supervised_losses import OBJECTIVES
from embedlab.objectives.cosent import cosine, ranking
from embedlab.objectives.info_nce import info_nce
from embedlab.parts import part_names
from embedlab.pooling import build_pooling
from tests.methods.golden import check_golden
from tests.methods.runs import run_of
from tests.ranks import Step, gradients, two_ranks
from tests.tiny_run import compose_run as compose_run
from tests.tiny_run import text_file as text_file

WORDS = ("cat", "dog", "lake", "rain", "tree", "house", "river", "bird")
ROWS = 4
NUMBERS = {
    "score": torch.tensor([0.2, 1.0, 0.7, 1.0]),
    "label": torch.tensor([0, 1, 0, 2]),
    **{f"score_{k}": torch.tensor([3.0, 1.0, -2.0, 0.5]) / (k + 1) for k in range(3)},
}
CASES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({}, ("anchor", "positive", "negative_1", "negative_2")),
    ({"directions": "joint"}, ("anchor", "positive", "negative")),
    ({"directions": "symmetric", "hardness": "all"}, ("anchor", "positive", "negative_1", "negative_2")),
    ({"hard_negative_weight": 0.5}, ("anchor", "positive", "negative")),
    ({"objective": "cosent"}, ("first", "second", "score")),
    ({"objective": "angle", "cosent_weight": 0.3}, ("first", "second", "score")),
    ({"objective": "angle"}, ("anchor", "positive", "negative")),
    ({"objective": "gist", "tau": 0.1}, ("anchor", "positive", "negative_1")),
    ({"objective": "gist", "tau": 0.1, "cached": True}, ("anchor", "positive", "negative_1")),
    ({"objective": "multi_positive"}, ("text", "label")),
    ({"objective": "multi_positive"}, ("anchor", "positive")),
    ({"objective": "sigmoid"}, ("anchor", "positive", "negative_1")),
    ({"objective": "margin_mse"}, ("anchor", "positive", "negative_1", "negative_2", "score_0", "score_1", "score_2")),
    ({"objective": "kl", "score_scale": 20.0, "add_in_batch": True},
     ("anchor", "positive", "negative_1", "score_0", "score_1")),
    ({"matryoshka": Matryoshka((32, 8), (1.0, 0.5))}, ("source", "target")),
    ({"objective": "cosent", "matryoshka": Matryoshka((32, 8, 4), dims_per_step=2)}, ("first", "second", "score")),
]  # fmt: skip
NAMES = [f"{config.get('objective', 'in_batch')}-{len(views)}-{i}" for i, (config, views) in enumerate(CASES)]


def encoder_of(folder: str, seed: int = 0) -> SentenceEncoder:
    torch.manual_seed(seed)
    backbone, tokenizer = load_backbone(BackboneConfig(source="local", path=folder, dropout=0.0))
    return SentenceEncoder(backbone, build_pooling("mean", backbone.info), Tokenization(tokenizer))


def made(folder: str, case: int, rows: slice = slice(None)) -> tuple[Supervised, dict[str, Any]]:
    """The method of a case, and its batch of these rows."""
    return built(folder, *CASES[case], rows)


def built(
    folder: str, settings: dict[str, Any], names: tuple[str, ...], rows: slice = slice(None)
) -> tuple[Supervised, dict[str, Any]]:
    config = SupervisedConfig(**settings)
    guide = encoder_of(folder) if config.objective == "gist" else None
    if guide is not None:  # another encoder than the trained one
        with torch.no_grad():
            guide.backbone.get_parameter(next(n for n, _ in guide.backbone.named_parameters())).mul_(-0.5)
    method = Supervised(encoder_of(folder), config, OptimizerConfig(), guide, seed=1).train()
    for place, name in enumerate(names if config.cached else ()):
        vectors = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(place))
        method.teachers[0]._roles[name] = name  # type: ignore[attr-defined]
        method.teachers[0]._vectors[name] = vectors, torch.zeros(1, dtype=torch.long)  # type: ignore[attr-defined]
    batch: dict[str, Any] = {"rows": torch.arange(ROWS)[rows]}
    for place, name in enumerate(names):
        if name in NUMBERS:
            batch[name] = NUMBERS[name][rows]
            continue
        # The anchor of row 1 comes again in row 3.
        words = [(place * 3 + (1 if i == 3 and place == 0 else i)) % len(WORDS) for i in range(ROWS)]
        tokens = method.encoder.tokenization.pad(method.encoder.tokenization.ids([WORDS[w] for w in words]))
        batch[name] = {k: v[rows] for k, v in tokens.items()} | {"hash": torch.tensor(words)[rows]}
    return method, batch


@pytest.fixture(scope="module", params=[(ROWS // 2,), (ROWS - 1, 1)], ids=["even", "uneven"])
def halves(request: pytest.FixtureRequest, tiny: Callable[..., Path]) -> list[dict[str, torch.Tensor]]:
    return two_ranks(made, str(tiny("bert")), len(CASES), *request.param)


@pytest.mark.parametrize("case", range(len(CASES)), ids=NAMES)
def test_two_devices_have_the_gradient_of_one(
    case: int, halves: list[dict[str, torch.Tensor]], tiny: Callable[..., Path]
) -> None:
    method, batch = made(str(tiny("bert")), case)
    Step(method)(batch).backward()
    found = gradients(method)
    assert found.keys() == halves[case].keys()
    assert max(float(grad.abs().max()) for grad in found.values()) > 1e-6
    for name, grad in found.items():
        torch.testing.assert_close(halves[case][name], grad, rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("case", range(len(CASES)), ids=NAMES)
def test_a_batch_of_one_or_in_half_precision_is_finite(
    case: int, half: bool, rows: int, tiny: Callable[..., Path]
) -> None:
    method, batch = made(str(tiny("bert")), case, slice(rows))
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        loss, logged = method.total(batch)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(value).all() for value in logged.values())
    assert all(torch.isfinite(grad).all() for grad in gradients(method).values())


def vectors_of(method: Supervised, batch: dict[str, Any]) -> list[torch.Tensor]:
    return [method.encoder(batch[n]["input_ids"], batch[n]["attention_mask"]) for n in view_names(batch)]


def test_the_losses_are_those_of_the_objectives(tiny: Callable[..., Path]) -> None:
    folder = str(tiny("bert"))
    method, batch = made(folder, 0)
    z = vectors_of(method, batch)
    hashes = [batch[name]["hash"] for name in view_names(batch)]
    expected = info_nce(
        z[0], z[1], 0.05, hard_negatives=torch.stack(z[2:]), anchor_hashes=hashes[0], candidate_hashes=hashes[1],
        hard_negative_hashes=torch.stack(hashes[2:]),
    )  # fmt: skip
    torch.testing.assert_close(method.losses(batch).losses["info_nce"], expected.loss)
    method, batch = made(folder, next(i for i, (s, _) in enumerate(CASES) if s == {"objective": "cosent"}))
    z = vectors_of(method, batch)
    torch.testing.assert_close(method.losses(batch).losses["cosent"], ranking(cosine(*z), batch["score"]))


def test_the_in_batch_term_of_angle_counts_positives_alone(tiny: Callable[..., Path]) -> None:
    method, batch = made(str(tiny("bert")), next(i for i, (s, _) in enumerate(CASES) if "cosent_weight" in s))
    batch["score"] = torch.tensor([0.2, 1.0, 0.7, 0.0])
    z = [normalize(v, dim=-1) for v in vectors_of(method, batch)]
    rows, texts = (
        torch.stack(z, 1).flatten(0, 1),
        torch.stack([batch[n]["hash"] for n in ("first", "second")], 1),
    )
    texts = texts.flatten()
    total = 0.0
    for row in (2, 3):  # the views of pair 1
        partner = row ^ 1
        others = [
            c for c in range(8) if c == partner or (c != row and texts[c] not in (texts[row], texts[partner]))
        ]
        logits = torch.stack([rows[row] @ rows[c] / 0.05 for c in others])
        total += float((torch.logsumexp(logits, 0) - rows[row] @ rows[partner] / 0.05).detach())
    assert method.losses(batch).losses["in_batch"].item() == pytest.approx(total / 8, rel=1e-4)


def test_views_are_in_the_order_of_their_numbers() -> None:
    batch = {
        "negative_10": 1,
        "negative_2": 1,
        "score_0": 1,
        "positive": 1,
        "rows": 1,
        "anchor": 1,
        "teacher1_1_anchor": 1,
    }
    assert view_names(batch) == ["anchor", "positive", "negative_2", "negative_10"]


def test_dims_of_a_step_are_drawn_from_seed_and_step() -> None:
    nested = Matryoshka((64, 32, 16, 8), (1.0, 2.0, 3.0, 4.0), dims_per_step=2)
    drawn = [nested.drawn(5, step) for step in range(200)]
    assert drawn == [nested.drawn(5, step) for step in range(200)]
    assert drawn != [nested.drawn(6, step) for step in range(200)]
    pairs = {64: 1.0, 32: 2.0, 16: 3.0, 8: 4.0}
    for one in drawn:
        assert len(set(one.dims)) == 2
        assert [pairs[d] for d in one.dims] == list(one.weights)
    assert {d for one in drawn for d in one.dims} == set(pairs)


@pytest.mark.parametrize(("nested", "says"), [
    (Matryoshka((32, 8), (1.0, -1.0)), "must be positive"),
    (Matryoshka((32, 8), (0.0, 1.0)), "must be positive"),
    (Matryoshka((1024, 8)), r"1024 exceeds width 64.*method\.matryoshka\.dims"),
    (Matryoshka((8, 8)), "each once"),
    (Matryoshka((0,)), "each once"),
    (Matryoshka((64, 8), (1.0,)), "1 for 2 dims"),
    (Matryoshka((64, 8), dims_per_step=3), "there are 2 dims"),
    (Matryoshka(None, (1.0,)), "there are no dims"),
])  # fmt: skip
def test_dims_that_cannot_be_are_refused(nested: Matryoshka, says: str) -> None:
    with pytest.raises(UserError, match=says):
        nested.check(64)
    assert Matryoshka((64, 8)).check(64) == []
    assert "not trained" in Matryoshka((16, 8)).check(64)[0]


def test_the_learned_scale_and_bias_do_not_decay(tiny: Callable[..., Path]) -> None:
    case = next(i for i, (settings, _) in enumerate(CASES) if settings.get("objective") == "sigmoid")
    method, _ = made(str(tiny("bert")), case)
    group = next(g for g in parameter_groups(method, 1e-3) if any(p is method.bias for p in g["params"]))
    assert group["weight_decay"] == 0.0
    assert {id(p) for p in group["params"]} == {id(method.bias), id(method.log_scale)}


@pytest.mark.parametrize("case", range(len(CASES)), ids=NAMES)
def test_numbers_of_other_sets_of_a_mix_change_nothing(case: int, tiny: Callable[..., Path]) -> None:
    method, batch = made(str(tiny("bert")), case)
    missing = {name: torch.full((ROWS,), float("nan")) for name in ("score", "score_0", "score_1", "score_2")}
    missing["label"] = torch.full((ROWS,), -1)
    with torch.no_grad():
        torch.testing.assert_close(
            method.total({**missing, **batch})[0], method.total(batch)[0], rtol=0, atol=0
        )


def test_every_parameter_has_a_gradient_in_the_steps_of_every_set(tiny: Callable[..., Path]) -> None:
    folder = str(tiny("bert"))
    _, rated = made(folder, next(i for i, (s, _) in enumerate(CASES) if s == {"objective": "cosent"}))
    _, pairs = made(folder, next(i for i, (s, _) in enumerate(CASES) if s.get("objective") == "sigmoid"))
    objectives = {"a": "cosent", "b": "sigmoid"}
    method = Supervised(encoder_of(folder), SupervisedConfig(), OptimizerConfig(), objectives=objectives)
    for batch in (rated | {"data_set": "a"}, pairs | {"data_set": "b"}):
        method.zero_grad()
        loss, _ = method.total(batch)
        loss.backward()
        assert all(p.grad is not None for p in method.trained())
        assert (method.bias.grad.abs() > 0) == (batch["data_set"] == "b")


@pytest.mark.parametrize("model_type", ["bert", "roberta"])
@pytest.mark.parametrize("positions", [16, 64])
def test_a_guide_of_another_width_tokenizer_or_length_reads_its_own_tokens(
    model_type: str, positions: int, tiny: Callable[..., Path]
) -> None:
    trained = encoder_of(str(tiny("bert", max_positions=64)))
    guide = encoder_of(str(tiny(model_type, width=16, max_positions=positions)))
    method = Supervised(trained, SupervisedConfig(objective="gist"), OptimizerConfig(), guide)
    fields = {role: (role, None) for role in ("anchor", "positive")}
    views = method.views(fields, 40)
    alike = model_type == "bert" and positions == 64
    assert views.keys() == {*fields, *(() if alike else ("teacher1_1_anchor", "teacher1_1_positive"))}
    text = "the cat sat on the mat and " * 12
    batch: dict[str, Any] = {"rows": torch.arange(3)}
    for place, (view, (_, tokenization)) in enumerate(views.items()):
        rows = tokenization.ids([text, text[place + 5 :], "a dog"])
        assert max(map(len, rows)) <= (40 if "teacher" not in view else min(40, positions))
        batch[view] = tokenization.pad(rows) | {"hash": torch.arange(3) + 3 * place}
    assert torch.isfinite(method.total(batch)[0])


@pytest.mark.parametrize("guide", ["/nowhere", "two words"])
def test_a_guide_that_is_not_there_is_named_by_its_key(
    guide: str, compose_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    run = compose_run("data=pairs", "method=supervised", "method.objective=gist", f"method.guide='{guide}'")
    with pytest.raises(UserError, match=rf"no such file or folder.*method\.guide={guide}"):
        Supervised.from_run(run)


def test_the_guide_is_frozen_and_no_part_of_the_checkpoint(tiny: Callable[..., Path]) -> None:
    case = next(i for i, (settings, _) in enumerate(CASES) if settings.get("objective") == "gist")
    method, batch = made(str(tiny("bert")), case)
    before = [p.clone() for p in method.teachers[0].encoder.parameters()]
    loss, _ = method.total(batch)
    loss.backward()
    assert not method.teachers[0].encoder.training
    assert all(
        p.grad is None and torch.equal(p, q)
        for p, q in zip(method.teachers[0].encoder.parameters(), before, strict=True)
    )
    assert not any("teacher" in name for name in method.state_dict())


INFO = BackboneInfo("encoder", 2, 64, 64, True, 0.1, "bert", False)


@pytest.mark.parametrize("objective", TAKES)
@pytest.mark.parametrize("kind", ["pairs", "triplets", "scored", "labelled", "nli", "parallel"])
def test_an_objective_takes_the_data_that_has_what_it_compares(objective: str, kind: str) -> None:
    guide = {"guide": "mini"} if objective == "gist" else {}
    config = method_config({"name": "supervised", "objective": objective, **guide})
    run = run_of()
    run.data = data_config({"name": kind, "files": "x", **({"scores": True} if kind == "triplets" else {})})
    if kind in TAKES[objective]:
        config.check(INFO, run)
        assert set(OBJECTIVES) == set(TAKES)
    else:
        with pytest.raises(
            UserError, match=rf"objective={objective}: data={kind} has no .*data={TAKES[objective][0]}"
        ) as caught:
            config.check(INFO, run)
        named = str(caught.value.fix).partition(", or data=")[0]
        readers = [one for one in TAKES if kind in TAKES[one]]
        assert named == f"method.objective={' or '.join(readers)}", "what this data can train is said first"


@pytest.mark.parametrize(("settings", "says"), [
    ({"objective": "gist"}, "objective=gist: needs method.guide"),
    ({"objective": "cosent"}, "objective=cosent: data=triplets has no score"),
    ({"objective": "kl"}, "data.scores=true"),
    ({"hard_negative_weight": 1.0, "hardness": "hard"}, r"method\.hard_negative_weight"),
    ({"scale": 0.0}, r"method\.scale"),
    ({"temperature": 0.0}, r"method\.temperature"), ({"score_scale": 0.0}, r"method\.score_scale"),
    ({"objective": "angle", "angle_weight": -0.1}, r"method\.angle_weight"),
    ({"objective": "angle", "angle_weight": 0.0, "in_batch_weight": 0.0}, "have the weight 0"),
    ({"tau": -1.0}, r"method\.tau"),
])  # fmt: skip
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], says: str) -> None:
    run = run_of()
    run.data = data_config({"name": "triplets", "files": "x"})
    with pytest.raises(UserError, match=says):
        method_config({"name": "supervised", **settings}).check(INFO, run)


OTHER = {
    "tau": 0.3, "mask_duplicates": False, "gather_negatives": False,
    "hard_negative_weight": 0.5, "directions": "joint", "hardness": "hard", "hardness_strength": 2.0,
    "guide": "mini", "cached": True, "margin": 0.1, "margin_kind": "relative", "anchors": False, "positives": False,
    "cosent_weight": 1.0, "in_batch_weight": 0.5, "angle_weight": 1.0, "positive_from": 0.5,
    "score_scale": 20.0, "add_in_batch": True, "scale": 10.0, "temperature": 2.0,
}  # fmt: skip
ELSEWHERE = ("gather_negatives", "guide", "cached")
"""Keys that the loss of one device does not show."""
ROLES = {
    "pairs": ("anchor", "positive"), "triplets": ("anchor", "positive", "negative_1", "negative_2"),
    "scored": ("first", "second", "score"), "labelled": ("text", "label"),
}  # fmt: skip
SCORES = ("score_0", "score_1", "score_2")
BASES: list[tuple[str, dict[str, Any]]] = [
    ("triplets", {}), ("triplets", {"hardness": "all"}), ("triplets", {"directions": "joint"}), ("pairs", {}),
    ("scored", {"objective": "cosent"}), ("scored", {"objective": "angle"}), ("triplets", {"objective": "angle"}),
    ("scored", {"objective": "angle", "in_batch_weight": 0.0}), ("scored", {"objective": "angle", "angle_weight": 0.0}),
    ("triplets", {"objective": "gist"}), ("triplets", {"objective": "gist", "margin": 0.2}),
    ("labelled", {"objective": "multi_positive"}), ("pairs", {"objective": "multi_positive"}),
    ("pairs", {"objective": "sigmoid"}), ("triplets", {"objective": "margin_mse"}),
    ("triplets", {"objective": "margin_mse", "add_in_batch": True}), ("triplets", {"objective": "kl"}),
    ("triplets", {"objective": "kl", "add_in_batch": True}),
]  # fmt: skip


def data_of(kind: str, objective: str) -> dict[str, Any]:
    return {"name": kind, "files": "x"} | ({"scores": True} if objective in ("margin_mse", "kl") else {})


@pytest.mark.parametrize(("kind", "settings"), BASES, ids=str)
def test_a_key_is_refused_where_it_changes_nothing(
    kind: str, settings: dict[str, Any], tiny: Callable[..., Path]
) -> None:
    assert OTHER.keys() == READS.keys()
    assert {settings.get("objective", "in_batch") for _, settings in BASES} == TAKES.keys()
    objective = settings.get("objective", "in_batch")
    needed = {"guide": "mini"} if objective == "gist" else {}
    run = run_of()
    run.data = data_config(data_of(kind, objective))
    method, batch = built(
        str(tiny("bert")), settings, ROLES[kind] + (SCORES if objective in ("margin_mse", "kl") else ())
    )
    texts = view_names(batch)
    vectors = torch.randn(len(texts) * ROWS, 8, generator=torch.Generator().manual_seed(1))
    method.teachers = [lambda batch, names: vectors]  # whose cosines are far from each other
    batch[texts[:2][-1]]["hash"][1] = batch[texts[0]]["hash"][0]  # the text of row 0 comes again
    with torch.no_grad():
        plain = method.total(batch)[0]
        for key, value in OTHER.items():
            if key in settings or key in needed:
                continue
            config = SupervisedConfig(**(settings | needed | {key: value}))
            method._configs = {objective: config.of(None)}
            changes = not torch.allclose(method.total(batch)[0], plain, rtol=1e-6)
            if key in ELSEWHERE:
                changes = config._reads(key, objective, run.data)
            if changes:
                config.check(INFO, run)
                continue
            says = rf"(does not read it|for the plain in-batch).* \(method\.{key}={value}\)\. Fix: \S"
            with pytest.raises(UserError, match=says):
                config.check(INFO, run)


@pytest.mark.parametrize(
    ("kind", "settings", "line"),
    [
        ("scored", {"objective": "cosent", "tau": 0.1},
         "objective=cosent does not read it (method.tau=0.1). Fix: method.tau=null, or method.objective=in_batch or "
         "gist or multi_positive or angle or margin_mse or kl"),
        ("pairs", {"hardness_strength": 2.0},
         "objective=in_batch does not read it without method.hardness (method.hardness_strength=2.0). Fix: "
         "method.hardness_strength=9.0, or method.hardness"),
        ("pairs", {"hard_negative_weight": 1.0},
         "objective=in_batch does not read it without data=triplets or nli (method.hard_negative_weight=1.0). Fix: "
         "method.hard_negative_weight=0.0, or data=triplets or nli"),
        ("pairs", {"hardness": "hard"},
         "objective=in_batch does not read it without data=triplets or nli (method.hardness=hard). Fix: "
         "method.hardness=null, or data=triplets or nli"),
    ],
)  # fmt: skip
def test_who_reads_a_key_is_said(kind: str, settings: dict[str, Any], line: str) -> None:
    run = run_of()
    run.data = data_config(data_of(kind, ""))
    with pytest.raises(UserError) as refused:
        SupervisedConfig(**settings).check(INFO, run)
    assert str(refused.value) == line


@pytest.mark.parametrize("key", READS)
def test_of_a_mix_one_set_that_reads_a_key_is_enough(key: str) -> None:
    for objective in TAKES:
        sets = {"own": data_of(TAKES[objective][-1], objective) | {"objective": objective}}
        sets["more"] = data_of("labelled", "") | {"objective": "multi_positive"}
        guide = {"guide": "mini"} if objective == "gist" else {}
        config = SupervisedConfig(**guide | {key: OTHER[key]})
        run = run_of()
        run.data = data_config({"mix": sets})
        alone = [config._reads(key, name, one.config) for name, one in zip((objective, "multi_positive"),
                 run.data.sets.values(), strict=True)]  # fmt: skip
        if any(alone) or (key, objective) == ("guide", "gist"):
            config.check(INFO, run)
        else:
            with pytest.raises(
                UserError, match=rf"{objective} or multi_positive does not read it|multi_positive does"
            ):
                config.check(INFO, run)


def test_the_angle_alone_is_warned_of() -> None:
    run = run_of()
    run.data = data_config({"name": "scored", "files": "x"})
    assert SupervisedConfig(objective="angle").check(INFO, run) == []
    (warning,) = SupervisedConfig(objective="angle", in_batch_weight=0.0).check(INFO, run)
    assert "opposite vectors" in warning


def test_what_a_captured_step_cannot_compute_is_said() -> None:
    mix = {
        "mix": {
            "a": {"name": "pairs", "files": "x"},
            "b": {"name": "scored", "files": "y", "objective": "cosent"},
        }
    }
    config = SupervisedConfig()
    assert config.why_not_captured(data_config({"name": "pairs", "files": "x"})) is None
    assert "others" in str(config.why_not_captured(data_config(mix)))
    # One that all sets have and the method has not: a captured step does not know of which set its batch is.
    mix["mix"]["a"] = {"name": "scored", "files": "x", "objective": "cosent"}
    assert "others" in str(config.why_not_captured(data_config(mix)))
    assert SupervisedConfig(objective="cosent").why_not_captured(data_config(mix)) is None
    drawn = SupervisedConfig(matryoshka=Matryoshka((8, 4), dims_per_step=1))
    assert "dims_per_step" in str(drawn.why_not_captured(data_config({"name": "pairs", "files": "x"})))


def test_golden_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_golden("supervised", tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "name", [n for n in part_names("methods") if hasattr(method_config({"name": n}), "matryoshka")]
)
def test_a_method_has_matryoshka_or_refuses_it(name: str) -> None:
    values = {"name": name, "matryoshka": {"dims": [64, 8]}}
    config = method_config(values)
    assert config.matryoshka.dims == (64, 8)
    assert config.nests
    if not hasattr(config, "vicreg_weights"):
        return
    with pytest.raises(UserError, match=r"whole vectors alone.*method\.matryoshka\.dims"):
        ContrastConfig.check(method_config({**values, "loss": "vicreg"}), INFO, run_of())


def test_the_alignment_of_translations_is_nested_too() -> None:
    draw = torch.Generator().manual_seed(0)
    sides = [tuple(torch.randn(4, 8, generator=draw) for _ in range(2)) for _ in range(2)]
    hashes = (torch.arange(4), torch.arange(4, 8))

    def loss(width: int, **more: Any) -> torch.Tensor:
        cut = [tuple(v[:, :width] for v in side) for side in sides]
        return align(Vectors(cut[0], cut[0], cut[1], hashes), AlignmentConfig("bepa", **more))[0]

    nested = loss(8, matryoshka=Matryoshka((8, 4), (1.0, 0.5)))
    torch.testing.assert_close(nested, loss(8) + 0.5 * loss(4))
