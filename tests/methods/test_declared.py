"""What each method says of itself, on which checks, strategies and steps rely."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from embedlab.config.template import Template
from embedlab.errors import UserError
from embedlab.methods import method_config
from embedlab.parts import part_names
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
