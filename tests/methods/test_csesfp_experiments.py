"""The experiments of CSE-SFP: the published recipes, and that each composes into a run that makes sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from embedlab import files as _paths
from embedlab.cli.compose import compose
from embedlab.errors import UserError
from embedlab.run.check import check_run
from embedlab.run.parse import parse_run
from embedlab.run.stages import Stage, run_stages

PUBLISHED = {
    "csesfp_opt": ("facebook/opt-6.7b", 264, 3e-5, "means something{rep1}, it can also be summarized as"),
    "csesfp_llama2": ("meta-llama/Llama-2-7b-hf", 256, 4e-5, "means in one word{rep1}, it can be summ"),
    "csesfp_llama3": ("meta-llama/Meta-Llama-3-8B", 256, 5e-5, "means in one word{rep1}, it can be summ"),
    "csesfp_mistral": ("mistralai/Mistral-7B-v0.1", 312, 2e-5, "means something{rep1}, it can be summ"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_recipe(name: str) -> None:
    backbone, batch, lr, words = PUBLISHED[name]
    config = parse_run(compose("train", [f"experiment={name}"]))
    assert check_run(config) == []
    assert config.backbone.name == backbone
    assert config.template is not None
    assert words in config.template.text
    assert (config.data.batch_size, config.data.max_length, config.data.pad_to_multiple) == (batch, 32, 8)
    assert config.data.drop_last is False
    o = config.optimizer
    assert (o.chunk, o.clip) == (batch // 4, 4.0)
    assert (o.lr, o.warmup_steps, o.schedule, o.weight_decay, o.accumulate) == (lr, 100, "linear", 0.0, 1)
    assert (config.trainer.max_epochs, config.seed, config.evaluation.every) == (1, 42, 150)
    a = config.adapter
    assert (a.r, a.alpha, a.dropout, a.quantization, a.targets) == (64, 16.0, 0.05, "nf4", ())
    assert (a.double_quantization, a.compute_dtype, a.gradient_checkpointing) == (True, "float32", True)
    method: Any = config.method
    assert (method.name, method.tau, method.anchor, method.eval_text) == ("csesfp", 0.05, "rep2", "closed")
    assert method.mask_duplicates is False
    assert config.pooling.name == "rep2"


def test_one_card_recipe_and_its_rival() -> None:
    ours = parse_run(compose("train", ["experiment=csesfp_smollm2"]))
    assert check_run(ours) == []
    rival = ["experiment=csesfp_smollm2", "method=prompteol", "template=eol", "pooling=last"]
    theirs = parse_run(compose("train", rival))
    (warning,) = check_run(theirs)
    assert "no dropout of its own" in warning
    assert (theirs.data, theirs.optimizer, theirs.adapter) == (ours.data, ours.optimizer, ours.adapter)


def test_sensitivity_sweeps_ten_templates() -> None:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    with initialize_config_dir(str(_paths.conf_dir()), version_base="1.3"):
        whole = hydra_compose("train", ["experiment=csesfp_templates"], return_hydra_config=True)
    swept = [f"{key}={value}" for key, value in whole.hydra.sweeper.params.items()]
    (jobs,) = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(swept), None)
    names = [job[0].removeprefix("template=") for job in jobs]
    assert names[:3] == ["eol_sum", "sth_sum", "sth_sum_also"]
    values, texts = compose("train", ["experiment=csesfp_templates"]), set()
    for name in names:
        template = yaml.safe_load((_paths.conf_dir() / "template" / f"{name}.yaml").read_text())
        assert check_run(parse_run(values | {"template": template})) == []
        texts.add(template["text"])
    assert len(texts) == 10


def test_cost_is_the_one_card_recipe() -> None:
    config = parse_run(compose("train", ["experiment=csesfp_cost"]))
    assert check_run(config) == []
    assert config.evaluation.final == ()


def test_tiny_pretrains_its_own_decoder(tmp_path: Path) -> None:
    values = compose("train", ["experiment=csesfp_tiny", "trainer=cpu"])
    stage = parse_run(Stage.read("pretrain", values["stages"]["pretrain"]).values(values))
    assert check_run(stage) == []
    assert (stage.method.name, stage.backbone.source, stage.adapter.r) == ("causal_lm", "fresh", None)
    assert stage.template is None
    ran: list[str] = []

    def train_one(values: dict[str, Any], folder: Path) -> int:
        ran.append(folder.name)
        return 0

    _, main = run_stages(values, tmp_path, train_one)
    assert ran == ["pretrain"]
    assert main["backbone"]["path"] == str(tmp_path / "pretrain" / "export")
    config = parse_run(main)
    assert (config.method.name, config.adapter.quantization) == ("csesfp", "nf4")


def test_tiny_on_a_decoder_that_is_there_pretrains_nothing(tmp_path: Path) -> None:
    values = compose("train", ["experiment=csesfp_tiny", "trainer=cpu", "backbone=smollm2"])
    status, main = run_stages(values, tmp_path, lambda values, folder: pytest.fail("a stage ran"))
    assert status == 0
    assert main["backbone"]["path"] is None


@pytest.mark.parametrize("name", [*PUBLISHED, "csesfp_smollm2", "csesfp_cost"])
def test_on_an_encoder_they_say_why_not(name: str) -> None:
    config = parse_run(compose("train", [f"experiment={name}", "backbone=bert-base"]))
    with pytest.raises(UserError, match=r"backbone=bert.*Fix: .*decoder"):
        check_run(config)
