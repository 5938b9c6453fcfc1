"""What each method says of itself, on which checks, strategies and steps rely."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from embedlab.config.run import RunConfig
from embedlab.config.template import Template
from embedlab.errors import UserError
from embedlab.methods import method_config
from embedlab.parts import part_names
from embedlab.run.run import build
from tests.methods.baselines import Tiny, encoder
from tests.methods.runs import run_of

BASELINES = ("rankcse", "esimcse", "mixcse", "diffcse", "infocse", "whitenedcse", "pcl")
CONTRASTS = (
    *("simcse", "supervised", "promptbert", "csesfp", "prompteol", "jtcse", "tncse", "bepa", "distil"),
    *BASELINES,
)
OWN = ("pairs", "triplets", "nli", "parallel", "scored", "labelled")
SINGLE = ("csesfp", "prompteol", "jtcse", "tncse", "distil", "masked_lm", "causal_lm", "mntp", *BASELINES)
"""Trained on single sentences or running text alone."""
FACTS: dict[str, dict[str, Any]] = {
    "kinds": {
        **dict.fromkeys(SINGLE, ("wikipedia",)),
        **dict.fromkeys(("bepa", "sncse"), ("parallel",)),
        "supervised": OWN,
    },
    "backbone_kind": {
        **dict.fromkeys(("bepa", "jtcse", "tncse", "masked_lm", "diffcse", "infocse", "mntp"), "encoder"),
        **dict.fromkeys(("csesfp", "prompteol", "causal_lm"), "decoder"),
    },
    "can_unpad": dict.fromkeys(
        (
            *(
                "simcse",
                "supervised",
                "promptbert",
                "jtcse",
                "tncse",
                "bepa",
                "masked_lm",
                "csesfp",
                "prompteol",
            ),
            *("sncse", *BASELINES),
        ),
        True,
    ),
    # BERT's and GPT's releases leave norms and biases out.
    "decays_norms_and_biases": dict.fromkeys(("masked_lm", "causal_lm", "mntp"), False),
    "towers": dict.fromkeys(("jtcse", "tncse", "ensemble", "metaeol"), 2),
    # Only what calls its backbone as a whole.
    "shardable": dict.fromkeys(
        (
            "bepa",
            "jtcse",
            "tncse",
            "masked_lm",
            "causal_lm",
            "distil",
            "ensemble",
            "rankcse",
            "esimcse",
            "pcl",
            "diffcse",
            "infocse",
            "whitening",
            "mntp",
            "metaeol",
        ),
        False,
    ),
    "needs_others": dict.fromkeys((*CONTRASTS, "sncse"), True),
    "pools": dict.fromkeys(("masked_lm", "causal_lm", "mntp"), False),
    "idle": dict.fromkeys(("ensemble", "whitening", "metaeol"), True),
}
USUAL = {
    "kinds": ("wikipedia", "nli", "parallel"),
    "backbone_kind": None,
    "can_unpad": False,
    "decays_norms_and_biases": True,
    "towers": 1,
    "shardable": True,
    "needs_others": False,
    "pools": True,
    "idle": False,
}


@pytest.mark.parametrize("fact", FACTS)
def test_each_method_says_what_it_needs(fact: str) -> None:
    names = part_names("methods")
    assert set(FACTS[fact]) <= set(names)
    said = {name: getattr(method_config({"name": name}), fact) for name in names}
    assert said == {name: FACTS[fact].get(name, USUAL[fact]) for name in names}


@pytest.mark.parametrize(
    ("name", "change", "wanted"),
    [
        ("simcse", {}, True),
        ("rankcse", {"teacher": "mini"}, True),
        ("mixcse", {}, True),
        ("diffcse", {}, True),
        ("infocse", {}, True),
        ("esimcse", {"rate": 0.0}, True),
        ("esimcse", {}, False),
        ("pcl", {}, True),
        ("whitenedcse", {"groups": 8}, False),
        ("whitenedcse", {"groups": 32}, True),
        ("sncse", {}, True),
        ("sncse", {"second_template": Template("{sentence} is {mask}.")}, False),
    ],
)
def test_two_passes_over_one_text_need_dropout(
    tiny: Tiny, name: str, change: dict[str, Any], wanted: bool
) -> None:
    kind = {"sncse": ("parallel", "mask", Template("{sentence}: {mask}"))}.get(
        name, ("wikipedia", "cls", None)
    )
    run = run_of(*kind, max_length=32)
    run.adapter, run.backbone.source, run.backbone.name = SimpleNamespace(r=None), "local", "x"
    info, config = encoder(tiny).backbone.info, method_config({"name": name, **change})
    config.check(replace(info, dropout=0.1), run)
    config.check(replace(info, dropout=0.0, adapter_dropout=0.05), run)
    if not wanted:
        config.check(replace(info, dropout=0.0), run)
        return
    with pytest.raises(UserError, match=rf"method={name} differ by dropout alone.*backbone\.dropout=0\.1"):
        config.check(replace(info, dropout=0.0), run)


@pytest.mark.parametrize(
    ("change", "needs"), [({"lam": 0.0}, False), ({"loss": "mse"}, False), ({"lam": 0.5}, True)]
)
def test_bepa_needs_others_for_its_contrast(change: dict[str, Any], needs: bool) -> None:
    assert method_config({"name": "bepa", **change}).needs_others is needs


@pytest.mark.parametrize(
    ("name", "change", "nests"),
    [
        ("bepa", {"lam": 0.0}, False),
        ("bepa", {"loss": "mse"}, False),
        ("bepa", {}, True),
        ("distil", {"k1": None, "similarity": 5.0, "teacher": "x"}, False),
        ("distil", {"teacher": "x"}, True),
    ],
)
def test_dims_that_no_term_of_a_loss_has_are_refused(
    tiny: Tiny, name: str, change: dict[str, Any], nests: bool
) -> None:
    run, info = (
        run_of("parallel" if name == "bepa" else "wikipedia", max_length=32),
        encoder(tiny).backbone.info,
    )
    config = method_config({"name": name, "matryoshka": {"dims": [info.width, 8]}, **change})
    if nests:
        config.check(info, run)
        return
    with pytest.raises(UserError, match=r"whole vectors alone.*method\.matryoshka\.dims"):
        config.check(info, run)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("bert", ("method=masked_lm", "data.pack=16", "data.max_length=null")),
        ("llama", ("method=causal_lm", "data.pack=16", "data.max_length=null")),
        ("gpt2", ("method=mntp", "backbone.bidirectional=true", "data.pack=16", "data.max_length=null")),
        ("bert", ("method=bepa", "method.lam=0", "data=parallel", "data.max_length=32")),
    ],
)
def test_a_loss_without_sentence_vectors_trains_no_pooling(
    compose_run: Callable[..., RunConfig], tmp_path: Path, model_type: str, settings: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """A weight that has no gradient stops the other processes of a run; that it stays as drawn is said."""
    build(compose_run(*settings, "pooling=mean", model_type=model_type), tmp_path)
    assert "as they were drawn" not in caplog.text
    method, _ = build(
        compose_run(*settings, "pooling=scalar_mix", "pooling.n=2", model_type=model_type), tmp_path
    )
    assert f"pooling=scalar_mix has weights, which method={method.name} as it is set" in caplog.text
    ids = torch.randint(8, 100, (4, 16), generator=torch.Generator().manual_seed(0))
    view = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "hash": torch.arange(4)}
    loss, _ = method.total(dict.fromkeys(("sentence", "source", "target"), view))
    loss.backward()
    trained = {name for name, p in method.named_parameters() if p.requires_grad}
    assert trained == {name for name, p in method.named_parameters() if p.grad is not None}
    assert not any("pooling" in name for name in trained)


TAUGHT = {"teacher": "runs/a"}
RELEASED, LISTNET = {"form": "released"}, {"ranking": "listnet"}
UNREAD: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("rankcse", TAUGHT, {"teacher2": "runs/b"}, {"alpha": 0.5}),
    ("rankcse", TAUGHT, LISTNET, {"tau3": 0.1}),
    ("rankcse", TAUGHT | RELEASED, {"form": "paper"} | LISTNET, {"tau3": 0.1, "beta": 0.5}),
    ("rankcse", TAUGHT | RELEASED, LISTNET, {"tau2": 0.1}),
    ("rankcse", TAUGHT | RELEASED | LISTNET, {"form": "paper"}, {"self_in_list": False}),
    ("rankcse", TAUGHT | RELEASED | LISTNET, {"ranking": "listmle"}, {"self_in_list": False}),
    ("distil", TAUGHT | {"k1": None, "similarity": 1.0}, {"kl": 0.5}, {"tau": 0.1}),
    ("distil", TAUGHT | {"k1": None, "cosine": 1.0}, {"k1": 0.1}, {"tau": 0.1}),
    ("pcl", {"augmentations": ("shuffle", "none")}, {"augmentations": ("delete",)}, {"share": 0.4}),
    ("pcl", {"augmentations": ("reverse",)}, {"augmentations": ("repeat", "shuffle")}, {"share": 0.4}),
    *(("bepa", {"target": target}, {"target": "ema"}, {"ema": 0.9}) for target in ("shared", "stopgrad")),
    *(
        ("bepa", {"loss": loss}, {"loss": "sigreg"}, {"sigreg_weight": 1.0, "sigreg_slices": 8})
        for loss in ("infonce", "cosine", "vicreg")
    ),
]
"""Method, settings with which nothing reads the last ones, and what of them has to be otherwise for that."""


@pytest.mark.parametrize(("method", "settings", "otherwise", "unread"), UNREAD)
def test_a_key_that_changes_nothing_is_refused(
    tiny: Tiny, method: str, settings: dict[str, Any], otherwise: dict[str, Any], unread: dict[str, Any]
) -> None:
    info, run = (
        encoder(tiny).backbone.info,
        run_of("parallel" if method == "bepa" else "wikipedia", max_length=32),
    )

    def check(**given: Any) -> None:
        method_config({"name": method} | given).check(info, run)

    check(**settings)
    for key, value in unread.items():
        with pytest.raises(UserError, match=rf"\(method\.{key}={value}\)\. Fix: method\.{key}=.*, or "):
            check(**settings, **{key: value})
        check(**settings | otherwise, **{key: value})
