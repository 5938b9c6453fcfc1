"""Every trial of S2Sent's and PromptBERT's experiments composes and is a sound run; none of them loads a weight."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from embedlab import files as _paths
from embedlab.cli.compose import plain
from embedlab.config.run import RunConfig
from embedlab.run.check import backbone_info, check_run
from embedlab.run.parse import parse_run

SWEEPS = {
    "s2sent_table2": 9 * 7,
    "s2sent_table2_prompt": 14 * 7,
    "s2sent_table2_prompt_roberta": 14 * 7,
    "s2sent_table3": 6 * 7,
    "s2sent_table4": 2 * 7,
    "s2sent_fig5": 5 * 7,
    "s2sent_fig6": 25,
    "s2sent_fig7": 8,
    "s2sent_fig8": 6,
    "s2sent_fig6_prompt": 25,
    "s2sent_fig6_prompt_roberta": 25,
    "s2sent_fig7_prompt": 8,
    "s2sent_fig7_prompt_roberta": 8,
    "s2sent_controls": 9 * 3,
}


@pytest.fixture(scope="module", autouse=True)
def conf() -> Iterator[None]:
    with initialize_config_dir(str(_paths.conf_dir()), version_base="1.3"):
        yield


@cache
def trials(experiment: str, *arguments: str) -> tuple[tuple[str, ...], ...]:
    """The overrides of each job that `embedlab train -m experiment=... arguments` runs."""
    swept = [f"{k}={v}" for k, v in composed(experiment).hydra.sweeper.params.items()]
    parsed = OverridesParser.create().parse_overrides([*swept, *arguments])
    (batch,) = BasicSweeper.split_arguments(parsed, None)
    return tuple(tuple(job) for job in batch)


@cache
def composed(experiment: str, *groups: str) -> Any:
    arguments = [f"experiment={experiment}", "trainer=cpu", *groups]
    return compose("train", arguments, return_hydra_config=True)


@cache
def run(experiment: str, *overrides: str) -> RunConfig:
    """Composed once for the choices of groups; values are set in the result, which is much faster."""
    groups = [o for o in overrides if o.partition("=")[0] in ("pooling", "backbone")]
    config = composed(experiment, *groups).copy()
    OmegaConf.set_struct(config, False)
    del config.hydra
    for override in overrides:
        key, _, value = override.partition("=")
        if override not in groups:
            OmegaConf.update(config, key, yaml.safe_load(value))
    return parse_run(plain(config))


@pytest.mark.parametrize("experiment", SWEEPS)
def test_every_trial_is_a_sound_run(experiment: str) -> None:
    assert len(trials(experiment)) == SWEEPS[experiment]
    for job in trials(experiment, "seed=3"):
        config = run(experiment, *job)
        check_run(config)
        assert config.seed == 3
        assert config.method.tau == 0.05
        assert (config.data.max_length, config.optimizer.schedule, config.evaluation.every) == (
            32,
            "linear",
            125,
        )


def arms(experiment: str, *keys: str) -> dict[str, tuple[Any, ...]]:
    found = {}
    for job in trials(experiment, "seed=3"):
        config = run(experiment, *job)
        name = next(o.partition("=")[2] for o in job if o.startswith("arm="))
        found[name] = tuple(
            getattr(config.method if hasattr(config.method, key) else config.pooling, key) for key in keys
        )
    return found


def test_table_2_has_its_rows() -> None:
    assert arms("s2sent_table2", "n", "kind", "pool", "mlp", "m", "r") == {
        "base": (1, "none", "cls", "train", 4, 12),
        "last1_mean": (1, "none", "mean", "none", 4, 12),
        "last1_s2": (1, "last1d", "mean", "none", 4, 12),
        "last3_avg": (3, "none", "mean", "none", 4, 12),
        "last3_avg_s2": (3, "avg1d", "mean", "none", 4, 12),
        "last3_stack_s2": (3, "stack2d", "mean", "none", 4, 12),
        "last6_avg": (6, "none", "mean", "none", 4, 12),
        "last6_avg_s2": (6, "avg1d", "mean", "none", 4, 12),
        "last6_stack_s2": (6, "stack2d", "mean", "none", 4, 12),
    }


def test_the_prompt_columns_of_table_2_have_its_rows_at_the_mask_and_the_gated_ones_at_the_mean_too() -> None:
    found = arms("s2sent_table2_prompt", "n", "kind", "pool", "denoise", "squeeze", "m")
    rows = {
        "last1_s2": (1, "last1d"),
        "last3_avg": (3, "none"),
        "last3_avg_s2": (3, "avg1d"),
        "last3_stack_s2": (3, "stack2d"),
        "last6_avg": (6, "none"),
        "last6_avg_s2": (6, "avg1d"),
        "last6_stack_s2": (6, "stack2d"),
    }
    expected = {f"{name}_mask": (*row, "mask", True, "dct", 4) for name, row in rows.items()}
    expected |= {
        f"{name}_mean": (*row, "mean", False, "dct", 4) for name, row in rows.items() if "s2" in name
    }
    expected["base"] = (1, "none", "mask", True, "dct", 4)
    expected["last3_stack_s2_mean_denoised"] = (3, "stack2d", "mean", True, "dct", 4)
    assert found == expected


def test_robertas_prompt_columns_have_its_templates_and_the_same_arms() -> None:
    config, bert = (run(f"s2sent_table2_prompt{end}", "arm=low8_mask") for end in ("_roberta", ""))
    assert backbone_info(config).model_type == "roberta"
    assert config.template == run("promptbert_roberta_unsup").template != bert.template
    assert config.method.second_template == run("promptbert_roberta_unsup").method.second_template
    assert config.pooling == bert.pooling
    assert trials("s2sent_table2_prompt_roberta") == trials("s2sent_table2_prompt")


def test_figure_5_on_promptbert_differs_from_it_in_the_read_out_alone() -> None:
    names = {"no_fs": "no_fs_mask", "gap": "gap_mask", "low4": "last3_stack_s2_mask", "low8": "low8_mask"}
    for of_simcse, of_prompt in names.items():
        pooling = run("s2sent_table2_prompt", f"arm={of_prompt}").pooling
        assert pooling.pool == "mask"
        assert replace(pooling, pool="mean") == run("s2sent_fig5", f"arm={of_simcse}").pooling


@pytest.mark.parametrize(
    ("experiment", "suites"), [("s2sent_table4", ["sts", "transfer"]), ("s2sent_fig8", ["sts", "geometry"])]
)
def test_what_a_table_or_figure_needs_is_scored_by_its_runs(experiment: str, suites: list[str]) -> None:
    assert list(run(experiment).evaluation.final) == suites


def test_table_3_pairs_each_read_out_with_both_divisors() -> None:
    found = arms("s2sent_table3", "pool", "block_norm", "mlp")
    assert found["cls_s2_global_exp"] == ("cls", "global_exp", "train")
    assert found["cls_s2"] == ("cls", "softmax", "train")
    assert found["mean_s2_global_exp"] == ("mean", "global_exp", "none")
    warnings = check_run(run("s2sent_table3", "arm=cls_s2"))
    assert any("table 3" in w for w in warnings)


def test_figure_5_varies_what_the_gate_sees() -> None:
    found = arms("s2sent_fig5", "kind", "squeeze", "m")
    assert [found[a] for a in ("no_fs", "gap", "low4", "low8")] == [
        ("stack2d", "none", 4),
        ("stack2d", "gap", 1),
        ("stack2d", "dct", 4),
        ("stack2d", "dct", 8),
    ]


def test_figure_6_takes_other_values_from_the_command_line() -> None:
    jobs = trials("s2sent_fig6", "pooling.n=1,3,6", "pooling.m=1,4", "backbone=mini")
    assert len(jobs) == 6
    assert {tuple(j[:2]) for j in jobs} == {
        (f"pooling.n={n}", f"pooling.m={m}") for n, m in itertools.product((1, 3, 6), (1, 4))
    }
    assert run("s2sent_fig6", "pooling.n=1").pooling.kind == "last1d"


def test_the_controls_are_the_poolings_named() -> None:
    names = [run("s2sent_controls", *job).pooling for job in trials("s2sent_controls", "seed=3")]
    assert [p.name for p in names] == ["mean", "last_n", "scalar_mix", "feature_mix", *["s2sent"] * 5]
    assert [(p.gate, p.squeeze, p.kind) for p in names[4:8]] == [
        ("frozen", "dct", "stack2d"),
        ("learned", "none", "stack2d"),
        ("learned", "dct", "avg1d"),
        ("learned", "dct", "stack2d"),
    ]


@pytest.mark.parametrize(
    ("experiment", "model_type", "second"),
    [
        ("promptbert_bert_unsup", "bert", 'This sentence : "{sentence}" means {mask}.'),
        ("promptbert_roberta_unsup", "roberta", "The sentence : ' {sentence} ' means{mask}."),
    ],
)
def test_promptberts_recipe(experiment: str, model_type: str, second: str) -> None:
    config = run(experiment)
    assert check_run(config) == []
    assert backbone_info(config).model_type == model_type
    assert config.method.second_template.text == second
    assert (config.method.denoise, config.method.denoise_dev, config.method.mlp) == (True, True, "train")
    assert (config.data.batch_size, config.optimizer.lr, config.pooling.name) == (256, 1e-5, "mask")


@pytest.mark.parametrize("experiment", ["s2sent_table2", "s2sent_fig6", "promptbert_bert_unsup"])
def test_every_experiment_takes_another_backbone(experiment: str) -> None:
    check_run(run(experiment, "backbone=distilbert"))
