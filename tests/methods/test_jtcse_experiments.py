"""The experiments of JTCSE and TNCSE: the published recipes, stage by stage."""

from __future__ import annotations

from typing import Any

import pytest

from embedlab.cli.compose import compose
from embedlab.config.run import RunConfig
from embedlab.run.parse import parse_run
from embedlab.run.stages import Stage

RECIPES = {
    "jtcse_bert": ("jtcse", 1.3e-6, 64, None, (1.5e-5, 2e-5)),
    "jtcse_roberta": ("jtcse", 1e-6, 256, None, (1.5e-5, 1.25e-5)),
    "tncse_bert": ("tncse", 1e-6, 64, 0.00025, (1.5e-5, 2e-5)),
    "tncse_roberta": ("tncse", 1e-6, 256, 0.0175, (1.5e-5, 1.25e-5)),
}


def parts(experiment: str, *overrides: str) -> dict[str, RunConfig]:
    """The main run and its stages, by name."""
    values = compose("train", [f"experiment={experiment}", *overrides])
    stages = {name: Stage.read(name, content).values(values) for name, content in values["stages"].items()}
    return {name: parse_run(own) for name, own in {**stages, "main": values}.items()}


@pytest.mark.parametrize("name", RECIPES)
def test_published_recipe(name: str) -> None:
    method, lr, batch, dropout, rates = RECIPES[name]
    found = parts(name)
    main, towers = found["main"], [found["stage1_a"], found["stage1_b"]]
    assert (main.method.name, main.optimizer.lr, main.data.batch_size) == (method, lr, batch)
    assert main.backbone.dropout == dropout
    assert tuple(tower.optimizer.lr for tower in towers) == rates
    for run in (main, *towers):
        o = run.optimizer
        assert (o.schedule, o.warmup_steps, o.weight_decay, o.clip) == ("constant", 0, 0.01, None)
        assert (run.data.max_length, run.trainer.max_epochs, run.evaluation.every) == (64, 1, 100)
        assert run.pooling.name == "cls"
    for tower in towers:
        stage: Any = tower.method
        assert (stage.name, stage.tau, stage.mlp, stage.layout) == ("simcse", 0.05, "none", "pairs")
        assert tower.data.batch_size == 64


@pytest.mark.parametrize("name", ["jtcse_bert", "jtcse_distil"])
def test_dropout_of_the_last_stage_is_not_that_of_those_before(name: str) -> None:
    found = parts(name, "backbone.dropout=0.0175")
    assert found.pop("main").backbone.dropout == 0.0175
    assert all(stage.backbone.dropout is None for stage in found.values())


@pytest.mark.parametrize("arm", "bcdefgh")
def test_arms_without_a_side_stream_have_no_coin(arm: str) -> None:
    found = parts("jtcse_ablation", f"arm={arm}")
    main: Any = found["main"].method
    stage: Any = found["stage1_a"].method
    assert main.icnce == ("fixed" if arm in "ef" else "coin")
    assert ("side" in main.terms) == (arm in "gh")
    assert (stage.mlp, stage.layout) == (("train", "rows") if arm == "c" else ("none", "pairs"))
