"""Every backbone x method x pooling is a sound run or is refused with a reason, at once and without weights."""

from __future__ import annotations

import itertools
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from embedlab.cli.compose import compose
from embedlab.errors import UserError
from embedlab.files import assets_dir, conf_dir
from embedlab.methods import method_class
from embedlab.run.check import check_run
from embedlab.run.parse import parse_run

DATA_OF = {
    "masked_lm": ("wikipedia", 128),
    "mntp": ("wikipedia", 128),
    "causal_lm": ("wikipedia", 128),
    "bepa": ("parallel", None),
}
DATA_OF["bepa_official"] = DATA_OF["sncse"] = DATA_OF["bepa"]
TEMPLATE_OF_POOLING = {"mask": "promptbert_bert", "rep1": "eol_sum", "rep2": "eol_sum"}
TEMPLATE_OF_POOLING |= {"rep_mean": "eol_sum", "rep_concat": "eol_sum"}


def group(name: str) -> dict[str, dict[str, Any]]:
    """The choices of a group, as Hydra composes them."""
    found = {}
    for path in sorted((conf_dir() / name).glob("*.yaml")):
        if name == "backbone" and path.stem in ("local", "hub", "fresh"):
            continue  # they need a path, or an architecture
        values = compose("train", [f"{name}={path.stem}", "data.files=text.txt"])
        found[path.stem] = values[name]
    return found


@pytest.fixture(scope="module")
def groups() -> dict[str, dict[str, dict[str, Any]]]:
    return {name: group(name) for name in ("backbone", "method", "pooling", "template", "data")}


@pytest.fixture(scope="module")
def base() -> dict[str, Any]:
    return compose("train", ["data.files=text.txt", "trainer=cpu"])


def test_every_combination_is_accepted_or_refused_with_a_reason(groups, base) -> None:  # type: ignore[no-untyped-def]
    for method in groups["method"].values():
        method_class(method["name"])  # imported once, not timed
    accepted, slowest = 0, 0.0
    reasons: list[tuple[str, UserError]] = []
    backbones = dict(groups["backbone"])
    if not (assets_dir() / "mini" / "config.json").is_file():
        del backbones["mini"]
    for (backbone, b), (method, m), (pooling, p) in itertools.product(
        backbones.items(), groups["method"].items(), groups["pooling"].items()
    ):
        data, pack = DATA_OF.get(method, ("wikipedia", None))
        template = groups["template"][TEMPLATE_OF_POOLING.get(p["name"], "none")]
        values = {**base, "backbone": b, "method": m, "pooling": p, "template": template}
        values["data"] = {**groups["data"][data], "files": "text.txt", "pack": pack}
        began = time.process_time()
        try:
            warnings = check_run(parse_run(values))
            assert all(isinstance(line, str) for line in warnings)
            assert all(line for line in warnings)
            accepted += 1
        except UserError as reason:
            reasons.append((f"{backbone} x {method} x {pooling}", reason))
        spent = time.process_time() - began
        if spent > 1.0:  # an import, or a machine that was taken away: once more
            began = time.process_time()
            with suppress(UserError):
                check_run(parse_run(values))
            spent = time.process_time() - began
        slowest = max(slowest, spent)
    assert accepted > 100
    assert len(reasons) > 100
    for where, reason in reasons:
        assert reason.key, f"{where}: {reason}"
        assert "\n" not in str(reason), where
    assert slowest < 1.0


def test_the_papers_own_combinations_are_sound(groups, base) -> None:  # type: ignore[no-untyped-def]
    own = [("bert-base", "simcse", "cls", "none"), ("roberta-base", "simcse", "cls", "none"),
           ("bert-base", "simcse", "s2_paper", "none"), ("bert-base", "promptbert", "mask", "promptbert_bert"),
           ("llama2", "csesfp", "rep2", "eol_sum"), ("xlm-roberta", "masked_lm", "cls", "none"),
           ("xlm-roberta", "bepa", "cls", "none")]  # fmt: skip
    for backbone, method, pooling, template in own:
        data, pack = DATA_OF.get(method, ("wikipedia", None))
        values = {**base, "backbone": groups["backbone"][backbone], "method": groups["method"][method]}
        values |= {"pooling": groups["pooling"][pooling], "template": groups["template"][template]}
        values["data"] = {**groups["data"][data], "files": "text.txt", "pack": pack}
        check_run(parse_run(values))


@pytest.mark.parametrize("path", sorted((conf_dir() / "experiment").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_experiment_composes(path: Path) -> None:
    asked = {"jtcse_bert_sick": ["sick=text.txt"], "edfse_like_bert": ["rtt=tables"]}.get(path.stem, [])
    composed = compose("train", [f"experiment={path.stem}", "data.files=text.txt", *asked])
    for stage in composed.pop("stages").values():
        section, _, key = stage["result"].partition(".")
        if key in composed.get(section, {}):
            composed[section][key] = "what/the/stage/made"
    del composed["stages_dir"]
    parse_run(composed)


@pytest.mark.parametrize(
    "name", ["method", "pooling", "optimizer", "trainer", "logger", "callbacks", "evaluation"]
)
def test_yaml_defaults_are_those_of_the_dataclass(name: str) -> None:
    """A key whose default stands twice must not differ by where the configuration came from."""
    from dataclasses import MISSING, fields

    from embedlab.config import trainer as settings
    from embedlab.engine import optimizer
    from embedlab.pooling import pooling_class

    classes: dict[str, Any] = {
        "optimizer": optimizer.OptimizerConfig,
        "trainer": settings.TrainerConfig,
        "logger": settings.LoggerConfig,
        "callbacks": settings.CallbacksConfig,
        "evaluation": settings.ScoringConfig,
    }
    first = {"trainer": "auto", "logger": "csv"}
    for path in sorted((conf_dir() / name).glob("*.yaml")):
        values = yaml.safe_load(path.read_text())
        if name in first and path.stem != first[name]:
            continue
        if name in ("method", "pooling"):
            if path.stem != values.get("name"):
                continue  # a preset
            found = method_class if name == "method" else pooling_class
            cls = found(values["name"]).config_class
        else:
            cls = classes[name]
        known = {f.name: f.default for f in fields(cls) if f.default is not MISSING}
        for key, value in values.items():
            if key in known and not isinstance(value, (dict, list)):
                given = float(value) if isinstance(known[key], float) and value is not None else value
                assert given == known[key], f"{path.name}: {key}={value}, dataclass has {known[key]}"
